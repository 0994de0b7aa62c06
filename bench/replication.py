"""What followers cost, and how long a failover takes: `python -m bench.replication`.

Three servers with full durability, two brokers and the load share this machine, so the ratios tell
of more contention than three machines would have. Each round measures every mode once, one after
the other; a ratio is taken within its round, and the median over the rounds is printed.
"""

import asyncio
import contextlib
import itertools
import re
import statistics
import time
from typing import Any

import click
import httpx

from queen_pg import migrate
from queen_pg.log import promote, replica, statement
from queen_pg.log.node import confirmed
from tests.support.broker import Broker
from tests.support.nodes import Nodes, three

from .run import LEAD_SECONDS, Load, program
from .window import clock, quantile

# (name, how many follow, how many of them each step waits for)
MODES = (
    ("no follower", 0, 0),
    ("1 follower, asynchronous", 1, 0),
    ("1 follower, quorum of 1", 1, 1),
    ("2 followers, asynchronous", 2, 0),
    ("2 followers, quorum of 1", 2, 1),
    ("2 followers, quorum of 2", 2, 2),
)
WORKLOADS: dict[str, dict[str, Any]] = {
    "push of 1, 1 connection": {"kind": "push", "clients": 1, "batch": 1, "spread": False},
    "push of 1, 32 connections": {"kind": "push", "clients": 32, "batch": 1, "spread": False},
    "push of 100, 4 connections": {"kind": "push", "clients": 4, "batch": 100, "spread": True},
}
HEAD = f"{'rate':>8}{'ratio':>8}{'p50 ms':>9}{'ratio':>8}{'p99 ms':>9}"
PARTITIONS = 1000
WARM_SECONDS = 1.0
CATCH_UP_SECONDS = 120.0
PROBE_SECONDS = 0.01


async def build(nodes: Nodes) -> None:
    """Make a log of the three."""
    await nodes.allow()
    await migrate.upgrade(nodes["a"].url)
    for name in ("b", "c"):
        async with nodes.cluster() as cluster:
            naming = replica.Naming(name, "a", nodes["a"].address)
            await replica.add(cluster, nodes[name].address, naming)


async def enter(nodes: Nodes, following: int, quorum: int) -> None:
    """Have so many follow, and wait until they have everything."""
    async with nodes.cluster() as cluster:
        if cluster.quorum:
            await replica.set_quorum(cluster, 0)
        primary = cluster.require_primary()
        for place, node in enumerate(cluster.followers):
            subscription = statement.slot(node.name)
            await node.run(
                statement.enable(subscription)
                if place < following
                else statement.disable(subscription)
            )
        end = await primary.position()
        for node in cluster.followers[:following]:
            assert await confirmed(primary, node.name, end, CATCH_UP_SECONDS)
        if quorum:
            await replica.set_quorum(cluster, quorum)


def measured(broker: Broker, task: dict[str, Any], seconds: float) -> dict[str, float]:
    """Run a load for so long; return its rate and its latencies."""
    task = {**task, "queue": "bench", "partitions": PARTITIONS, "host": "127.0.0.1"}
    task["port"] = broker.port
    load = Load(program("load"), task, {})
    try:
        load.ready()
        since = clock() + LEAD_SECONDS + WARM_SECONDS
        load.go(since, since + seconds)
        result = load.result()
    finally:
        load.kill()
    assert not result["errors"], result["errors"]
    histogram = {int(number): count for number, count in result["histogram"].items()}
    return {
        "rate": result["count"] / seconds,
        "p50": quantile(histogram, 0.5) or 0.0,
        "p99": quantile(histogram, 0.99) or 0.0,
    }


async def cost(nodes: Nodes, broker: Broker, rounds: int, seconds: float) -> None:
    """Measure each mode in turn, and print the medians and the ratios to no follower."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for (mode, following, quorum), (name, task) in itertools.product(MODES, WORKLOADS.items()):
            await enter(nodes, following, quorum)
            sample = await asyncio.to_thread(measured, broker, task, seconds)
            found.setdefault((name, mode), []).append(sample)
            click.echo(f"round {number + 1}: {name}: {mode}: {sample}", err=True)
    await enter(nodes, 2, 1)
    for name in WORKLOADS:
        alone = found[name, MODES[0][0]]
        click.echo(f"\n{name}\n{'':<28}{HEAD}")
        for mode, _, _ in MODES:
            samples = found[name, mode]
            rate, p50, p99 = (
                statistics.median(sample[key] for sample in samples)
                for key in ("rate", "p50", "p99")
            )
            pairs = list(zip(samples, alone, strict=True))
            faster = statistics.median(one["rate"] / other["rate"] for one, other in pairs)
            longer = statistics.median(one["p50"] / other["p50"] for one, other in pairs)
            click.echo(
                f"{mode:<28}{rate:>8.0f}{faster:>8.2f}{1000 * p50:>9.2f}{longer:>8.2f}"
                f"{1000 * p99:>9.2f}"
            )


async def failovers(nodes: Nodes, brokers: list[Broker], rounds: int) -> None:
    """Kill the primary again and again; print how long nobody was answered."""
    led, answered = [], []
    async with httpx.AsyncClient(timeout=5) as http:
        for number in range(rounds):
            async with nodes.cluster() as cluster:
                old = cluster.require_primary().name
            dead = asyncio.Event()
            pushing = asyncio.create_task(_first_answer(http, brokers, dead))
            await asyncio.sleep(1)
            nodes[old].kill()
            killed = time.monotonic()
            dead.set()
            async with nodes.cluster() as cluster:
                await promote.promote(cluster, None, accept_loss=False)
            said = next(line for line in reversed(nodes.said) if " leads epoch " in line)
            led.append(float(re.findall(r"([0-9.]+) s", said)[0]))
            answered.append(await pushing - killed)
            nodes[old].start()
            async with nodes.cluster() as cluster:
                await replica.rejoin(cluster, nodes[old].address, old)
            click.echo(f"failover {number + 1}: {led[-1]:.2f} {answered[-1]:.2f}", err=True)
    for name, values in (("promote", led), ("kill to first answer", answered)):
        ordered = sorted(values)
        click.echo(
            f"{name:<24}min {ordered[0]:.2f} s   median {statistics.median(ordered):.2f} s"
            f"   max {ordered[-1]:.2f} s   of {len(ordered)}"
        )


async def _first_answer(
    http: httpx.AsyncClient, brokers: list[Broker], dead: asyncio.Event
) -> float:
    """Push one message after the other; return the moment of the first answer after a death."""
    body = {"items": [{"queue": "bench", "partition": "probe", "payload": 1}]}
    for broker in itertools.cycle(brokers):
        after = dead.is_set()
        with contextlib.suppress(httpx.TransportError):
            response = await http.post(f"{broker.base_url}/api/v1/push", json=body)
            if after and response.status_code == 201:
                break
        await asyncio.sleep(PROBE_SECONDS)
    return time.monotonic()


@click.command()
@click.option(
    "--rounds", default=3, show_default=True, help="How often each mode is measured; 0: not."
)
@click.option("--seconds", default=5.0, show_default=True, help="How long each time.")
@click.option(
    "--failovers", "kills", default=20, show_default=True, help="How many to time; 0: none."
)
def main(rounds: int, seconds: float, kills: int) -> None:
    """Measure what followers cost, and how long a failover takes."""

    async def run() -> None:
        with three(durable=True) as nodes:
            await build(nodes)
            with Broker(nodes.url) as first, Broker(nodes.url) as second:
                if rounds:
                    await cost(nodes, first, rounds, seconds)
                else:
                    await enter(nodes, 2, 1)
                if kills:
                    await failovers(nodes, [first, second], kills)

    asyncio.run(run())


if __name__ == "__main__":
    main()
