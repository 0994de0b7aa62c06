"""Standby slots: on each follower a slot for each other one, so that a promotion copies nothing.

Followers differ by a few steps when their primary dies. Whoever is promoted has the most; the
others go on from its log at exactly the step that each of them lacks. For that it must have kept
that log since a place where the other had everything before. Two facts make such places findable:
a follower applies steps in its primary's order, and its own log says of each from which place in
its primary's log it came.

A slot that nobody moves keeps the log until the disk is full. `advance` moves them, a few seconds
behind; brokers and `queen-pg failover` call it. A slot that is missing or was given up costs a
copy at the next promotion, and nothing else.
"""

import asyncio
from collections.abc import Sequence

import asyncpg

from queen_pg import sql
from queen_pg.log import statement
from queen_pg.log.node import POLL_SECONDS, Cluster, Node

CATCH_UP_SECONDS = 10.0


async def arrange(cluster: Cluster) -> None:
    """Give each follower a slot for each other one, and nobody else any."""
    followers = [node for node in cluster.followers if node.facts.subscription is not None]
    if cluster.dry:
        for node in followers:
            node.show("-- a slot for each other follower")
        return
    names = {node.name for node in followers}
    for node in followers:
        await node.look()
        wanted = {statement.slot(name) for name in names - {node.name}}
        ours = {statement.slot(name) for name in cluster.members}
        for slot in node.facts.slots:
            if slot in ours - wanted:
                await node.run(statement.drop_slot(slot))
        for other in followers:
            slot = statement.slot(other.name)
            if slot in wanted and slot not in node.facts.slots and node.facts.may_replicate:
                await _create(node, other)


async def _create(node: Node, other: Node) -> None:
    """Create a slot on a follower from a place before which the other one has everything.

    It is temporary until that is known, so that an interruption leaves none that keeps too little.
    """
    draft = f"{statement.slot(other.name)}_draft"
    await node.run(statement.draft_slot(draft))
    try:
        progress = await node.progress()
        if progress and await _reaches(other, progress):
            await node.run(statement.copy_slot(draft, statement.slot(other.name)))
    finally:
        await node.run(statement.drop_slot(draft))


async def _reaches(follower: Node, lsn: int) -> bool:
    clock = asyncio.get_running_loop().time
    deadline = clock() + CATCH_UP_SECONDS
    while await follower.progress() < lsn:
        if clock() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


async def advance(followers: Sequence[asyncpg.Connection]) -> None:
    """Move the slots on followers up to where the others have everything."""
    # In this order: whatever is in the log before `own` came from before `progress`.
    places = []
    for connection in followers:
        row = await connection.fetchrow(sql.read("reads/log_standby"))
        if row is not None and row["slots"]:
            progress = await connection.fetchval(
                sql.read("reads/log_progress"), row["subscription_id"]
            )
            places.append((connection, row, progress))
    # Only places in one primary's log compare, and an epoch has one.
    progress_of = {(row["epoch"], row["name"]): progress for _, row, progress in places}
    for connection, row, progress in places:
        for name in row["slots"]:
            if progress_of.get((row["epoch"], name), 0) >= progress > 0:
                await connection.execute(statement.advance_slot(statement.slot(name), row["own"]))


async def position(candidate: Node, follower: str, progress: int) -> int | None:
    """Return the place in a candidate's log before which a follower has everything.

    None when the candidate has not kept its log since there; 0 when its slot is there already.
    """
    slot = statement.slot(follower)
    row = await candidate.fetchrow("log_confirmed", slot)
    if row is None or row["lsn"] is None or row["wal_status"] == "lost":
        return None
    found = 0
    came_from = None
    for step in await candidate.fetch("log_origins", slot, statement.PUBLICATION):
        data: bytes = step["data"]
        if data[:1] == b"B":
            came_from = None
        elif data[:1] == b"O":
            came_from = int.from_bytes(data[1:9])
        elif came_from is not None and came_from <= progress:
            found = int.from_bytes(data[10:18])
        else:
            break
    return found
