"""Timers: carry out a call's operations, read what is pending."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from queen_pg.broker import switch
from queen_pg.database import Database
from queen_pg.errors import Declined


async def check_encryption(
    db: Database, tenant: int, operations: Sequence[dict[str, Any]], deadline: float
) -> None:
    """Refuse payloads that their sender has encrypted, for queues that encrypt at rest."""
    queues = {operation["queue"] for operation in operations if operation.get("encrypted")}
    if queues and await db.read(
        "_timers_encrypting", deadline=deadline, tenant=tenant, queue=sorted(queues)
    ):
        raise Declined(
            "timers_bad_request",
            "timers_encrypted_conflict",
            "the queue encrypts what it stores by itself",
        )


async def run(
    db: Database, tenant: int, operations: Sequence[dict[str, Any]], deadline: float
) -> list[str]:
    """Carry out validated operations, all or nothing; return each one's result as JSON."""
    arguments = {"tenant": tenant, "operations": msgspec.json.encode(operations).decode()}

    async def attempt() -> list[str]:
        rows = await db.step("_timers", deadline=deadline, **arguments)
        if rows[0]["verdict"] == "disabled":
            raise switch.timers_disabled()
        return [row["result"] for row in sorted(rows, key=lambda row: row["operation_index"])]

    await check_encryption(db, tenant, operations, deadline)
    return await db.retry("timers", deadline, attempt) if operations else []


class Peek(NamedTuple):
    """A pending timer: its fields on the wire and its payload, both JSON."""

    fields: str
    payload: str


async def peek(db: Database, tenant: int, queue: str, timer_key: str) -> Peek | None:
    """Return a pending timer, or None."""
    rows = await db.read("_timer_peek", tenant=tenant, queue=queue, timer_key=timer_key)
    return Peek(*rows[0]) if rows else None


async def pending(
    db: Database, tenant: int, queue: str, after: str, size_max: int
) -> list[tuple[str, str]]:
    """Return a queue's pending timers behind a key, in key order: the key, the fields as JSON."""
    rows = await db.read("_timer_list", tenant=tenant, queue=queue, after=after, size_max=size_max)
    return [(row["timer_key"], row["fields"]) for row in rows]


async def count(db: Database, tenant: int, queue: str, prefix: str) -> int:
    """Return how many timers of a queue are pending under a prefix of their keys."""
    [row] = await db.read("_timer_count", tenant=tenant, queue=queue, prefix=prefix)
    number: int = row["timer_count"]
    return number
