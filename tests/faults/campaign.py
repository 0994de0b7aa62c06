"""Run rounds of workload and fault, judge their histories, and count the verdicts."""

import asyncio
import contextlib
import random
from collections import Counter
from typing import Literal

import asyncpg
import msgspec

from tests.faults.api import Api
from tests.faults.checkers import CHECKERS
from tests.faults.history import History
from tests.faults.nemesis import FAULTS
from tests.faults.stage import Stage
from tests.faults.workloads import WORKLOADS

Verdict = Literal["valid", "invalid", "unknown"]


class Round(msgspec.Struct):
    """One round's outcome; `unknown` means that it could not be played to its end."""

    workload: str
    fault: str
    seed: int
    verdict: Verdict
    violations: list[str]
    operations: dict[str, int]


async def play(stage: Stage, workload: str, fault: str, seed: int, seconds: float) -> Round:
    """Play one round on a stage whose database holds nothing of earlier rounds."""
    rng = random.Random(seed)
    history = History()
    api = Api(stage.urls, history, rng)
    work = WORKLOADS[workload](api, rng)
    violations: list[str] = []
    verdict: Verdict = "unknown"
    try:
        await work.prepare()
        running = asyncio.create_task(work.run(seconds))
        await asyncio.sleep(rng.uniform(0.2, seconds / 3))
        await FAULTS[fault](stage, rng)
        await running
        await stage.heal()
        database = await stage.database()
        await work.finish(database)
        await database.close()
        violations = CHECKERS[workload](history)
        verdict = "invalid" if violations else "valid"
    except AssertionError as error:
        violations = [str(error)]
    finally:
        await api.close()
    outcomes = Counter(operation.outcome for operation in history.operations)
    return Round(workload, fault, seed, verdict, violations[:20], dict(outcomes))


async def clear(stage: Stage) -> None:
    """Empty the tables between rounds."""
    await stage.heal()
    admin = await stage.admin()
    cleared = False
    while not cleared:
        # Brokers go on meanwhile, and what they read they lock in an order of their own.
        with contextlib.suppress(asyncpg.DeadlockDetectedError):
            await admin.execute(
                "truncate queen.messages, queen.cursors, queen.ready, queen.dead_letters, queen.kv,"
                " queen.timers, queen.partitions, queen.consumer_groups, queen.queues"
            )
            cleared = True
    await admin.close()
