"""The error table: one class per wire code, and signals that never get there."""

import inspect

from queen_pg import errors
from queen_pg.errors import Conflict, DuplicateMessage, QueenError, Signal, Unavailable

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass)]


def test_every_error_is_drawn_at_the_top() -> None:
    drawn = errors.__doc__ or ""
    for found in CLASSES:
        if issubclass(found, QueenError | Signal):
            assert f" {found.__name__} " in f" {drawn.replace(chr(10), ' ')} ", found


def test_statuses_and_what_to_do_about_them() -> None:
    for found in CLASSES:
        if issubclass(found, QueenError):
            assert 400 <= found.status <= 507
            # The SDK reads Retry-After on these only.
            assert (found.retry_after is not None) == (found.status in (429, 503)), found


def test_an_unavailable_error_says_which_one() -> None:
    error = Unavailable("no_leader", "said so")
    assert (error.code, error.status, error.message) == ("no_leader", 503, "said so")


def test_signals_are_no_wire_errors() -> None:
    assert not issubclass(Signal, QueenError)
    assert issubclass(DuplicateMessage, Conflict)
