"""Migrations: repeatable, concurrent, modest in rights, the same by hand, never backwards."""

import asyncio
import subprocess
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from queen_pg import migrate, sql
from queen_pg.embedded import bundled_binaries
from tests.support.catalog import catalog
from tests.support.database import Databases
from tests.support.server import Server


async def run(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def value(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_a_second_upgrade_changes_nothing(databases: Databases) -> None:
    written = (
        "select sum(p.xmin::text::bigint) from pg_proc p where pronamespace = 'queen'::regnamespace"
    )
    async with databases.clone(migrated=False) as url:
        before = await migrate.upgrade(url)
        assert (before.revision, before.current) == (None, False)
        first, first_written = await catalog(url), await value(url, written)
        again = await migrate.upgrade(url)
        assert (again.revision, again.current) == (again.head, True)
        assert await catalog(url) == first
        assert await value(url, written) == first_written


async def test_eight_brokers_may_start_at_once(databases: Databases) -> None:
    async with databases.clone(migrated=False) as url:
        await asyncio.gather(*(migrate.upgrade(url) for _ in range(8)))
        assert (await migrate.state(url)).current
        assert await value(url, "select count(*) from queen.tenants") == 1


async def test_functions_of_another_release_are_replaced_and_leftovers_dropped(
    databases: Databases,
) -> None:
    async with databases.clone() as url:
        wanted = await catalog(url)
        await run(
            url,
            "create function queen._uuid_v7(moment timestamptz) returns uuid"
            " language sql as 'select gen_random_uuid()'",
            "create or replace function queen._fail("
            "    sqlstate text, message text, detail jsonb default null, hint text default null"
            ") returns void language plpgsql as 'begin end'",
            "create or replace function queen._function_set() returns text"
            " language sql as $$ select 'another release' $$",
        )
        assert not (await migrate.state(url)).current
        await migrate.upgrade(url)
        assert await catalog(url) == wanted


async def test_a_role_with_create_on_the_database_is_enough(
    server: Server, databases: Databases
) -> None:
    async with databases.clone(migrated=False) as url:
        name = urlsplit(url).path[1:]
        admin = urlunsplit(urlsplit(server.admin_url)._replace(path=f"/{name}"))
        role = f"{name}_role"
        await run(
            admin,
            f"create role {role} login password 'secret' nosuperuser nocreatedb nocreaterole",
            f"grant create on database {name} to {role}",
        )
        try:
            parts = urlsplit(url)
            host = parts.netloc.rpartition("@")[2]
            theirs = urlunsplit(parts._replace(netloc=f"{role}:secret@{host}"))
            await migrate.upgrade(theirs)
            assert (await migrate.state(theirs)).current
            owner = "select nspowner::regrole::text from pg_namespace where nspname = 'queen'"
            assert await value(theirs, owner) == role
            # Brokers that start later need not even that right.
            await run(admin, f"revoke create on database {name} from {role}")
            await migrate.upgrade(theirs)
        finally:
            await run(admin, f"drop owned by {role}", f"drop role {role}")


async def test_the_script_applied_by_hand_gives_the_same_catalog(databases: Databases) -> None:
    async with databases.clone(migrated=False) as by_hand, databases.clone() as by_us:
        done = subprocess.run(
            [bundled_binaries() / "psql", by_hand, "-X", "-q", "-v", "ON_ERROR_STOP=1"],
            input=migrate.script(),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert await catalog(by_hand) == await catalog(by_us)
        assert (await migrate.state(by_hand)).current


async def test_the_script_since_a_revision_holds_the_functions_only(databases: Databases) -> None:
    script = migrate.script(since="0002")
    assert "create table queen.queues" not in script
    assert "create or replace function queen._fail" in script
    async with databases.clone() as url:
        await run(url, script)
        assert (await migrate.state(url)).current


async def test_a_newer_database_is_refused_and_left_alone(databases: Databases) -> None:
    async with databases.clone() as url:
        await run(url, "update queen.alembic_version set version_num = '9999'")
        with pytest.raises(migrate.NewerDatabase, match="9999"):
            await migrate.upgrade(url)
        assert not (await migrate.state(url)).known


async def test_a_failed_upgrade_leaves_nothing_behind(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with databases.clone(migrated=False) as url:
        whole = sql.read
        monkeypatch.setattr(
            sql, "read", lambda stem: "select 1/0" if stem == "guard" else whole(stem)
        )
        with pytest.raises(asyncpg.DivisionByZeroError):
            await migrate.upgrade(url)
        assert await value(url, "select to_regnamespace('queen')") is None
        monkeypatch.undo()
        await migrate.upgrade(url)
        assert (await migrate.state(url)).current
