"""procrastinate: defer over psycopg's pool, and a worker with LISTEN that deletes finished jobs."""

import asyncio
from typing import Any

import procrastinate

from bench import window
from bench.peers import program
from bench.window import Tally, clock

EMPTY = "parked"


def application(url: str, connections: int) -> procrastinate.App:
    """Return the application on a pool of so many connections."""
    connector = procrastinate.PsycopgConnector(
        conninfo=url, min_size=connections, max_size=connections
    )
    return procrastinate.App(connector=connector)


async def install(task: dict[str, Any]) -> None:
    """Create its tables."""
    app = application(task["url"], 1)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def run(task: dict[str, Any], tally: Tally) -> None:
    """Defer one by one or in batches; or run a worker whose task counts."""
    app = application(task["url"], task["clients"] + 2)

    @app.task(name="bench")
    async def handle(at: float, pad: str) -> None:  # noqa: ARG001
        now = clock()
        tally.add(now, 1, now - at)

    delay = {"seconds": task["delay"]} if "delay" in task else None

    async def send(documents: list[dict[str, Any]]) -> None:
        deferrer = handle.configure(schedule_in=delay)
        if len(documents) == 1:
            await deferrer.defer_async(**documents[0])
        else:
            await deferrer.batch_defer_async(*documents)

    async with app.open_async():
        if task["kind"] == "enqueue":
            await program.enqueue(task, tally, send)
            return
        await asyncio.to_thread(window.opened, tally)
        shape: dict[str, Any] = {"wait": True, "install_signal_handlers": False}
        if task["kind"] == "work":
            forms = [shape | {"concurrency": task["clients"], "delete_jobs": "always"}]
        else:
            # Workers in their usual form, each of which listens on a connection of its own.
            forms = [shape | {"queues": [EMPTY]}] * task["clients"]
        workers = [asyncio.create_task(app.run_worker_async(**form)) for form in forms]
        await asyncio.sleep(max(tally.until - clock(), 0))
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers, timeout=5)


if __name__ == "__main__":
    program.main(install, run)
