"""Waiting for states of the database instead of for time to pass."""

import asyncio

import asyncpg

WAIT_SECONDS = 20.0
LOOK_SECONDS = 0.005

# Not from pg_stat_activity, which stands still inside a transaction.
BLOCKED = """
select exists (
    select from pg_locks l where not l.granted and pg_backend_pid() = any(pg_blocking_pids(l.pid)))
"""


async def until_blocked(holder: asyncpg.Connection) -> None:
    """Return once somebody waits for a lock that this session holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await holder.fetchval(BLOCKED):
            await asyncio.sleep(LOOK_SECONDS)


async def until(session: asyncpg.Connection | asyncpg.Pool, condition: str) -> None:
    """Return once a query answers true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await session.fetchval(condition):
            await asyncio.sleep(LOOK_SECONDS)
