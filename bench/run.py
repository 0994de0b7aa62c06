"""Run loads, look at what the server did meanwhile, and repeat it for each candidate in turn."""

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from .stage import Broker, Stage
from .window import clock, quantile

READY_SECONDS = 120.0
# What a step is rolled back with that lost against another.
_RACE = re.compile(r'sqlstate="(40001|40P01)"')
# From the word to the first instant that counts, besides the warm-up.
LEAD_SECONDS = 0.1
# What ends a candidate's run, and not everybody's.
FAILURES = (RuntimeError, OSError, asyncpg.PostgresError)


@dataclass
class Sample:
    """What one run of one candidate gave."""

    rate: float
    p50: float | None = None
    p99: float | None = None
    commits: float = 0.0
    rollbacks: float = 0.0
    wal: float = 0.0
    # Processor time for each that was completed, in seconds.
    server_cpu: float | None = None
    broker_cpu: float | None = None
    load_cpu: float | None = None
    # Steps that lost a race and were run again, as a share of all steps.
    retried: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)


@dataclass
class Candidate:
    """Somebody who does a workload: us, the floor, or a peer."""

    name: str
    run: Callable[[], Sample]


class Load:
    """A load process: see `window`."""

    def __init__(self, program: Sequence[str], task: dict[str, Any], environment: dict[str, str]):
        self._name = f"{program[-1]} {task.get('kind')}"
        self._process = subprocess.Popen(
            [*program, json.dumps(task)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # One that never gets ready is ended, so that reading its output ends too.
        self._timer = threading.Timer(READY_SECONDS, self._process.kill)
        self._timer.start()

    def ready(self) -> None:
        """Wait until it is connected."""
        line = self._line()
        while line.strip() != "ready":
            line = self._line()
        self._timer.cancel()

    def go(self, since: float, until: float) -> None:
        """Tell it the window."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([since, until]) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait for its end, and return what it counted."""
        assert self._process.stdout is not None
        lines = self._process.stdout.read().strip().splitlines()
        if self._process.wait() != 0 or not lines:
            raise RuntimeError(f"{self._name} failed")
        report: dict[str, Any] = json.loads(lines[-1])
        return report

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._timer.cancel()
        if self._process.poll() is None:
            self._process.kill()
        # Waits for it, and closes what led to it.
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended before it was ready")
        return line


def program(name: str) -> list[str]:
    """Return the command of a load program, whatever this package is called where it runs."""
    return [sys.executable, "-m", f"{__package__}.{name}"]


def http(broker: Broker, **task: Any) -> Load:
    """Start a load over HTTP."""
    task |= {"host": broker.host, "port": broker.port}
    return Load(program("load"), task, {})


def sql(url: str, **task: Any) -> Load:
    """Start a load of plain SQL."""
    return Load(program("floor"), task | {"url": url}, {})


def measure(
    stage: Stage,
    database: str,
    loads: Sequence[Load],
    *,
    warm: float,
    seconds: float,
    count: Sequence[int] | None = None,
    brokers: Sequence[Broker] = (),
) -> Sample:
    """Let the loads run together, and return what those that `count` (by place) completed."""
    try:
        for load in loads:
            load.ready()
        since = clock() + LEAD_SECONDS + warm
        until = since + seconds
        for load in loads:
            load.go(since, until)
        time.sleep(max(since - clock(), 0))
        before, used, lost = stage.counters(database), _Used(stage, brokers), _Lost(brokers)
        time.sleep(max(until - clock(), 0))
        server_cpu, broker_cpu = used.since()
        retried = lost.since()
        after = stage.counters(database)
        results = [load.result() for load in loads]
    finally:
        for load in loads:
            load.kill()
    histogram: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    done = everything = 0
    for place, result in enumerate(results):
        errors.update(result["errors"])
        everything += result["count"] + result["before"]
        if count is None or place in count:
            done += result["count"]
            histogram.update({int(key): value for key, value in result["histogram"].items()})
    counted = {key: after[key] - before[key] for key in before}
    return Sample(
        rate=done / seconds,
        p50=quantile(histogram, 0.50),
        p99=quantile(histogram, 0.99),
        commits=counted["xact_commit"] / max(done, 1),
        rollbacks=counted["xact_rollback"] / max(counted["xact_commit"], 1),
        wal=counted["wal"] / max(done, 1),
        server_cpu=server_cpu and server_cpu / max(done, 1),
        broker_cpu=broker_cpu and broker_cpu / max(done, 1),
        load_cpu=sum(result["cpu"] for result in results) / max(everything, 1),
        retried=retried,
        errors=dict(+errors),
        counted=counted | {"done": done, "handled": everything},
    )


class _Used:
    """The processor time that the server and the brokers use from now on."""

    def __init__(self, stage: Stage, brokers: Sequence[Broker]) -> None:
        self._stage = stage
        self._brokers = brokers
        self._before = self._now()

    def _now(self) -> tuple[float | None, float | None]:
        brokers = sum(broker.cpu_seconds for broker in self._brokers) if self._brokers else None
        return self._stage.cpu_seconds(), brokers

    def since(self) -> tuple[float | None, float | None]:
        """Return what the two have used."""
        (server, broker), (server_before, broker_before) = self._now(), self._before
        return (
            None if server is None or server_before is None else server - server_before,
            None if broker is None or broker_before is None else broker - broker_before,
        )


class _Lost:
    """The share of the brokers' steps that lose a race from now on."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        steps = lost = 0.0
        for broker in self._brokers:
            for name, value in broker.metrics().items():
                if name.startswith("queen_step_seconds_count"):
                    steps += value
                elif name.startswith("queen_step_retries_total") and _RACE.search(name):
                    lost += value
        return steps, lost

    def since(self) -> float | None:
        """Return the share; None without brokers or steps."""
        (steps, lost), (steps_before, lost_before) = self._now(), self._before
        return (lost - lost_before) / (steps - steps_before) if steps > steps_before else None


def rounds(candidates: Sequence[Candidate], times: int) -> dict[str, list[Sample]]:
    """Run every candidate once a round, so that the machine's moods meet them all alike."""
    samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in candidates}
    for number in range(times):
        # The order turns, so that nobody always runs after the same one.
        turned = [*candidates[number % len(candidates) :], *candidates[: number % len(candidates)]]
        for candidate in turned:
            try:
                samples[candidate.name].append(candidate.run())
            except FAILURES as error:
                print(f"  {candidate.name}: {error}", file=sys.stderr)
    return samples


def median(samples: Sequence[Sample], name: str) -> float | None:
    """Return the median of a figure."""
    values = [value for sample in samples if (value := getattr(sample, name)) is not None]
    return statistics.median(values) if values else None
