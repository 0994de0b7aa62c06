"""What is measured. Each workload lists its candidates: us, the floor, and the peers that do it."""

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .bench import (
    COMMIT,
    EXCHANGE,
    FLOOR,
    OURS,
    PARTITIONS,
    Bench,
    Profile,
    Workload,
    several,
)
from .partitions import partitions
from .path import (
    CLAIMING,
    CONSUMED,
    WORKERS,
    floor_tasks,
    path_task,
    path_tasks,
    peer_tasks,
    work_task,
)
from .peer import Peer
from .run import LEAD_SECONDS, Candidate, Sample, http, sql

# Connections of the floor for bulk inserts: which of them is best depends on the machine.
FLOOR_CLIENTS = (1, 2, 4)
COMMIT_CLIENTS = 8
# Partitions that shall be fought for.
HOT = 100
# Connections of ours: which of them is best depends on the machine, as with the floor.
PUSHERS = {1: (64,), 10: (16,), 100: (8, 16)}
# Messages that wait, for each second, where pops and acks alone are measured: nobody may finish.
POPPED = {1: 12_000, 100: 120_000}
# The share of an offered rate from which on it counts as held.
HELD = 0.95
# Until what is delayed is due: long after the run.
DELAY_SECONDS = 3600
# How many times the usual warm-up consumers have to come and wait.
PARKING = 4
# Consumers that wait, where each holds a connection.
CONNECTED = 10


def pushes(batch: int, *, spread: bool) -> Workload:
    """Pushes of `batch` messages, each push to one partition or each message to another."""

    def candidates(bench: Bench) -> list[Candidate]:
        shape = {"batch": batch, "spread": spread, "partitions": PARTITIONS}
        queue = bench.known()
        several_of_ours = len(PUSHERS[batch]) > 1
        found = [
            Candidate(
                f"{OURS}, {several(clients, 'connection')}" if several_of_ours else OURS,
                partial(bench.us, {"kind": "push", "queue": queue, "clients": clients} | shape),
            )
            for clients in PUSHERS[batch]
        ]
        for clients in (COMMIT_CLIENTS,) if batch == 1 else FLOOR_CLIENTS:
            found.append(
                Candidate(
                    f"{FLOOR}, {several(clients, 'connection')}",
                    partial(bench.floor, {"kind": "rows", "clients": clients} | shape),
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
                    partial(bench.floor, {"kind": "rows", "clients": clients} | shape),
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
        seconds = LEAD_SECONDS + bench.profile.warm + bench.profile.seconds
        backlog = int(seconds * POPPED[batch])
        task = {"kind": "work", "batch": batch, "width": 1}

        def ours() -> Sample:
            queue = bench.queue()
            bench.fill(queue, backlog, spread=False, partitions=PARTITIONS)
            clients = WORKERS if batch > 1 else 64
            return lasting(bench.us(task | {"queue": queue, "clients": clients}), backlog)

        def floor() -> Sample:
            bench.emptied(backlog)
            clients = CLAIMING if batch > 1 else COMMIT_CLIENTS
            return lasting(
                bench.floor({"kind": "claims", "batch": batch, "clients": clients}), backlog
            )

        def theirs(peer: Peer, *, singly: bool = False) -> Sample:
            bench.fresh(peer)
            many = peer.fetches_many and not singly
            total = int(seconds * (peer.pace if many else min(peer.pace, POPPED[batch])))
            bench.fill_peer(peer, total)
            return lasting(bench.peer(peer, task | {"clients": WORKERS, "singly": singly}), total)

        found = [Candidate(OURS, ours), Candidate(FLOOR, floor)]
        for peer in bench.peers:
            found.append(Candidate(peer.name, partial(theirs, peer)))
            if batch == 1 and peer.fetches_many:
                alone = partial(theirs, peer, singly=True)
                found.append(Candidate(f"{peer.name}, one at a time", alone))
        return found

    return Workload(f"work-{batch}", f"Pop and ack of {batch}", "messages/s", candidates)


def lasting(sample: Sample, total: int) -> Sample:
    """Return a sample, with an error in it where everything was consumed before its end."""
    if sample.counted["handled"] >= total:
        sample.errors["nothing was left"] = 1
    return sample


def stocked(
    fill: Callable[[int], None], total: int, run: Callable[[], Sample]
) -> Callable[[], Sample]:
    """Return a run before which what waits is filled up to so many messages."""
    left = 0

    def again() -> Sample:
        nonlocal left
        fill(total - left)
        sample = run()
        left = max(total - sample.counted["handled"], 0)
        return lasting(sample, total)

    return again


def path(rate: int | None) -> Workload:
    """The full path at an offered rate, or as fast as it goes.

    A peer that held a rate in none of its rounds is offered no higher one.
    """

    def candidates(bench: Bench) -> list[Candidate]:
        def ours() -> Sample:
            return bench.us(*path_tasks(bench.known(), rate), count=CONSUMED)

        def floor() -> Sample:
            bench.emptied()
            return bench.floor(*floor_tasks(rate), count=CONSUMED)

        def theirs(peer: Peer) -> Sample:
            bench.fresh(peer)
            sample = bench.peer(peer, *peer_tasks(rate), count=CONSUMED)
            if rate:
                place = (peer.name, rate)
                bench.held[place] = bench.held.get(place, False) or sample.rate >= HELD * rate
            return sample

        beaten = {who for (who, at), held in bench.held.items() if rate and at < rate and not held}
        return [
            Candidate(OURS, ours),
            Candidate(FLOOR, floor),
            *(
                Candidate(peer.name, partial(theirs, peer))
                for peer in bench.peers
                if peer.name not in beaten
            ),
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
                peaks.append(bench.us(*path_tasks(bench.known(), None), count=CONSUMED).rate)
            return bench.us(*path_tasks(bench.known(), max(peaks[0] / 10, 1)), count=CONSUMED)

        return [
            Candidate(OURS, ours),
            Candidate(EXCHANGE, lambda: bench.us({"kind": "health", "clients": 1})),
            Candidate(COMMIT, lambda: bench.floor({"kind": "rows", "clients": 1} | shape)),
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

        def floor() -> Sample:
            bench.emptied()
            inserts, claims = floor_tasks(None, HOT)
            steps = {"kind": "steps", "clients": COMMIT_CLIENTS}
            return bench.floor(inserts, claims, steps, count=(1, 2))

        return [
            *(
                Candidate(f"{OURS}, {several(number, 'broker')}", partial(ours, number))
                for number in (1, 2)
            ),
            Candidate(FLOOR, floor),
        ]

    return Workload("races", f"The path and steps on {HOT} partitions", "messages/s", candidates)


def transactions() -> Workload:
    """Ack 1, push 1, KV 1, timer 1 in a transaction."""

    def candidates(bench: Bench) -> list[Candidate]:
        clients = 16
        seconds = bench.profile.warm + bench.profile.seconds

        def ours() -> Sample:
            queue = bench.queue()
            total = int(seconds * 2000) + clients * 100
            bench.fill(queue, total, spread=False, partitions=200)
            return bench.us({"kind": "step", "queue": queue, "batch": 100, "clients": clients})

        return [
            Candidate(OURS, ours),
            Candidate(FLOOR, lambda: bench.floor({"kind": "steps", "clients": clients})),
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
            Candidate(FLOOR, lambda: bench.floor(task)),
        ]

    return Workload("kv", "KV, half reads and half writes", "calls/s", candidates)


def parked() -> Workload:
    """The path at a steady rate beside consumers that wait for another queue."""

    def candidates(bench: Bench) -> list[Candidate]:
        rate = bench.profile.rates[0]
        # What two thousand that come at once have held up is worked off before it counts.
        warm = bench.profile.warm * PARKING
        bench = replace(bench, profile=replace(bench.profile, warm=warm))

        def ours(consumers: int) -> Sample:
            tasks = path_tasks(bench.known(), rate)
            if consumers:
                tasks.append(
                    {"kind": "park", "queue": "parked", "clients": consumers, "groups": 100}
                )
            return bench.us(*tasks, count=CONSUMED)

        def floor(consumers: int) -> Sample:
            bench.emptied()
            tasks = floor_tasks(rate)
            if consumers:
                tasks.append({"kind": "listen", "clients": consumers})
            return bench.floor(*tasks, count=CONSUMED)

        def theirs(peer: Peer, consumers: int) -> Sample:
            bench.fresh(peer)
            park = {"kind": "park", "clients": consumers}
            return bench.peer(peer, *peer_tasks(peer.offered(rate)), park, count=CONSUMED)

        # Where each holds a connection there are fewer.
        connected = min(CONNECTED, bench.profile.parked)
        found = []
        for who, run, consumers in (
            (OURS, ours, bench.profile.parked),
            (FLOOR, floor, connected),
        ):
            found += [
                Candidate(f"{who}, {number:,} parked", partial(run, number))
                for number in (0, consumers)
            ]
        for peer in bench.peers:
            consumers = bench.profile.parked if peer.parks_together else connected
            found.append(
                Candidate(
                    f"{peer.name}, {consumers:,} parked{peer.said(rate)}",
                    partial(theirs, peer, consumers),
                )
            )
        return found

    return Workload("parked", "Push → pop → ack beside parked consumers", "messages/s", candidates)


def backlog() -> Workload:
    """Pop and ack where much waits, and more that is not due yet."""

    def candidates(bench: Bench) -> list[Candidate]:
        profile = bench.profile
        waiting, delayed = bench.queue(), bench.queue()

        def fill(queue: str, total: int) -> None:
            bench.fill(queue, total, spread=True, partitions=10_000)

        @functools.cache
        def delay() -> None:
            bench.broker.configure(delayed, delayedProcessing=DELAY_SECONDS)
            fill(delayed, profile.delayed)

        @functools.cache
        def delay_peer(peer: Peer) -> None:
            bench.fresh(peer)
            bench.fill_peer(peer, peer.waiting(profile.delayed), delay=DELAY_SECONDS)

        def ours() -> Sample:
            delay()
            work = {"kind": "work", "batch": 100, "width": 32}
            return bench.us(
                work | {"queue": waiting, "clients": WORKERS},
                work | {"queue": delayed, "clients": 1},
            )

        def floor() -> Sample:
            return bench.floor({"kind": "claims", "batch": 100, "clients": CLAIMING})

        def theirs(peer: Peer) -> Sample:
            return bench.peer(peer, {"kind": "work", "batch": 100, "clients": WORKERS})

        def fill_peer(peer: Peer, total: int) -> None:
            delay_peer(peer)
            bench.fill_peer(peer, total)

        def title(who: str, waiting: int, delayed: int) -> str:
            return f"{who}, {waiting:,} waiting" + (f", {delayed:,} delayed" if delayed else "")

        found = [
            Candidate(
                title(OURS, profile.backlog, profile.delayed),
                stocked(partial(fill, waiting), profile.backlog, ours),
            ),
            # Its table is filled anew each time, which takes seconds.
            Candidate(
                title(FLOOR, profile.backlog, 0),
                stocked(lambda _: bench.emptied(profile.backlog), profile.backlog, floor),
            ),
        ]
        for peer in bench.peers:
            total, later = peer.waiting(profile.backlog), peer.waiting(profile.delayed)
            found.append(
                Candidate(
                    title(peer.name, total, later),
                    stocked(partial(fill_peer, peer), total, partial(theirs, peer)),
                )
            )
        return found

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
