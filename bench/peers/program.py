"""What the Python peers' programs share: payloads, due instants, the three kinds."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench import window
from bench.window import Tally, clock

PAYLOAD_BYTES = 256

Send = Callable[[list[dict[str, Any]]], Awaitable[object]]


def payload(at: float) -> dict[str, Any]:
    """Return a document of the usual size that carries an instant."""
    return {"at": at, "pad": "x" * (PAYLOAD_BYTES - 30)}


def encoded(document: dict[str, Any]) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


async def enqueue(task: dict[str, Any], tally: Tally, send: Send) -> None:
    """Send batches from `clients` tasks until `total` or the end; with a rate, an open loop."""
    batch = task["batch"]
    total = task.get("total", math.inf) / task["clients"]
    await asyncio.to_thread(window.opened, tally)

    async def client(place: int) -> None:
        sent = 0
        every = task["clients"] / task["rate"] if task.get("rate") else 0.0
        due = clock() + every * place / task["clients"]
        while sent < total and clock() < tally.until:
            if every and due > clock():
                await asyncio.sleep(due - clock())
            started = due if every else clock()
            await send([payload(started) for _ in range(batch)])
            now = clock()
            tally.add(now, batch, now - started)
            sent += batch
            due += every

    await asyncio.gather(*(client(place) for place in range(task["clients"])))


def main(
    install: Callable[[dict[str, Any]], Awaitable[None]],
    run: Callable[[dict[str, Any], Tally], Awaitable[None]],
) -> None:
    """Do what the command line describes."""
    task = window.task()

    async def go() -> None:
        if task["kind"] == "install":
            await install(task)
            return
        tally = Tally()
        await run(task, tally)
        window.close(tally)

    uvloop.run(go())
