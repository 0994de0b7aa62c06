"""Every kind of connection that the client takes, behind one door for its tests."""

import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
import pytest_asyncio
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from tests.docs.django_site import connect_django


class Door:
    """A connection inside a transaction, and how it ends."""

    def __init__(self, connection: Any, commit: Any, rollback: Any) -> None:
        self.connection = connection
        self._commit = commit
        self._rollback = rollback

    async def call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function of the client, and await its result where the connection is async."""
        return await settle(function(self.connection, *arguments, **named))

    async def commit(self) -> None:
        """End the transaction."""
        await settle(self._commit())

    async def rollback(self) -> None:
        """End the transaction without a trace."""
        await settle(self._rollback())


async def settle(value: Any) -> Any:
    """Return a value, awaited if it is to be."""
    return await value if inspect.isawaitable(value) else value


KINDS = (
    "asyncpg",
    "asyncpg pool",
    "psycopg",
    "psycopg with rows as dicts",
    "psycopg async",
    "sqlalchemy connection",
    "sqlalchemy session",
    "sqlalchemy async connection",
    "sqlalchemy async session",
    "django",
)


@contextlib.asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Door]:
    """Yield a door of the kind, and close it."""
    async with contextlib.AsyncExitStack() as stack:
        if kind == "asyncpg":
            connection = await asyncpg.connect(url)
            stack.push_async_callback(connection.close)
        elif kind == "asyncpg pool":
            pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=1))
            connection = await stack.enter_async_context(pool.acquire())
        if kind.startswith("asyncpg"):
            await connection.execute("begin")

            async def end(how: str) -> None:
                await connection.execute(how)
                await connection.execute("begin")

            yield Door(connection, lambda: end("commit"), lambda: end("rollback"))
            await connection.execute("rollback")
        elif kind == "psycopg async":
            held = await stack.enter_async_context(await psycopg.AsyncConnection.connect(url))
            yield Door(held, held.commit, held.rollback)
        elif kind.startswith("psycopg"):
            options = {"row_factory": dict_row} if kind.endswith("dicts") else {}
            blocking = stack.enter_context(psycopg.connect(url, **options))
            yield Door(blocking, blocking.commit, blocking.rollback)
        elif kind.startswith("sqlalchemy async"):
            engine = create_async_engine(
                sqlalchemy.make_url(url).set(drivername="postgresql+asyncpg"), poolclass=NullPool
            )
            stack.push_async_callback(engine.dispose)
            made = AsyncSession(engine) if kind.endswith("session") else engine.connect()
            entered = await stack.enter_async_context(made)
            yield Door(entered, entered.commit, entered.rollback)
        elif kind.startswith("sqlalchemy"):
            plain = sqlalchemy.create_engine(
                sqlalchemy.make_url(url).set(drivername="postgresql+psycopg"), poolclass=NullPool
            )
            stack.callback(plain.dispose)
            opened_ = Session(plain) if kind.endswith("session") else plain.connect()
            inside = stack.enter_context(opened_)
            yield Door(inside, inside.commit, inside.rollback)
        else:
            django = stack.enter_context(connect_django(url))
            yield Door(django, django.commit, django.rollback)


@pytest_asyncio.fixture(params=KINDS)
async def door(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Door]:
    """A door of each kind to a database that only this test uses."""
    async with opened(request.param, database) as found:
        yield found
