"""The conveyor: concurrent pushes, acks and claims share transactions, each kind its own.

Commits decide what a broker on PostgreSQL can carry, so while one transaction runs, whatever
arrives waits and goes together in the next: no delay when idle, large batches when busy. A call's
parts for several partitions are independent of each other (data-plane 2.2-4, 6.3), which is what
allows a call to be split over lanes and a lane's batch to hold parts of many calls. A step has a
transaction of its own. No two transactions are at the same partition at a time, so these calls of
one process do not race each other (`lanes`).

A caller is answered after the commit. A refusal is a result and spoils nothing; when a shared
transaction fails for another reason than a lost race, its parts are run again one by one.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from queen_pg.broker import ack as acks
from queen_pg.broker.ack import Acked, AckItem
from queen_pg.broker.claim import Span, claim
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.partition import PartitionIds
from queen_pg.broker.push import Batch, PushItem, PushResult, repeat
from queen_pg.broker.transaction import Transaction, Verdict, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import DuplicateMessage, Stale
from queen_pg.lanes import PARTITIONS_MAX, Belt, Lanes, Part, overdue

# A push of so many messages is divided over two lanes.
WIDE_MESSAGES = 64
# What a waiting item takes besides its payload, roughly.
ITEM_BYTES = 200
# A step that is under way ends at its deadline by itself, and then it is known what became of it.
GRACE_SECONDS = 0.1


class _Share(msgspec.Struct):
    """What a call has for one transaction of one lane, and where in the call it stands."""

    lane: int
    places: list[int] = msgspec.field(default_factory=list)
    partitions: list[int] = msgspec.field(default_factory=list)


class Conveyor:
    """Carries this process's pushes, acks, claims and steps."""

    def __init__(
        self, db: Database, settings: Settings, deliveries: Deliveries | None = None
    ) -> None:
        self._db = db
        self._deliveries = deliveries
        self._ids = PartitionIds(db)
        self._lanes = Lanes(settings.lanes, self._belts)

    def _belts(self) -> list[Belt]:
        return [
            Belt("push", self._carry_pushes),
            Belt("ack", self._carry_acks),
            Belt("claim", self._carry_claims, siding=False),
        ]

    async def start(self) -> None:
        """Learn how many partitions a transaction may touch before its row locks become a table's.

        PostgreSQL promotes predicate locks when a transaction holds too many in one table, and then
        it conflicts with everybody.
        """
        [[allowed]] = await self._db.read("_predicate_locks_max")
        self._lanes.limit(max(1, min(PARTITIONS_MAX, allowed // 2)))

    async def push(
        self, tenant: int, items: Sequence[PushItem], deadline: float
    ) -> list[PushResult]:
        """Append every message that is not a duplicate; return a result for each, in order."""
        batch = Batch(items)
        refused = batch.too_large()
        ids = await self._ids.ensure(tenant, batch.names, deadline)
        shares = self._divide(
            ((ids[name], places) for name, places in batch.groups() if places[0] not in refused),
            wide=len(items) >= WIDE_MESSAGES,
        )
        answers = await self._send("push", tenant, "", items, shares, deadline)
        results: list[Any] = [None] * len(items)
        _fill(results, shares, answers)
        for place in refused:
            results[place] = PushResult("error", None, items[place].transaction_id or "", None)
        return results

    async def ack(
        self, tenant: int, consumer_group: str, items: Sequence[AckItem], deadline: float
    ) -> Acked:
        """Judge and apply acks; each (partition, lease) of the call is decided on its own."""
        partitions: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            partitions.setdefault(item.partition_id, []).append(place)
        shares = self._divide(partitions.items())
        answers = await self._send("ack", tenant, consumer_group, items, shares, deadline)
        results: list[Any] = [None] * len(items)
        _fill(results, shares, [acked.results for acked in answers])
        return Acked(results, sorted({group for acked in answers for group in acked.woken}))

    async def commit(self, tenant: int, transaction: Transaction, deadline: float) -> Verdict:
        """Carry out a step, in a transaction of its own, across the lanes."""
        verdict = await commit(
            self._db,
            tenant,
            transaction,
            deadline,
            ids=self._ids,
            deliveries=self._deliveries,
            alone=self._lanes.cross,
        )
        if self._deliveries is not None and verdict.success:
            for item, result in zip(transaction.acks, verdict.acks, strict=True):
                if item.lease_id and result.lease_released:
                    self._deliveries.forget(item.lease_id, item.partition_id)
        return verdict

    async def claim(self, spans: Sequence[Span], deadline: float) -> list[int | None]:
        """Claim spans, as `broker.claim` does; raise Held and claim nothing where one is held."""
        shares = self._divide((span.partition_id, [place]) for place, span in enumerate(spans))
        answers = await self._send("claim", 0, "", spans, shares, deadline)
        attempts: list[int | None] = [None] * len(spans)
        _fill(attempts, shares, answers)
        return attempts

    def _divide(
        self, groups: Iterable[tuple[int, list[int]]], *, wide: bool = False
    ) -> list[_Share]:
        """Divide a call's partitions, each with the places of its items, into shares."""
        shares: list[_Share] = []
        current: dict[int, _Share] = {}
        for partition_id, places in groups:
            lane = self._lanes.lane_of(partition_id, wide=wide)
            share = current.get(lane)
            if share is None or len(share.partitions) == self._lanes.partitions_max:
                share = current[lane] = _Share(lane)
                shares.append(share)
            share.places += places
            share.partitions.append(partition_id)
        return shares

    async def _send(
        self,
        kind: str,
        tenant: int,
        consumer_group: str,
        items: Sequence[Any],
        shares: Sequence[_Share],
        deadline: float,
    ) -> Sequence[Any]:
        """Put each share into its lane; return what the lanes answer, once all have."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        parts = []
        for share in shares:
            chosen = [items[place] for place in share.places]
            parts.append(
                Part(
                    tenant=tenant,
                    consumer_group=consumer_group,
                    items=chosen,
                    partitions=share.partitions,
                    bytes=_size(kind, chosen),
                    deadline=deadline,
                    since=now,
                    answer=loop.create_future(),
                )
            )
        self._lanes.load.take_in(parts)
        for place, share in enumerate(shares):
            self._lanes.put(share.lane, kind, parts[place])
        expiry = loop.call_at(deadline + GRACE_SECONDS, _expire, parts)
        try:
            # A single future is awaited as it is: to gather it costs as much as all of the above.
            if len(parts) == 1:
                return [await parts[0].answer]
            return await asyncio.gather(*(part.answer for part in parts))
        finally:
            expiry.cancel()
            # An error's traceback holds this frame: it must not hold the error in turn.
            parts.clear()

    async def _carry_pushes(self, parts: Sequence[Part]) -> Sequence[Sequence[PushResult]]:
        tenant = parts[0].tenant
        deadline = max(part.deadline for part in parts)
        items = [item for part in parts for item in part.items]
        batch = Batch(
            items,
            [number for number, part in enumerate(parts) for _ in part.items],
        )
        careful = False

        async def attempt() -> list[PushResult]:
            nonlocal careful
            while True:
                ids = await self._ids.ensure(tenant, batch.names, deadline)
                arrays = batch.lay_out(ids)
                try:
                    async with self._db.turn(partitions):
                        return await arrays.store(self._db, tenant, deadline, careful=careful)
                except DuplicateMessage:
                    if careful:
                        raise
                    careful = True
                except Stale:
                    self._ids.forget(tenant, batch.names)
                    raise

        # A lane is shared: it waits for a held row once, and not for long.
        again = repeat(self._db, tenant, items, deadline)
        partitions = {partition for part in parts for partition in part.partitions}
        return _parted(
            await self._db.retry(
                "push", deadline, attempt, patient=False, repeat=again, partitions=partitions
            ),
            parts,
        )

    async def _carry_acks(self, parts: Sequence[Part]) -> Sequence[Acked]:
        acked = await acks.ack_calls(
            self._db,
            parts[0].tenant,
            [(part.consumer_group, part.items) for part in parts],
            max(part.deadline for part in parts),
            deliveries=self._deliveries,
            patient=False,
        )
        first, *others = _parted(acked.results, parts)
        # One of them tells who can go on.
        return [Acked(first, acked.woken), *(Acked(results, []) for results in others)]

    async def _carry_claims(self, parts: Sequence[Part]) -> Sequence[Sequence[int | None]]:
        spans = [span for part in parts for span in part.items]
        deadline = max(part.deadline for part in parts)
        return _parted(await claim(self._db, spans, deadline), parts)


def _expire(parts: Sequence[Part]) -> None:
    for part in parts:
        part.fail(overdue())


def _parted(results: list[Any], parts: Sequence[Part]) -> list[list[Any]]:
    """Cut the results of a batch into those of its parts."""
    divided = []
    start = 0
    for part in parts:
        divided.append(results[start : start + len(part.items)])
        start += len(part.items)
    return divided


def _fill(results: list[Any], shares: Sequence[_Share], answers: Sequence[Sequence[Any]]) -> None:
    """Put what the lanes answered to its places in the call."""
    for share, answer in zip(shares, answers, strict=True):
        for place, result in zip(share.places, answer, strict=True):
            results[place] = result


def _size(kind: str, items: Sequence[Any]) -> int:
    """What items keep in memory while they wait, roughly, in bytes."""
    size = ITEM_BYTES * len(items)
    return size + sum(len(item.payload) for item in items) if kind == "push" else size
