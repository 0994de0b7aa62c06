"""How the log stands: who leads, how far the followers are, and what would be lost now."""

import asyncio

import msgspec

from queen_pg.log import statement
from queen_pg.log.node import Cluster, Node, confirmed

CATCH_UP_SECONDS = 3.0


class FollowerStatus(msgspec.Struct, kw_only=True, rename="camel"):
    """One follower; what is None is not known."""

    name: str
    address: str
    reached: bool
    joined: bool
    synchronous: bool
    following: bool = False
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    kept_bytes: int | None = None
    slot: str | None = None
    errors: int | None = None
    conflicts: int | None = None


class Status(msgspec.Struct, kw_only=True, rename="camel"):
    """The log as it stands."""

    epoch: int
    primary: str | None
    replication: str
    quorum: int
    may_set_quorum: bool | None
    would_be_lost: str
    followers: list[FollowerStatus]
    stale: list[str]


async def status(cluster: Cluster) -> Status:
    """Look at every node; takes up to a few seconds where a follower lags."""
    primary = cluster.primary
    members = [
        member
        for member in cluster.members.values()
        if primary is None or member.name != primary.name
    ]
    followers = []
    end = await primary.position() if primary is not None else 0
    seconds = await asyncio.gather(
        *(_seconds_behind(primary, member.name, end) for member in members)
    )
    for member, lag in zip(members, seconds, strict=True):
        node = cluster.node(member.name)
        row = FollowerStatus(
            name=member.name,
            address=f"{member.host}:{member.port}",
            reached=node is not None,
            joined=member.joined,
            synchronous=member.synchronous,
            lag_seconds=lag,
        )
        if primary is not None:
            await _read_slot(row, primary)
        if node is not None:
            await _read_subscription(row, node)
        followers.append(row)
    enforced = primary is not None and bool(primary.facts.standby_names)
    quorum = cluster.quorum if enforced or primary is None else 0
    return Status(
        epoch=max((node.epoch for node in cluster.nodes), default=0),
        primary=None if primary is None else primary.name,
        replication="quorum" if quorum else "asynchronous" if followers else "none",
        quorum=quorum,
        may_set_quorum=None if primary is None else primary.facts.may_set_quorum,
        would_be_lost=_would_be_lost(primary, quorum, followers),
        followers=followers,
        stale=[
            node.name
            for node in cluster.nodes
            if node is not primary and node.sight.role != "follower" and node.facts.installed
        ],
    )


async def _seconds_behind(primary: Node | None, follower: str, end: int) -> float | None:
    """Return how long the follower takes to confirm what is in the log now, None if too long."""
    if primary is None:
        return None
    started = asyncio.get_running_loop().time()
    if not await confirmed(primary, follower, end, CATCH_UP_SECONDS):
        return None
    return round(asyncio.get_running_loop().time() - started, 3)


async def _read_slot(row: FollowerStatus, primary: Node) -> None:
    slot = await primary.fetchrow("log_slot", statement.slot(row.name))
    if slot is None:
        row.slot = "missing"
        return
    row.slot = slot["wal_status"]
    row.lag_bytes = slot["lag_bytes"]
    row.kept_bytes = slot["kept_bytes"]


async def _read_subscription(row: FollowerStatus, node: Node) -> None:
    if node.facts.subscription_id is None:
        return
    [worker] = await node.fetch("log_worker", node.facts.subscription_id)
    row.following = bool(worker["workers"]) and bool(node.facts.enabled)
    conflicts = "log_conflicts" if node.facts.server_version >= 180_000 else "log_errors"
    [counts] = await node.fetch(conflicts, node.facts.subscription_id)
    row.errors, row.conflicts = counts["errors"], counts["conflicts"]


def _would_be_lost(primary: Node | None, quorum: int, followers: list[FollowerStatus]) -> str:
    """Say what nobody would have, should the primary be gone for good this moment."""
    if primary is None:
        return "the primary is away: whatever no follower has"
    if not followers:
        return "everything: there is no follower"
    if quorum:
        confirming = sum(row.synchronous and row.following for row in followers)
        if confirming >= quorum:
            return "nothing that was answered"
        return "nothing that was answered; steps wait, because too few followers confirm"
    known = [row.lag_bytes for row in followers if row.lag_bytes is not None and row.joined]
    if not known:
        return "everything: no follower has a copy"
    return f"the last {min(known)} bytes of the log, answered or not"


def lines(status: Status) -> list[str]:
    """Return the status for people."""
    if status.quorum:
        mode = f"quorum: a step is answered when {status.quorum} followers have it on disk too"
    elif status.replication == "asynchronous":
        mode = "asynchronous: an answered step may be lost with the primary"
        if status.may_set_quorum is False:
            mode += " (this server does not let this role set synchronous_standby_names)"
    else:
        mode = "none"
    text = [
        f"epoch          {status.epoch}",
        f"primary        {status.primary or 'cannot be reached'}",
        f"replication    {mode}",
        f"lost now       {status.would_be_lost}",
    ]
    for row in status.followers:
        state = (
            "following"
            if row.following
            else "cannot be reached"
            if not row.reached
            else "not following"
        )
        parts = [state]
        if not row.joined:
            parts.append("without its copy yet")
        if row.lag_bytes is not None:
            behind = "" if row.lag_seconds is None else f", {row.lag_seconds:.3f} s"
            parts.append(f"{row.lag_bytes} bytes{behind} behind")
        if row.kept_bytes is not None:
            parts.append(f"slot {row.slot}, keeps {row.kept_bytes} bytes")
        elif row.slot is not None:
            parts.append(f"slot {row.slot}")
        if row.synchronous:
            parts.append("counts for the quorum")
        # Each connection that was lost counts as an error, too.
        if row.conflicts or (row.errors and not row.following):
            parts.append(f"{row.errors} errors, {row.conflicts or 0} conflicts: see its log")
        text.append(f"{row.name:<15}{'; '.join(parts)}")
    text += [
        f"{name:<15}takes no part: bring it back with queen-pg replica rejoin"
        for name in status.stale
    ]
    return text
