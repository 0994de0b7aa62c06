"""Acks: what a consumer says of the messages it was delivered."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

import asyncpg
import msgspec

from queen_pg.broker.delivery import Deliveries
from queen_pg.database import Database, Repeat, array

QUEUE_MODE = "__QUEUE_MODE__"

AckStatus = Literal["completed", "failed", "retry", "dlq"]

# PostgreSQL's bigint; a partition id beyond it names nothing.
LARGEST_ID = 2**63 - 1


class AckItem(msgspec.Struct, frozen=True):
    """One ack: a message by its transaction id in a partition, and what became of it."""

    partition_id: int
    transaction_id: str
    status: AckStatus = "completed"
    error: str | None = None
    lease_id: str | None = None

    def document(self, consumer_group: str, call: int = 0) -> dict[str, Any]:
        """Return the ack as the SQL functions read it; acks of different calls are judged apart."""
        return {
            "partitionId": self.partition_id if self.partition_id <= LARGEST_ID else None,
            "consumerGroup": consumer_group,
            "leaseId": self.lease_id or None,
            "transactionId": self.transaction_id,
            "status": self.status,
            "error": self.error,
            "call": call,
        }


class AckResult(msgspec.Struct, frozen=True, rename="camel"):
    """What an ack is told; `error` is None when it succeeded (data-plane 6.2)."""

    success: bool
    error: str | None
    lease_released: bool
    dlq: bool
    noop: bool


KEPT = AckResult(True, None, lease_released=False, dlq=False, noop=False)
RELEASED = AckResult(True, None, lease_released=True, dlq=False, noop=False)


async def _always() -> bool:
    return True


# What completes under a lease is answered as before when it is sent again (data-plane 6.3).
_REPEAT = Repeat(_always)


class Acked(msgspec.Struct, frozen=True):
    """The results of a call, and the ids of the groups that can claim something again at once."""

    results: list[AckResult]
    woken: list[int]


def released(items: Sequence[AckItem], results: Sequence[AckResult]) -> set[str]:
    """Return the ids of the leases that these acks have released."""
    return {
        item.lease_id
        for item, result in zip(items, results, strict=True)
        if item.lease_id and result.lease_released
    }


async def ack(
    db: Database, tenant: int, consumer_group: str, items: Sequence[AckItem], deadline: float
) -> Acked:
    """Judge and apply acks; each (partition, lease) is decided on its own (data-plane 6.3)."""
    return await ack_calls(db, tenant, [(consumer_group, items)], deadline)


async def ack_calls(
    db: Database,
    tenant: int,
    calls: Sequence[tuple[str, Sequence[AckItem]]],
    deadline: float,
    *,
    deliveries: Deliveries | None = None,
    patient: bool = True,
) -> Acked:
    """Do the same for several calls, each a consumer group and its acks, in shared transactions.

    The common acks go first, and together; those that turn out to need judgement follow. Messages
    that are among the `deliveries` of this process need not be looked up. Unless `patient`, raise
    Held when somebody's transaction holds what they need.
    """
    acks = [
        (call, consumer_group, item)
        for call, (consumer_group, items) in enumerate(calls)
        for item in items
    ]
    results: list[AckResult | None] = [None] * len(acks)
    woken: set[int] = set()
    completions = await locate(db, tenant, calls, deadline, deliveries)
    if completions:
        woken.update(await _complete(db, completions, results, deadline, patient))
        if deliveries is not None:
            _forget(deliveries, completions, results)
    rest = [place for place, result in enumerate(results) if result is None]
    if rest:
        documents = [acks[place][2].document(acks[place][1], acks[place][0]) for place in rest]
        judged = await _judge(db, tenant, documents, deadline, patient)
        woken.update(judged.woken)
        for place, result in zip(rest, judged.results, strict=True):
            results[place] = result
    return Acked([result for result in results if result is not None], sorted(woken))


async def locate(
    db: Database,
    tenant: int,
    calls: Sequence[tuple[str, Sequence[AckItem]]],
    deadline: float,
    deliveries: Deliveries | None = None,
) -> list["Completion"]:
    """Return the common acks among those of the calls, as queen._complete takes them, by cursor."""
    targets = _common(calls)
    acks = [(group, item) for group, items in calls for item in items]
    located = _remembered(deliveries or Deliveries(), tenant, targets, acks)
    unknown = [target for target in targets if target.places[0] not in located]
    if unknown:
        located |= await _look_up(db, tenant, unknown, acks, deadline)
    return _completions(targets, located)


def arguments(completions: Sequence["Completion"]) -> dict[str, Any]:
    """Return the arguments of queen._complete."""
    return {
        "partition_id::bigint[]": array([each.partition_id for each in completions]),
        "group_id::bigint[]": array([each.group_id for each in completions]),
        "lease_id": [each.lease_id for each in completions],
        "first_offset::bigint[]": array([each.first_offset for each in completions]),
        "last_offset::bigint[]": array([each.last_offset for each in completions]),
    }


class _Target(msgspec.Struct):
    """What one call says of one lease on a partition, by the places of its acks: completed, all."""

    consumer_group: str
    partition_id: int
    lease_id: UUID
    places: list[int]


class Completion(msgspec.Struct):
    """Targets on one cursor, each beginning above the one before: what queen._complete takes."""

    partition_id: int
    group_id: int
    lease_id: UUID
    first_offset: int
    last_offset: int
    targets: list[_Target]


def _common(calls: Sequence[tuple[str, Sequence[AckItem]]]) -> list[_Target]:
    """Return the targets that only complete, under a lease.

    Where a call speaks of a partition under several leases, what comes first counts, and all of it
    is left to judgement.
    """
    targets: list[_Target] = []
    start = 0
    for consumer_group, items in calls:
        leases: dict[int, dict[str | None, list[int]]] = {}
        for place, item in enumerate(items, start):
            lease_id = item.lease_id if item.status == "completed" else None
            leases.setdefault(item.partition_id, {}).setdefault(lease_id, []).append(place)
        start += len(items)
        for partition_id, by_lease in leases.items():
            [(lease_id, places), *others] = by_lease.items()
            lease = _lease(lease_id)
            if lease is not None and not others and partition_id <= LARGEST_ID:
                targets.append(_Target(consumer_group, partition_id, lease, places))
    return targets


def _lease(text: str | None) -> UUID | None:
    """Return a lease's id, or None for a text that is not just as we write one."""
    with contextlib.suppress(ValueError):
        if text and str(lease := UUID(text)) == text:
            return lease
    return None


def _remembered(
    deliveries: Deliveries,
    tenant: int,
    targets: Sequence[_Target],
    acks: Sequence[tuple[str, AckItem]],
) -> dict[int, tuple[int, int]]:
    """Return group and offset for the acks, by place, of targets that this process delivered."""
    located: dict[int, tuple[int, int]] = {}
    for target in targets:
        delivery = deliveries.find(str(target.lease_id), target.partition_id)
        if delivery is None or (delivery.tenant, delivery.consumer_group) != (
            tenant,
            target.consumer_group,
        ):
            continue
        offsets = [delivery.offsets.get(acks[place][1].transaction_id) for place in target.places]
        for place, offset in zip(target.places, offsets, strict=True):
            if offset is not None and None not in offsets:
                located[place] = (delivery.group_id, offset)
    return located


async def _look_up(
    db: Database,
    tenant: int,
    targets: Sequence[_Target],
    acks: Sequence[tuple[str, AckItem]],
    deadline: float,
) -> dict[int, tuple[int, int]]:
    """Find group and offset for the acks of targets; those whose message is unclear are left out.

    Neither a message's offset nor a group's id changes, so this need not be part of a step.
    """
    places = [place for target in targets for place in target.places]
    rows = await db.read(
        "_locate_acks",
        deadline=deadline,
        tenant=tenant,
        partition_id=[acks[place][1].partition_id for place in places],
        consumer_group=[acks[place][0] for place in places],
        transaction_id=[acks[place][1].transaction_id for place in places],
    )
    return {places[row["place"] - 1]: (row["group_id"], row["message_offset"]) for row in rows}


def _completions(
    targets: Sequence[_Target], located: Mapping[int, tuple[int, int]]
) -> list[Completion]:
    """Return what queen._complete can take, by cursor; the rest is left to judgement."""
    completions: dict[tuple[int, int], Completion] = {}
    for target in targets:
        if not all(place in located for place in target.places):
            continue
        offsets = [located[place][1] for place in target.places]
        first, last = min(offsets), max(offsets)
        key = (target.partition_id, located[target.places[0]][0])
        before = completions.get(key)
        if before is None:
            completions[key] = Completion(*key, target.lease_id, first, last, [target])
        elif before.lease_id == target.lease_id and before.last_offset < first:
            before.last_offset = last
            before.targets.append(target)
    return [completions[key] for key in sorted(completions)]


def _forget(
    deliveries: Deliveries, completions: Sequence[Completion], results: Sequence[AckResult | None]
) -> None:
    """Forget deliveries that are settled."""
    for each in completions:
        if results[each.targets[-1].places[-1]] is RELEASED:
            deliveries.forget(str(each.lease_id), each.partition_id)


async def _complete(
    db: Database,
    completions: Sequence[Completion],
    results: list[AckResult | None],
    deadline: float,
    patient: bool,
) -> list[int]:
    """Carry out completions, fill in the results of those granted; return the groups to wake."""
    if not completions:
        return []

    async def attempt() -> asyncpg.Record:
        async with db.turn(partitions):
            [row] = await db.step("_complete", deadline=deadline, **arguments(completions))
        return row

    partitions = [each.partition_id for each in completions]
    row = await db.retry(
        "ack", deadline, attempt, patient=patient, repeat=_REPEAT, partitions=partitions
    )
    for number, released in zip(row["place"] or (), row["released"] or (), strict=True):
        *others, last = completions[number - 1].targets
        for target in others:
            for place in target.places:
                results[place] = KEPT
        for place in last.places:
            results[place] = RELEASED if released else KEPT
    woken: list[int] = row["woken"]
    return woken


async def _judge(
    db: Database,
    tenant: int,
    documents: Sequence[dict[str, Any]],
    deadline: float,
    patient: bool,
) -> Acked:
    acks = msgspec.json.encode(documents).decode()

    async def attempt() -> Acked:
        [row] = await db.step("_ack", deadline=deadline, tenant=tenant, acks=acks)
        return Acked(msgspec.json.decode(row["results"], type=list[AckResult]), row["woken"])

    fenced = all(
        document["status"] == "completed" and document["leaseId"] for document in documents
    )
    again = _REPEAT if fenced else None
    return await db.retry("ack", deadline, attempt, patient=patient, repeat=again)
