"""PGQueuer: enqueue over asyncpg, and its queue manager with LISTEN."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench import window
from bench.peers import program
from bench.window import Tally, clock

ENTRYPOINT, EMPTY = "bench", "parked"
STOP_SECONDS = 5


async def install(task: dict[str, Any]) -> None:
    """Create its tables, and have them vacuumed as it recommends."""
    async with asyncpg.create_pool(task["url"], min_size=1, max_size=1) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()
        await queries.optimize_autovacuum()


async def park(task: dict[str, Any], tally: Tally) -> None:
    """Run queue managers in their usual form, each on a connection of its own, and wait."""
    connections = [await asyncpg.connect(task["url"]) for _ in range(task["clients"])]
    workers = [PgQueuer(AsyncpgDriver(connection)) for connection in connections]
    for worker in workers:

        @worker.entrypoint(EMPTY)
        async def handle(_: Job) -> None:
            raise AssertionError("nothing is enqueued there")

    await asyncio.to_thread(window.opened, tally)
    running = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.sleep(max(tally.until - clock(), 0))
    for worker in workers:
        worker.shutdown.set()
    await asyncio.wait(running, timeout=STOP_SECONDS)


async def run(task: dict[str, Any], tally: Tally) -> None:
    """Enqueue one by one or in lists; or run the queue manager with an entrypoint that counts."""
    if task["kind"] == "park":
        await park(task, tally)
        return
    clients = max(task["clients"], 4)
    pool = await asyncpg.create_pool(task["url"], min_size=clients, max_size=clients)
    driver = AsyncpgPoolDriver(pool)
    if task["kind"] == "enqueue":
        queries = Queries(driver)
        delay = timedelta(seconds=task["delay"]) if "delay" in task else None

        async def send(documents: list[dict[str, Any]]) -> None:
            payloads = [program.encoded(document) for document in documents]
            count = len(payloads)
            if count == 1:
                await queries.enqueue(ENTRYPOINT, payloads[0], execute_after=delay)
            else:
                await queries.enqueue([ENTRYPOINT] * count, payloads, [0] * count, [delay] * count)

        await program.enqueue(task, tally, send)
        await pool.close()
        return

    worker = PgQueuer(driver)

    @worker.entrypoint(ENTRYPOINT)
    async def handle(job: Job) -> None:
        now = clock()
        tally.add(now, 1, now - json.loads(job.payload or b"")["at"])

    await asyncio.to_thread(window.opened, tally)
    running = asyncio.create_task(
        worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=task["batch"])
    )
    await asyncio.sleep(max(tally.until - clock(), 0))
    worker.shutdown.set()
    await asyncio.wait([running], timeout=STOP_SECONDS)


if __name__ == "__main__":
    program.main(install, run)
