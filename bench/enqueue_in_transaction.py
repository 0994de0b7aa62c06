"""Enqueue inside the application's transaction: `python -m bench.enqueue_in_transaction`.

Every candidate does the same: begin, insert a business row, enqueue one message, commit; over the
same driver, in one run, round by round beside each other. What differs is how the message is
stored: by nobody (the row alone), in a hand-written outbox, by `queen.push`, by pgmq's `send`, and
by the function that procrastinate defers with. The peers' schemas are their own installers'; the
loads call their SQL as their clients do, so that no client library is part of the figures.

An outbox is not done when its row is committed: a relay has yet to read it, send it and mark it.
None of that is counted here, for nobody.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import click
import uvloop

from . import report
from .peer import Installed
from .stage import Stage, stage

OURS = "us"
ENTITIES = 1000
PAYLOAD = {"orderId": 9137, "pad": "x" * 226}

ORDERS = """
create table shop_order (
    id bigint generated always as identity primary key, customer text not null,
    total integer not null
)
"""
OUTBOX = """
create table outbox (
    id bigint generated always as identity primary key, topic text not null, key text not null,
    payload json not null, created_at timestamptz not null default now()
)
"""
# Every entity has been heard of before: a partition is created once in its life.
GROWN = f"""
select count(*) from queen.push_many((
    select json_agg(json_build_object('queue', 'orders', 'partition', 'order-' || n, 'payload', n))
    from generate_series(0, {ENTITIES - 1}) n));
"""
DEFER = (
    "select procrastinate_defer_jobs_v1(array[row('bench', 'bench', 0, null, null, $1::jsonb,"
    " null)::procrastinate_job_to_defer_v1])"
)


@dataclass(frozen=True)
class Candidate:
    """One way to enqueue: its database, what is installed there, and its statement."""

    name: str
    database: str
    statement: str | None
    keyed: bool = False
    set_up: str = ""
    peer: str | None = None


CANDIDATES = (
    Candidate("row alone", "floor", None),
    Candidate(
        "hand-written outbox",
        "outbox",
        "insert into outbox (topic, key, payload) values ('orders', $2, $1)",
        keyed=True,
        set_up=OUTBOX,
    ),
    Candidate("queen.push", OURS, "select queen.push('orders', $1, $2)", keyed=True, set_up=GROWN),
    Candidate(
        "queen.push, with a transaction id",
        OURS,
        "select queen.push('orders', $1, $2, transaction_id => gen_random_uuid()::text)",
        keyed=True,
    ),
    Candidate(
        "queen.push, a group reads",
        "read",
        "select queen.push('orders', $1, $2)",
        keyed=True,
        set_up=GROWN + "select queen.seek('orders', 'billing', 'end')",
    ),
    Candidate(
        "queen.push, notify => true",
        OURS,
        "select queen.push('orders', $1, $2, notify => true)",
        keyed=True,
    ),
    Candidate("pgmq.send", "pgmq", "select pgmq.send('bench', $1::jsonb)", peer="pgmq"),
    Candidate("procrastinate", "procrastinate", DEFER, peer="procrastinate"),
)


async def prepare(server: Stage, installed: Installed | None) -> list[Candidate]:
    """Create the databases; return the candidates that can run."""
    peers = {peer.name: peer for peer in installed.peers} if installed else {}
    ready: list[Candidate] = []
    made: set[str] = set()
    for candidate in CANDIDATES:
        if candidate.peer and candidate.peer not in peers:
            continue
        if candidate.database not in made:
            if candidate.database in (OURS, "read"):
                await asyncio.to_thread(server.migrate, candidate.database)
            else:
                await asyncio.to_thread(server.create, candidate.database)
            if candidate.peer and installed is not None:
                url = server.url(candidate.database)
                await asyncio.to_thread(installed.install, peers[candidate.peer], url)
            db = await asyncpg.connect(server.url(candidate.database))
            await db.execute(ORDERS + ";" + candidate.set_up)
            await db.close()
            made.add(candidate.database)
        ready.append(candidate)
    return ready


async def measure(url: str, candidate: Candidate, clients: int, seconds: float) -> float:
    """Return the transactions that a candidate commits in a second."""
    document = json.dumps(PAYLOAD)
    counts = [0] * clients

    async def client(place: int, db: asyncpg.Connection) -> None:
        chance = random.Random(place)
        insert = await db.prepare("insert into shop_order (customer, total) values ('anna', 42)")
        enqueue = await db.prepare(candidate.statement) if candidate.statement else None
        while time.monotonic() < until:
            async with db.transaction():
                await insert.fetch()
                if enqueue is not None and candidate.keyed:
                    await enqueue.fetch(document, f"order-{chance.randrange(ENTITIES)}")
                elif enqueue is not None:
                    await enqueue.fetch(document)
            counts[place] += 1

    connections = [await asyncpg.connect(url) for _ in range(clients)]
    started = time.monotonic()
    until = started + seconds
    await asyncio.gather(*(client(place, db) for place, db in enumerate(connections)))
    elapsed = time.monotonic() - started
    for db in connections:
        await db.close()
    return sum(counts) / elapsed


async def run(
    server: Stage, candidates: Sequence[Candidate], clients: int, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Measure every candidate once a round, so that all meet the same moods of the machine."""
    rates: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for number in range(rounds + 1):
        for candidate in candidates:
            rate = await measure(server.url(candidate.database), candidate, clients, seconds)
            # The first round warms up: it fills caches, and creates the partitions.
            if number:
                rates[candidate.name].append(rate)
    return rates


def lines(clients: int, rates: dict[str, list[float]]) -> Iterator[str]:
    """Yield the table's lines."""
    alone = statistics.median(rates["row alone"])
    outbox = statistics.median(rates["hand-written outbox"])
    yield f"{clients} connection{'s' * (clients > 1)}"
    yield f"  {'':<36}{'tx/s':>8}{'spread':>14}{'of row alone':>14}{'of outbox':>11}{'µs more':>9}"
    for name, found in rates.items():
        rate = statistics.median(found)
        more = clients / rate - clients / alone
        yield (
            f"  {name:<36}{rate:>8,.0f}{f'{min(found):,.0f}–{max(found):,.0f}':>14}"
            f"{rate / alone:>14.2f}{rate / outbox:>11.2f}{more * 1e6:>9,.0f}"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", help="A PostgreSQL whose role may create databases, instead of our own.")
@click.option("--rounds", default=5, help="How often each candidate runs.")
@click.option("--seconds", default=4.0, help="How long each run is measured.")
@click.option("--clients", default="1,8", help="Connections, with commas between.")
@click.option("--peers/--no-peers", default=True, help="Whether peers are installed and run.")
@click.option(
    "--peers-folder",
    type=click.Path(path_type=Path),
    default=Path.home() / ".cache" / "queen-pg-bench",
    help="Where the peers are installed.",
)
def main(
    url: str | None, rounds: int, seconds: float, clients: str, peers: bool, peers_folder: Path
) -> None:
    """Measure what a message costs the transaction that it commits with."""
    installed = Installed(peers_folder) if peers else None
    for name, problem in (installed.problems if installed else {}).items():
        click.echo(f"{name}: {problem}", err=True)
    with stage(url) as server:
        click.echo(f"{report.machine()}\n{server.settings()}")
        candidates = uvloop.run(prepare(server, installed))
        for count in map(int, clients.split(",")):
            rates = uvloop.run(run(server, candidates, count, rounds, seconds))
            click.echo("\n" + "\n".join(lines(count, rates)))


if __name__ == "__main__":
    sys.exit(main())
