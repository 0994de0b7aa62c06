"""Autopilot's batch (data-plane 4.6-3): a group's pace, measured from its settled leases."""

from uuid import UUID

import pytest

from queen_pg.broker.autopilot import Pace
from queen_pg.broker.pop import Source

SOURCE = Source(1, "orders", "billing")


def settle(pace: Pace, messages: int, seconds: float, lease: int = 1) -> None:
    pace.delivered(SOURCE, UUID(int=lease), messages, 10.0)
    pace.settled(UUID(int=lease), 10.0 + seconds)


def test_without_a_sample_the_batch_is_100() -> None:
    assert Pace().batch(SOURCE) == 100


@pytest.mark.parametrize(
    ("messages", "seconds", "batch"),
    [(1000, 1.0, 200), (10, 10.0, 100), (1000, 0.01, 1000)],
)
def test_the_batch_is_a_fifth_of_a_second_of_work_within_bounds(
    messages: int, seconds: float, batch: int
) -> None:
    pace = Pace()
    settle(pace, messages, seconds)
    assert pace.batch(SOURCE) == batch
    assert pace.batch(Source(1, "orders", "other")) == 100


def test_a_new_sample_weighs_a_quarter() -> None:
    pace = Pace()
    settle(pace, 1000, 1.0)
    settle(pace, 3000, 1.0, lease=2)
    assert pace.batch(SOURCE) == 300


def test_a_lease_is_counted_once_and_an_unknown_one_not_at_all() -> None:
    pace = Pace()
    settle(pace, 1000, 1.0)
    pace.settled(UUID(int=1), 99.0)
    pace.settled(UUID(int=7), 99.0)
    assert pace.batch(SOURCE) == 200
