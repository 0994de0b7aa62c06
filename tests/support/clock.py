"""A broker's door to PostgreSQL whose clock stands where the test puts it."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import asyncpg

from queen_pg.config import Settings
from queen_pg.database import Database, connection_options, translate
from tests.support.database import set_clock

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


class ClockedDatabase(Database):
    """A Database in which every call happens at `moment`, whatever session it runs in."""

    def __init__(self, settings: Settings, moment: datetime = EPOCH) -> None:
        super().__init__(settings)
        self.moment = moment
        self._clocked: dict[str, asyncpg.Pool] = {}
        self._set: dict[int, datetime] = {}

    async def start(self) -> None:
        """Open a pool for steps and one for reads."""
        for isolation in ("serializable", "read committed"):
            url = self._settings.pg_url
            assert url is not None
            self._clocked[isolation] = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=self._settings.pg_pool_size,
                setup=self._set_clock,
                reset=_keep_the_clock,
                **connection_options(url, isolation, pooler=False),
            )

    async def close(self) -> None:
        """Close both pools."""
        for pool in self._clocked.values():
            await pool.close()

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        """Call queen.<function> as one SERIALIZABLE transaction at the moment."""
        return await self._at_the_moment("serializable", function, deadline, arguments)

    async def read(
        self, function: str, /, *, deadline: float | None = None, **arguments: Any
    ) -> list[asyncpg.Record]:
        """Call queen.<function> at READ COMMITTED at the moment."""
        return await self._at_the_moment("read committed", function, deadline, arguments)

    async def _at_the_moment(
        self, isolation: str, function: str, deadline: float | None, arguments: dict[str, Any]
    ) -> list[asyncpg.Record]:
        try:
            async with asyncio.timeout_at(deadline), self._clocked[isolation].acquire() as session:
                rows: list[asyncpg.Record] = await session.fetch(
                    self._text(function, tuple(arguments)), *arguments.values()
                )
                return rows
        except Exception as error:
            changes = isolation == "serializable"
            raise translate(error, function, in_flight=True, changes=changes) from error

    async def _set_clock(self, session: asyncpg.Connection) -> None:
        pid = session.get_server_pid()
        if self._set.get(pid) != self.moment:
            await set_clock(session, self.moment)
            self._set[pid] = self.moment


async def _keep_the_clock(_: asyncpg.Connection) -> None:
    """Leave the session as it is: its clock is set anew for every call."""
