"""Doors to the database that show what isolation costs, and doors and functions broken on purpose.

`Watched` tells which predicate locks and scans each step took, `Counting` how often steps were
sent back. `Lowered` and `weaken` take away what a test relies on, so that it can be seen to fail.
"""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import asyncpg

from queen_pg.config import Settings
from queen_pg.database import Database, call_text, translate
from queen_pg.errors import Conflict, Signal

DEADLINE_SECONDS = 60.0

LOCKS = """
select c.relname, l.locktype
from pg_locks l
join pg_class c on c.oid = l.relation
where l.mode = 'SIReadLock' and l.pid = pg_backend_pid() and l.locktype in ('relation', 'page')
  and c.relnamespace = 'queen'::regnamespace
"""
# An index that never had an entry has one page, its own description: there is none to lock alone.
BARREN = """
select c.relname
from pg_class c
where c.relnamespace = 'queen'::regnamespace and c.relkind = 'i'
  and pg_relation_size(c.oid) <= current_setting('block_size')::integer
"""
SCANS = "select relname, seq_scan from pg_stat_xact_user_tables where schemaname = 'queen'"


def soon(seconds: float = DEADLINE_SECONDS) -> float:
    """Return a deadline: an instant on the loop's clock."""
    return asyncio.get_running_loop().time() + seconds


class Observation(NamedTuple):
    """What one call took: relations locked as a whole or by the page, and tables scanned whole.

    Indexes that had no entry as the call began are not among the relations, but apart.
    """

    function: str
    careful: bool
    relations: frozenset[str]
    barren_indexes: frozenset[str]
    pages: frozenset[str]
    scans: frozenset[str]

    @property
    def name(self) -> str:
        """The function, and whether it ran carefully."""
        return f"{self.function} (careful)" if self.careful else self.function


class Watched(Database):
    """Runs every call in an open transaction of one connection, and looks before it commits."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.steps: list[Observation] = []
        self.reads: list[Observation] = []
        self._observed_url = settings.pg_url
        self._observer: asyncpg.Connection | None = None
        # What goes on in the background uses the connection too.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        self._observer = await asyncpg.connect(self._observed_url)

    async def close(self) -> None:
        if self._observer is not None:
            await self._observer.close()

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        return await self._observe(self.steps, "serializable", function, arguments)

    async def read(
        self, function: str, /, *, deadline: float | None = None, **arguments: Any
    ) -> list[asyncpg.Record]:
        return await self._observe(self.reads, "read_committed", function, arguments)

    async def _observe(
        self, seen: list[Observation], isolation: str, function: str, arguments: dict[str, Any]
    ) -> list[asyncpg.Record]:
        connection = self._observer
        assert connection is not None
        try:
            async with self._turn, connection.transaction(isolation=isolation):
                before = dict(await connection.fetch(SCANS))
                barren = {name for (name,) in await connection.fetch(BARREN)}
                rows: list[asyncpg.Record] = await connection.fetch(
                    call_text(function, arguments), *arguments.values()
                )
                after = await connection.fetch(SCANS)
                locks = await connection.fetch(LOCKS)
        except asyncpg.PostgresError as error:
            raise translate(error, function, in_flight=True, changes=True) from error
        whole = {name for name, kind in locks if kind == "relation"}
        seen.append(
            Observation(
                function,
                bool(arguments.get("careful")),
                frozenset(whole - barren),
                frozenset(whole & barren),
                frozenset(name for name, kind in locks if kind == "page"),
                frozenset(name for name, count in after if count > before.get(name, 0)),
            )
        )
        return rows


class Counting(Database):
    """Counts the steps that committed, and those that were sent back, by function."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.committed: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.deadlocks = 0

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        try:
            rows = await self._run(function, deadline, arguments)
        except Signal as signal:
            if isinstance(signal, Conflict):
                self.lost[function] += 1
                self.deadlocks += signal.sqlstate == "40P01"
            raise
        self.committed[function] += 1
        return rows

    async def _run(
        self, function: str, deadline: float, arguments: dict[str, Any]
    ) -> list[asyncpg.Record]:
        return await super().step(function, deadline=deadline, **arguments)


class Lowered(Counting):
    """A door whose steps run at READ COMMITTED."""

    async def _run(
        self, function: str, deadline: float, arguments: dict[str, Any]
    ) -> list[asyncpg.Record]:
        return await self.read(function, deadline=deadline, **arguments)


async def weaken(connection: asyncpg.Connection, function: str, text: str, instead: str) -> None:
    """Replace a piece of a function's body in this database; it must be there once."""
    definition: str = await connection.fetchval(
        "select pg_get_functiondef(p.oid) from pg_proc p"
        " where p.pronamespace = 'queen'::regnamespace and p.proname = $1",
        function,
    )
    assert definition.count(text) == 1, f"{function} holds {text!r} {definition.count(text)} times"
    await connection.execute(definition.replace(text, instead))
