"""Lanes: one transaction of each kind at a time, and no two of a process on the same partition.

Work on one partition goes to the same lane, with one exception: a call with many messages is
divided over two, because the database takes longer for each of them than this process does, and
would be waited for by one transaction at a time. A step is not divided: it crosses the lanes,
which means that it waits until nobody is at any of its partitions and takes all of them at once.
While it waits, what comes later for one of them stays behind it, and what a belt has passed over
before goes first: whoever waits is waited for by the younger only, so nobody starves and no two
wait for each other.

An application that has pushed to a partition holds it until its own transaction ends. What is for
such a partition leaves the lane for its siding, where it is tried again and again, and keeps nobody
waiting but its own caller.
"""

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any

import msgspec

from queen_pg.errors import Held, Internal, Overloaded, QueenError, Unavailable
from queen_pg.telemetry import CONVEYOR_BATCH, CONVEYOR_WAIT, logger

# What one transaction takes: more would keep those who wait for the next one waiting, and while the
# database works on all that there is, this process has nothing to prepare.
BATCH_ITEMS_MAX = 400
BATCH_BYTES_MAX = 8 * 1024 * 1024
# Each partition costs predicate locks, of which the server may allow fewer (`Conveyor.start`).
PARTITIONS_MAX = 500
# How many of those who wait for a busy partition are passed over, to find others behind them.
PASSED_MAX = 256
# What may wait; a call beyond it is refused before it is taken in (data-plane 1-5, `overloaded`).
WAITING_ITEMS_MAX = 100_000
WAITING_BYTES_MAX = 256 * 1024 * 1024
# Where the last transaction was shared, a lane waits a moment before the next, for as long as more
# keeps coming: the database is often faster than calls arrive, and would be given few at a time.
SHARED_PARTS = 4
FULL_ITEMS = 32
LULL_SECONDS = 0.0005
LINGER_SECONDS = 0.003

_log = logger("lanes")


def overdue() -> Unavailable:
    """Return the error of a call whose deadline passes while it waits."""
    return Unavailable("timeout", "timeout: the call was not carried out before its deadline")


class Part(msgspec.Struct, eq=False):
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


class Load:
    """What waits in all lanes together."""

    def __init__(self) -> None:
        self.items = 0
        self.bytes = 0

    def take_in(self, parts: Sequence[Part]) -> None:
        """Count a call in; raise Overloaded when too much waits already."""
        items, size = self.items, self.bytes
        for part in parts:
            items += len(part.items)
            size += part.bytes
        if self.items and (items > WAITING_ITEMS_MAX or size > WAITING_BYTES_MAX):
            raise Overloaded("too much is waiting to be written; try again")
        self.items, self.bytes = items, size

    def let_go(self, part: Part) -> None:
        """Count a part out."""
        self.items -= len(part.items)
        self.bytes -= part.bytes

    def answer(self, batch: Sequence[Part], answers: Sequence[Any]) -> None:
        """Give each part its answer, and count it out."""
        for part, answer in zip(batch, answers, strict=True):
            self.let_go(part)
            if not part.answer.done():
                part.answer.set_result(answer)

    def fail(self, batch: Sequence[Part], error: BaseException) -> None:
        """Give each part the error, and count it out."""
        # Its traceback holds frames that hold the parts.
        error.__traceback__ = None
        for part in batch:
            self.let_go(part)
            part.fail(error)


class Belt:
    """The parts of one kind that wait in a lane, and how a batch of them is carried.

    A kind without a siding is told when a partition is held.
    """

    def __init__(
        self,
        kind: str,
        carry: Callable[[Sequence[Part]], Awaitable[Sequence[Any]]],
        *,
        siding: bool = True,
    ) -> None:
        self.kind = kind
        self.carry = carry
        self.siding = siding
        self.batch_sizes = CONVEYOR_BATCH.labels(kind)
        self.waits = CONVEYOR_WAIT.labels(kind)
        self.waiting: deque[Part] = deque()
        # Since when parts that were passed over wait, the first for each partition.
        self.passed: dict[int, float] = {}
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

    def next_batch(self, partitions_max: int, traffic: "Traffic") -> list[Part]:
        """Take the parts that go next: of one tenant, within the bounds of a transaction.

        Those that are barred stay, and with them whatever comes later for the same partitions.
        """
        batch: list[Part] = []
        passed: list[Part] = []
        self.passed = {}
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
            if traffic.bars(part) or not self.passed.keys().isdisjoint(part.partitions):
                passed.append(part)
                for partition in part.partitions:
                    self.passed.setdefault(partition, part.since)
                continue
            batch.append(part)
            items += len(part.items)
            size += part.bytes
            partitions += len(part.partitions)
        self.waiting.extendleft(reversed(passed))
        self.last = len(batch)
        return batch


class _Crossing(msgspec.Struct, eq=False):
    """A step that crosses the lanes; it has its `way` once all of its partitions are its own."""

    partitions: frozenset[int]
    since: float
    way: asyncio.Future[None]

    @property
    def under_way(self) -> bool:
        """Whether the partitions are its own."""
        return self.way.done() and not self.way.cancelled()


class Traffic:
    """The partitions that somebody is at, and the steps that wait for some, oldest first."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.waiting: dict[int, deque[_Crossing]] = {}

    def bars(self, part: Part) -> bool:
        """Whether a part has to stay: somebody is at its partitions, or waited there before it."""
        if not self.busy.isdisjoint(part.partitions):
            return True
        return bool(self.waiting) and any(
            partition in self.waiting and self.waiting[partition][0].since < part.since
            for partition in part.partitions
        )

    def wait(self, crossing: _Crossing) -> None:
        """Let a step wait behind those that wait for the same partitions already."""
        for partition in crossing.partitions:
            self.waiting.setdefault(partition, deque()).append(crossing)

    def wait_no_more(self, crossing: _Crossing) -> None:
        """Let a step wait no more, wherever it stands."""
        for partition in crossing.partitions:
            others = self.waiting[partition]
            others.remove(crossing)
            if not others:
                del self.waiting[partition]


class _Lane:
    """Runs one transaction of each kind at a time, for partitions that nobody is at."""

    def __init__(
        self,
        belts: Sequence[Belt],
        load: Load,
        traffic: Traffic,
        freed: Callable[[Collection[int]], None],
    ) -> None:
        self._belts = {belt.kind: belt for belt in belts}
        self._load = load
        self._traffic = traffic
        self._freed = freed
        self.partitions_max = PARTITIONS_MAX
        self._siding = _Siding(load)

    def first(self, partition: int) -> float:
        """Return since when the first part that was passed over waits for a partition."""
        return min(belt.passed.get(partition, math.inf) for belt in self._belts.values())

    def put(self, kind: str, part: Part) -> None:
        belt = self._belts[kind]
        if belt.siding and self._siding.holds(part):
            self._siding.put(belt, part)
            return
        belt.waiting.append(part)
        self._start(belt)

    def start(self) -> None:
        """Start the belts that somebody may have stopped."""
        for belt in self._belts.values():
            self._start(belt)

    def _start(self, belt: Belt) -> None:
        if belt.task is None and belt.waiting:
            belt.task = asyncio.get_running_loop().create_task(self._run(belt))

    async def _run(self, belt: Belt) -> None:
        try:
            while belt.waiting:
                await belt.gather()
                batch = belt.next_batch(self.partitions_max, self._traffic)
                if not batch:
                    # Whoever is at what is wanted here, or waits for it, starts this belt again.
                    return
                partitions = {partition for part in batch for partition in part.partitions}
                self._traffic.busy |= partitions
                try:
                    await self._carry(belt, batch)
                finally:
                    self._traffic.busy -= partitions
                    self._freed(partitions)
                # The others choose first what goes next.
                await asyncio.sleep(0)
        finally:
            belt.task = None

    async def _carry(self, belt: Belt, batch: list[Part]) -> None:
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
            _log.error("lanes.failed", kind=belt.kind, exc_info=error)
            self._load.fail(batch, Internal("internal error"))
        else:
            self._load.answer(batch, answers)


class _Siding:
    """What waits for partitions that somebody holds: tried in turn, one at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._waiting: deque[tuple[Belt, Part]] = deque()
        self._partitions: Counter[int] = Counter()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether anything waits here."""
        return bool(self._partitions)

    def holds(self, part: Part) -> bool:
        """Whether something for one of the part's partitions waits here already."""
        return self.busy and any(partition in self._partitions for partition in part.partitions)

    def put(self, belt: Belt, part: Part) -> None:
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

    async def _carry(self, belt: Belt, part: Part) -> None:
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
            _log.error("lanes.failed", kind=belt.kind, exc_info=error)
            self._load.fail([part], Internal("internal error"))
        else:
            self._load.answer([part], answers)


class Lanes:
    """All lanes of a process, and what crosses them."""

    def __init__(self, number: int, belts: Callable[[], Sequence[Belt]]) -> None:
        self.load = Load()
        self.partitions_max = PARTITIONS_MAX
        self._number = number
        self._traffic = Traffic()
        # Behind each lane another one, for the other half of what is divided.
        self._lanes = [
            _Lane(belts(), self.load, self._traffic, self._freed) for _ in range(2 * number)
        ]

    def limit(self, partitions_max: int) -> None:
        """Set how many partitions a transaction of a lane takes."""
        self.partitions_max = partitions_max
        for lane in self._lanes:
            lane.partitions_max = partitions_max

    def lane_of(self, partition: int, *, wide: bool = False) -> int:
        """Return the number of the lane that a partition belongs to, maybe in a `wide` call."""
        group, lane = divmod(partition, self._number)
        return lane + self._number if wide and group % 2 else lane

    def put(self, lane: int, kind: str, part: Part) -> None:
        """Let a part wait in a lane for its turn."""
        self._lanes[lane].put(kind, part)

    @contextlib.asynccontextmanager
    async def cross(self, partitions: Collection[int], deadline: float) -> AsyncIterator[None]:
        """Have partitions to oneself; raise Unavailable("timeout") when it takes too long."""
        loop = asyncio.get_running_loop()
        crossing = _Crossing(frozenset(partitions), loop.time(), loop.create_future())
        self._traffic.wait(crossing)
        self._let_go_ahead(crossing)
        try:
            if not crossing.under_way:
                try:
                    async with asyncio.timeout_at(deadline):
                        await crossing.way
                except TimeoutError:
                    raise overdue() from None
            yield
        finally:
            if crossing.under_way:
                self._traffic.busy -= crossing.partitions
            else:
                self._traffic.wait_no_more(crossing)
            self._freed(crossing.partitions)

    def _freed(self, partitions: Collection[int]) -> None:
        """Let those steps and lanes go ahead that have waited for nothing but these partitions."""
        if waiting := self._traffic.waiting:
            for crossing in {waiting[each][0] for each in partitions if each in waiting}:
                self._let_go_ahead(crossing)
        for lane in self._lanes:
            lane.start()

    def _first(self, partition: int) -> float:
        """Return since when the first part that was passed over waits for a partition."""
        lane = self.lane_of(partition)
        return min(
            self._lanes[lane].first(partition), self._lanes[lane + self._number].first(partition)
        )

    def _let_go_ahead(self, crossing: _Crossing) -> None:
        if not crossing.way.done() and all(
            partition not in self._traffic.busy
            and self._traffic.waiting[partition][0] is crossing
            and self._first(partition) > crossing.since
            for partition in crossing.partitions
        ):
            self._traffic.wait_no_more(crossing)
            self._traffic.busy |= crossing.partitions
            crossing.way.set_result(None)
