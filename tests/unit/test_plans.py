"""When sessions have to plan anew."""

from queen_pg.plans import FACTOR, SMALL_BYTES, Plans

LARGE = FACTOR * SMALL_BYTES + 1


def test_the_first_look_has_nothing_to_compare() -> None:
    assert not Plans().outgrown({"messages": 100 * LARGE})


def test_a_table_that_was_empty_outgrows_its_plans_once() -> None:
    plans = Plans()
    assert not plans.outgrown({"messages": 0, "cursors": 0})
    assert not plans.outgrown({"messages": LARGE - 1, "cursors": 0})
    assert plans.outgrown({"messages": LARGE, "cursors": 0})
    assert not plans.outgrown({"messages": FACTOR * LARGE, "cursors": 0})
    assert plans.outgrown({"messages": FACTOR * LARGE + 1, "cursors": 0})


def test_a_table_that_shrinks_may_outgrow_again() -> None:
    plans = Plans()
    assert not plans.outgrown({"messages": LARGE})
    assert not plans.outgrown({"messages": 0})
    assert plans.outgrown({"messages": LARGE})


def test_a_table_that_is_new_has_outgrown_nothing() -> None:
    plans = Plans()
    assert not plans.outgrown({})
    assert not plans.outgrown({"messages": LARGE})
