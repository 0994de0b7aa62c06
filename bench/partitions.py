"""The path over very many partitions, and how the log is warmed before it is measured.

After a checkpoint the first change of a page goes into the log as a whole, and with a million
partitions nearly every message is the first to change some: what is measured depends on the time
since the checkpoint. So everybody runs until the log's bytes a message level off, and one
candidate shows the first seconds.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .bench import FLOOR, OURS, Bench, Workload
from .load import payload
from .path import CLAIMING, CONSUMED, INSERTING, path_tasks
from .run import Candidate, Sample, http
from .window import clock

# What is warmed is looked at in slices of this length, until one writes no less than this share of
# what the one before wrote for each message.
SLICE_SECONDS = 3.0
LEVEL = 0.95
# How long a load needs to be under way.
LEAD_SECONDS = 0.2


def partitions() -> Workload:
    """The path as fast as it goes, over so many partitions that all hold history."""

    def candidates(bench: Bench) -> list[Candidate]:
        @functools.cache
        def grown(count: int) -> str:
            queue = bench.queue()
            grow(bench, queue, count)
            return queue

        @functools.cache
        def floor_grown(count: int) -> int:
            # Each number of partitions has a range of ids of its own.
            first = count * 10
            grow_floor(bench, first, count)
            return first

        def ours(count: int, bench: Bench) -> Sample:
            return bench.us(*path_tasks(grown(count), None, count), count=CONSUMED)

        def floor(count: int, bench: Bench) -> Sample:
            load = {"kind": "keyed", "clients": INSERTING + CLAIMING, "consumers": CLAIMING}
            return bench.floor(load | {"first": floor_grown(count), "partitions": count})

        def after_checkpoint(count: int) -> Sample:
            grown(count)
            bench.stage.checkpoint()
            return ours(count, shorter(bench, bench.profile.seconds))

        counts = bench.profile.partition_counts
        cold = f"{OURS}, {counts[-1]:,} partitions, after a checkpoint"
        found = [Candidate(cold, partial(after_checkpoint, counts[-1]))]
        for count in reversed(counts):
            for who, run in ((OURS, ours), (FLOOR, floor)):
                found.append(
                    Candidate(
                        f"{who}, {count:,} partitions", partial(settled, bench, partial(run, count))
                    )
                )
        bench.emptied()
        return found

    return Workload("partitions", "Push → pop → ack over partitions", "messages/s", candidates)


def settled(bench: Bench, run: Callable[[Bench], Sample]) -> Sample:
    """Measure what is run once the log's bytes a message have levelled off, or time is up."""
    slices = shorter(bench, SLICE_SECONDS)
    until = clock() + bench.profile.settle_seconds
    before = math.inf
    while clock() < until:
        wal = run(slices).wal
        if wal > before * LEVEL:
            break
        before = wal
    return run(bench)


def shorter(bench: Bench, seconds: float) -> Bench:
    """Return the same run, with samples that begin as soon as the load does."""
    return replace(bench, profile=replace(bench.profile, warm=LEAD_SECONDS, seconds=seconds))


def grow(bench: Bench, queue: str, count: int) -> None:
    """Give a queue partitions that each have had a message."""
    bench.broker.configure(queue)
    bench.stage.execute(
        f"""
        with added as (
            insert into queen.partitions (queue_id, name, next_offset, last_append_at)
            select q.id, 'p-' || n, 1, now() from queen.queues q, generate_series(0, {count} - 1) n
            where q.name = '{queue}'
            returning id
        )
        insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id,
                                    payload)
        select a.id, 0, now(), u.id, u.id::text, '{payload(0)}'
        from added a cross join lateral (select gen_random_uuid() as id where a.id > 0) u
        """,
        OURS,
    )
    bench.stage.settle(OURS)
    workers = {"kind": "work", "queue": queue, "batch": 1000, "width": 64, "clients": 8}
    seconds = bench.profile.warm + bench.profile.seconds
    # Everything that waits is consumed, so that cursors and hints exist for all partitions.
    for _ in range(600):
        if bench.run(http(bench.broker, **workers), seconds)["count"] == 0:
            break


def grow_floor(bench: Bench, first: int, count: int) -> None:
    """Give the floor a row of history in each of its partitions."""
    bench.stage.execute(
        f"""
        insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id,
                                    payload)
        select {first} + n, 0, now(), u.id, u.id::text, '{payload(0)}'
        from generate_series(0, {count} - 1) n
        cross join lateral (select gen_random_uuid() as id where n >= 0) u
        """,
        FLOOR,
    )
    bench.stage.settle(FLOOR)
