"""Each checker accepts a right history and catches the faults it is there for."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults import checkers
from tests.faults.history import History, Operation


def history(*operations: tuple[Any, ...]) -> History:
    """Build a history of (kind, asked, answer[, started, ended[, outcome]])."""
    made = History()
    for number, (kind, asked, answer, *rest) in enumerate(operations):
        started, ended = (rest[0], rest[1]) if len(rest) > 1 else (2 * number, 2 * number + 1)
        outcome = rest[2] if len(rest) > 2 else "ok"
        made.operations.append(Operation(kind, asked, started, ended, outcome, answer))
    return made


def pushed(name: str, offset: int, partition: str = "p0") -> tuple[str, dict[str, Any], Any]:
    item = {"id": name, "partition": partition}
    return "push", {"items": [item]}, [{"offset": offset, "status": "queued", "message_id": name}]


def popped(lease: str, *names: str, offset: int = 0) -> tuple[str, dict[str, Any], Any]:
    messages = [
        {"id": name, "partition": "p0", "offset": offset + place, "lease": lease}
        for place, name in enumerate(names)
    ]
    return "pop", {"lease_seconds": 2}, messages


def stored(*names: str) -> tuple[str, dict[str, Any], Any]:
    return "stored", {}, {"p0": list(enumerate(names))}


Right = tuple[tuple[Any, ...], ...]
Wrong = Callable[[list[Any]], None]


def replace(place: int, answer: Any) -> Wrong:
    def plant(operations: list[Any]) -> None:
        operations[place] = (*operations[place][:2], answer, *operations[place][3:])

    return plant


def insert(place: int, *operation: Any) -> Wrong:
    def plant(operations: list[Any]) -> None:
        operations.insert(place, operation)

    return plant


LOG: Right = (
    pushed("a", 0),
    pushed("b", 1),
    stored("a", "b"),
    ("read", {"reader": 1}, {"p0": ["a", "b"]}),
)
QUEUE: Right = (
    pushed("a", 0),
    popped("l1", "a"),
    ("ack", {"lease": "l1"}, ["a"]),
    pushed("b", 1),
    popped("l2", "b", offset=1),
    ("ack", {"lease": "l2"}, ["b"]),
)
PIPELINE: Right = (pushed("a", 0), ("state", {}, {"outputs": {"a": 1}, "counts": {"a": 1}}))
REGISTER: Right = (
    ("write", {"key": "k", "value": "x", "expect": 0}, {"applied": True, "version": 5}),
    ("read", {"key": "k"}, {"version": 5, "value": "x"}),
    ("write", {"key": "k", "value": "y", "expect": 5}, {"applied": True, "version": 7}),
)
COUNTER: Right = (
    ("incr", {"key": "c"}, 1),
    ("incr", {"key": "c"}, 2),
    ("incr", {"key": "c"}, None, 8, 9, "unknown"),
    ("state", {}, {"c": 3}),
)
CLAIM: Right = (
    ("claim", {"key": "k", "by": "x"}, {"applied": True, "value": "x"}),
    ("claim", {"key": "k", "by": "y"}, {"applied": False, "value": "x"}),
)
MULTIKEY: Right = (
    ("transfer", {"read": {"a": 1, "b": 2}}, {"wrote": {"a": 3}}, 0, 9),
    ("transfer", {"read": {"a": 3, "b": 2}}, {"wrote": {"b": 4}}, 0, 9),
    ("state", {"sum": 400}, {"sum": 400}),
)
DEDUP: Right = (
    pushed("a", 0),
    (
        "push",
        {"items": [{"id": "a", "partition": "p0"}]},
        [{"offset": 0, "status": "duplicate", "message_id": "a"}],
    ),
    stored("a"),
)
TIMERS: Right = (
    ("schedule", {"id": "t"}, {"deliverAt": "2030-01-01T00:00:01Z"}),
    ("schedule", {"id": "u"}, {"deliverAt": "2030-01-01T00:00:01Z"}),
    ("cancel", {"id": "u"}, True),
    ("state", {}, {"fired": {"t": ["2030-01-01T00:00:02Z"]}}),
)
LETTERS: Right = (
    ("nack", {"id": "a", "payload": 1, "error": "e"}, True),
    ("state", {}, {"letters": {"a": [{"payload": 1, "error": "e"}]}, "replayed": {"x": 1}}),
)
LOCKS: Right = (
    ("acquire", {}, 5),
    ("guarded", {"token": 5}, 6),
    ("acquire", {}, 7),
    ("guarded", {"token": 7}, 8),
)
RETENTION: Right = (
    pushed("a", 0),
    pushed("b", 1),
    ("stored", {}, {"p0": [(1, "b")]}),
    ("state", {}, {"p0": 2}),
)

PLANTED: list[tuple[str, str, Right, Wrong]] = [
    ("log", "a lost row", LOG, replace(2, {"p0": [(0, "a")]})),
    ("log", "a skipped offset", LOG, replace(2, {"p0": [(0, "a"), (2, "b")]})),
    ("log", "a row stored twice", LOG, replace(2, {"p0": [(0, "a"), (1, "b"), (2, "b")]})),
    ("log", "a reader with another order", LOG, replace(3, {"p0": ["b", "a"]})),
    ("queue", "an acked message again", QUEUE, insert(6, *popped("l3", "a"))),
    ("queue", "a message never delivered", QUEUE, insert(6, *pushed("c", 2))),
    ("queue", "an order with a skip", QUEUE, insert(1, *popped("l0", "b", offset=1), 0, 0.5)),
    (
        "queue",
        "two leases at once",
        QUEUE,
        insert(2, "pop", {"lease_seconds": 2}, popped("l9", "a")[2], 2.5, 2.6),
    ),
    (
        "pipeline",
        "a doubled effect",
        PIPELINE,
        replace(1, {"outputs": {"a": 2}, "counts": {"a": 1}}),
    ),
    ("pipeline", "a lost effect", PIPELINE, replace(1, {"outputs": {}, "counts": {"a": 1}})),
    (
        "pipeline",
        "an output from nowhere",
        PIPELINE,
        replace(1, {"outputs": {"a": 1, "z": 1}, "counts": {"a": 1}}),
    ),
    (
        "register",
        "a stale read",
        REGISTER,
        insert(3, "read", {"key": "k"}, {"version": 5, "value": "x"}),
    ),
    (
        "register",
        "a condition won twice",
        REGISTER,
        insert(
            3, "write", {"key": "k", "value": "z", "expect": 5}, {"applied": True, "version": 9}
        ),
    ),
    ("register", "a version with two values", REGISTER, replace(1, {"version": 5, "value": "q"})),
    ("counter", "a lost increment", COUNTER, replace(3, {"c": 1})),
    ("counter", "an increment counted twice", COUNTER, replace(3, {"c": 4})),
    ("counter", "one answer to two increments", COUNTER, replace(1, 1)),
    ("claim", "two winners", CLAIM, replace(1, {"applied": True, "value": "y"})),
    (
        "claim",
        "a loser told of another winner",
        CLAIM,
        replace(1, {"applied": False, "value": "z"}),
    ),
    (
        "multikey",
        "write skew",
        MULTIKEY,
        lambda operations: operations.__setitem__(
            1, ("transfer", {"read": {"a": 1, "b": 2}}, {"wrote": {"b": 4}}, 0, 9)
        ),
    ),
    ("multikey", "a lost update", MULTIKEY, replace(1, {"wrote": {"a": 3}})),
    ("multikey", "a sum that changed", MULTIKEY, replace(2, {"sum": 401})),
    (
        "dedup",
        "a retry with another offset",
        DEDUP,
        replace(1, [{"offset": 1, "status": "duplicate", "message_id": "a"}]),
    ),
    (
        "dedup",
        "an id queued twice",
        DEDUP,
        replace(1, [{"offset": 0, "status": "queued", "message_id": "a"}]),
    ),
    ("dedup", "an id stored twice", DEDUP, replace(2, {"p0": [(0, "a"), (1, "a")]})),
    (
        "timers",
        "a timer that fired twice",
        TIMERS,
        replace(3, {"fired": {"t": ["2030-01-01T00:00:02Z"] * 2}}),
    ),
    (
        "timers",
        "a timer that fired early",
        TIMERS,
        replace(3, {"fired": {"t": ["2030-01-01T00:00:00Z"]}}),
    ),
    (
        "timers",
        "a cancelled timer that fired",
        TIMERS,
        replace(3, {"fired": {"t": ["2030-01-01T00:00:02Z"], "u": ["2030-01-01T00:00:02Z"]}}),
    ),
    ("timers", "a timer that never fired", TIMERS, replace(3, {"fired": {}})),
    ("dead_letters", "a lost dead letter", LETTERS, replace(1, {"letters": {}, "replayed": {}})),
    (
        "dead_letters",
        "a lost error",
        LETTERS,
        replace(1, {"letters": {"a": [{"payload": 1, "error": ""}]}, "replayed": {}}),
    ),
    (
        "dead_letters",
        "a double replay",
        LETTERS,
        replace(1, {"letters": LETTERS[1][2]["letters"], "replayed": {"x": 2}}),
    ),
    ("locks", "a token that fell", LOCKS, replace(2, 4)),
    ("locks", "a stale guard honoured", LOCKS, insert(4, "guarded", {"token": 5}, 9)),
    ("retention", "an offset used again", RETENTION, replace(1, [{"offset": 0}])),
    ("retention", "a hole in what remains", RETENTION, replace(2, {"p0": [(0, "a"), (2, "b")]})),
    ("retention", "offsets that start again", RETENTION, replace(3, {"p0": 0})),
]


@pytest.mark.parametrize(
    ("checker", "right"),
    sorted(
        {(checker, id(right)): (checker, right) for checker, _, right, _ in PLANTED}.values(),
        key=lambda pair: pair[0],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_right_history_is_valid(checker: str, right: Right) -> None:
    assert checkers.CHECKERS[checker](history(*right)) == []


@pytest.mark.parametrize(
    ("checker", "fault", "right", "plant"),
    PLANTED,
    ids=[f"{checker}: {fault}" for checker, fault, _, _ in PLANTED],
)
def test_a_planted_fault_is_caught(checker: str, fault: str, right: Right, plant: Wrong) -> None:
    operations = [copy.deepcopy(operation) for operation in right]
    plant(operations)
    assert checkers.CHECKERS[checker](history(*operations)), fault


def test_every_checker_has_a_planted_fault() -> None:
    assert {checker for checker, *_ in PLANTED} == checkers.CHECKERS.keys()
