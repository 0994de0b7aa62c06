"""What the workloads of a run share: how long they run, on what, and how they are measured."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import exchange, request
from .load import payload
from .peer import Installed, Peer
from .run import Candidate, Load, Sample, http, measure, sql
from .stage import Broker, Stage
from .window import clock

OURS, FLOOR = "us", "floor"
EXCHANGE, COMMIT = "HTTP exchange", "one-row commit"
# Partitions that a load spreads over where their number is not what is measured.
PARTITIONS = 1000


@dataclass(frozen=True)
class Profile:
    """How long and how often everything runs."""

    name: str
    rounds: int
    warm: float
    seconds: float
    # Offered rates of the full path, in messages a second, from the lowest.
    rates: tuple[int, ...]
    partition_counts: tuple[int, ...]
    # How long, at most, `partitions` warms until the log's bytes a message level off.
    settle_seconds: float
    parked: int
    backlog: int
    delayed: int
    reader_seconds: float
    soak_seconds: float
    # How long the floor and the peers run where we run for `reader_seconds` or `soak_seconds`.
    beside_seconds: float


QUICK = Profile(
    "quick", 3, 1.0, 3.0, (1000, 2000, 4000, 8000), (100, 10_000), 12, 500, 300_000, 30_000,
    20, 20, 12,
)  # fmt: skip
FULL = Profile(
    "full", 5, 1.0, 8.0, (1000, 2000, 4000, 8000), (100, 1000, 10_000, 1_000_000), 40, 2000,
    1_000_000, 100_000, 180, 600, 120,
)  # fmt: skip


@dataclass
class Bench:
    """What the workloads of a run share."""

    stage: Stage
    broker: Broker
    profile: Profile
    installed: Installed | None
    queues: Iterator[int] = field(default_factory=itertools.count)
    # Whether a peer held an offered rate in any round.
    held: dict[tuple[str, int], bool] = field(default_factory=dict)

    @property
    def peers(self) -> Sequence[Peer]:
        """The peers of this run."""
        return self.installed.peers if self.installed else []

    def queue(self) -> str:
        """Return the name of a queue that nobody has used."""
        return f"bench-{next(self.queues)}"

    def known(self, partitions: int = PARTITIONS) -> str:
        """Return the name of a queue whose partitions exist: they are made once in their lives."""
        queue = self.queue()
        items = ",".join(
            f'{{"queue":"{queue}","partition":"p-{number}","payload":{payload(clock())}}}'
            for number in range(partitions)
        )
        body = f'{{"items":[{items}]}}'.encode()
        exchange(self.broker.address, request("POST", "/api/v1/push", body))
        return queue

    def another(self) -> Broker:
        """Start another broker on the same database; the caller stops it."""
        return Broker(self.stage.url(OURS), {})

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[Broker]:
        """Run another broker on a database of its own, which is dropped after it."""
        broker = Broker(self.stage.migrate(name), self.broker.environment)
        try:
            yield broker
        finally:
            broker.stop()
            self.stage.drop(name)

    def us(self, *tasks: dict[str, Any], count: Sequence[int] | None = None) -> Sample:
        """Measure loads over HTTP."""
        loads = [http(self.broker, **task) for task in tasks]
        return self.measure(OURS, loads, count, [self.broker])

    def floor(self, *tasks: dict[str, Any], count: Sequence[int] | None = None) -> Sample:
        """Measure loads of plain SQL on the floor's database."""
        url = self.stage.url(FLOOR)
        return self.measure(FLOOR, [sql(url, **task) for task in tasks], count)

    def peer(
        self, peer: Peer, *tasks: dict[str, Any], count: Sequence[int] | None = None
    ) -> Sample:
        """Measure a peer's programs on its database."""
        assert self.installed is not None
        url = self.stage.url(peer.name)
        return self.measure(
            peer.name, [self.installed.start(peer, url=url, **task) for task in tasks], count
        )

    def run(self, load: Load, seconds: float = math.inf) -> dict[str, Any]:
        """Let one load run to its end, outside any measurement."""
        try:
            load.ready()
            load.go(0, min(clock() + seconds, clock() + 3600))
            return load.result()
        finally:
            load.kill()

    def fresh(self, peer: Peer) -> None:
        """Give a peer an empty database."""
        assert self.installed is not None
        self.installed.install(peer, self.stage.create(peer.name))

    def emptied(self, total: int = 0) -> None:
        """Leave so many messages to the floor, and no others."""
        self.stage.execute("truncate queen.messages", FLOOR)
        if total:
            shape = {"batch": 100, "spread": False, "partitions": PARTITIONS, "clients": 4}
            self.run(sql(self.stage.url(FLOOR), kind="rows", total=total, **shape))
            self.stage.settle(FLOOR)

    def fill(self, queue: str, total: int, **task: Any) -> None:
        """Leave so many more messages to us."""
        task |= {"kind": "push", "clients": 8, "batch": 100}
        self.run(http(self.broker, queue=queue, total=total, **task))
        self.stage.settle(OURS)

    def fill_peer(self, peer: Peer, total: int, **task: Any) -> None:
        """Leave so many more messages to a peer."""
        assert self.installed is not None
        task |= {"clients": 4, "batch": 100, "total": total}
        self.run(self.installed.start(peer, "enqueue", self.stage.url(peer.name), **task))
        self.stage.settle(peer.name)

    def measure(
        self,
        database: str,
        loads: Sequence[Load],
        count: Sequence[int] | None = None,
        brokers: Sequence[Broker] = (),
    ) -> Sample:
        """Measure loads on a candidate's database, for as long as the profile says."""
        return measure(
            self.stage, database, loads, warm=self.profile.warm, seconds=self.profile.seconds,
            count=count, brokers=brokers,
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A name for the command line, a title for the table, and who does it."""

    name: str
    title: str
    unit: str
    candidates: Callable[[Bench], list[Candidate]]


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count > 1)}"
