"""PGQueuer: enqueue over asyncpg, and its queue manager with LISTEN."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench import window
from bench.peers import program
from bench.window import Tally, clock

ENTRYPOINT = "bench"


async def install(task: dict[str, Any]) -> None:
    """Create its tables."""
    async with asyncpg.create_pool(task["url"], min_size=1, max_size=1) as pool:
        await Queries(AsyncpgPoolDriver(pool)).install()


async def run(task: dict[str, Any], tally: Tally) -> None:
    """Enqueue one by one or in lists; or run the queue manager with an entrypoint that counts."""
    clients = max(task["clients"], 4)
    pool = await asyncpg.create_pool(task["url"], min_size=clients, max_size=clients)
    driver = AsyncpgPoolDriver(pool)
    if task["kind"] == "enqueue":
        queries = Queries(driver)

        async def send(documents: list[dict[str, Any]]) -> None:
            payloads = [program.encoded(document) for document in documents]
            if len(payloads) == 1:
                await queries.enqueue(ENTRYPOINT, payloads[0])
            else:
                await queries.enqueue([ENTRYPOINT] * len(payloads), payloads, [0] * len(payloads))

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
    await asyncio.wait([running], timeout=5)


if __name__ == "__main__":
    program.main(install, run)
