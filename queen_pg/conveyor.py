"""The conveyor: concurrent pushes, acks and claims share transactions, each kind its own.

Commits decide what a broker on PostgreSQL can carry, so while one transaction runs, whatever
arrives waits and goes together in the next: no delay when idle, large batches when busy. Work on
one partition always goes to the same lane, and a lane runs one transaction of each kind at a time
and no two on the same partition, so calls of this process never race each other. A call's parts for
several partitions are independent of each other (data-plane 2.2-4, 6.3), which is what allows a
call to be split over lanes and a lane's batch to hold parts of many calls.

A caller is answered after the commit. A refusal is a result and spoils nothing; when a shared
transaction fails for another reason than a lost race, its parts are run again one by one.

An application that has pushed to a partition holds it until its own transaction ends. What is for
such a partition leaves the lane for its siding, where it is tried again and again, and keeps nobody
waiting but its own caller.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from queen_pg.broker import ack as acks
from queen_pg.broker.ack import Acked, AckItem
from queen_pg.broker.claim import Span, claim
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.partition import PartitionIds, PartitionName
from queen_pg.broker.push import Batch, PushItem, PushResult, repeat
from queen_pg.broker.transaction import Transaction, Verdict, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import (
    DuplicateMessage,
    Held,
    Internal,
    Overloaded,
    QueenError,
    Stale,
    Unavailable,
)
from queen_pg.telemetry import CONVEYOR_BATCH, CONVEYOR_WAIT, logger

# What one transaction takes: more would keep those who wait for the next one waiting, and while the
# database works on all that there is, this process has nothing to prepare.
BATCH_ITEMS_MAX = 400
BATCH_BYTES_MAX = 8 * 1024 * 1024
# Each partition costs predicate locks, of which the server may allow fewer (`start`).
PARTITIONS_MAX = 500
# How many of those who wait for a busy partition are passed over, to find others behind them.
PASSED_MAX = 256
# What may wait; a call beyond it is refused before it is taken in (data-plane 1-5, `overloaded`).
WAITING_ITEMS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024
# What a waiting item takes besides its payload, roughly.
ITEM_BYTES = 200
# Where the last transaction was shared, a lane waits a moment before the next, for as long as more
# keeps coming: the database is often faster than calls arrive, and would be given few at a time.
SHARED_PARTS = 4
FULL_ITEMS = 32
LULL_SECONDS = 0.0005
LINGER_SECONDS = 0.003
# A step that is under way ends at its deadline by itself, and then it is known what became of it.
GRACE_SECONDS = 0.1

_log = logger("conveyor")


class _Share(msgspec.Struct):
    """What a call has for one transaction of one lane, and where in the call it stands."""

    lane: int
    places: list[int] = msgspec.field(default_factory=list)
    partitions: list[int] = msgspec.field(default_factory=list)


class _Part(msgspec.Struct, eq=False):
    """A call's share on its way; `answer` comes once it is committed."""

    tenant: int
    consumer_group: str
    items: Sequence[Any]
    partitions: list[int]
    bytes: int
    deadline: float
    since: float
    answer: asyncio.Future[Any]

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless there is an answer already."""
        if not self.answer.done():
            self.answer.set_exception(error)


class _Load:
    """What waits in all lanes together."""

    def __init__(self) -> None:
        self.items = 0
        self.bytes = 0

    def take_in(self, parts: Sequence[_Part]) -> None:
        """Count a call in; raise Overloaded when too much waits already."""
        items, size = self.items, self.bytes
        for part in parts:
            items += len(part.items)
            size += part.bytes
        if self.items and (items > WAITING_ITEMS_MAX or size > WAITING_BYTES_MAX):
            raise Overloaded("too much is waiting to be written; try again")
        self.items, self.bytes = items, size

    def let_go(self, part: _Part) -> None:
        self.items -= len(part.items)
        self.bytes -= part.bytes

    def answer(self, batch: Sequence[_Part], answers: Sequence[Any]) -> None:
        """Give each part its answer, and count it out."""
        for part, answer in zip(batch, answers, strict=True):
            self.let_go(part)
            if not part.answer.done():
                part.answer.set_result(answer)

    def fail(self, batch: Sequence[_Part], error: BaseException) -> None:
        """Give each part the error, and count it out."""
        for part in batch:
            self.let_go(part)
            part.fail(error)


class _Belt:
    """The parts of one kind that wait in a lane, and how a batch of them is carried.

    A kind without a siding is told when a partition is held.
    """

    def __init__(
        self,
        kind: str,
        carry: Callable[[Sequence[_Part]], Awaitable[Sequence[Any]]],
        *,
        siding: bool = True,
    ) -> None:
        self.kind = kind
        self.carry = carry
        self.siding = siding
        self.batch_sizes = CONVEYOR_BATCH.labels(kind)
        self.waits = CONVEYOR_WAIT.labels(kind)
        self.waiting: deque[_Part] = deque()
        self.task: asyncio.Task[None] | None = None
        self.last = 0

    async def gather(self) -> None:
        """Let those come too who are on their way, where the last batch says that there are."""
        if self.last < SHARED_PARTS:
            return
        until = asyncio.get_running_loop().time() + LINGER_SECONDS
        before = 0
        while before < len(self.waiting) and not self._full():
            before = len(self.waiting)
            await asyncio.sleep(LULL_SECONDS)
            if asyncio.get_running_loop().time() >= until:
                break

    def _full(self) -> bool:
        """Whether what waits is worth a commit as it is."""
        return (
            len(self.waiting) >= FULL_ITEMS
            or sum(len(part.items) for part in self.waiting) >= FULL_ITEMS
        )

    def next_batch(self, partitions_max: int, busy: set[int]) -> list[_Part]:
        """Take the parts that go next: of one tenant, within the bounds of a transaction.

        Those for busy partitions stay, and with them whatever comes later for the same ones.
        """
        batch: list[_Part] = []
        passed: list[_Part] = []
        barred = set(busy)
        items = size = partitions = 0
        while self.waiting and len(passed) < PASSED_MAX:
            part = self.waiting[0]
            if batch and (
                part.tenant != batch[0].tenant
                or items + len(part.items) > BATCH_ITEMS_MAX
                or size + part.bytes > BATCH_BYTES_MAX
                or partitions + len(part.partitions) > partitions_max
            ):
                break
            self.waiting.popleft()
            if not barred.isdisjoint(part.partitions):
                passed.append(part)
                barred.update(part.partitions)
                continue
            batch.append(part)
            items += len(part.items)
            size += part.bytes
            partitions += len(part.partitions)
        self.waiting.extendleft(reversed(passed))
        self.last = len(batch)
        return batch


class _Lane:
    """Runs one transaction of each kind at a time, and no two of them on the same partition."""

    def __init__(self, belts: Sequence[_Belt], load: _Load) -> None:
        self._belts = {belt.kind: belt for belt in belts}
        self._load = load
        self.partitions_max = PARTITIONS_MAX
        self._busy: set[int] = set()
        self._siding = _Siding(load)

    def put(self, kind: str, part: _Part) -> None:
        belt = self._belts[kind]
        if belt.siding and self._siding.holds(part):
            self._siding.put(belt, part)
            return
        belt.waiting.append(part)
        self._start(belt)

    def _start(self, belt: _Belt) -> None:
        if belt.task is None and belt.waiting:
            belt.task = asyncio.get_running_loop().create_task(self._run(belt))

    async def _run(self, belt: _Belt) -> None:
        try:
            while belt.waiting:
                await belt.gather()
                batch = belt.next_batch(self.partitions_max, self._busy)
                if not batch:
                    # Whoever is busy with what is wanted here starts this belt again.
                    return
                partitions = {partition for part in batch for partition in part.partitions}
                self._busy |= partitions
                try:
                    await self._carry(belt, batch)
                finally:
                    self._busy -= partitions
                    for other in self._belts.values():
                        self._start(other)
                # The others choose first what goes next.
                await asyncio.sleep(0)
        finally:
            belt.task = None

    async def _carry(self, belt: _Belt, batch: list[_Part]) -> None:
        if belt.siding and self._siding.busy:
            for part in filter(self._siding.holds, batch):
                self._siding.put(belt, part)
            batch = [part for part in batch if not self._siding.holds(part)]
            if not batch:
                return
        belt.batch_sizes.observe(len(batch))
        belt.waits.observe(asyncio.get_running_loop().time() - batch[0].since)
        try:
            answers = await belt.carry(batch)
        except Unavailable as error:
            self._load.fail(batch, error)
        except (QueenError, Held) as error:
            if len(batch) > 1:
                for part in batch:
                    await self._carry(belt, [part])
            elif belt.siding and isinstance(error, Held):
                self._siding.put(belt, batch[0])
            else:
                self._load.fail(batch, error)
        except asyncio.CancelledError:
            self._load.fail(batch, Unavailable("outcome_unknown", "the broker stopped meanwhile"))
            raise
        except Exception as error:
            _log.error("conveyor.failed", kind=belt.kind, exc_info=error)
            self._load.fail(batch, Internal("internal error"))
        else:
            self._load.answer(batch, answers)


class _Siding:
    """What waits for partitions that somebody holds: tried in turn, one at a time."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._waiting: deque[tuple[_Belt, _Part]] = deque()
        self._partitions: Counter[int] = Counter()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether anything waits here."""
        return bool(self._partitions)

    def holds(self, part: _Part) -> bool:
        """Whether something for one of the part's partitions waits here already."""
        return self.busy and any(partition in self._partitions for partition in part.partitions)

    def put(self, belt: _Belt, part: _Part) -> None:
        self._partitions.update(part.partitions)
        self._waiting.append((belt, part))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting:
                belt, part = self._waiting.popleft()
                try:
                    await self._carry(belt, part)
                except Held:
                    self._waiting.append((belt, part))
                else:
                    self._partitions -= Counter(part.partitions)
        finally:
            self._task = None

    async def _carry(self, belt: _Belt, part: _Part) -> None:
        """Try one part; raise Held when somebody still has its partition."""
        if part.answer.done():
            # Its caller's time is over.
            self._load.let_go(part)
            return
        try:
            answers = await belt.carry([part])
        except Held:
            raise
        except QueenError as error:
            self._load.fail([part], error)
        except asyncio.CancelledError:
            self._load.fail([part], Unavailable("outcome_unknown", "the broker stopped meanwhile"))
            raise
        except Exception as error:
            _log.error("conveyor.failed", kind=belt.kind, exc_info=error)
            self._load.fail([part], Internal("internal error"))
        else:
            self._load.answer([part], answers)


class Conveyor:
    """Carries this process's pushes, acks and claims."""

    def __init__(
        self, db: Database, settings: Settings, deliveries: Deliveries | None = None
    ) -> None:
        self._db = db
        self._deliveries = deliveries
        self._ids = PartitionIds(db)
        self._load = _Load()
        self._lanes = [_Lane(self._belts(), self._load) for _ in range(settings.lanes)]

    def _belts(self) -> list[_Belt]:
        return [
            _Belt("push", self._carry_pushes),
            _Belt("ack", self._carry_acks),
            _Belt("claim", self._carry_claims, siding=False),
        ]

    async def start(self) -> None:
        """Learn how many partitions a transaction may touch before its row locks become a table's.

        PostgreSQL promotes predicate locks when a transaction holds too many in one table, and then
        it conflicts with everybody.
        """
        [[allowed]] = await self._db.read("_predicate_locks_max")
        for lane in self._lanes:
            lane.partitions_max = max(1, min(PARTITIONS_MAX, allowed // 2))

    async def push(
        self, tenant: int, items: Sequence[PushItem], deadline: float
    ) -> list[PushResult]:
        """Append every message that is not a duplicate; return a result for each, in order."""
        batch = Batch(items)
        refused = batch.too_large()
        ids = await self._resolve(tenant, batch.names, deadline)
        shares = self._divide(
            (ids[name], places) for name, places in batch.groups() if places[0] not in refused
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
        """Carry out a step, in a transaction of its own and beside the lanes."""
        return await commit(
            self._db, tenant, transaction, deadline, ids=self._ids, deliveries=self._deliveries
        )

    async def claim(self, spans: Sequence[Span], deadline: float) -> list[int | None]:
        """Claim spans, as `broker.claim` does; raise Held and claim nothing where one is held."""
        shares = self._divide((span.partition_id, [place]) for place, span in enumerate(spans))
        answers = await self._send("claim", 0, "", spans, shares, deadline)
        attempts: list[int | None] = [None] * len(spans)
        _fill(attempts, shares, answers)
        return attempts

    def _divide(self, groups: Iterable[tuple[int, list[int]]]) -> list[_Share]:
        """Divide a call's partitions, each with the places of its items, into shares."""
        shares: list[_Share] = []
        current: dict[int, _Share] = {}
        for partition_id, places in groups:
            lane = partition_id % len(self._lanes)
            share = current.get(lane)
            if share is None or len(share.partitions) == self._lanes[lane].partitions_max:
                share = current[lane] = _Share(lane)
                shares.append(share)
            share.places += places
            share.partitions.append(partition_id)
        return shares

    async def _resolve(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        ids: dict[PartitionName, int] = {}
        unknown: list[PartitionName] = []
        for name in names:
            found = self._ids.known(tenant, name)
            if found is None:
                unknown.append(name)
            else:
                ids[name] = found
        if unknown:
            ids |= await self._ids.ensure(tenant, unknown, deadline)
        return ids

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
                _Part(
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
        self._load.take_in(parts)
        for share, part in zip(shares, parts, strict=True):
            self._lanes[share.lane].put(kind, part)
        expiry = loop.call_at(deadline + GRACE_SECONDS, _expire, parts)
        try:
            # A single future is awaited as it is: to gather it costs as much as all of the above.
            if len(parts) == 1:
                return [await parts[0].answer]
            return await asyncio.gather(*(part.answer for part in parts))
        finally:
            expiry.cancel()

    async def _carry_pushes(self, parts: Sequence[_Part]) -> Sequence[Sequence[PushResult]]:
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
            ids = await self._resolve(tenant, batch.names, deadline)
            arrays = batch.lay_out(ids)
            try:
                return await arrays.store(self._db, tenant, deadline, careful=careful)
            except DuplicateMessage:
                if careful:
                    raise
                careful = True
                return await attempt()
            except Stale:
                self._ids.forget(tenant, batch.names)
                raise

        # A lane is shared: it waits for a held row once, and not for long.
        again = repeat(self._db, tenant, items, deadline)
        return _parted(
            await self._db.retry("push", deadline, attempt, patient=False, repeat=again), parts
        )

    async def _carry_acks(self, parts: Sequence[_Part]) -> Sequence[Acked]:
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

    async def _carry_claims(self, parts: Sequence[_Part]) -> Sequence[Sequence[int | None]]:
        spans = [span for part in parts for span in part.items]
        deadline = max(part.deadline for part in parts)
        return _parted(await claim(self._db, spans, deadline), parts)


def _expire(parts: Sequence[_Part]) -> None:
    for part in parts:
        part.fail(
            Unavailable("timeout", "timeout: the call was not carried out before its deadline")
        )


def _parted(results: list[Any], parts: Sequence[_Part]) -> list[list[Any]]:
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
