"""Firing: find the timers that are due, push their messages, count what failed (step 3.4)."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from queen_pg.broker.partition import ensure
from queen_pg.database import Database
from queen_pg.errors import DuplicateMessage, QueenError, Stale, StorageFull, Unavailable

BATCH_MAX = 256
"""Timers fired in one step."""

PATIENCE_MS = 250
"""How long a partition is waited for that somebody holds."""

Partition = tuple[int, str, str]
"""A tenant, and the names of a queue and of a partition in it."""


class Passed(NamedTuple):
    """How far a pass over the due timers has come, and the partitions that it found held."""

    fire_at: datetime | None = None
    tenant: int | None = None
    queue: str | None = None
    timer_key: str | None = None
    held: frozenset[Partition] = frozenset()

    def over(self, timers: Sequence[asyncpg.Record], held: set[Partition]) -> "Passed":
        """Return how far it is behind these timers, some of them in held partitions."""
        last = timers[-1]
        return Passed(
            last["fire_at"], last["tenant"], last["queue"], last["timer_key"], self.held | held
        )


START = Passed()


class Due(NamedTuple):
    """What there is to fire now, oldest first; else the seconds until the next timer, if any."""

    timers: list[asyncpg.Record]
    wait_seconds: float | None


class Fired(NamedTuple):
    """How many timers fired, by queue, and the partitions of those that had to stay."""

    queues: dict[str, int]
    held: set[Partition]


def partition_of(timer: asyncpg.Record) -> Partition:
    """Return the partition that a timer is for."""
    return timer["tenant"], timer["queue"], timer["partition"]


async def due(db: Database, passed: Passed = START) -> Due:
    """Look for timers to fire, of all tenants, where a pass has not come yet."""
    held = sorted(passed.held)
    rows = await db.read(
        "_timers_due",
        batch_max=BATCH_MAX,
        after_fire_at=passed.fire_at,
        after_tenant=passed.tenant,
        after_queue=passed.queue,
        after_timer_key=passed.timer_key,
        held_tenant=[tenant for tenant, _, _ in held],
        held_queue=[queue for _, queue, _ in held],
        held_partition=[partition for _, _, partition in held],
    )
    if rows and rows[0]["tenant"] is None:
        return Due([], rows[0]["wait_seconds"])
    return Due(rows, None)


async def fire(
    db: Database,
    tenant: int,
    timers: Sequence[asyncpg.Record],
    attempts_max: int,
    deadline: float,
    *,
    patient: bool = False,
) -> Fired:
    """Fire those of a tenant's due timers that are still due.

    Those of a partition that somebody holds stay; who is patient waits a moment for such ones, if
    there are no others. Raises Held when that was in vain, and while another step fires. A batch
    that cannot be fired for good is fired one by one, so that only the timer at fault pays for it.
    Unavailable and StorageFull pass through: they are nobody's fault, and will pass.
    """
    try:
        return await _fire(db, tenant, timers, deadline, patient=patient)
    except (Unavailable, StorageFull):
        raise
    except QueenError as error:
        if len(timers) == 1:
            await _fail(db, tenant, timers[0], str(error), attempts_max, deadline)
            return Fired({}, set())
    fired: Counter[str] = Counter()
    held: set[Partition] = set()
    for timer in timers:
        # What lies behind a timer that had to stay must not overtake it.
        if partition_of(timer) not in held:
            one = await fire(db, tenant, [timer], attempts_max, deadline)
            fired.update(one.queues)
            held |= one.held
    return Fired(fired, held)


async def _fire(
    db: Database,
    tenant: int,
    timers: Sequence[asyncpg.Record],
    deadline: float,
    *,
    patient: bool,
) -> Fired:
    # A step that created partitions would hold its timers while it waits for whoever does the same.
    missing = {
        (timer["queue"], timer["partition"]) for timer in timers if timer["partition_id"] is None
    }
    created = await ensure(db, tenant, sorted(missing), deadline)
    arguments: dict[str, list[Any]] = {
        name: [timer[name] for timer in timers] for name in ("queue", "timer_key", "partition")
    }
    arguments["partition_id"] = [
        timer["partition_id"] or created[timer["queue"], timer["partition"]] for timer in timers
    ]
    careful = False

    async def attempt() -> Fired:
        nonlocal careful
        fired: Counter[str] = Counter()
        held = {partition_of(timer) for timer in timers}
        try:
            rows = await db.step(
                "_timers_fire",
                deadline=deadline,
                tenant=tenant,
                **arguments,
                careful=careful,
                wait_ms=PATIENCE_MS if patient else 0,
            )
        except DuplicateMessage:
            careful = True
            raise
        except Stale:
            # A partition found a moment ago is gone: look again.
            return Fired({}, held)
        for row in rows:
            fired[row["fired_queue"]] += row["timer_count"]
            held.discard((tenant, row["fired_queue"], row["fired_partition"]))
        return Fired(fired, held)

    return await db.retry("timers_fire", deadline, attempt, patient=False)


async def _fail(
    db: Database,
    tenant: int,
    timer: asyncpg.Record,
    error: str,
    attempts_max: int,
    deadline: float,
) -> None:
    async def attempt() -> None:
        await db.step(
            "_timer_fail",
            deadline=deadline,
            tenant=tenant,
            queue=timer["queue"],
            timer_key=timer["timer_key"],
            error=error,
            attempts_max=attempts_max,
        )

    await db.retry("timer_fail", deadline, attempt)
