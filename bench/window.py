"""How a load process is told what to do, and how it answers what it did.

The process prints `ready` once it is connected. It is then told the window, as two instants of the
system's monotonic clock, on a line of its standard input. It works until the second instant, counts
what was completed between the two, and prints a JSON document.
"""

import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# Latencies are kept in buckets, each this much wider than the one before.
BUCKET_RATIO = math.log(1.02)

clock = time.monotonic


@dataclass
class Tally:
    """What was completed inside the window, with latencies in seconds."""

    since: float = 0.0
    until: float = math.inf
    count: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    before: int = 0

    def add(self, now: float, count: int, latency: float | None = None) -> None:
        """Count what was completed at a moment; with a latency, as so many of that latency."""
        if now < self.since:
            self.before += count
        elif now < self.until:
            self.count += count
            if latency is not None:
                self.histogram[bucket(latency)] += count

    def report(self) -> dict[str, Any]:
        """Return what the process prints at its end."""
        return {
            "count": self.count,
            "before": self.before,
            "histogram": dict(self.histogram),
            "errors": dict(self.errors),
            "cpu": time.process_time(),
        }


def bucket(seconds: float) -> int:
    """Return the number of the bucket that a latency belongs to."""
    return round(math.log(max(seconds, 1e-6)) / BUCKET_RATIO)


def quantile(histogram: dict[int, int], share: float) -> float | None:
    """Return the latency, in seconds, under which this share of a histogram lies."""
    left = share * sum(histogram.values())
    for number in sorted(histogram):
        left -= histogram[number]
        if left <= 0:
            return math.exp(number * BUCKET_RATIO)
    return None


def task() -> dict[str, Any]:
    """Return what this process is to do."""
    document: dict[str, Any] = json.loads(sys.argv[1])
    return document


def opened(tally: Tally) -> None:
    """Say that everything is connected, and wait for the window."""
    print("ready", flush=True)
    tally.since, tally.until = json.loads(sys.stdin.readline())


def close(tally: Tally) -> None:
    """Print what was done."""
    print(json.dumps(tally.report()), flush=True)
