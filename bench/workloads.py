"""What is measured. Each workload lists its candidates: us, the floor, and the peers that do it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .client import exchange, request
from .load import payload
from .peer import Installed, Peer
from .run import Candidate, Load, Sample, http, measure, sql
from .stage import Broker, Stage
from .window import clock

OURS, FLOOR = "us", "floor"
EXCHANGE, COMMIT = "HTTP exchange", "one-row commit"
# Connections of the floor for bulk inserts: which of them is best depends on the machine.
FLOOR_CLIENTS = (1, 2, 4)
COMMIT_CLIENTS = 8
# Partitions that a load spreads over where their number is not what is measured.
PARTITIONS = 1000
# And where they shall be fought for.
HOT = 100
PUSHERS = {1: 64, 10: 16, 100: 8}
WORKERS = 16


@dataclass(frozen=True)
class Profile:
    """How long and how often everything runs."""

    name: str
    rounds: int
    warm: float
    seconds: float
    # Offered rates of the full path, in messages a second, tried in order until one is not held.
    rates: tuple[int, ...]
    partition_counts: tuple[int, ...]
    parked: int
    backlog: int
    delayed: int
    reader_seconds: float
    soak_seconds: float


QUICK = Profile(
    "quick", 3, 1.0, 3.0, (1000, 2000, 4000, 8000), (100, 10_000), 500, 50_000, 5_000, 20, 20
)
FULL = Profile(
    "full", 5, 2.0, 8.0, (500, 1000, 2000, 3000, 4000, 6000, 8000, 12_000),
    (100, 1000, 10_000, 1_000_000), 2000, 1_000_000, 100_000, 180, 600,
)  # fmt: skip


@dataclass
class Bench:
    """What the workloads of a run share."""

    stage: Stage
    broker: Broker
    profile: Profile
    installed: Installed | None
    queues: Iterator[int] = field(default_factory=itertools.count)

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

    def us(self, *tasks: dict[str, Any], count: Sequence[int] | None = None) -> Sample:
        """Measure loads over HTTP."""
        loads = [http(self.broker, **task) for task in tasks]
        return self.measure(OURS, loads, count, [self.broker])

    def floor(self, **task: Any) -> Sample:
        """Measure a load of plain SQL on the floor's database."""
        return self.measure(FLOOR, [sql(self.stage.url(FLOOR), **task)])

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


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count > 1)}"


@dataclass(frozen=True)
class Workload:
    """A name for the command line, a title for the table, and who does it."""

    name: str
    title: str
    unit: str
    candidates: Callable[[Bench], list[Candidate]]


def pushes(batch: int, *, spread: bool) -> Workload:
    """Pushes of `batch` messages, each push to one partition or each message to another."""

    def candidates(bench: Bench) -> list[Candidate]:
        shape = {"batch": batch, "spread": spread, "partitions": PARTITIONS}
        queue = bench.known()
        found = [
            Candidate(
                OURS,
                lambda: bench.us(
                    {"kind": "push", "queue": queue, "clients": PUSHERS[batch]} | shape
                ),
            )
        ]
        for clients in (COMMIT_CLIENTS,) if batch == 1 else FLOOR_CLIENTS:
            found.append(
                Candidate(
                    f"{FLOOR}, {several(clients, 'connection')}",
                    partial(bench.floor, kind="rows", clients=clients, **shape),
                )
            )
        if not spread:
            for peer in bench.peers:
                task = {"kind": "enqueue", "batch": batch, "clients": 16 if batch == 1 else 4}
                found.append(Candidate(peer.name, partial(bench.peer, peer, task)))
        return found

    where = "many partitions" if spread else "one partition each"
    return Workload(
        f"push-{batch}-{'many' if spread else 'one'}",
        f"Push of {batch}, {where}" if batch > 1 else "Push of 1",
        "messages/s",
        candidates,
    )


def calls(*, spread: bool) -> Workload:
    """Pushes of 100 by `select queen.push_batch(...)`, and by `queen.push_many(...)` beside it."""

    def candidates(bench: Bench) -> list[Candidate]:
        shape = {"batch": 100, "spread": spread, "partitions": PARTITIONS}
        queue = bench.known()
        url = bench.stage.url(OURS)

        def called(call: str, clients: int) -> Sample:
            load = sql(url, kind="calls", call=call, queue=queue, clients=clients, **shape)
            return bench.measure(OURS, [load])

        found = []
        for clients in FLOOR_CLIENTS:
            connections = several(clients, "connection")
            arrays = "push_batch, partitions" if spread else "push_batch"
            found += [
                Candidate(f"{OURS}, {connections}", partial(called, arrays, clients)),
                Candidate(
                    f"{FLOOR}, {connections}",
                    partial(bench.floor, kind="rows", clients=clients, **shape),
                ),
            ]
        document = f"{OURS}, push_many, {connections}"
        return [*found, Candidate(document, partial(called, "push_many", clients))]

    where = "many partitions" if spread else "one partition each"
    return Workload(
        f"sql-100-{'many' if spread else 'one'}",
        f"Push of 100 by SQL (push_batch), {where}",
        "messages/s",
        candidates,
    )


def works(batch: int) -> Workload:
    """Pop and ack what waits, `batch` at a time."""

    def candidates(bench: Bench) -> list[Candidate]:
        seconds = bench.profile.warm + bench.profile.seconds
        backlog = int(seconds * (4_000 if batch == 1 else 30_000))
        workers = WORKERS if batch > 1 else 64
        task = {"kind": "work", "batch": batch, "width": 1, "clients": workers}

        def ours() -> Sample:
            queue = bench.queue()
            fill = {"kind": "push", "queue": queue, "spread": False, "partitions": PARTITIONS}
            bench.run(http(bench.broker, clients=8, batch=100, total=backlog, **fill))
            return bench.us(task | {"queue": queue})

        def theirs(peer: Peer) -> Sample:
            assert bench.installed is not None
            bench.fresh(peer)
            url = bench.stage.url(peer.name)
            total = backlog if peer.name in ("pgmq", "graphile", "pgboss") else backlog // 5
            fill = {"clients": 4, "batch": 100, "total": total}
            bench.run(bench.installed.start(peer, "enqueue", url, **fill))
            return bench.peer(peer, task | {"clients": WORKERS})

        return [Candidate(OURS, ours)] + [
            Candidate(peer.name, partial(theirs, peer)) for peer in bench.peers
        ]

    return Workload(f"work-{batch}", f"Pop and ack of {batch}", "messages/s", candidates)


def path_tasks(
    queue: str, rate: float | None, partitions: int = PARTITIONS
) -> list[dict[str, Any]]:
    """Return the loads of push → pop → ack: one message a push, explicit acks."""
    return [
        path_task(queue, 64, partitions) | {"rate": rate},
        work_task(queue, WORKERS),
    ]


def path_task(queue: str, clients: int, partitions: int) -> dict[str, Any]:
    """Return a load that pushes one message at a time."""
    shape = {"batch": 1, "spread": False, "partitions": partitions}
    return {"kind": "push", "queue": queue, "clients": clients, **shape}


def work_task(queue: str, clients: int) -> dict[str, Any]:
    """Return a load that pops what is there, up to 100 messages of 32 partitions, and acks it."""
    return {"kind": "work", "queue": queue, "clients": clients, "batch": 100, "width": 32}


def path(rate: int | None) -> Workload:
    """The full path at an offered rate, or as fast as it goes."""

    def candidates(bench: Bench) -> list[Candidate]:
        def theirs(peer: Peer) -> Sample:
            bench.fresh(peer)
            enqueue = {"kind": "enqueue", "batch": 1, "clients": 16, "rate": rate}
            work = {"kind": "work", "batch": 100, "clients": WORKERS}
            return bench.peer(peer, enqueue, work, count=[1])

        return [Candidate(OURS, lambda: bench.us(*path_tasks(bench.known(), rate), count=[1]))] + [
            Candidate(peer.name, partial(theirs, peer)) for peer in bench.peers
        ]

    title = "Push → pop → ack" + (f", {rate} offered" if rate else ", as fast as it goes")
    return Workload(f"path-{rate or 'max'}", title, "messages/s", candidates)


def latency() -> Workload:
    """The path at a tenth of its peak, and what no message can do without, one at a time."""

    def candidates(bench: Bench) -> list[Candidate]:
        shape = {"batch": 1, "spread": False, "partitions": PARTITIONS}
        peaks: list[float] = []

        def ours() -> Sample:
            if not peaks:
                peaks.append(bench.us(*path_tasks(bench.known(), None), count=[1]).rate)
            return bench.us(*path_tasks(bench.known(), max(peaks[0] / 10, 1)), count=[1])

        return [
            Candidate(OURS, ours),
            Candidate(EXCHANGE, lambda: bench.us({"kind": "health", "clients": 1})),
            Candidate(COMMIT, lambda: bench.floor(kind="rows", clients=1, **shape)),
        ]

    return Workload("latency", "Push → pop → ack at a tenth of the peak", "a second", candidates)


def races() -> Workload:
    """Pushes, pops, acks and transactions on the same few partitions, by one broker and by two."""

    def candidates(bench: Bench) -> list[Candidate]:
        def ours(brokers: int) -> Sample:
            queue = bench.known(HOT)
            found = [bench.broker] + [bench.another() for _ in range(brokers - 1)]
            try:
                loads = [
                    http(broker, **task, first=number * 100)
                    for number, broker in enumerate(found)
                    for task in (
                        path_task(queue, 32 // brokers, HOT),
                        work_task(queue, 8 // brokers),
                        {"kind": "step", "queue": queue, "batch": 10, "clients": 8 // brokers},
                    )
                ]
                consumers = [place for place in range(len(loads)) if place % 3]
                return bench.measure(OURS, loads, consumers, found)
            finally:
                for broker in found[1:]:
                    broker.stop()

        return [
            Candidate(f"{OURS}, {several(number, 'broker')}", partial(ours, number))
            for number in (1, 2)
        ]

    return Workload("races", f"The path and steps on {HOT} partitions", "messages/s", candidates)


def transactions() -> Workload:
    """Ack 1, push 1, KV 1, timer 1 in a transaction."""

    def candidates(bench: Bench) -> list[Candidate]:
        clients = 16
        seconds = bench.profile.warm + bench.profile.seconds

        def ours() -> Sample:
            queue = bench.queue()
            fill = {"kind": "push", "queue": queue, "spread": False, "partitions": 200}
            total = int(seconds * 2000) + clients * 100
            bench.run(http(bench.broker, clients=8, batch=100, total=total, **fill))
            return bench.us({"kind": "step", "queue": queue, "batch": 100, "clients": clients})

        return [
            Candidate(OURS, ours),
            Candidate(FLOOR, lambda: bench.floor(kind="steps", clients=clients)),
        ]

    return Workload(
        "transaction", "Transaction: ack, push, KV, timer", "transactions/s", candidates
    )


def kv() -> Workload:
    """Reads and writes of single keys, half and half."""

    def candidates(bench: Bench) -> list[Candidate]:
        task = {"kind": "kv", "clients": 16, "keys": 10_000}
        return [
            Candidate(OURS, lambda: bench.us(task)),
            Candidate(FLOOR, lambda: bench.floor(**task)),
        ]

    return Workload("kv", "KV, half reads and half writes", "calls/s", candidates)


def partitions() -> Workload:
    """The path as fast as it goes, over so many partitions that all hold history."""

    def candidates(bench: Bench) -> list[Candidate]:
        found = []
        for count in bench.profile.partition_counts:
            queue = bench.queue()
            grown: list[bool] = []

            def ours(count: int = count, queue: str = queue, grown: list[bool] = grown) -> Sample:
                if not grown:
                    grow(bench, queue, count)
                    grown.append(True)
                return bench.us(*path_tasks(queue, None, count), count=[1])

            found.append(Candidate(f"{OURS}, {count:,} partitions", ours))
        return found

    return Workload("partitions", "Push → pop → ack over partitions", "messages/s", candidates)


def grow(bench: Bench, queue: str, count: int) -> None:
    """Give a queue partitions that each have had a message."""
    bench.broker.configure(queue)
    bench.stage.execute(
        f"""
        with added as (
            insert into queen.partitions (queue_id, name, next_offset, last_append_at)
            select q.id, 'p-' || n, 1, now() from queen.queues q, generate_series(0, {count} - 1) n
            where q.name = '{queue}'
            returning id
        )
        insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id,
                                    payload)
        select a.id, 0, now(), u.id, u.id::text, '{payload(0)}'
        from added a cross join lateral (select gen_random_uuid() as id where a.id > 0) u
        """,
        OURS,
    )
    bench.stage.execute("vacuum analyze queen.partitions, queen.messages", OURS)
    workers = {"kind": "work", "queue": queue, "batch": 1000, "width": 64, "clients": 8}
    seconds = bench.profile.warm + bench.profile.seconds
    # Everything that waits is consumed, so that cursors and hints exist for all partitions.
    for _ in range(600):
        if bench.run(http(bench.broker, **workers), seconds)["count"] == 0:
            break


def parked() -> Workload:
    """The path at a steady rate beside consumers that wait for another queue."""

    def candidates(bench: Bench) -> list[Candidate]:
        def ours(consumers: int) -> Sample:
            tasks = path_tasks(bench.known(), bench.profile.rates[0])
            if consumers:
                tasks.append(
                    {"kind": "park", "queue": "parked", "clients": consumers, "groups": 100}
                )
            return bench.us(*tasks, count=[1])

        return [
            Candidate(f"{OURS}, {consumers:,} parked", partial(ours, consumers))
            for consumers in (0, bench.profile.parked)
        ]

    return Workload("parked", "Push → pop → ack beside parked consumers", "messages/s", candidates)


def backlog() -> Workload:
    """Pop and ack where much waits, and more that is not due yet."""

    def candidates(bench: Bench) -> list[Candidate]:
        waiting, delayed = bench.queue(), bench.queue()
        filled: list[bool] = []

        def fill() -> None:
            bench.broker.configure(delayed, delayedProcessing=3600)
            shape = {"kind": "push", "spread": True, "partitions": 10_000, "clients": 8}
            for queue, total in (
                (waiting, bench.profile.backlog),
                (delayed, bench.profile.delayed),
            ):
                bench.run(http(bench.broker, queue=queue, batch=100, total=total, **shape))

        def ours() -> Sample:
            if not filled:
                fill()
                filled.append(True)
            work = {"kind": "work", "batch": 100, "width": 32}
            return bench.us(
                work | {"queue": waiting, "clients": WORKERS},
                work | {"queue": delayed, "clients": 1},
            )

        title = f"{OURS}, {bench.profile.backlog:,} waiting, {bench.profile.delayed:,} delayed"
        return [Candidate(title, ours)]

    return Workload("backlog", "Pop and ack from a backlog", "messages/s", candidates)


def all_of(profile: Profile) -> list[Workload]:
    """Return the workloads of a profile, in the order in which they run."""
    return [
        latency(),
        pushes(1, spread=False),
        pushes(10, spread=False),
        pushes(10, spread=True),
        pushes(100, spread=False),
        pushes(100, spread=True),
        calls(spread=False),
        calls(spread=True),
        works(1),
        works(100),
        *(path(rate) for rate in profile.rates),
        path(None),
        transactions(),
        kv(),
        races(),
        partitions(),
        parked(),
        backlog(),
    ]
