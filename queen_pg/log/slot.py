"""Logical slots: each keeps the log until its reader has confirmed it, and forgets no reader."""

import asyncpg
import msgspec

from queen_pg import sql
from queen_pg.log import statement
from queen_pg.log.node import LogError

KEPT_BYTES_POOR = 1024**3
"""What a slot may keep before somebody should look."""


class Slot(msgspec.Struct, frozen=True):
    """One slot; `kept_bytes_max` is the server's limit, negative where it has none."""

    name: str
    plugin: str
    active: bool
    wal_status: str | None
    lsn: int | None
    kept_bytes: int | None
    node: str | None
    standing_by: bool
    kept_bytes_max: int

    @property
    def purpose(self) -> str:
        """Whom the slot is for."""
        if self.node is not None:
            return f"{'stands by for' if self.standing_by else 'follower'} {self.node}"
        return "feed" if self.plugin == "pgoutput" else "not ours"

    @property
    def forgotten(self) -> bool:
        """Whether nobody reads it and the disk pays for that."""
        return not self.active and (self.kept_bytes or 0) > KEPT_BYTES_POOR


async def slots(connection: asyncpg.Connection) -> list[Slot]:
    """Return the slots of a node."""
    return [Slot(**row) for row in await connection.fetch(sql.read("reads/log_slots"))]


async def drop(connection: asyncpg.Connection, name: str) -> None:
    """Drop a slot; raise LogError for one that a node needs, or that somebody reads."""
    found = {slot.name: slot for slot in await slots(connection)}.get(name)
    if found is None:
        raise LogError(f"there is no slot {name}")
    if found.node is not None:
        raise LogError(f"{name} is for {found.purpose}; queen-pg replica remove drops it")
    if found.active:
        raise LogError(f"somebody is reading {name}; end that first")
    await connection.execute(statement.drop_slot(name))
