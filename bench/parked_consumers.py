"""What waiting consumers cost: `python -m bench.parked_consumers`.

Parks pops on one broker, each over a connection of its own, and measures while nothing happens: the
processor time of the broker and of PostgreSQL, and the connections to the database. Then a message
is pushed, and the time is taken until a parked pop has it.
"""

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

import click

from .client import exchange, request
from .stage import Broker, Stage, stage

NAME = "parked"
TIMEOUT_MS = 60_000
# At most so many connections are opened at once.
OPENING = 200
# A new group is looked after for a while; then nothing is left to do for it.
SETTLE_SECONDS = 15.0
ANSWER_SECONDS = 10.0
PUSHES = 20

CONNECTIONS = "select count(*) from pg_stat_activity where application_name = 'queen-pg'"


class Place(NamedTuple):
    """Where a pop waits."""

    queue: str
    partition: str | None
    group: str

    @property
    def path(self) -> str:
        """The path and parameters of its pop."""
        path = f"/api/v1/pop/queue/{quote(self.queue, safe='')}"
        if self.partition is not None:
            path += f"/partition/{quote(self.partition, safe='')}"
        return (
            f"{path}?wait=true&timeout={TIMEOUT_MS}&batch=1&autoAck=true&consumerGroup={self.group}"
        )


WAYS: dict[str, Callable[[int], Place]] = {
    "queues of their own": lambda number: Place(f"queue-{number}", None, "g"),
    "one queue and group": lambda _: Place("queue", None, "g"),
    "groups of their own": lambda number: Place("queue", None, f"group-{number}"),
    "partitions that exist": lambda number: Place("queue", f"partition-{number}", "g"),
    "partitions that do not": lambda number: Place("queue", f"unborn-{number}", "g"),
}


class Parked:
    """Pops that wait, and when the last of them was answered."""

    def __init__(self, address: tuple[str, int], places: Sequence[Place]) -> None:
        self.answered = asyncio.Event()
        self._address = address
        self._places = places
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Send all pops, and keep their connections open meanwhile."""
        gate = asyncio.Semaphore(OPENING)
        sent = [asyncio.Event() for _ in self._places]
        self._tasks = [
            asyncio.create_task(self._wait(place, gate, event))
            for place, event in zip(self._places, sent, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in sent))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, place: Place, gate: asyncio.Semaphore, sent: asyncio.Event) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(request("GET", place.path))
            await writer.drain()
            sent.set()
        try:
            while True:
                line = await reader.readline()
                if line.startswith(b"HTTP/1.1 200"):
                    self.answered.set()
                if not line:
                    return
        finally:
            writer.close()


class Figures(NamedTuple):
    """What was measured while nothing happened, in shares of a core; and the answers' delays."""

    broker: float
    server: float | None
    connections: int
    delays: list[float]


async def measure(
    server: Stage, broker: Broker, places: Sequence[Place], seconds: float
) -> Figures:
    """Park pops at the places, and measure."""
    parked = Parked(broker.address, places)
    async with parked.waiting():
        await asyncio.sleep(SETTLE_SECONDS)
        before = time.monotonic(), broker.cpu_seconds, server.cpu_seconds()
        await asyncio.sleep(seconds)
        after = time.monotonic(), broker.cpu_seconds, server.cpu_seconds()
        [row] = await asyncio.to_thread(server.query, CONNECTIONS, NAME)
        delays = []
        for number in range(PUSHES):
            place = places[number * len(places) // PUSHES]
            delays.append(await answer(broker, parked, place))
    span = after[0] - before[0]
    of_server = None
    if before[2] is not None and after[2] is not None:
        of_server = (after[2] - before[2]) / span
    return Figures((after[1] - before[1]) / span, of_server, row["count"], delays)


async def answer(broker: Broker, parked: Parked, place: Place) -> float:
    """Push to where a pop waits, and return the seconds until one was answered."""
    parked.answered.clear()
    item = {"queue": place.queue, "partition": place.partition, "payload": None}
    body = json.dumps({"items": [item]}).encode()
    began = time.monotonic()
    await asyncio.to_thread(exchange, broker.address, request("POST", "/api/v1/push", body))
    async with asyncio.timeout(ANSWER_SECONDS):
        await parked.answered.wait()
    return time.monotonic() - began


def create(broker: Broker, places: Sequence[Place]) -> None:
    """Make the partitions that shall exist, with a message that everybody has had."""
    items = [
        {"queue": place.queue, "partition": place.partition, "payload": None}
        for place in places
        if place.partition is not None and not place.partition.startswith("unborn")
    ]
    if items:
        body = json.dumps({"items": items}).encode()
        exchange(broker.address, request("POST", "/api/v1/push", body))


@click.command("parked-consumers", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--pops", type=int, default=2000, help="How many pops wait.")
@click.option("--seconds", type=float, default=10.0, help="How long is measured.")
@click.option("--url", help="A PostgreSQL whose role may create databases, instead of our own.")
def main(pops: int, seconds: float, url: str | None) -> None:
    """Measure what waiting consumers cost."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    click.echo(f"{pops} parked pops, measured for {seconds:g} s; shares of one core")
    click.echo(f"{'':<24}{'broker':>8}{'server':>8}{'conns':>7}{'answer ms':>11}{'worst':>8}")
    with stage(url) as server:
        for way, place in WAYS.items():
            places = [place(number) for number in range(pops)]
            broker = Broker(server.migrate(NAME), {})
            try:
                create(broker, places)
                figures = asyncio.run(measure(server, broker, places, seconds))
            finally:
                broker.stop()
            delays = sorted(figures.delays)
            of_server = "" if figures.server is None else f"{figures.server:.1%}"
            click.echo(
                f"{way:<24}{figures.broker:>8.1%}{of_server:>8}{figures.connections:>7}"
                f"{1000 * delays[len(delays) // 2]:>11.1f}{1000 * delays[-1]:>8.1f}"
            )
        server.drop(NAME)


if __name__ == "__main__":
    main()
