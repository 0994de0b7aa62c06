"""What is prepared before a measurement: a log that levelled off, rates worth offering, stock."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bench.bench import QUICK, Bench
from bench.partitions import settled
from bench.peer import PEERS
from bench.run import Sample
from bench.workloads import path, stocked

PEER, OTHER = PEERS[:2]


def bench(**more: Any) -> Bench:
    """A run on which nothing is started."""
    nothing: Any = None
    return Bench(nothing, nothing, QUICK, SimpleNamespace(peers=[PEER, OTHER]), **more)  # type: ignore[arg-type]


@pytest.fixture
def samples() -> Iterator[Sample]:
    """Runs that write less and less for each message, as after a checkpoint."""
    return (Sample(rate=number, wal=wal) for number, wal in enumerate((32, 10, 4, 3.9, 3.7)))


def test_what_is_measured_follows_the_slice_that_levelled_off(samples: Iterator[Sample]) -> None:
    assert settled(bench(), lambda _: next(samples)).wal == 3.7


def test_what_is_measured_does_not_wait_for_ever(samples: Iterator[Sample]) -> None:
    hasty = bench()
    hasty.profile = replace(QUICK, settle_seconds=0.0)
    assert settled(hasty, lambda _: next(samples)).wal == 32


def test_who_never_held_a_rate_is_offered_no_higher_one() -> None:
    run = bench(held={(PEER.name, 1000): False, (OTHER.name, 1000): True})
    offered = [each.name for each in path(2000).candidates(run)]
    assert offered == ["us", "floor", OTHER.name]
    at_most = [each.name for each in path(None).candidates(run)]
    assert at_most == ["us", "floor", PEER.name, OTHER.name]


def test_what_was_consumed_is_filled_up_and_an_end_is_told() -> None:
    filled: list[int] = []
    handled = iter((30, 100))
    again = stocked(filled.append, 100, lambda: Sample(rate=1, counted={"handled": next(handled)}))
    assert again().errors == {}
    assert again().errors == {"nothing was left": 1}
    assert filled == [100, 30]
