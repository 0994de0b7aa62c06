"""Every workload of the bench runs to its end, for us and for the floor: very small, very short."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import endurance, stage
from bench.bench import FLOOR, OURS, QUICK, Bench, Workload
from bench.results import Results, merged
from bench.run import Candidate, Sample, rounds
from bench.stage import Broker, Stage
from bench.workloads import all_of
from tests.support.server import Server

TINY = replace(
    QUICK,
    name="tiny",
    rounds=1,
    warm=0.2,
    seconds=0.5,
    rates=(200,),
    partition_counts=(20,),
    parked=10,
    # More than is consumed before the end.
    backlog=150_000,
    delayed=100,
    settle_seconds=1.0,
    reader_seconds=2.4,
    soak_seconds=2.4,
    beside_seconds=2.4,
)
# How long a window with a message in it is waited for.
PATIENCE_SECONDS = 60.0
# One of each kind: the others differ in numbers only.
ALIKE = ("push-10-one", "push-100-one", "push-100-many", "sql-100-many", "work-1")
WORKLOADS = [each for each in all_of(TINY) if each.name not in ALIKE]


@pytest.fixture(scope="module")
def bench(server: Server) -> Iterator[Bench]:
    """A run on the server of the tests, without peers."""
    stage = Stage(server.admin_url)
    try:
        broker = Broker(stage.migrate(OURS), {})
        try:
            stage.migrate(FLOOR)
            yield Bench(stage, broker, TINY, None)
        finally:
            broker.stop()
    finally:
        stage.clear()


def measured_until_counted(candidates: list[Candidate]) -> dict[str, list[Sample]]:
    """Run each once; those again whose window passed, beside other tests, without a message."""
    measured: dict[str, list[Sample]] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while candidates and time.monotonic() < deadline:
        measured |= rounds(candidates, 1)
        candidates = [
            each for each in candidates if any(not row.rate for row in measured[each.name])
        ]
    return measured


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_a_workload_runs_to_its_end(bench: Bench, workload: Workload) -> None:
    candidates = workload.candidates(bench)
    # The floor with several connections is the floor with one.
    chosen = {each.name.partition(", ")[0]: each for each in candidates}
    measured = measured_until_counted(list(chosen.values()))
    results = Results({})
    results.add(workload.name, workload.title, workload.unit, measured)
    assert merged([results.dump()]) == results
    for name, samples in measured.items():
        assert len(samples) == 1, f"{name} failed"
        assert samples[0].rate > 0, name
        if name == OURS:
            # The floor counts its lost races here, and does not run them again.
            assert samples[0].errors == {}


@pytest.mark.parametrize("run", [endurance.reader, endurance.soak], ids=lambda run: run.__name__)
def test_the_path_is_sampled_over_time(
    bench: Bench, run: Callable[[Bench, int], dict[str, dict[str, Any]]]
) -> None:
    results = run(bench, 200)
    assert set(results) == {OURS, FLOOR}
    for result in results.values():
        assert len(result["samples"]) == len(result["tables"]) == endurance.INTERVALS
        # Beside other tests, one interval of these may pass without a message.
        assert sum(sample["rate"] for sample in result["samples"]) > 0
    tables = {who: {each["name"] for each in results[who]["tables"][-1]} for who in results}
    assert {"messages", "ready", "cursors"} <= tables[OURS]
    assert "messages" in tables[FLOOR]


def test_a_process_that_ends_while_it_is_looked_at_has_used_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its file can be opened, and no longer read."""

    def ended(_: Path) -> str:
        raise ProcessLookupError

    own = os.getpid()
    assert stage._processor_seconds(own) > 0
    monkeypatch.setattr(Path, "read_text", ended)
    assert stage._processor_seconds(own) == 0
