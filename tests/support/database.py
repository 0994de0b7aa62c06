"""Databases for tests: migrated once into a template, then cloned in a few milliseconds each."""

import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from datetime import datetime

import asyncpg

from queen_pg import migrate
from tests.support.server import Server


class Databases:
    """Creates and drops the databases of one test run."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._prefix = f"test_{os.getpid()}_{secrets.token_hex(3)}"
        self._count = 0
        self._template: str | None = None

    async def create(self, *, migrated: bool = True) -> str:
        """Create a database and return its name."""
        template = await self._migrated_template() if migrated else "template0"
        self._count += 1
        name = f"{self._prefix}_{self._count}"
        await self._create(name, template)
        return name

    async def drop(self, name: str) -> None:
        """Drop a database and end whatever is still connected to it."""
        async with self._admin() as connection:
            await connection.execute(f"drop database if exists {name} with (force)")

    async def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            await self.drop(self._template)
            self._template = None

    def url(self, name: str) -> str:
        """Return the URL of a database, for the role that owns it."""
        return self._server.url(name)

    @contextlib.asynccontextmanager
    async def clone(self, *, migrated: bool = True) -> AsyncIterator[str]:
        """Yield the URL of a database of one's own."""
        name = await self.create(migrated=migrated)
        try:
            yield self.url(name)
        finally:
            await self.drop(name)

    async def _migrated_template(self) -> str:
        if self._template is None:
            name = f"{self._prefix}_template"
            await self._create(name, "template0")
            await migrate.upgrade(self.url(name))
            self._template = name
        return self._template

    async def _create(self, name: str, template: str) -> None:
        owner = f" owner {self._server.owner}" if self._server.owner else ""
        # WAL_LOG copies a small database without the two checkpoints of the other strategy.
        async with self._admin() as connection:
            await connection.execute(
                f"create database {name} template {template}{owner} strategy wal_log"
            )

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self._server.admin_url)
        try:
            yield connection
        finally:
            await connection.close()


async def set_clock(connection: asyncpg.Connection, moment: datetime | None) -> None:
    """Set the clock of one session of the owner; None gives it the wall clock again."""
    await connection.execute(
        "select set_config('queen.fake_now', $1, false)", moment.isoformat() if moment else ""
    )
