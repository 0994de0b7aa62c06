"""Bring a database up to date: frozen revisions for the tables, then the set of functions.

Both happen in one transaction under an advisory lock, so that many brokers may start at once: the
first one works, the others wait and find it done. A role with CREATE on the database is enough.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import msgspec

from queen_pg import sql
from queen_pg.leader import Watch, leading_url

# Alembic and SQLAlchemy take as long to import as all the rest, and a broker that finds its
# database up to date needs neither. So they are imported where they are used.
if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection

LOCK = int.from_bytes(b"queen-pg")
CONNECT_SECONDS = 10.0

# What PostgreSQL says when the schema, the table or the function of the state is not there yet.
NOT_INSTALLED = ("3F000", "42P01", "42883")


class NewerDatabase(Exception):
    """The database was migrated by a later release than this one."""


class State(msgspec.Struct, frozen=True):
    """What a database holds, compared with what this release would install."""

    revision: str | None
    function_set: str | None
    head: str
    known: bool
    server_version: str

    @property
    def current(self) -> bool:
        """Whether there is nothing to do."""
        return self.revision == self.head and self.function_set == sql.digest()


async def upgrade(url: str) -> State:
    """Install what is missing and return the state before; raise NewerDatabase for a later one.

    Of several hosts the followers come first: what the primary sends them must find its place.
    """
    watch = Watch(url)
    if watch.several:
        try:
            followers = [seen.url for seen in await watch.sights() if seen.role == "follower"]
        finally:
            watch.close()
        for follower in followers:
            await upgrade_host(follower)
    return await upgrade_host(await leading_url(url))


async def upgrade_host(url: str) -> State:
    """Do the same for one host, whatever it is in the log."""
    before = await _state(url)
    if not before.known:
        raise NewerDatabase(
            f"the database is at revision {before.revision}; this release ends at {before.head}"
        )
    if before.current:
        return before
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: _connect(url, upgrading=True),
        poolclass=NullPool,
    )
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade)
    finally:
        await engine.dispose()
    return before


async def state(url: str, *, pooler: bool = False) -> State:
    """Ask a database what it holds; of several hosts, the one that takes writes."""
    return await _state(await leading_url(url, pooler=pooler))


async def _state(url: str) -> State:
    connection = await _connect(url, upgrading=False)
    version = connection.get_settings().server_version.split()[0]
    try:
        row = await connection.fetchrow(sql.read("reads/state"))
    except asyncpg.PostgresError as error:
        if error.sqlstate not in NOT_INSTALLED:
            raise
        row = None
    finally:
        await connection.close(timeout=CONNECT_SECONDS)
    return _compare(version, *row) if row else _compare(version, None, None)


def script(since: str | None = None) -> str:
    """Return the whole upgrade as one SQL script, from an empty database or since a revision."""
    from alembic import command

    config = _config()
    output = io.StringIO()
    config.output_buffer = output
    command.upgrade(config, f"{since}:head" if since else "head", sql=True)
    return output.getvalue()


async def _connect(url: str, *, upgrading: bool) -> asyncpg.Connection:
    settings = {"application_name": "queen-pg migrate", "timezone": "UTC"}
    if upgrading:
        # Not for a mere look, which may go through a pooler that refuses such parameters.
        # A follower's database is read-only by default, for clients that look for the primary.
        settings["default_transaction_read_only"] = "off"
        # Nor does a migration wait for followers that wait for the same migration.
        settings["synchronous_commit"] = "local"
    return await asyncpg.connect(
        url,
        timeout=CONNECT_SECONDS,
        target_session_attrs="read-write" if upgrading else "any",
        statement_cache_size=0,
        server_settings=settings,
    )


def _upgrade(connection: "Connection") -> None:
    from alembic import command

    # The lock is also what opens the adapter's transaction, before a script goes past it.
    connection.exec_driver_sql(f"select pg_advisory_xact_lock({LOCK})")
    if _state_under_lock(connection).current:
        return
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _state_under_lock(connection: "Connection") -> State:
    from sqlalchemy.exc import ProgrammingError

    try:
        with connection.begin_nested():
            row = connection.exec_driver_sql(sql.read("reads/state")).one()
    except ProgrammingError:
        return _compare("", None, None)
    return _compare("", row.revision, row.function_set)


def _compare(version: str, revision: str | None, function_set: str | None) -> State:
    revisions = sorted(path.name[:4] for path in _scripts().glob("versions/[0-9]*_*.py"))
    known = revision is None or revision in revisions
    return State(revision, function_set, revisions[-1], known, version)


def _scripts() -> Path:
    """Return the folder of the revisions: inside the package in a wheel, else beside it."""
    here = Path(__file__).parent
    shipped = here / "migrations"
    return shipped if shipped.is_dir() else here.parent / "migrations"


def _config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_scripts()))
    config.set_main_option("path_separator", "os")
    config.attributes["lock"] = LOCK
    return config
