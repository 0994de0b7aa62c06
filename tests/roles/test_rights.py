"""What each role can do, and what it can't."""

import subprocess
import sys

import asyncpg
import httpx
import pytest

from queen_pg import migrate
from tests.roles.conftest import Governed, make_roles
from tests.support.broker import Broker
from tests.support.database import Databases
from tests.support.server import Server

# One call of every public function; a null where nothing needs to happen.
CALLS = (
    "select queen.now(), queen.current_tenant()",
    "select queen.configure('orders', '{\"retryLimit\": 0}')",
    "select queen.push('orders', '1', 'p', 't')",
    "select queen.push_batch('orders', array['1']::json[])",
    'select queen.push_many(\'[{"queue": "orders", "payload": 1}]\')',
    "select queen.pop('orders', 'g', 'p', subscription_mode => 'all')",
    "select queen.ack(1, 't')",
    "select queen.nack(1, 't')",
    "select queen.extend_lease(gen_random_uuid())",
    'select queen.transaction(\'{"kv": [{"op": "get", "ns": "n", "key": "k"}]}\')',
    "select queen.kv_put('n', 'k', '1'), queen.kv_get('n', 'k'), queen.kv_check('n', 'k', 0)",
    "select queen.kv_incr('n', 'c'), queen.kv_once('n', 'o'), queen.kv_list('n')",
    "select queen.kv_delete('n', 'k')",
    "select queen.timer_schedule('orders', 'k', '1', delay => '1 hour')",
    "select queen.timer_cancel('orders', 'k')",
    "select queen.lock_acquire('l', '1 minute'), queen.lock_holders('l'), queen.lock_check('l', 1)",
    "select queen.lock_renew('l', 1, '1 minute'), queen.lock_release('l', 1)",
    "select queen.seek('orders', 'g', 'end')",
    "select queen.dlq_replay(gen_random_uuid())",
    "select queen.delete_queue('orders')",
)

PUBLIC_FUNCTIONS = """
select p.proname, p.oid::integer as number
from pg_proc p where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_'
"""
RELATIONS = """
select 'queen.' || c.relname as name, c.relkind::text
from pg_class c where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v', 'S')
"""


async def refused(connection: asyncpg.Connection, statement: str) -> None:
    """Assert that the statement is refused for want of a right."""
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute(statement)


async def test_an_application_calls_every_public_function(
    governed: Governed, logins: dict[str, str]
) -> None:
    async with governed.login(logins["application"]) as connection:
        called = set()
        for call in CALLS:
            await connection.execute(call)
            called |= {word.split("(")[0] for word in call.split("queen.")[1:]}
    owner = await asyncpg.connect(governed.owner_url)
    public = {row["proname"] for row in await owner.fetch(PUBLIC_FUNCTIONS)}
    await owner.close()
    assert called == public


async def test_an_application_can_do_nothing_else(
    governed: Governed, logins: dict[str, str]
) -> None:
    role = logins["application"]
    owner = await asyncpg.connect(governed.owner_url)
    internal = await owner.fetch(
        "select p.oid::regprocedure::text from pg_proc p"
        " where p.pronamespace = 'queen'::regnamespace and p.proname ~ '^_'"
        " and has_function_privilege($1, p.oid, 'execute')",
        role,
    )
    readable = await owner.fetch(
        f"select * from ({RELATIONS}) r where relkind <> 'S' and has_table_privilege($1, r.name,"
        " 'select, insert, update, delete, truncate, references, trigger')",
        role,
    )
    numbers = await owner.fetch(
        f"select * from ({RELATIONS}) r where relkind = 'S'"
        " and has_sequence_privilege($1, r.name, 'usage, select, update')",
        role,
    )
    await owner.close()
    assert ([*internal], [*readable], [*numbers]) == ([], [], [])

    async with governed.login(role) as connection:
        for statement in (
            "select from queen.messages",
            "select from queen.message",
            "insert into queen.tenant_roles (role, tenant_id) values (session_user, 1)",
            "update queen.partitions set next_offset = 0",
            "delete from queen.cursors",
            "select queen._delete_queue(1, 'orders')",
            "select nextval('queen.kv_version')",
            "create function queen.mine() returns int language sql as 'select 1'",
            "create table queen.mine (id integer)",
            "drop function queen.push",
            "alter function queen.push owner to session_user",
        ):
            await refused(connection, statement)


async def test_nobody_but_the_owner_sets_the_clock(
    governed: Governed, logins: dict[str, str]
) -> None:
    for role in ("application", "broker", "reader"):
        async with governed.login(logins[role]) as connection:
            await connection.execute("set queen.fake_now = '2001-01-01'")
            assert (await connection.fetchval("select queen.now()")).year > 2001


async def test_a_hostile_session_does_not_get_the_owner_s_rights(
    governed: Governed, logins: dict[str, str]
) -> None:
    """What a session puts in the way of a name is not what a public function finds.

    Nor is it what a function finds that the session has called before, with its own rights.
    """
    admin = await asyncpg.connect(governed.admin_url)
    role = logins["application"]
    await admin.execute(f"grant queen_reader to {role}")
    async with governed.login(role) as connection:
        await connection.execute(
            """
            create function pg_temp.spy(value text) returns boolean language plpgsql as $$
            begin
                if current_user <> session_user then
                    raise exception 'called as %', current_user;
                end if;
                return true;
            end;
            $$;
            create domain pg_temp.text as pg_catalog.text check (pg_temp.spy(value));
            create domain pg_temp.json as pg_catalog.json;
            create domain pg_temp.jsonb as pg_catalog.jsonb;
            create domain pg_temp.uuid as pg_catalog.uuid;
            create table pg_temp.queues (name pg_catalog.text);
            create function pg_temp.now() returns timestamptz language sql
                as 'select null::timestamptz';
            create domain pg_temp.timestamptz as pg_catalog.timestamptz
                check (pg_temp.spy(value::pg_catalog.text));
            set search_path = pg_temp, queen, pg_catalog;
            select queen._view_now(), queen._offset_at(1, queen.now(), 0, 1);
            select from queen.lag;
            """
        )
        for call in CALLS:
            await connection.execute(call)
    await admin.execute(f"revoke queen_reader from {role}")
    await admin.close()


async def test_every_public_function_is_safe_to_call_with_its_owner_s_rights(
    conn: asyncpg.Connection,
) -> None:
    rows = await conn.fetch(
        "select p.proname, p.prosecdef, p.proconfig from pg_proc p"
        " where p.pronamespace = 'queen'::regnamespace"
    )
    for row in rows:
        if row["prosecdef"]:
            assert "search_path=pg_catalog, pg_temp" in (row["proconfig"] or []), row["proname"]
        elif not row["proname"].startswith("_"):
            # The clock reads nothing and knows who asks.
            assert row["proname"] == "now"


async def test_a_reader_reads_everything_and_changes_nothing(
    governed: Governed, logins: dict[str, str]
) -> None:
    owner = await asyncpg.connect(governed.owner_url)
    await owner.execute("select queen.push('orders', '1', 'p', 't')")
    await owner.execute("select queen.pop('orders', 'g', subscription_mode => 'new')")
    relations = [row for row in await owner.fetch(RELATIONS) if row["relkind"] != "S"]
    functions = await owner.fetch(PUBLIC_FUNCTIONS)
    await owner.close()
    async with governed.login(logins["reader"]) as connection:
        for relation, kind in relations:
            await connection.fetch(f"select * from {relation}")
            if kind == "r":
                await refused(connection, f"delete from {relation}")
        for name, number in functions:
            allowed = await connection.fetchval(
                "select has_function_privilege($1::integer::oid, 'execute')", number
            )
            assert allowed == (name in ("now", "current_tenant"))
        await refused(connection, "select queen.push('orders', '1')")
        await refused(connection, "create view queen.mine as select 1")


async def test_a_broker_serves_and_changes_no_schema(
    governed: Governed, logins: dict[str, str]
) -> None:
    url = governed.url(logins["broker"])
    with Broker(url, QUEEN_MIGRATE="off") as broker:
        pushed = httpx.post(
            f"{broker.base_url}/api/v1/push",
            json={"items": [{"queue": "orders", "payload": 1, "transactionId": "t"}]},
        )
        popped = httpx.get(
            f"{broker.base_url}/api/v1/pop/queue/orders",
            params={"consumerGroup": "g", "subscriptionMode": "all"},
        ).json()
        step = httpx.post(
            f"{broker.base_url}/api/v1/transaction",
            json={
                "operations": [
                    {
                        "type": "ack",
                        "transactionId": "t",
                        "partitionId": popped["partitionId"],
                        "consumerGroup": "g",
                        "leaseId": popped["leaseId"],
                    }
                ],
                "kv": [{"op": "put", "ns": "n", "key": "k", "value": 1, "forever": True}],
                "timers": [
                    {
                        "op": "schedule",
                        "queue": "orders",
                        "timerKey": "k",
                        "delayMs": 3_600_000,
                        "txn": "later",
                        "payload": "MQ==",
                    }
                ],
            },
        ).json()
        removed = httpx.delete(f"{broker.base_url}/api/v1/resources/queues/orders").json()
    assert (pushed.status_code, step["success"], removed["deleted"]) == (201, True, True)

    async with governed.login(logins["broker"]) as connection:
        for statement in (
            "create table queen.mine (id integer)",
            "drop table queen.messages",
            "truncate queen.messages",
            "alter table queen.messages add column mine integer",
            "create or replace function queen.now() returns timestamptz language sql as 'select 1'",
            "insert into queen.tenant_roles (role, tenant_id) values ('queen_broker', 1)",
            "update queen.epoch set number = number + 1",
            "update queen.alembic_version set version_num = '0000'",
        ):
            await refused(connection, statement)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await migrate.upgrade(url) if not (await migrate.state(url)).current else await _reinstall(
            url
        )


async def _reinstall(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "create or replace function queen._function_set() returns text"
            " language sql as $$ select '' $$"
        )
    finally:
        await connection.close()


async def test_a_stranger_can_do_nothing(governed: Governed, logins: dict[str, str]) -> None:
    async with governed.login(logins["stranger"]) as connection:
        for call in (*CALLS, "select from queen.message", "select from queen.queues"):
            await refused(connection, call)


async def test_the_owner_migrates_without_being_a_superuser(
    server: Server, databases: Databases, logins: dict[str, str]
) -> None:
    name = await databases.create(migrated=False)
    try:
        database = Governed(server, name)
        await make_roles(database.admin_url)
        await migrate.upgrade(database.url(logins["owner"]))
        async with database.login(logins["application"]) as connection:
            await connection.execute("select queen.push('orders', '1')")
        async with database.login(logins["owner"]) as connection:
            owners = await connection.fetch(
                "select distinct pg_get_userbyid(c.relowner) from pg_class c"
                " where c.relnamespace = 'queen'::regnamespace"
                " union select pg_get_userbyid(p.proowner) from pg_proc p"
                " where p.pronamespace = 'queen'::regnamespace"
            )
        assert [row[0] for row in owners] == ["queen_owner"]
    finally:
        await databases.drop(name)


async def test_the_script_for_administrators_can_be_run_again(governed: Governed) -> None:
    await make_roles(governed.admin_url)
    printed = subprocess.run(
        [sys.executable, "-m", "queen_pg", "roles"], capture_output=True, text=True, check=True
    ).stdout
    connection = await asyncpg.connect(governed.admin_url)
    await connection.execute(printed)
    await connection.close()


async def test_a_right_that_was_given_by_hand_is_gone_after_the_next_migration(
    governed: Governed, logins: dict[str, str]
) -> None:
    owner = await asyncpg.connect(governed.owner_url)
    await owner.execute(
        "grant select on queen.messages to queen_application;"
        "grant execute on all functions in schema queen to public, queen_application"
    )
    await owner.close()
    await make_roles(governed.admin_url)
    async with governed.login(logins["application"]) as connection:
        await refused(connection, "select from queen.messages")
        await refused(connection, "select queen._switched_on('kv')")
