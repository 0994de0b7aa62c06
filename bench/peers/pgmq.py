"""pgmq: its packaged SQL, without the extension, and its asyncpg client."""

import asyncio
from typing import Any

import asyncpg
from pgmq.async_queue import PGMQueue
from pgmq.install import get_embedded_install_sql

from bench import window
from bench.peers import program
from bench.window import Tally, clock

QUEUE, EMPTY = "bench", "parked"
VISIBILITY_SECONDS = 60


async def install(task: dict[str, Any]) -> None:
    """Load the packaged SQL and create the queue."""
    db = await asyncpg.connect(task["url"])
    await db.execute(get_embedded_install_sql())
    for name in (QUEUE, EMPTY):
        await db.execute(f"select pgmq.create('{name}')")
    await db.close()


async def run(task: dict[str, Any], tally: Tally) -> None:
    """Send one by one or in batches; read batches, waiting for them, and delete them; or wait."""
    clients = task["clients"]
    pool = await asyncpg.create_pool(task["url"], min_size=clients, max_size=clients)
    queue = PGMQueue(pool=pool, init_extension=False)
    await queue.init()

    delay = task.get("delay", 0)

    async def send(documents: list[dict[str, Any]]) -> None:
        if len(documents) == 1:
            await queue.send(QUEUE, documents[0], delay=delay)
        else:
            await queue.send_batch(QUEUE, documents, delay=delay)

    async def work() -> None:
        while clock() < tally.until:
            messages = await queue.read_with_poll(
                QUEUE, VISIBILITY_SECONDS, task["batch"], max_poll_seconds=1, poll_interval_ms=10
            )
            if not messages:
                continue
            delivered = clock()
            await queue.delete_batch(QUEUE, [message.msg_id for message in messages])
            now = clock()
            for message in messages:
                tally.add(now, 1, delivered - message.message["at"])

    async def park() -> None:
        # The server looks every 100 ms, as it does unless it is told otherwise.
        while clock() < tally.until:
            await queue.read_with_poll(EMPTY, VISIBILITY_SECONDS, max_poll_seconds=1)

    if task["kind"] == "enqueue":
        await program.enqueue(task, tally, send)
    else:
        await asyncio.to_thread(window.opened, tally)
        consume = work if task["kind"] == "work" else park
        await asyncio.gather(*(consume() for _ in range(clients)))
    await pool.close()


if __name__ == "__main__":
    program.main(install, run)
