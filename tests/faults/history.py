"""What a client did and was told: the only thing that a checker may look at."""

import itertools
import time
from typing import Any, Literal

import msgspec

Outcome = Literal["ok", "fail", "unknown"]
"""An operation that was not answered, or answered with a 5xx, may have happened: unknown."""


class Operation(msgspec.Struct):
    """One call: what was asked, between which moments, and what was answered.

    Moments are seconds of the machine's monotonic clock.
    """

    kind: str
    asked: dict[str, Any]
    started: float
    ended: float = 0.0
    outcome: Outcome = "unknown"
    answer: Any = None


class History:
    """The operations of a round, in the order in which they began."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._numbers = itertools.count()

    def number(self) -> int:
        """Return a number that this round has not used."""
        return next(self._numbers)

    def begin(self, kind: str, **asked: Any) -> Operation:
        """Note that an operation is about to be sent."""
        operation = Operation(kind, asked, time.monotonic())
        self.operations.append(operation)
        return operation

    @staticmethod
    def end(operation: Operation, outcome: Outcome, answer: Any = None) -> None:
        """Note what came of it."""
        operation.ended = time.monotonic()
        operation.outcome = outcome
        operation.answer = answer

    def of(self, kind: str, outcome: Outcome | None = None) -> list[Operation]:
        """Return the operations of a kind, or those of them with one outcome."""
        return [
            operation
            for operation in self.operations
            if operation.kind == kind and (outcome is None or operation.outcome == outcome)
        ]
