import asyncpg
import pytest

from queen_pg import sql
from queen_pg.database import Database
from queen_pg.errors import Unavailable

# What a step always writes together with a guarded table, what differs on every node by design, and
# what each node's own migrations write.
UNGUARDED = {"messages", "ready", "epoch", "alembic_version"}


async def test_every_table_but_those_written_beside_another_is_guarded(
    conn: asyncpg.Connection,
) -> None:
    bare = await conn.fetch(
        "select c.relname from pg_catalog.pg_class c"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r' and not exists ("
        "   select from pg_catalog.pg_trigger t where t.tgrelid = c.oid"
        "   and t.tgname = 'primary_only' and t.tgenabled = 'O')"
    )
    assert {row[0] for row in bare} == UNGUARDED


@pytest.mark.parametrize("role", ["follower", "fenced"])
async def test_who_is_not_the_primary_refuses_to_push(conn: asyncpg.Connection, role: str) -> None:
    await conn.execute("update queen.epoch set role = $1, number = 7", role)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute("select queen.push('orders', '1')")
    assert refused.value.sqlstate == "QU910"
    assert f'"role": "{role}"' in refused.value.detail
    assert '"epoch": 7' in refused.value.detail


async def test_the_broker_says_no_leader(database: str, db: Database) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("update queen.epoch set role = 'fenced'")
    with pytest.raises(Unavailable) as refused:
        await db.read("_throw_switches", kv=False, timers_schedule=None, timers_fire=None)
    assert refused.value.code == "no_leader"
    assert await connection.fetchval("select bool_and(enabled) from queen.switches")
    await connection.close()


async def test_only_a_later_epoch_fences(conn: asyncpg.Connection) -> None:
    assert not await conn.fetchval("select queen._fence(1)")
    assert await conn.fetchval("select role from queen.epoch") == "primary"
    assert await conn.fetchval("select queen._fence(2)")
    assert await conn.fetchval("select role from queen.epoch") == "fenced"
    assert not await conn.fetchval("select queen._fence(3)")


async def test_a_follower_cannot_be_fenced(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen._follow(1, 'b')")
    assert not await conn.fetchval("select queen._fence(9)")


async def test_leading_moves_every_sequence_past_what_the_rows_show(
    conn: asyncpg.Connection,
) -> None:
    await conn.execute("select queen.push('orders', '1')")
    await conn.execute("alter table queen.partitions alter column id restart")
    await conn.execute("select queen._lead(3, 'b')")
    sequences = await conn.fetch(
        "select s.relname, d.refobjid::regclass::text as owner"
        " from pg_catalog.pg_class s"
        " left join pg_catalog.pg_depend d on d.objid = s.oid and d.deptype = 'i'"
        " where s.relnamespace = 'queen'::regnamespace and s.relkind = 'S'"
    )
    assert {row["relname"] for row in sequences} == {
        "tenants_id_seq",
        "queues_id_seq",
        "partitions_id_seq",
        "consumer_groups_id_seq",
        "kv_version",
    }, "a new sequence has to be moved in queen._lead too"
    for name, table in sequences:
        first = await conn.fetchval(f"select nextval('queen.{name}')")
        if table is not None:
            highest = await conn.fetchval(f"select coalesce(max(id), 0) from {table}")
            assert first > highest + 999
        else:
            assert first > 3 << 40
    assert await conn.fetchval("select role from queen.epoch") == "primary"


async def test_no_epoch_gives_out_an_id_that_another_gave(conn: asyncpg.Connection) -> None:
    """Not even where every row is gone that bore one: brokers remember the ids of partitions."""
    given: list[int] = []
    for epoch in range(2, 5):
        await conn.execute("select queen._lead($1, 'b')", epoch)
        await conn.execute("select queen.push('orders', '1', 'p')")
        given += [
            row["id"]
            for table in ("queues", "partitions")
            for row in await conn.fetch(f"select id from queen.{table}")
        ]
        await conn.execute("select queen.pop('orders', 'g', subscription_mode => 'all')")
        given += [row["id"] for row in await conn.fetch("select id from queen.consumer_groups")]
        await conn.execute(
            "truncate queen.messages, queen.cursors, queen.ready, queen.partitions,"
            " queen.consumer_groups, queen.queues cascade"
        )
    # Of each epoch a queue, a partition and a group.
    assert sorted(each >> 40 for each in given) == [2] * 3 + [3] * 3 + [4] * 3


async def test_leading_twice_in_an_epoch_moves_nothing_twice(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen._lead(2, 'b')")
    first = await conn.fetchval("select last_value from queen.partitions_id_seq")
    version = await conn.fetchval("select last_value from queen.kv_version")
    await conn.execute("select queen._lead(2, 'b')")
    assert await conn.fetchval("select last_value from queen.partitions_id_seq") == first
    assert await conn.fetchval("select last_value from queen.kv_version") == version


async def test_a_server_says_what_it_is(conn: asyncpg.Connection) -> None:
    row = await conn.fetchrow(sql.read("reads/node"))
    assert dict(row) == {
        "epoch": 1,
        "fenced_by": None,
        "role": "primary",
        "name": None,
        "recovering": False,
        "timeline": 1,
    }
