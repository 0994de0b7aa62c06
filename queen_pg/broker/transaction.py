"""The step: acks, pushes, positions, KV writes and timers as one transaction."""

from collections.abc import Sequence
from typing import Any

import asyncpg
import msgspec

from queen_pg.broker.ack import AckItem, AckResult
from queen_pg.broker.partition import resolve
from queen_pg.broker.push import Arrays, Batch, PushItem, PushResult
from queen_pg.database import Database
from queen_pg.errors import DuplicateMessage, Refused

ROLLED_BACK = {
    "rejected_ack": "an ack was rejected (its lease is gone, or its message is already committed"
    " or unknown); the transaction was rolled back",
    "duplicate": "a pushed transaction id is already in its partition; the transaction was rolled"
    " back",
    "kv_precondition": "a required KV operation did not apply; the transaction was rolled back",
    "kv_disabled": "KV is switched off; the transaction was rolled back",
    "timers_disabled": "scheduling timers is switched off; the transaction was rolled back",
    "queue_not_found": "a position names a queue that does not exist; the transaction was rolled"
    " back",
}


class TransactionAck(AckItem, frozen=True):
    """An ack inside a transaction, with the consumer group it is for."""

    consumer_group: str = ""


class Position(msgspec.Struct, frozen=True):
    """Where a group is to read on; a null `offset` forgets the position (step 1.7)."""

    queue: str
    consumer_group: str
    partition: str
    offset: int | None
    metadata: str | None = None


class Transaction(msgspec.Struct, frozen=True):
    """What a call asks for; KV and timer operations are validated, with wire names."""

    acks: Sequence[TransactionAck] = ()
    items: Sequence[PushItem] = ()
    kv: Sequence[dict[str, Any]] = ()
    timers: Sequence[dict[str, Any]] = ()
    positions: Sequence[Position] = ()


class Failure(msgspec.Struct, frozen=True, rename="camel"):
    """The required KV operation that lost; `value` is its key's JSON text now, None when absent."""

    failed_index: int
    kv_reason: str
    version: int
    value: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """A transaction's outcome: all of its parts' results, or the reason why nothing was written.

    The results of KV and timer operations are JSON, without their index.
    """

    success: bool
    reason: str = ""
    error: str = ""
    acks: list[AckResult] = []
    pushes: list[PushResult] = []
    kv: list[str] = []
    timers: list[str] = []
    failure: Failure | None = None
    woken: list[int] = []


async def commit(db: Database, tenant: int, transaction: Transaction, deadline: float) -> Verdict:
    """Carry out a step, all or nothing; a verdict against it is a result, not an error.

    Names and transaction ids are resolved before the step begins: they never change, and a step
    that looked them up would read index pages into which others insert. The first run is
    optimistic; what it cannot judge is judged carefully by a second.
    """
    batch = Batch(transaction.items)
    acks = _json([item.document(item.consumer_group) for item in transaction.acks])
    kv = _json(transaction.kv)
    timers = _json(transaction.timers)
    careful = False

    async def attempt() -> Verdict:
        nonlocal careful
        arrays = batch.lay_out(await resolve(db, tenant, batch.names, deadline))
        resolved = "[]"
        if transaction.acks:
            [[resolved]] = await db.read(
                "_resolve_acks", deadline=deadline, tenant=tenant, acks=acks
            )
        positions = await _resolve_positions(db, tenant, transaction.positions, deadline)
        if positions is None:
            return _refusal("queue_not_found")
        try:
            [row] = await db.step(
                "_transaction",
                deadline=deadline,
                tenant=tenant,
                acks=acks,
                resolved=resolved,
                **arrays.arguments,
                positions=positions,
                kv=kv,
                timers=timers,
                careful=careful,
            )
        except (DuplicateMessage, Refused):
            if careful:
                raise
            careful = True
            return await attempt()
        return _verdict(row, arrays)

    return await db.retry("transaction", deadline, attempt)


def _verdict(row: asyncpg.Record, arrays: Arrays) -> Verdict:
    if row["reason"] is not None:
        failure = row["failure"]
        return _refusal(
            row["reason"], None if failure is None else msgspec.json.decode(failure, type=Failure)
        )
    pushes = [
        {
            "item": item,
            "status": "duplicate" if duplicate else "queued",
            "message_id": message_id,
            "message_offset": offset,
        }
        for item, duplicate, message_id, offset in zip(
            row["push_item"] or (),
            row["push_duplicate"] or (),
            row["push_message_id"] or (),
            row["push_offset"] or (),
            strict=True,
        )
    ]
    return Verdict(
        success=True,
        acks=msgspec.json.decode(row["ack_results"], type=list[AckResult]),
        pushes=arrays.results(pushes),
        kv=row["kv_results"] or [],
        timers=row["timer_results"] or [],
        woken=row["woken"],
    )


def _refusal(reason: str, failure: Failure | None = None) -> Verdict:
    return Verdict(success=False, reason=reason, error=ROLLED_BACK[reason], failure=failure)


async def _resolve_positions(
    db: Database, tenant: int, positions: Sequence[Position], deadline: float
) -> str | None:
    """Return the positions with ids for names, or None when a queue is unknown."""
    if not positions:
        return "[]"
    rows = await db.step(
        "_resolve_positions",
        deadline=deadline,
        tenant=tenant,
        positions=_json(
            [
                {
                    "queue": position.queue,
                    "consumerGroup": position.consumer_group,
                    "partition": position.partition,
                    "offset": position.offset,
                    "metadata": position.metadata,
                }
                for position in positions
            ]
        ),
    )
    resolved: str | None = rows[0][0]
    return resolved


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
