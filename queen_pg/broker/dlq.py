"""Dead letters: list them."""

from datetime import datetime
from uuid import UUID

import msgspec

from queen_pg.database import Database


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that a consumer group gave up; `partition` is None when that is gone."""

    id: UUID
    queue: str
    partition: str | None
    partition_id: int
    consumer_group: str
    message_offset: int
    message_id: UUID
    transaction_id: str
    payload: str
    error: str
    retry_count: int
    failed_at: datetime


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters to list; None matches all, and the instants are inclusive."""

    queue: str | None = None
    partition: str | None = None
    consumer_group: str | None = None
    failed_from: datetime | None = None
    failed_to: datetime | None = None


async def page(
    db: Database, tenant: int, filters: Filters, *, skip: int, batch_max: int
) -> tuple[int, list[DeadLetter]]:
    """Return how many dead letters match, and some of them, newest failure first."""
    rows = await db.read(
        "_dead_letters",
        tenant=tenant,
        **msgspec.structs.asdict(filters),
        skip=skip,
        batch_max=batch_max,
    )
    names = DeadLetter.__struct_fields__
    letters = [DeadLetter(*(row[name] for name in names)) for row in rows if row["id"] is not None]
    return rows[0]["total"], letters
