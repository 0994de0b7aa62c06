"""The step: acks, pushes, positions, KV writes and timers as one transaction."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import asyncpg
import msgspec

from queen_pg.broker.ack import (
    KEPT,
    RELEASED,
    AckItem,
    AckResult,
    Completion,
    arguments,
    locate,
)
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.partition import PartitionIds
from queen_pg.broker.push import Arrays, Batch, PushItem, PushResult, repeat
from queen_pg.database import Database
from queen_pg.errors import DuplicateMessage, Refused, Stale

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

Alone = Callable[[Collection[int], float], AbstractAsyncContextManager[None]]
"""Waits, until a deadline, to be the only one of this process at some partitions."""


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


async def commit(
    db: Database,
    tenant: int,
    transaction: Transaction,
    deadline: float,
    *,
    ids: PartitionIds | None = None,
    deliveries: Deliveries | None = None,
    alone: Alone = lambda *_: nullcontext(),
) -> Verdict:
    """Carry out a step, all or nothing; a verdict against it is a result, not an error.

    Names and transaction ids are resolved before the step begins: they never change, and a step
    that looked them up would read index pages into which others insert. `ids` and `deliveries` are
    what this process remembers of them. The first run is optimistic; what it cannot judge is judged
    carefully by a second. Both are `alone` at the partitions of the pushes and acks, as far as they
    are known; what is tried again later lets go of them until then.
    """
    ids = ids or PartitionIds(db)
    batch = Batch(transaction.items)
    partitions = {item.partition_id for item in transaction.acks}
    careful = False

    async def attempt() -> Verdict:
        known = await ids.resolve(tenant, batch.names, deadline)
        arrays = batch.lay_out(known)
        common = None
        if not careful:
            common = await _common_acks(db, tenant, transaction, deadline, deliveries)
        try:
            partitions.update(known.values())
            async with alone(partitions, deadline), db.turn(partitions):
                return await run(arrays, common)
        except Stale:
            ids.forget(tenant, batch.names)
            raise

    async def run(arrays: Arrays, common: _Common | None) -> Verdict:
        nonlocal careful
        if not careful:
            try:
                if common:
                    return await _transact(db, tenant, transaction, arrays, common, deadline)
                return await _judge(db, tenant, transaction, arrays, deadline, careful=False)
            except (DuplicateMessage, Refused):
                careful = True
        return await _judge(db, tenant, transaction, arrays, deadline, careful=True)

    again = repeat(db, tenant, transaction.items, deadline, _tells)
    return await db.retry("transaction", deadline, attempt, repeat=again, partitions=partitions)


def _tells(verdict: Verdict) -> bool:
    """Whether a repeated step's verdict is not what its first run left behind (step 1.11-14)."""
    return verdict.reason not in ("rejected_ack", "duplicate")


class _Common(msgspec.Struct):
    """A step's acks as queen._complete takes them, and the place of each of them in the step."""

    completions: Sequence[Completion]
    places: Sequence[int]


async def _common_acks(
    db: Database,
    tenant: int,
    transaction: Transaction,
    deadline: float,
    deliveries: Deliveries | None,
) -> _Common | None:
    """Return the acks of a common step, or None when something about it needs judgement."""
    if transaction.positions:
        return None
    by_group: dict[str, list[int]] = {}
    for place, item in enumerate(transaction.acks):
        by_group.setdefault(item.consumer_group, []).append(place)
    calls = [
        (group, [transaction.acks[place] for place in places]) for group, places in by_group.items()
    ]
    completions = await locate(db, tenant, calls, deadline, deliveries) if calls else []
    covered = sum(len(target.places) for each in completions for target in each.targets)
    if covered < len(transaction.acks):
        return None
    return _Common(completions, [place for places in by_group.values() for place in places])


async def _transact(
    db: Database,
    tenant: int,
    transaction: Transaction,
    arrays: Arrays,
    common: _Common,
    deadline: float,
) -> Verdict:
    """Carry out a common step; raise Refused where something has to be judged."""
    [row] = await db.step(
        "_transact",
        deadline=deadline,
        tenant=tenant,
        **{f"ack_{name}": value for name, value in arguments(common.completions).items()},
        **arrays.arguments,
        **arrays.extents(),
        kv=_json(transaction.kv),
        timers=_json(transaction.timers),
    )
    if row["reason"] is not None:
        return _refusal(row["reason"])
    acks = [KEPT] * len(transaction.acks)
    for each, released in zip(common.completions, row["released"] or (), strict=True):
        for target in each.targets:
            for place in target.places:
                acks[common.places[place]] = RELEASED if released else KEPT
    return Verdict(
        success=True,
        acks=acks,
        pushes=arrays.appended(row) if transaction.items else [],
        kv=row["kv_results"] or [],
        timers=row["timer_results"] or [],
        woken=row["woken"] or [],
    )


async def _judge(
    db: Database,
    tenant: int,
    transaction: Transaction,
    arrays: Arrays,
    deadline: float,
    *,
    careful: bool,
) -> Verdict:
    """Carry out a step whose acks have to be judged, or, carefully, any step."""
    acks = _json([item.document(item.consumer_group) for item in transaction.acks])
    resolved = "[]"
    if transaction.acks:
        [[resolved]] = await db.read("_resolve_acks", deadline=deadline, tenant=tenant, acks=acks)
    positions = await _resolve_positions(db, tenant, transaction.positions, deadline)
    if positions is None:
        return _refusal("queue_not_found")
    [row] = await db.step(
        "_transaction",
        deadline=deadline,
        tenant=tenant,
        acks=acks,
        resolved=resolved,
        **arrays.arguments,
        positions=positions,
        kv=_json(transaction.kv),
        timers=_json(transaction.timers),
        careful=careful,
    )
    return _verdict(row, arrays)


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
