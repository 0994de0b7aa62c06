"""The nemesis: one function per fault.

Each breaks something once and mends it before it returns, unless that is the stage's business
(`Stage.heal`).
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable

import asyncpg

from tests.faults.stage import Stage

Fault = Callable[[Stage, random.Random], Awaitable[None]]

# Longer than the leases of the workloads.
LONG_SECONDS = 3.0
SHORT_SECONDS = 1.0


async def nothing(stage: Stage, rng: random.Random) -> None:
    """The control: no fault at all."""
    await asyncio.sleep(SHORT_SECONDS)


async def kill_broker(stage: Stage, rng: random.Random) -> None:
    """kill -9 of a broker, and a new one in its place."""
    number = rng.randrange(len(stage.brokers))
    await stage.kill_broker(number)
    await asyncio.sleep(rng.uniform(0, SHORT_SECONDS))
    stage.brokers[number].launch()


async def pause_broker(stage: Stage, rng: random.Random) -> None:
    """A broker is stopped past its leases and goes on as if nothing had happened."""
    stage.pause(stage.broker_pid(rng.randrange(len(stage.brokers))))
    await asyncio.sleep(LONG_SECONDS)
    stage.resume()


async def kill_server(stage: Stage, rng: random.Random) -> None:
    """kill -9 of PostgreSQL, and crash recovery."""
    await stage.kill_server()
    await asyncio.sleep(rng.uniform(0, SHORT_SECONDS))
    await asyncio.to_thread(stage.server.revive)


async def kill_backend(stage: Stage, rng: random.Random) -> None:
    """kill -9 of one backend: the postmaster restarts all of them."""
    with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        admin = await stage.admin()
        pids = await admin.fetch(
            "select pid from pg_stat_activity where application_name = 'queen-pg'"
        )
        await admin.close()
        if pids:
            _kill(rng.choice(pids)["pid"])
    await asyncio.sleep(SHORT_SECONDS)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def pause_server(stage: Stage, rng: random.Random) -> None:
    """Every process of PostgreSQL is stopped for a while."""
    stage.pause(*stage.server_pids())
    await asyncio.sleep(rng.uniform(SHORT_SECONDS, LONG_SECONDS))
    stage.resume()


async def restart_server(stage: Stage, rng: random.Random) -> None:
    """A restart in good order, under load."""
    await stage.restart_server()


async def terminate_backends(stage: Stage, rng: random.Random) -> None:
    """A storm of pg_terminate_backend."""
    for _ in range(10):
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            admin = await stage.admin()
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            await admin.close()
        await asyncio.sleep(rng.uniform(0.05, 0.2))


async def cut(stage: Stage, rng: random.Random) -> None:
    """All connections to the database are reset, at any moment of their calls."""
    for _ in range(10):
        stage.proxy.cut()
        await asyncio.sleep(rng.uniform(0.05, 0.3))


async def cut_before_commit(stage: Stage, rng: random.Random) -> None:
    """Connections are reset as calls are sent: none of them happens."""
    await _cut_at(stage, rng, "before")


async def cut_after_commit(stage: Stage, rng: random.Random) -> None:
    """Connections are reset as calls are answered: they happened, and nobody is told."""
    await _cut_at(stage, rng, "after")


async def _cut_at(stage: Stage, rng: random.Random, point: str) -> None:
    for _ in range(5):
        stage.proxy.cut_at("before" if point == "before" else "after")
        await asyncio.sleep(rng.uniform(0.02, 0.1))
        stage.proxy.cut_at(None)
        await asyncio.sleep(rng.uniform(0.1, 0.3))


async def black_hole(stage: Stage, rng: random.Random) -> None:
    """The network swallows everything for a while, then delivers it."""
    stage.proxy.swallow(True)
    await asyncio.sleep(LONG_SECONDS)
    stage.proxy.swallow(False)


async def absence(stage: Stage, rng: random.Random) -> None:
    """The database cannot be reached at all for a while."""
    stage.proxy.refuse(True)
    await asyncio.sleep(LONG_SECONDS)
    stage.proxy.refuse(False)


async def exhaustion(stage: Stage, rng: random.Random) -> None:
    """Somebody else takes every connection that the server has."""
    taken: list[asyncpg.Connection] = []
    stage.proxy.cut()
    with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        while True:
            taken.append(await asyncpg.connect(stage.server.url))
    await asyncio.sleep(SHORT_SECONDS)
    for connection in taken:
        connection.terminate()


async def clock_jump(stage: Stage, rng: random.Random) -> None:
    """The broker's clock stands still a moment ahead, for new connections, and then comes back."""
    admin = await stage.admin()
    moment = await admin.fetchval("select (now() + interval '2 s')::text")
    await admin.execute(f"alter database queen set queen.fake_now = '{moment}'")
    await admin.close()
    await terminate_backends(stage, rng)
    admin = await stage.admin()
    await admin.execute("alter database queen reset all")
    await admin.close()
    await terminate_backends(stage, rng)


async def disk_full(stage: Stage, rng: random.Random) -> None:
    """The server's disk has no room left for a while; only on a stage with a disk of its own."""
    stage.fill_disk()
    await asyncio.sleep(LONG_SECONDS)
    stage.free_disk()


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        nothing,
        kill_broker,
        pause_broker,
        kill_server,
        kill_backend,
        pause_server,
        restart_server,
        terminate_backends,
        cut,
        cut_before_commit,
        cut_after_commit,
        black_hole,
        absence,
        exhaustion,
        clock_jump,
        disk_full,
    )
}

# A fault that needs a stage of its own.
SMALL_DISK = "disk_full"

# A lease is a duration on the broker's clock: when that jumps, the leases end early in real time.
POINTLESS = {("queue", "clock_jump"), ("locks", "clock_jump")}
