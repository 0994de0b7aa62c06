"""Queues: create one or change its options, describe it, delete it."""

from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from queen_pg.database import Database


class Queue(msgspec.Struct, frozen=True):
    """A queue as it stands, its options under their names on the wire."""

    uid: UUID
    namespace: str
    task: str
    options: dict[str, Any]


async def configure(
    db: Database,
    tenant: int,
    queue: str,
    options: dict[str, Any],
    deadline: float,
    *,
    replace: bool,
) -> Queue:
    """Create a queue or change its options; with `replace`, all that are not sent too.

    The options have their names on the wire; an unknown one is ignored. Raises BadRequest, naming
    the option, for a value that is none.
    """
    changes = msgspec.json.encode(options).decode()

    async def attempt() -> list[asyncpg.Record]:
        return await db.step(
            "_configure",
            deadline=deadline,
            tenant=tenant,
            queue=queue,
            changes=changes,
            replace_all=replace,
        )

    rows = await db.retry("_configure", deadline, attempt)
    return _queue(rows[0])


async def describe(db: Database, tenant: int, queue: str) -> Queue | None:
    """Return a queue, or None when there is none of that name."""
    rows = await db.read("_describe_queue", tenant=tenant, queue=queue)
    return _queue(rows[0]) if rows else None


async def delete(db: Database, tenant: int, queue: str, deadline: float) -> bool:
    """Delete a queue with all it holds, when that is done return whether it existed."""

    # At READ COMMITTED: it waits for the steps that are under way on the queue. At SERIALIZABLE
    # each of them would send it back to its start, and a busy queue could not be deleted.
    async def attempt() -> list[asyncpg.Record]:
        return await db.read("_delete_queue", deadline=deadline, tenant=tenant, queue=queue)

    rows = await db.retry("_delete_queue", deadline, attempt)
    return bool(rows[0]["_delete_queue"])


def _queue(row: asyncpg.Record) -> Queue:
    return Queue(row["uid"], row["namespace"], row["task"], msgspec.json.decode(row["options"]))
