"""Several sessions of one database, made to meet in a stated order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg

PATIENCE_SECONDS = 20
WAITING = "select exists (select from pg_locks where pid = $1 and not granted)"


@contextlib.asynccontextmanager
async def sessions(
    url: str, count: int = 2, **options: Any
) -> AsyncIterator[list[asyncpg.Connection]]:
    """Yield connections, and close them."""
    opened = [await asyncpg.connect(url, **options) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            await connection.close()


async def until_waiting(watcher: asyncpg.Connection, session: asyncpg.Connection) -> None:
    """Return once the session waits for a lock."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await watcher.fetchval(WAITING, session.get_server_pid()):
            await asyncio.sleep(0.002)
