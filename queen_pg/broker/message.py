"""One message, as people look at it."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from queen_pg.database import Database


class Message(msgspec.Struct, frozen=True):
    """A kept message with its queue, and what its newest dead letter says."""

    message_offset: int
    id: UUID
    transaction_id: str
    trace_id: UUID | None
    producer_sub: str | None
    created_at: datetime
    payload: str
    partition: str
    queue: str
    namespace: str
    task: str
    options: dict[str, Any]
    dead_letter: bool
    error: str | None
    retry_count: int


class Cursor(msgspec.Struct, frozen=True):
    """Where a consumer group stands in the partition; `leased` is whether its lease lives."""

    consumer_group: str
    committed_offset: int
    lease_expires_at: datetime | None
    leased: bool


async def find(
    db: Database, tenant: int, partition_id: int, transaction_id: str
) -> tuple[Message, list[Cursor]] | None:
    """Return the oldest kept message of a transaction id and its partition's cursors, or None."""
    rows = await db.read(
        "_find_message", tenant=tenant, partition_id=partition_id, transaction_id=transaction_id
    )
    if not rows:
        return None
    cursors = await db.read("_partition_cursors", partition_id=partition_id)
    row = dict(rows[0])
    row["options"] = msgspec.json.decode(row["options"])
    return Message(**row), [Cursor(**row) for row in cursors]
