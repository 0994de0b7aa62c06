"""Turns: brokers that compete for partitions come to them one after the other.

Of two SERIALIZABLE transactions that write one row the second always loses, because its snapshot is
older than the row that it waited for. Within a process the lanes see to it that no two meet. Of
other processes a lost race tells: for a while after it this process takes a lock on those
partitions before its transactions there begin. The lock is a courtesy between brokers. Who does
not get it in time goes on without, and may lose again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

import asyncpg

from queen_pg import sql

# How long a lost race is remembered.
LOST_SECONDS = 5.0
# How many partitions are remembered.
REMEMBERED_MAX = 10_000
# Locks that a transaction takes at most: they come out of a table that all sessions share.
LOCKS_MAX = 128
# How long to wait for a turn.
PATIENCE_SECONDS = 0.5
# A key has four bytes; partitions that share one wait for each other without need.
KEYS = 2**31

TAKE = sql.read("reads/turn")
END = sql.read("reads/turn_end")


class Turns:
    """The partitions over which this process has lost races, and turns at them."""

    def __init__(self) -> None:
        self._lost: dict[int, float] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def lost(self, partitions: Collection[int]) -> None:
        """Note that a transaction on some of these partitions has lost a race."""
        now = asyncio.get_running_loop().time()
        if len(self._lost) + len(partitions) > REMEMBERED_MAX:
            self._lost = {key: at for key, at in self._lost.items() if at > now - LOST_SECONDS}
        if len(self._lost) + len(partitions) <= REMEMBERED_MAX:
            self._lost.update(dict.fromkeys(partitions, now))

    def contested(self, partitions: Collection[int]) -> list[int]:
        """Return those of the partitions over which a race has been lost lately."""
        if not self._lost:
            return []
        since = asyncio.get_running_loop().time() - LOST_SECONDS
        return [key for key in partitions if self._lost.get(key, since) > since]

    @contextlib.asynccontextmanager
    async def at(self, pool: asyncpg.Pool, partitions: Collection[int]) -> AsyncIterator[None]:
        """Have a turn at partitions, as a session of the pool, if there is one to be had in time.

        The pool's connections are reset by `end`.
        """
        keys = sorted({partition % KEYS for partition in partitions})[:LOCKS_MAX]
        connection = None
        try:
            # TimeoutError is an OSError.
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    connection = await pool.acquire()
                    await connection.fetch(TAKE, keys)
            yield
        finally:
            if connection is not None:
                # Whoever had the turn need not wait for this.
                ending = asyncio.create_task(_release(pool, connection))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)


async def end(connection: asyncpg.Connection) -> None:
    """Let the next ones have their turn."""
    await connection.execute(END)


async def _release(pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
    # A connection that cannot be reset is closed by the pool.
    with contextlib.suppress(Exception):
        await pool.release(connection, timeout=PATIENCE_SECONDS)
