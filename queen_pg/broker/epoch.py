"""What the database at hand is in the replicated log, and how far its followers are (epoch.sql)."""

import asyncio
from typing import Literal

import msgspec

from queen_pg.database import DEFAULT_DEADLINE_SECONDS, Database
from queen_pg.telemetry import LOG_EPOCH, LOG_LAG, LOG_QUORUM, SLOT_KEPT

Mode = Literal["none", "asynchronous", "quorum"]


class Follower(msgspec.Struct, frozen=True):
    """A follower as its primary sees it; the lag is None where it is not known."""

    name: str
    connected: bool
    synchronous: bool
    lag_bytes: int | None
    lag_seconds: float | None


class LogState(msgspec.Struct, frozen=True):
    """A node's place in the log; `followers` are known to the primary only."""

    epoch: int
    role: str
    node: str | None
    quorum: int
    followers: list[Follower]

    @property
    def mode(self) -> Mode:
        """What an answer promises: a step on this node, or on `quorum` followers too."""
        if self.quorum:
            return "quorum"
        return "asynchronous" if self.followers else "none"


async def state(db: Database, deadline: float) -> LogState:
    """Ask the database what it is in the log."""
    rows = await db.read("_log_state", deadline=deadline)
    first = rows[0]
    return LogState(
        epoch=first["number"],
        role="standby" if first["in_recovery"] else first["role"],
        node=first["node"],
        quorum=first["quorum"] or 0,
        followers=[
            Follower(
                name=row["follower"],
                connected=row["connected"],
                synchronous=row["synchronous"],
                lag_bytes=row["lag_bytes"],
                lag_seconds=row["lag_seconds"],
            )
            for row in rows
            if row["follower"] is not None
        ],
    )


async def measure(db: Database, group: str) -> None:
    """Set the gauges that tell of a group's log, and of the slots that keep it."""
    now = await state(db, asyncio.get_running_loop().time() + DEFAULT_DEADLINE_SECONDS)
    slots = await db.read("_log_slots")
    LOG_EPOCH.labels(group).set(now.epoch)
    LOG_QUORUM.labels(group).set(now.quorum)
    for gauge in (LOG_LAG, SLOT_KEPT):
        gauge.remove_by_labels({"group": group})
    for follower in now.followers:
        if follower.lag_bytes is not None:
            LOG_LAG.labels(group, follower.name).set(follower.lag_bytes)
    for slot in slots:
        SLOT_KEPT.labels(group, slot["name"], int(slot["active"])).set(slot["kept_bytes"])
