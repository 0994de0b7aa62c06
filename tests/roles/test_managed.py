"""The administrators' script on a server where nobody is a superuser, as managed services are."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest_asyncio

from queen_pg import migrate
from tests.roles.conftest import PASSWORD, as_role
from tests.support.server import throwaway

ADMINS = ("dba", "other_dba")


@pytest_asyncio.fixture
async def managed() -> AsyncIterator[str]:
    """The URL of a server of its own, whose administrators each own a database of their name."""
    bin_folder = os.environ.get("QUEEN_PG_TEST_BINDIR")
    with throwaway(Path(bin_folder) if bin_folder else None) as embedded:
        superuser = await asyncpg.connect(embedded.superuser_url)
        for admin in ADMINS:
            await superuser.execute(f"create role {admin} login createrole password '{PASSWORD}'")
            await superuser.execute(f"create database {admin} owner {admin}")
        await superuser.close()
        yield embedded.superuser_url


def at(url: str, database: str, role: str) -> str:
    """Return the URL of a database for a role."""
    return as_role(urlunsplit(urlsplit(url)._replace(path=f"/{database}")), role, PASSWORD)


async def run_script(url: str) -> None:
    """Run what `queen-pg roles` prints."""
    command = [sys.executable, "-m", "queen_pg", "roles"]
    printed = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True
    )
    await execute(url, printed.stdout)


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def test_an_administrator_with_createrole_alone_sets_everything_up(managed: str) -> None:
    admin = at(managed, "dba", "dba")
    await run_script(admin)
    await run_script(admin)
    await execute(
        admin,
        f"create role deploy login password '{PASSWORD}' in role queen_owner",
        "alter role deploy set role = queen_owner",
        f"create role shop login password '{PASSWORD}' in role queen_application",
        f"create role anna login password '{PASSWORD}' in role queen_reader",
    )
    await migrate.upgrade(at(managed, "dba", "deploy"))
    await run_script(admin)
    await execute(at(managed, "dba", "shop"), "select queen.push('orders', '1')")
    reading = await asyncpg.connect(at(managed, "dba", "anna"))
    assert await reading.fetchval("select count(*) from queen.message") == 1
    await reading.close()


async def test_an_administrator_may_find_the_roles_there(managed: str) -> None:
    """They belong to the server, so a second database on it shares them with the first."""
    await run_script(at(managed, "dba", "dba"))
    await run_script(at(managed, "other_dba", "other_dba"))
