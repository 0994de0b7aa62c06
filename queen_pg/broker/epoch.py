"""What the database at hand is in the replicated log, and how far its followers are (epoch.sql)."""

from typing import Literal

import msgspec

from queen_pg.database import Database

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
