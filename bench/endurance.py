"""The path over a longer time, sampled: beside a reader that holds its snapshot, and as a soak.

What is looked for is change: the rate and the latencies of the last interval against the first,
and tables and dead rows that go on growing where the work does not.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import asyncpg

from .run import Sample, http, measure
from .workloads import OURS, Bench, path_tasks

INTERVALS = 6


def endure(bench: Bench, rate: int, seconds: float) -> dict[str, Any]:
    """Run the path at a rate, interval after interval; return the samples and tables of each."""
    # Consumed messages go once they are a minute old, and what is known of them a quarter of an
    # hour later (sql/retention.sql): what is kept levels off.
    queue = bench.known()
    minute = min(60, int(seconds / 6) + 1)
    bench.broker.configure(
        queue,
        retentionEnabled=True,
        completedRetentionSeconds=minute,
        dedupWindowSeconds=minute,
    )
    samples: list[Sample] = []
    tables: list[list[dict[str, Any]]] = []
    for _ in range(INTERVALS):
        loads = [http(bench.broker, **task) for task in path_tasks(queue, rate)]
        samples.append(
            measure(
                bench.stage,
                OURS,
                loads,
                warm=bench.profile.warm,
                seconds=seconds / INTERVALS,
                count=[1],
                brokers=[bench.broker],
            )
        )
        tables.append(bench.stage.tables(OURS))
    return {
        "rate": rate,
        "seconds": seconds,
        "samples": [asdict(sample) for sample in samples],
        "tables": tables,
    }


@contextlib.contextmanager
def old_snapshot(url: str) -> Iterator[None]:
    """Hold a REPEATABLE READ transaction open: nothing that it may still see can be vacuumed."""
    with asyncio.Runner() as runner:
        db = runner.run(asyncpg.connect(url))
        runner.run(db.execute("begin isolation level repeatable read; select from queen.queues"))
        try:
            yield
        finally:
            runner.run(db.close())


def reader(bench: Bench, rate: int) -> dict[str, Any]:
    """The path while a reader keeps its snapshot from before the first message."""
    with old_snapshot(bench.stage.url(OURS)):
        return endure(bench, rate, bench.profile.reader_seconds)


def soak(bench: Bench, rate: int) -> dict[str, Any]:
    """The path for a long time, with retention taking away what is consumed."""
    return endure(bench, rate, bench.profile.soak_seconds)
