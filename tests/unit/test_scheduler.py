"""The scheduler's clockwork: when it looks, what wakes it, how it takes failures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from queen_pg import scheduler as module
from queen_pg.broker import timer_fire
from queen_pg.broker.timer_fire import START, Due, Fired, Passed
from queen_pg.errors import Conflict, Unavailable
from queen_pg.scheduler import Scheduler, Sweep

Answer = Due | Exception


class Timers:
    """Stands for broker.timer_fire: answers what it is told to, and counts who asked."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.looks = 0
        self.fired: list[tuple[int, list[str]]] = []
        self.during: Callable[[], None] | None = None

    async def due(self, db: Any, passed: Passed = START) -> Due:
        self.looks += 1
        if self.during is not None:
            during, self.during = self.during, None
            during()
        answer = self.answers.pop(0) if self.answers else Due([], None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def fire(
        self,
        db: Any,
        tenant: int,
        timers: Sequence[Any],
        attempts_max: int,
        deadline: float,
        *,
        patient: bool = False,
    ) -> Fired:
        self.fired.append((tenant, [one["timer_key"] for one in timers]))
        return Fired({one["queue"]: 1 for one in timers}, set())


def due(*timers: tuple[int, str, str]) -> Due:
    records: list[Any] = [
        {"tenant": tenant, "queue": queue, "timer_key": key} for tenant, queue, key in timers
    ]
    return Due(records, None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


class Running:
    """A scheduler at work on timers that are only told of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.pushed: list[tuple[int, set[str]]] = []
        self.scheduler: Scheduler | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, timers: Timers, *sweeps: Sweep) -> Scheduler:
        self._monkeypatch.setattr(timer_fire, "due", timers.due)
        self._monkeypatch.setattr(timer_fire, "fire", timers.fire)
        nothing: Any = None
        self.scheduler = Scheduler(
            nothing, lambda tenant, queues: self.pushed.append((tenant, queues)), sweeps=sweeps
        )
        self._task = asyncio.create_task(self.scheduler.run())
        return self.scheduler

    async def stop(self) -> None:
        if self.scheduler is not None and self._task is not None:
            await asyncio.sleep(0)
            await self.scheduler.stop()
            await self._task


@pytest_asyncio.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    made = Running(monkeypatch)
    yield made
    await made.stop()


async def test_each_tenants_timers_are_fired_together_in_their_order(running: Running) -> None:
    timers = Timers(due((2, "q", "a"), (1, "q", "b"), (2, "p", "c")))
    running.start(timers)
    await until(lambda: len(running.pushed) == 2)
    assert timers.fired == [(1, ["b"]), (2, ["a", "c"])]
    assert running.pushed == [(1, {"q"}), (2, {"q", "p"})]


async def test_it_looks_again_at_once_while_there_was_something(running: Running) -> None:
    timers = Timers(*[due((1, "q", f"k{number}")) for number in range(5)])
    running.start(timers)
    await until(lambda: len(timers.fired) == 5)
    await until(lambda: timers.looks == 6)


async def test_it_sleeps_until_the_next_timer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 60)
    timers = Timers(Due([], 0.05), due((1, "q", "k")))
    started = asyncio.get_running_loop().time()
    running.start(timers)
    await until(lambda: bool(timers.fired))
    assert 0.05 <= asyncio.get_running_loop().time() - started < 5


async def test_it_looks_now_and_then_by_itself(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    timers = Timers(Due([], 3600), Due([], None), due((1, "q", "k")))
    running.start(timers)
    await until(lambda: bool(timers.fired))


async def test_wake_makes_it_look_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 60)
    timers = Timers()
    scheduler = running.start(timers)
    await until(lambda: timers.looks == 1)
    timers.answers.append(due((1, "q", "k")))
    scheduler.wake()
    await until(lambda: bool(timers.fired))


async def test_a_timer_that_is_far_ahead_wakes_nobody(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    timers = Timers()
    scheduler = running.start(timers)
    await until(lambda: timers.looks == 1)
    for _ in range(100):
        scheduler.wake(3600)
        await asyncio.sleep(0)
    assert timers.looks == 1
    await until(lambda: timers.looks == 2)


async def test_a_timer_before_the_next_look_is_looked_for_in_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 60)
    timers = Timers(Due([], None))
    scheduler = running.start(timers)
    await until(lambda: timers.looks == 1)
    timers.answers += [Due([], 0.05), due((1, "q", "k"))]
    scheduler.wake(0.05)
    await until(lambda: bool(timers.fired))


async def test_what_is_scheduled_during_a_look_is_not_slept_over(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 60)
    timers = Timers()
    scheduler = running.start(timers)
    await until(lambda: timers.looks == 1)
    timers.during = lambda: scheduler.wake(0.05)
    scheduler.wake()
    await until(lambda: timers.looks >= 3)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("retry", "gone"),
        Conflict("deadlock", sqlstate="40P01"),
        RuntimeError("a fault of ours"),
    ],
)
async def test_a_failure_is_told_once_and_survived(
    running: Running, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(module, "TROUBLE_SECONDS", 0.001)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    timers = Timers(error, error, error, due((1, "q", "k")), Due([], None), error)
    with capture_logs() as logs:
        running.start(timers)
        await until(lambda: timers.looks > 6)
    events = [log["event"] for log in logs]
    assert events[:3] == ["scheduler.failed", "scheduler.recovered", "scheduler.failed"]
    assert len(timers.fired) == 1


async def test_sweeps_run_over_and_over_and_fail_alone(running: Running) -> None:
    runs: dict[str, int] = {"good": 0, "bad": 0}

    async def good() -> None:
        runs["good"] += 1

    async def bad() -> None:
        runs["bad"] += 1
        raise Unavailable("timeout", "gone")

    with capture_logs() as logs:
        running.start(Timers(), Sweep("good", 0.001, good), Sweep("bad", 0.001, bad))
        await until(lambda: min(runs.values()) > 3)
    assert [log["work"] for log in logs if log["work"] != "kv"] == ["bad"]
