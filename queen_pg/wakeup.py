"""Waiting consumers: how they are served, and what wakes them.

A line serves its pops in rounds, one round at a time, oldest pop first: whatever arrives during a
round goes together into the next, so pops share their transactions. A pop that waits and gets
nothing stays in line, holding no connection.

A line is served when a pop joins it, when this process commits something for it, and when the poll
finds something ready: the poll asks for all lines at once, and alone guarantees progress.

What this process pushes is handed to those who wait without a look, and a pop that joins a line for
which nothing was left waits as those do who stand there already. That nothing was left is believed
until the next poll would be; a line that is too busy for the poll looks as often itself. Looks in
between begin where the last one ended, but for some time that a push may take to commit.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from queen_pg.broker import lease, pop
from queen_pg.broker.ack import QUEUE_MODE
from queen_pg.broker.append import Append
from queen_pg.broker.autopilot import Pace
from queen_pg.broker.claim import Claimer
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.identity import uuid_v7
from queen_pg.broker.pop import (
    Claim,
    Demand,
    PopAnswer,
    PopRequest,
    Served,
    Source,
    Subscription,
)
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Internal, QueenError, Signal, Unavailable
from queen_pg.telemetry import logger
from queen_pg.waiting import Line, Lines, Waiter

POLL_SECONDS = 0.5
# How much further back than its last walk over everything a look begins: hints are stamped before
# they are committed.
OVERLAP_SECONDS = 0.5
# The answer to a pop must arrive before its deadline: stop claiming this much earlier.
ANSWER_SECONDS = 0.1
# One round, however long its pops may wait.
ROUND_SECONDS = 30.0
# What one round claims at most, in calls.
ROUND_MAX = 64

_log = logger("wakeup")


class Others(Protocol):
    """The other processes that serve pops of this database."""

    def tell_pushed(self, tenant: int, queues: Iterable[str]) -> None:
        """Something was pushed to these queues."""

    def tell_freed(self, group_ids: Iterable[int]) -> None:
        """These groups can claim something again."""


class Waiters:
    """Serves every pop of this process."""

    others: Others | None = None
    claimer: Claimer | None = None
    deliveries: Deliveries | None = None

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db = db
        self._default_mode = settings.default_subscription_mode
        self._lines = Lines()
        self._pace = Pace()
        self._poller: asyncio.Task[None] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._suspected: set[Line] = set()
        self._looking: asyncio.Task[None] | None = None
        self._closing = False
        self._troubled = False

    async def pop(
        self, tenant: int, request: PopRequest, gone: Callable[[], bool] = lambda: False
    ) -> PopAnswer:
        """Answer a pop, after waiting as it asks; claim nothing for a client that is gone."""
        if request.queue is None:
            return await self._discover(tenant, request, gone)
        source = Source(
            tenant, request.queue, request.consumer_group or QUEUE_MODE, request.partition
        )
        answer = await self._stand(source, request, gone, self._demand(source, request))
        if answer.lease_id is not None and source.partition is None:
            messages = sum(len(claim.messages) for claim in answer.claims)
            self._pace.delivered(
                source, answer.lease_id, messages, asyncio.get_running_loop().time()
            )
        return answer

    def pushed(self, tenant: int, queues: Iterable[str], *, heard: bool = False) -> None:
        """Serve those who wait for these queues: something was pushed to them.

        Unless another process has said so (`heard`), the others are told. Who waits for a single
        partition is served if it holds something.
        """
        names = set(queues)
        if self.others is not None and not heard:
            self.others.tell_pushed(tenant, names)
        for queue in names:
            for line in self._lines.of_queue(tenant, queue):
                self._wake(line)
            self._suspect(self._lines.of_partitions(tenant, queue))

    def pushed_to(self, tenant: int, appends: Sequence[Append]) -> None:
        """Do the same for who pushed, and so knows what has come to which partition."""
        if self.others is not None:
            self.others.tell_pushed(tenant, {append.queue for append in appends})
        for append in appends:
            for line in (
                *self._lines.of_queue(tenant, append.queue),
                *self._lines.of_partition(tenant, append.queue, append.partition),
            ):
                if self._leased(line, append):
                    self._wake(line)
                else:
                    line.told(append)
                    self._serve_soon(line)

    def _leased(self, line: Line, append: Append) -> bool:
        """Whether a line's group seems to be at what precedes an append still."""
        return (
            self.deliveries is not None
            and line.group_id is not None
            and append.partition_id is not None
            and self.deliveries.out(line.group_id, append.partition_id)
        )

    def freed(self, group_ids: Iterable[int], *, heard: bool = False) -> None:
        """Serve those who wait in these groups: they can claim something again."""
        ids = set(group_ids)
        if self.others is not None and not heard:
            self.others.tell_freed(ids)
        for group_id in ids:
            lines = self._lines.of_group(group_id)
            for line in lines:
                if line.source.partition is None:
                    self._wake(line)
            self._suspect([line for line in lines if line.source.partition is not None])

    def deleted(self, tenant: int, queue: str) -> None:
        """Answer those who wait for this queue empty: it is gone (data-plane 9.6)."""
        for line in (
            *self._lines.of_queue(tenant, queue),
            *self._lines.of_partitions(tenant, queue),
        ):
            line.group = None
            line.doubt()
            self._dismiss(line)

    def settled(self, lease_ids: Iterable[str]) -> None:
        """Learn from leases that acks have released how fast their groups work."""
        now = asyncio.get_running_loop().time()
        for lease_id in lease_ids:
            self._pace.settled(UUID(lease_id), now)

    async def close(self) -> None:
        """Answer every waiting pop empty, and end."""
        self._closing = True
        for task in (self._poller, self._looking):
            if task is not None:
                task.cancel()
        for line in self._lines:
            if line.task is not None:
                with contextlib.suppress(asyncio.CancelledError, QueenError):
                    await line.task
            self._dismiss(line)

    def _demand(self, source: Source, request: PopRequest) -> Demand:
        conflating = bool(request.conflation)
        autopilot = request.autopilot and not conflating and request.partition is None
        batch = request.batch
        if batch is None:
            batch = self._pace.batch(source) if autopilot else pop.BATCH_DEFAULT
        batch = max(batch, 1)
        partitions = request.partitions
        if request.partition is not None:
            partitions = 1
        elif partitions is None and not autopilot:
            partitions = batch if conflating else 1
        if partitions is not None:
            partitions = min(max(partitions, 1), pop.PARTITIONS_MAX)
        seconds = request.lease_seconds
        return Demand(
            lease_id=uuid_v7(),
            subscription=Subscription.of(request, self._default_mode),
            batch=batch,
            partitions=partitions,
            lease_seconds=seconds if seconds is not None and seconds > 0 else None,
            commit_on_delivery=request.commit_on_delivery,
            conflation=request.conflation,
        )

    async def _stand(
        self, source: Source, request: PopRequest, gone: Callable[[], bool], demand: Demand
    ) -> PopAnswer:
        loop = asyncio.get_running_loop()
        line = self._lines.open(source)
        waiter = Waiter(
            demand=demand,
            answer=loop.create_future(),
            gone=gone,
            wait=request.wait and not self._closing,
            autopilot=request.autopilot
            and not request.conflation
            and request.partition is None
            and (request.batch is None or request.partitions is None),
        )
        seconds = min(max(request.timeout_ms, 1), 60_000) / 1000
        line.waiters.append(waiter)
        if not waiter.wait or seconds < 2 * POLL_SECONDS:
            self._wake(line)
        elif self._drained(line):
            waiter.entered = True
        else:
            # A look that goes on may find that nothing is left.
            self._serve_soon(line)
        if self._poller is None:
            self._poller = loop.create_task(self._poll())
        timer = loop.call_later(max(seconds - ANSWER_SECONDS, 0.001), self._expire, line, waiter)
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            self._abandon(line, waiter)
            raise
        finally:
            timer.cancel()
            self._leave(line, waiter)

    def _abandon(self, line: Line, waiter: Waiter) -> None:
        """Give back what a pop was answered that did not live to hear it."""
        answer = waiter.answer
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            claims = answer.result().claims
            task = asyncio.create_task(self._return(waiter.demand, line.group_id, claims))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    def _expire(self, line: Line, waiter: Waiter) -> None:
        """The time to wait is over; a pop that is being served gets its answer from the round."""
        waiter.wait = False
        if not waiter.served:
            _answer(line, waiter, [])

    def _leave(self, line: Line, waiter: Waiter) -> None:
        if waiter in line.waiters:
            line.waiters.remove(waiter)
        if not line.waiters and line.task is None:
            self._lines.close(line)

    def _dismiss(self, line: Line) -> None:
        """Answer everybody in a line empty."""
        for waiter in line.waiters:
            _answer(line, waiter, [])

    def _drained(self, line: Line) -> bool:
        """Whether nothing is there for a line's group, as far as is known and not long ago."""
        return (
            line.group is not None
            and not line.look
            and asyncio.get_running_loop().time() < line.walked_at + POLL_SECONDS
        )

    def _wake(self, line: Line) -> None:
        """Look soon for something for a line."""
        line.look = True
        self._serve_soon(line)

    def _serve_soon(self, line: Line) -> None:
        line.due = True
        if line.task is None and not self._closing:
            line.task = asyncio.get_running_loop().create_task(self._serve(line))

    async def _serve(self, line: Line) -> None:
        try:
            while line.due and line.waiters:
                line.due = False
                appends = line.take()
                # A look that is due finds them too, and a second claim costs more than it hastens.
                if appends and not line.look and not await self._hand(line, appends):
                    continue
                if not self._drained(line) or any(
                    not (waiter.wait or waiter.answer.done()) for waiter in line.waiters
                ):
                    await self._round(line)
        finally:
            line.task = None
            if not line.waiters:
                self._lines.close(line)

    async def _hand(self, line: Line, appends: list[Append]) -> bool:
        """Hand over what was pushed, or have it looked for; return False when that fails."""
        group = line.group
        standing = _standing(line)
        waiters = standing[:ROUND_MAX]
        if group is None or not waiters:
            line.doubt()
            return True
        handing = pop.hand(
            self._db,
            line.source,
            group,
            [waiter.demand for waiter in waiters],
            len(standing),
            appends,
            asyncio.get_running_loop().time() + ROUND_SECONDS,
            claimer=self.claimer,
            deliveries=self.deliveries,
        )
        served = await self._served(line, waiters, handing)
        if served is None:
            line.doubt()
            return False
        line.group = served.group
        if not served.drained:
            line.doubt()
        await self._give(line, waiters, served)
        return True

    async def _round(self, line: Line) -> None:
        """Look for something for a line once; answer who got something or does not wait."""
        standing = _standing(line)
        waiters = standing[:ROUND_MAX]
        if not waiters:
            return
        # A group that its pops have seen, and that is gone, was deleted: they must not revive it.
        entering = line.source.partition is not None or not all(w.entered for w in waiters)
        begun = asyncio.get_running_loop().time()
        walked_at, line.walked_at, line.look = line.walked_at, -math.inf, False
        line.looks += 1
        # Who does not wait is told what there is, however it came to be.
        recent = (
            line.group is not None
            and begun < walked_at + POLL_SECONDS
            and all(waiter.wait for waiter in waiters)
        )
        serving = pop.serve(
            self._db,
            line.source,
            [waiter.demand for waiter in waiters],
            len(standing),
            begun + ROUND_SECONDS,
            entering=entering,
            group=line.group,
            recent_seconds=begun - walked_at + OVERLAP_SECONDS if recent else None,
            claimer=self.claimer,
            deliveries=self.deliveries,
        )
        served = await self._served(line, waiters, serving)
        if served is None:
            return
        if served.drained:
            line.walked_at = walked_at if recent else begun
        self._lines.move(line, served.group_id)
        # Once it is registered and seeded, nothing changes about it until it is gone.
        settled = served.group is not None and served.group["registered"] and not served.seeding
        line.group = served.group if settled else None
        line.conflation = served.conflation
        line.seeding = served.seeding
        if not entering and served.group_id is None:
            for waiter in waiters:
                _answer(line, waiter, [])
            return
        for waiter in waiters:
            waiter.entered = True
        await self._give(line, waiters, served)
        for waiter, claims in zip(waiters, served.claims, strict=True):
            if not claims and not waiter.wait:
                _answer(line, waiter, claims)
        beyond = standing[len(waiters) :]
        if any(served.claims) and not served.drained:
            # There may be something for those who got nothing yet.
            line.due = line.due or not all(waiter.answer.done() for waiter in standing)
        else:
            # They would find nothing where this round found nothing.
            for waiter in beyond:
                if not waiter.wait:
                    _answer(line, waiter, [])

    async def _served(
        self, line: Line, waiters: Sequence[Waiter], serving: Awaitable[Served]
    ) -> Served | None:
        """Let nobody of these leave while they are being served; None, and told, when it fails."""
        for waiter in waiters:
            waiter.served = True
        try:
            served = await serving
        except QueenError as error:
            self._failed(line, waiters, error)
            return None
        except Exception as error:
            _log.error("pop.broken", queue=line.source.queue, exc_info=error)
            self._failed(line, waiters, Internal("internal error"))
            return None
        finally:
            for waiter in waiters:
                waiter.served = False
        self._troubled = False
        return served

    async def _give(self, line: Line, waiters: list[Waiter], served: Served) -> None:
        """Answer those who got something, or give it back for those who have gone meanwhile."""
        for waiter, claims in zip(waiters, served.claims, strict=True):
            if not waiter.demand.commit_on_delivery:
                # The ack tells when there is more in a partition that is leased.
                line.leased(claims)
            if claims and (waiter.answer.done() or waiter.gone()):
                await self._return(waiter.demand, line.group_id, claims)
                self._wake(line)
            elif claims:
                _answer(line, waiter, claims)

    def _failed(self, line: Line, waiters: Sequence[Waiter], error: QueenError) -> None:
        """Those who wait keep waiting while the database is away; the others are told."""
        if not self._troubled:
            _log.warning(
                "pop.failed", queue=line.source.queue, code=error.code, error=error.message
            )
            self._troubled = True
        for waiter in waiters:
            if not (waiter.wait and isinstance(error, Unavailable)) and not waiter.answer.done():
                waiter.answer.set_exception(error)

    async def _return(self, demand: Demand, group_id: int | None, claims: list[Claim]) -> None:
        """Give back what was claimed for a client that went away meanwhile (data-plane 4.3-12)."""
        if demand.commit_on_delivery or group_id is None or not claims:
            return
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        with contextlib.suppress(QueenError):
            await lease.give_back(
                self._db,
                demand.lease_id,
                [claim.partition_id for claim in claims],
                group_id,
                deadline,
            )

    async def _poll(self) -> None:
        """Wake every line for which something is ready, however it came to be."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            lines = [line for line in self._lines if line.waiters]
            queues = [line for line in lines if line.source.partition is None]
            groups = {line.group_id: line for line in queues if line.group_id is not None}
            partitions = [line for line in lines if line.source.partition is not None]
            # When the database is away, the next poll asks again.
            with contextlib.suppress(QueenError, Signal):
                if groups:
                    await self._look_at_groups(groups)
                if partitions:
                    await self._look_at_partitions(partitions)
            for line in queues:
                if line.group_id is None or line.seeding:
                    self._wake(line)

    def _suspect(self, lines: Iterable[Line]) -> None:
        """Look soon whether there is something for these lines of single partitions."""
        self._suspected.update(lines)
        if self._suspected and self._looking is None and not self._closing:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """Wake the lines that are suspected rightly; all of them are one question."""
        try:
            while self._suspected:
                suspected, self._suspected = self._suspected, set()
                with contextlib.suppress(QueenError, Signal):
                    await self._look_at_partitions(list(suspected))
        finally:
            self._looking = None

    async def _look_at_groups(self, lines: Mapping[int, Line]) -> None:
        """Wake the lines of groups that have something ready, or will before the next poll."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        looks = {line: line.looks for line in lines.values()}
        for row in await self._db.read(
            "_next_ready", group_id=list(lines), within_seconds=POLL_SECONDS
        ):
            line = lines[row["group_id"]]
            if row["wait_seconds"] is None:
                self._dismiss(line)
            elif row["wait_seconds"] > 0:
                loop.call_later(row["wait_seconds"], self._wake, line)
                continue
            else:
                # Wherever that is: from the oldest on.
                line.doubt()
                self._serve_soon(line)
            del looks[line]
        _found_nothing(looks, asked)

    async def _look_at_partitions(self, lines: Sequence[Line]) -> None:
        """Wake the lines of single partitions that hold something their group may claim."""
        asked = asyncio.get_running_loop().time()
        looks = {line: line.looks for line in lines}
        for row in await self._db.read(
            "_claimable",
            tenant=[line.source.tenant for line in lines],
            queue=[line.source.queue for line in lines],
            partition=[line.source.partition for line in lines],
            consumer_group=[line.source.consumer_group for line in lines],
            group_id=[line.group_id for line in lines],
        ):
            line = lines[row["place"] - 1]
            del looks[line]
            if row["gone"]:
                self._dismiss(line)
            else:
                self._wake(line)
        _found_nothing(looks, asked)

    async def _discover(
        self, tenant: int, request: PopRequest, gone: Callable[[], bool]
    ) -> PopAnswer:
        """Pop from every queue with the labels, in name order, on one budget (data-plane 4.3-3)."""
        group = request.consumer_group or QUEUE_MODE
        demand = self._demand(Source(tenant, "", group), request)
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        demand.lease_seconds = demand.lease_seconds or pop.DISCOVERY_LEASE_SECONDS
        taken: list[tuple[int | None, list[Claim]]] = []
        conflation = conflict = False
        for name in await pop.labelled(self._db, tenant, request.namespace, request.task, deadline):
            source = Source(tenant, name, group)
            if gone():
                break
            if demand.batch <= 0 or demand.partitions == 0:
                # The group begins on every queue with its first pop, served or not.
                await pop.enter(self._db, source, [demand], deadline)
                continue
            served = await pop.serve(
                self._db,
                source,
                [demand],
                1,
                deadline,
                claimer=self.claimer,
                deliveries=self.deliveries,
            )
            [claims] = served.claims
            taken.append((served.group_id, claims))
            conflation |= bool(served.conflation)
            conflict |= request.conflation not in (None, served.conflation)
            demand.batch -= sum(len(claim.messages) for claim in claims)
            if demand.partitions is not None:
                demand.partitions -= len(claims)
        if gone():
            for group_id, claims in taken:
                await self._return(demand, group_id, claims)
            return PopAnswer(group)
        claims = [claim for _, claims in taken for claim in claims]
        return PopAnswer(
            group,
            claims=claims,
            lease_id=_lease_id(demand, claims),
            conflation=conflation,
            conflation_conflict=conflict,
        )


def _found_nothing(looks: Mapping[Line, int], asked: float) -> None:
    """Note that there was nothing for lines, unless a look that has begun since knows more."""
    for line, number in looks.items():
        if line.looks == number:
            line.walked_at = max(line.walked_at, asked)


def _standing(line: Line) -> list[Waiter]:
    """Return who stands in a line; those who are gone stand there no more."""
    for waiter in line.waiters:
        if waiter.gone():
            _answer(line, waiter, [])
    return [waiter for waiter in line.waiters if not waiter.answer.done()]


def _answer(line: Line, waiter: Waiter, claims: list[Claim]) -> None:
    if waiter.answer.done():
        return
    demand = waiter.demand
    # As long as there is no group, nothing contradicts what the pop asks for.
    policy = bool(demand.conflation) if line.conflation is None else line.conflation
    waiter.answer.set_result(
        PopAnswer(
            consumer_group=line.source.consumer_group,
            lease_id=_lease_id(demand, claims),
            claims=claims,
            conflation=policy,
            conflation_conflict=demand.conflation not in (None, policy),
            autopilot=(demand.width, demand.batch) if waiter.autopilot else None,
        )
    )


def _lease_id(demand: Demand, claims: list[Claim]) -> UUID | None:
    return demand.lease_id if claims and not demand.commit_on_delivery else None
