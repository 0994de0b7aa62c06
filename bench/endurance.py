"""The path over a longer time, sampled: beside a reader that holds its snapshot, and as a soak.

What is looked for is change: the rate and the latencies of the last interval against the first,
and tables and dead rows that go on growing where the work does not. The floor and the peers run at
the same rate, for a shorter time of their own.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import asyncpg

from .bench import FLOOR, OURS, Bench
from .path import CONSUMED, floor_tasks, path_tasks, peer_tasks
from .peer import Peer
from .run import FAILURES, Load, Sample, http, measure, sql
from .stage import Broker

INTERVALS = 6
LONG = "us_long"


class Runner(NamedTuple):
    """Who runs the path for long: on which database, at which rate, by which loads."""

    database: str
    rate: int
    loads: Callable[[], Sequence[Load]]
    brokers: Sequence[Broker] = ()


def endure(bench: Bench, runner: Runner, seconds: float) -> dict[str, Any]:
    """Run the path interval after interval; return the samples and tables of each."""
    samples: list[Sample] = []
    tables: list[list[dict[str, Any]]] = []
    for _ in range(INTERVALS):
        samples.append(
            measure(
                bench.stage,
                runner.database,
                runner.loads(),
                warm=bench.profile.warm,
                seconds=seconds / INTERVALS,
                count=CONSUMED,
                brokers=runner.brokers,
            )
        )
        tables.append(bench.stage.tables(runner.database))
    return {
        "rate": runner.rate,
        "seconds": seconds,
        "samples": [asdict(sample) for sample in samples],
        "tables": tables,
    }


def ours(bench: Bench, rate: int, seconds: float, stack: contextlib.ExitStack) -> Runner:
    """Prepare a broker on tables of its own, so that their sizes say what this run has left."""
    broker = stack.enter_context(bench.apart(LONG))
    # Consumed messages go once they are a minute old, and what is known of them a quarter of an
    # hour later (sql/retention.sql): what is kept levels off.
    queue = replace(bench, broker=broker).known()
    minute = min(60, int(seconds / 6) + 1)
    broker.configure(
        queue,
        retentionEnabled=True,
        completedRetentionSeconds=minute,
        dedupWindowSeconds=minute,
    )
    tasks = path_tasks(queue, rate)
    return Runner(LONG, rate, lambda: [http(broker, **task) for task in tasks], [broker])


def floor(bench: Bench, rate: int, _: contextlib.ExitStack) -> Runner:
    """Prepare the floor's tables."""
    bench.emptied()
    url = bench.stage.url(FLOOR)
    return Runner(FLOOR, rate, lambda: [sql(url, **task) for task in floor_tasks(rate)])


def theirs(bench: Bench, rate: int, peer: Peer, _: contextlib.ExitStack) -> Runner:
    """Prepare a peer's tables."""
    installed = bench.installed
    assert installed is not None
    bench.fresh(peer)
    url, offered = bench.stage.url(peer.name), peer.offered(rate)
    return Runner(
        peer.name,
        offered,
        lambda: [installed.start(peer, url=url, **task) for task in peer_tasks(offered)],
    )


def everybody(
    bench: Bench,
    rate: int,
    seconds: float,
    beside: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield who has run, one after the other, and what it gave, each beside something."""
    shorter = min(seconds, bench.profile.beside_seconds)
    prepared: Mapping[str, tuple[Callable[[contextlib.ExitStack], Runner], float]] = {
        OURS: (partial(ours, bench, rate, seconds), seconds),
        FLOOR: (partial(floor, bench, rate), shorter),
    } | {peer.name: (partial(theirs, bench, rate, peer), shorter) for peer in bench.peers}
    for who, (prepare, time) in prepared.items():
        try:
            with contextlib.ExitStack() as stack:
                runner = prepare(stack)
                stack.enter_context(beside(bench.stage.url(runner.database)))
                result = endure(bench, runner, time)
        except FAILURES as error:
            print(f"  {who}: {error}", file=sys.stderr)
        else:
            yield who, result


@contextlib.contextmanager
def old_snapshot(url: str) -> Iterator[None]:
    """Hold a REPEATABLE READ transaction open: nothing that it may still see can be vacuumed."""
    with asyncio.Runner() as runner:
        db = runner.run(asyncpg.connect(url))
        runner.run(db.execute("begin isolation level repeatable read; select from pg_class"))
        try:
            yield
        finally:
            runner.run(db.close())


def reader(bench: Bench, rate: int) -> dict[str, dict[str, Any]]:
    """The path while a reader keeps its snapshot from before the first message that counts."""
    return dict(everybody(bench, rate, bench.profile.reader_seconds, old_snapshot))


def soak(bench: Bench, rate: int) -> dict[str, dict[str, Any]]:
    """The path for a long time, with retention taking away what is consumed."""

    def alone(_: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return dict(everybody(bench, rate, bench.profile.soak_seconds, alone))
