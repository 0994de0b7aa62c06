"""Waiting consumers: who waits for which queue and group, and what wakes them.

Pops of one source (a group on a queue, or on one partition) stand in one line. A line serves
its pops in rounds, one round at a time, oldest pop first: whatever arrives during a round goes
together into the next, so pops share their transactions. A pop that waits and gets nothing
stays in line, holding no connection.

A line is served when a pop joins it, when this process commits something for it, and when the poll
finds something ready: the poll asks for all lines at once, and alone guarantees progress.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID

import msgspec

from queen_pg.broker import lease, pop
from queen_pg.broker.ack import QUEUE_MODE
from queen_pg.broker.autopilot import Pace
from queen_pg.broker.identity import uuid_v7
from queen_pg.broker.pop import Claim, Demand, PopAnswer, PopRequest, Source, Subscription
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import QueenError, Unavailable
from queen_pg.telemetry import logger

POLL_SECONDS = 0.5
# The answer to a pop must arrive before its deadline: stop claiming this much earlier.
ANSWER_SECONDS = 0.1
# One round, however long its pops may wait.
ROUND_SECONDS = 30.0
# What one round claims at most, in calls.
ROUND_MAX = 64

_log = logger("wakeup")


class _Waiter(msgspec.Struct, eq=False):
    """One pop in line."""

    demand: Demand
    answer: asyncio.Future[PopAnswer]
    gone: Callable[[], bool]
    wait: bool
    autopilot: bool
    served: bool = False
    entered: bool = False


class _Line:
    """The pops of one source, and the task that serves them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.waiters: list[_Waiter] = []
        self.group_id: int | None = None
        self.conflation = False
        self.seeding = False
        self.task: asyncio.Task[None] | None = None
        self.due = False


class Others(Protocol):
    """The other processes that serve pops of this database."""

    def tell_pushed(self, tenant: int, queues: Iterable[str]) -> None:
        """Something was pushed to these queues."""

    def tell_freed(self, group_ids: Iterable[int]) -> None:
        """These groups can claim something again."""


class Waiters:
    """Serves every pop of this process."""

    others: Others | None = None

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db = db
        self._default_mode = settings.default_subscription_mode
        self._lines: dict[Source, _Line] = {}
        self._pace = Pace()
        self._poller: asyncio.Task[None] | None = None
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

        Unless another process has said so (`heard`), the others are told.
        """
        names = set(queues)
        if self.others is not None and not heard:
            self.others.tell_pushed(tenant, names)
        for line in self._lines.values():
            if line.source.tenant == tenant and line.source.queue in names:
                self._wake(line)

    def freed(self, group_ids: Iterable[int], *, heard: bool = False) -> None:
        """Serve those who wait in these groups: they can claim something again."""
        ids = set(group_ids)
        if self.others is not None and not heard:
            self.others.tell_freed(ids)
        if ids:
            for line in self._lines.values():
                if line.group_id in ids:
                    self._wake(line)

    def settled(self, lease_ids: Iterable[str]) -> None:
        """Learn from leases that acks have released how fast their groups work."""
        now = asyncio.get_running_loop().time()
        for lease_id in lease_ids:
            self._pace.settled(UUID(lease_id), now)

    async def close(self) -> None:
        """Answer every waiting pop empty, and end."""
        self._closing = True
        if self._poller is not None:
            self._poller.cancel()
        for line in list(self._lines.values()):
            if line.task is not None:
                with contextlib.suppress(asyncio.CancelledError, QueenError):
                    await line.task
            for waiter in line.waiters:
                _answer(line, waiter, [])

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
        line = self._lines.setdefault(source, _Line(source))
        waiter = _Waiter(
            demand=demand,
            answer=loop.create_future(),
            gone=gone,
            wait=request.wait and not self._closing,
            autopilot=request.autopilot
            and not request.conflation
            and request.partition is None
            and (request.batch is None or request.partitions is None),
        )
        line.waiters.append(waiter)
        self._wake(line)
        if self._poller is None:
            self._poller = loop.create_task(self._poll())
        seconds = min(max(request.timeout_ms, 1), 60_000) / 1000
        timer = loop.call_later(max(seconds - ANSWER_SECONDS, 0.001), self._expire, line, waiter)
        try:
            return await waiter.answer
        finally:
            timer.cancel()
            self._leave(line, waiter)

    def _expire(self, line: _Line, waiter: _Waiter) -> None:
        """The time to wait is over; a pop that is being served gets its answer from the round."""
        waiter.wait = False
        if not waiter.served:
            _answer(line, waiter, [])

    def _leave(self, line: _Line, waiter: _Waiter) -> None:
        if waiter in line.waiters:
            line.waiters.remove(waiter)
        if not line.waiters and line.task is None:
            self._lines.pop(line.source, None)

    def _wake(self, line: _Line) -> None:
        line.due = True
        if line.task is None and not self._closing:
            line.task = asyncio.get_running_loop().create_task(self._serve(line))

    async def _serve(self, line: _Line) -> None:
        try:
            while line.due and line.waiters:
                line.due = False
                await self._round(line)
        finally:
            line.task = None
            if not line.waiters:
                self._lines.pop(line.source, None)

    async def _round(self, line: _Line) -> None:
        """Serve a line once, and answer those who got something or do not wait."""
        for waiter in line.waiters:
            if waiter.gone():
                _answer(line, waiter, [])
        standing = [waiter for waiter in line.waiters if not waiter.answer.done()]
        waiters = standing[:ROUND_MAX]
        if not waiters:
            return
        # A group that its pops have seen, and that is gone, was deleted: they must not revive it.
        entering = line.source.partition is not None or not all(w.entered for w in waiters)
        for waiter in waiters:
            waiter.served = True
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        try:
            served = await pop.serve(
                self._db,
                line.source,
                [waiter.demand for waiter in waiters],
                len(standing),
                deadline,
                entering=entering,
            )
        except QueenError as error:
            self._failed(line, waiters, error)
            return
        finally:
            for waiter in waiters:
                waiter.served = False
        self._troubled = False
        line.group_id = served.group_id
        line.conflation = served.conflation
        line.seeding = served.seeding
        if not entering and served.group_id is None:
            for waiter in waiters:
                _answer(line, waiter, [])
            return
        for waiter in waiters:
            waiter.entered = True
        for waiter, claims in zip(waiters, served.claims, strict=True):
            if claims and (waiter.answer.done() or waiter.gone()):
                await self._return(line, waiter, claims)
                line.due = True
            elif claims or not waiter.wait:
                _answer(line, waiter, claims)
        # Those beyond this round would find nothing where it found nothing.
        if len(standing) > len(waiters) and any(served.claims):
            line.due = True

    def _failed(self, line: _Line, waiters: list[_Waiter], error: QueenError) -> None:
        """Those who wait keep waiting while the database is away; the others are told."""
        if not self._troubled:
            _log.warning(
                "pop.failed", queue=line.source.queue, code=error.code, error=error.message
            )
            self._troubled = True
        for waiter in waiters:
            if not (waiter.wait and isinstance(error, Unavailable)) and not waiter.answer.done():
                waiter.answer.set_exception(error)

    async def _return(self, line: _Line, waiter: _Waiter, claims: list[Claim]) -> None:
        """Give back what was claimed for a client that went away meanwhile (data-plane 4.3-12)."""
        if waiter.demand.commit_on_delivery or line.group_id is None:
            return
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        with contextlib.suppress(QueenError):
            await lease.give_back(
                self._db,
                waiter.demand.lease_id,
                [claim.partition_id for claim in claims],
                line.group_id,
                deadline,
            )

    async def _poll(self) -> None:
        """Wake every line for which something is ready, however it came to be."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            known: dict[int, list[_Line]] = {}
            for line in list(self._lines.values()):
                if line.task is not None or not line.waiters:
                    continue
                if line.group_id is None or line.source.partition is not None:
                    self._wake(line)
                else:
                    known.setdefault(line.group_id, []).append(line)
            if not known:
                continue
            try:
                rows = await self._db.read("_next_ready", group_id=list(known))
            except QueenError:
                continue
            loop = asyncio.get_running_loop()
            found = {row["group_id"] for row in rows}
            for row in rows:
                seconds = (row["ready_at"] - row["moment"]).total_seconds()
                for line in known[row["group_id"]]:
                    if seconds <= 0:
                        self._wake(line)
                    elif seconds < POLL_SECONDS:
                        loop.call_later(seconds, self._wake, line)
            for group_id in known.keys() - found:
                for line in known[group_id]:
                    if line.seeding:
                        self._wake(line)

    async def _discover(
        self, tenant: int, request: PopRequest, gone: Callable[[], bool]
    ) -> PopAnswer:
        """Pop from every queue with the labels, in name order, on one budget (data-plane 4.3-3)."""
        group = request.consumer_group or QUEUE_MODE
        demand = self._demand(Source(tenant, "", group), request)
        deadline = asyncio.get_running_loop().time() + ROUND_SECONDS
        demand.lease_seconds = demand.lease_seconds or pop.DISCOVERY_LEASE_SECONDS
        answer = PopAnswer(group)
        claims: list[Claim] = []
        conflation = conflict = False
        for name in await pop.labelled(self._db, tenant, request.namespace, request.task, deadline):
            if gone() or demand.batch <= 0 or demand.partitions == 0:
                break
            served = await pop.serve(self._db, Source(tenant, name, group), [demand], 1, deadline)
            claims += served.claims[0]
            conflation |= served.conflation
            conflict |= request.conflation not in (None, served.conflation)
            taken = sum(len(claim.messages) for claim in served.claims[0])
            demand.batch -= taken
            if demand.partitions is not None:
                demand.partitions -= len(served.claims[0])
        return msgspec.structs.replace(
            answer,
            claims=claims,
            lease_id=_lease_id(demand, claims),
            conflation=conflation,
            conflation_conflict=conflict,
        )


def _answer(line: _Line, waiter: _Waiter, claims: list[Claim]) -> None:
    if waiter.answer.done():
        return
    demand = waiter.demand
    waiter.answer.set_result(
        PopAnswer(
            consumer_group=line.source.consumer_group,
            lease_id=_lease_id(demand, claims),
            claims=claims,
            conflation=line.conflation,
            conflation_conflict=demand.conflation not in (None, line.conflation),
            autopilot=(demand.width, demand.batch) if waiter.autopilot else None,
        )
    )


def _lease_id(demand: Demand, claims: list[Claim]) -> UUID | None:
    return demand.lease_id if claims and not demand.commit_on_delivery else None
