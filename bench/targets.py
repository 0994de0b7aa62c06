"""What the figures must reach, as ratios of what one run measured side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .bench import COMMIT, EXCHANGE, FLOOR, OURS
from .run import Sample, median

Figures = Mapping[str, Mapping[str, Sequence[Sample]]]
"""The samples of every candidate of every workload, by their names."""


class Target(NamedTuple):
    """A bound, and how its figure is made; a KeyError says that it was not measured."""

    title: str
    figure: Callable[[Figures], float]
    bound: float
    at_most: bool = False


class Judged(NamedTuple):
    """A target's outcome; without a figure it was not measured."""

    title: str
    wanted: str
    figure: float | None
    met: bool


def judge(figures: Figures) -> Iterator[Judged]:
    """Yield the outcome of every target."""
    for title, figure, bound, at_most in TARGETS:
        try:
            found = figure(figures)
        except KeyError:
            found = None
        met = found is not None and (found <= bound if at_most else found >= bound)
        yield Judged(title, f"{'≤' if at_most else '≥'} {bound:g}", found, met)


def _figure(figures: Figures, workload: str, candidate: str, name: str) -> float:
    found = median(figures[workload][candidate], name)
    if found is None:
        raise KeyError(candidate)
    return found


def _best(figures: Figures, workload: str, chosen: Callable[[str], bool]) -> float:
    rates = [
        rate
        for name, rows in figures[workload].items()
        if chosen(name) and (rate := median(rows, "rate")) is not None
    ]
    if not rates:
        raise KeyError(workload)
    return max(rates)


def is_ours(name: str) -> bool:
    """Whether a candidate is this broker."""
    return name == OURS or name.startswith(f"{OURS}, ")


def is_floor(name: str) -> bool:
    """Whether a candidate is plain SQL, or another thing that nothing can do without."""
    return name == FLOOR or name.startswith(f"{FLOOR}, ") or name in (EXCHANGE, COMMIT)


def is_peer(name: str) -> bool:
    """Whether a candidate is another queue."""
    return not is_ours(name) and not is_floor(name)


def _of_floor(workload: str) -> Callable[[Figures], float]:
    return lambda figures: _best(figures, workload, is_ours) / _best(figures, workload, is_floor)


def _of_peers(workload: str) -> Callable[[Figures], float]:
    return lambda figures: _best(figures, workload, is_ours) / _best(figures, workload, is_peer)


def _of_trip(name: str) -> Callable[[Figures], float]:
    """Return a latency as a multiple of one HTTP exchange and one commit."""
    return lambda figures: (
        _figure(figures, "latency", OURS, name)
        / sum(_figure(figures, "latency", each, "p50") for each in (EXCHANGE, COMMIT))
    )


def _partitions(figures: Figures) -> float:
    many, few = (
        _figure(figures, "partitions", f"{OURS}, {count:,} partitions", "rate")
        for count in (1_000_000, 1000)
    )
    return many / few


TARGETS = (
    Target(
        "Push of 100, one partition each: rows/s of the floor's best",
        _of_floor("push-100-one"),
        0.6,
    ),
    Target(
        "Push of 100, many partitions: rows/s of the floor's best", _of_floor("push-100-many"), 0.4
    ),
    Target(
        "Push of 100 by SQL, one partition each: rows/s of the floor's",
        _of_floor("sql-100-one"),
        0.8,
    ),
    Target(
        "Push of 100 by SQL, many partitions: rows/s of the floor's", _of_floor("sql-100-many"), 0.5
    ),
    Target(
        "Push of 1, 64 connections: messages a commit",
        lambda figures: 1 / _figure(figures, "push-1-one", OURS, "commits"),
        15,
    ),
    Target("Push of 1: messages/s of the floor's one-row commits", _of_floor("push-1-one"), 1.2),
    Target("Push of 1: messages/s of the best peer's", _of_peers("push-1-one"), 1),
    Target("Push → pop → ack: messages/s of the best peer's jobs", _of_peers("path-max"), 2),
    Target(
        "Push → pop → ack under load: commits a message",
        lambda figures: _figure(figures, "path-max", OURS, "commits"),
        0.5,
        at_most=True,
    ),
    Target(
        "End to end at a tenth of the peak: p50 of exchange + commit",
        _of_trip("p50"),
        3,
        at_most=True,
    ),
    Target(
        "End to end at a tenth of the peak: p99 of exchange + commit",
        _of_trip("p99"),
        10,
        at_most=True,
    ),
    Target("Transactions: of the same rows by hand, SERIALIZABLE", _of_floor("transaction"), 0.5),
    Target("A million partitions: of the rate at a thousand", _partitions, 0.8),
    Target(
        "Steps retried, one broker",
        lambda figures: _figure(figures, "races", f"{OURS}, 1 broker", "retried"),
        0.01,
        at_most=True,
    ),
    Target(
        "Steps retried, two brokers on the same hot queues",
        lambda figures: _figure(figures, "races", f"{OURS}, 2 brokers", "retried"),
        0.05,
        at_most=True,
    ),
)
