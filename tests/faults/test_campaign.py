"""The campaign's short profile: each workload under one fault, each fault over one workload.

The long profile, every workload under every fault, is run by hand (docs/guarantees.md).
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.campaign import clear, play
from tests.faults.nemesis import FAULTS
from tests.faults.stage import PGBOUNCER, Stage, stage
from tests.faults.workloads import WORKLOADS

SECONDS = 2.0

PAIRS = [
    ("log", "cut"),
    ("log", "kill_server"),
    ("queue", "pause_broker"),
    ("pipeline", "cut_after_commit"),
    ("pipeline", "kill_broker"),
    ("register", "terminate_backends"),
    ("counter", "cut_before_commit"),
    ("claim", "kill_backend"),
    ("multikey", "clock_jump"),
    ("dedup", "black_hole"),
    ("timers", "absence"),
    ("dead_letters", "restart_server"),
    ("locks", "pause_server"),
    ("retention", "exhaustion"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("workload", "fault"), PAIRS)
async def test_a_round_is_valid(standing: Stage, workload: str, fault: str) -> None:
    await clear(standing)
    played = await play(standing, workload, fault, seed=1, seconds=SECONDS)
    assert (played.verdict, played.violations) == ("valid", [])
    assert played.operations["ok"] > 0


def test_every_workload_and_every_fault_has_its_round() -> None:
    own = {"nothing", "disk_full"}
    assert {workload for workload, _ in PAIRS} == WORKLOADS.keys()
    assert {fault for _, fault in PAIRS} == FAULTS.keys() - own


@pytest.mark.skipif(not Path(PGBOUNCER).exists(), reason="needs Debian's pgbouncer")
async def test_a_pipeline_behind_a_transaction_pooler_is_valid() -> None:
    async with stage(pooled=True) as made:
        await clear(made)
        played = await play(made, "pipeline", "terminate_backends", seed=1, seconds=SECONDS)
    assert (played.verdict, played.violations) == ("valid", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own takes root")
async def test_a_log_whose_disk_was_full_is_valid() -> None:
    async with stage(small_disk=True) as made:
        await clear(made)
        played = await play(made, "log", "disk_full", seed=1, seconds=2 * SECONDS)
    assert (played.verdict, played.violations) == ("valid", [])
