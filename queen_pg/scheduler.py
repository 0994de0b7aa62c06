"""The scheduler: fires due timers, and runs the sweeps that keep the database small.

Neither carries correctness: a timer's row is judged by the step that fires it, and what a sweep
removes was invisible before. So many brokers may run a scheduler, and one that was stopped only
catches up, oldest timer first and a bounded batch at a time.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from queen_pg.broker import kv, timer_fire
from queen_pg.database import Database
from queen_pg.errors import Held, QueenError, Signal
from queen_pg.telemetry import logger

# Timers of other brokers and of plain SQL are found this late at most.
LOOK_SECONDS = 1.0
# Somebody else is firing what is due here, or holds the partitions that it is for.
BUSY_SECONDS = 0.05
# The database is away, or full: an attempt that costs no timer anything.
TROUBLE_SECONDS = 1.0
STEP_SECONDS = 30.0
ATTEMPTS_MAX = 5
# A pass that fired so many begins anew, so that a partition which was held is soon tried again.
PASS_MAX = 4096

KV_SWEEP_SECONDS = 1.0
KV_SWEEP_KEYS = 1000

T = TypeVar("T")

_log = logger("scheduler")


class Sweep(NamedTuple):
    """Work to be done over and over: `run` does one bounded stretch of it."""

    name: str
    interval_seconds: float
    run: Callable[[], Awaitable[None]]


class Scheduler:
    """Fires the timers of all tenants; `on_pushed` hears of the queues that got messages."""

    def __init__(
        self,
        db: Database,
        on_pushed: Callable[[int, set[str]], None],
        *,
        attempts_max: int = ATTEMPTS_MAX,
        sweeps: Sequence[Sweep] = (),
    ) -> None:
        self._db = db
        self._on_pushed = on_pushed
        self._attempts_max = attempts_max
        self._sweeps = (Sweep("kv", KV_SWEEP_SECONDS, KvSweep(db).run), *sweeps)
        self._woken = asyncio.Event()
        self._soonest = math.inf
        # While it looks there is nothing to wake.
        self._next_look = -math.inf
        self._tasks: list[asyncio.Task[None]] = []
        self._troubled: set[str] = set()
        self._passed = timer_fire.START
        self._fired = 0
        self._patient = False

    async def run(self) -> None:
        """Fire and sweep until `stop` is called."""
        self._tasks = [
            asyncio.create_task(self._fire_for_ever(), name="timers"),
            *(asyncio.create_task(self._sweep(sweep), name=sweep.name) for sweep in self._sweeps),
        ]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """End. A step that is under way is cancelled: it happens whole, or not at all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self, within_seconds: float = 0.0) -> None:
        """Look again when that much time has passed, if not before: a timer has been scheduled."""
        due = asyncio.get_running_loop().time() + within_seconds
        self._soonest = min(self._soonest, due)
        if due < self._next_look:
            self._woken.set()

    async def _fire_for_ever(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self._woken.clear()
            self._soonest = math.inf
            pause = await self._guarded("timers", self.fire_due)
            # A timer that was scheduled during the look may not have been seen by it.
            self._next_look = min(
                clock() + (TROUBLE_SECONDS if pause is None else pause), self._soonest
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_look):
                    await self._woken.wait()
            self._next_look = -math.inf

    async def fire_due(self) -> float:
        """Fire one batch of due timers; return the seconds until there may be more to do.

        Where somebody holds partitions, the pass goes on behind that batch and without them. After
        a pass that fired nothing, the next one waits a moment for them.
        """
        timers, wait_seconds = await timer_fire.due(self._db, self._passed)
        if not timers:
            if self._passed is not timer_fire.START:
                return self._next_pass(patient=not self._fired)
            return LOOK_SECONDS if wait_seconds is None else min(wait_seconds, LOOK_SECONDS)
        held = await self._fire(timers)
        if held is None or not (held or self._passed.held) or self._fired >= PASS_MAX:
            return self._next_pass(patient=False)
        self._passed = self._passed.over(timers, held)
        return 0

    async def _fire(self, timers: Sequence[Any]) -> set[timer_fire.Partition] | None:
        """Fire a batch; return the partitions that were held, or None while others fire."""
        held: set[timer_fire.Partition] = set()
        others = False
        deadline = asyncio.get_running_loop().time() + STEP_SECONDS
        patient, self._patient = self._patient, False
        by_tenant = sorted(timers, key=lambda due: due["tenant"])
        for tenant, group in itertools.groupby(by_tenant, key=lambda due: due["tenant"]):
            batch = list(group)
            try:
                fired = await timer_fire.fire(
                    self._db, tenant, batch, self._attempts_max, deadline, patient=patient
                )
            except Held:
                held |= {timer_fire.partition_of(timer) for timer in batch}
                others = others or not patient
                continue
            held |= fired.held
            if fired.queues:
                self._fired += sum(fired.queues.values())
                self._on_pushed(tenant, set(fired.queues))
        return None if others else held

    def _next_pass(self, *, patient: bool) -> float:
        fired, self._fired = self._fired, 0
        self._passed = timer_fire.START
        self._patient = patient
        return 0 if fired else BUSY_SECONDS

    async def _sweep(self, sweep: Sweep) -> None:
        while True:
            await asyncio.sleep(sweep.interval_seconds)
            await self._guarded(sweep.name, sweep.run)

    async def _guarded(self, name: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do some work; when it fails, say so once until it succeeds again, and return None."""
        try:
            result = await work()
        except Exception as error:
            if name not in self._troubled:
                expected = isinstance(error, QueenError | Signal)
                _log.warning(
                    "scheduler.failed",
                    work=name,
                    error=str(error),
                    exc_info=None if expected else error,
                )
                self._troubled.add(name)
            return None
        if name in self._troubled:
            _log.info("scheduler.recovered", work=name)
            self._troubled.discard(name)
        return result


class KvSweep:
    """Walks over all KV rows, a stretch at a time, and removes the dead ones."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._place = kv.START

    async def run(self) -> None:
        """Sweep one stretch, and go on at once where it was full of dead rows."""
        while True:
            removed, self._place = await kv.sweep(self._db, self._place, KV_SWEEP_KEYS)
            if removed < KV_SWEEP_KEYS // 2:
                return
