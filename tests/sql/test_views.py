"""The views: what they show, what they don't, how wide they are, and what they cost."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.docs.markdown import psql
from tests.support.database import Databases, set_clock
from tests.support.profile import LONG

NOON = datetime.fromisoformat("2031-01-01T12:00:00+00:00")
VIEWS = (
    *("message", "lag", "lease", "dead_letter"),
    *("timer", "kv_live", "partition_state", "queue_state"),
)


async def rows(conn: asyncpg.Connection, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await conn.fetch(query)]


async def fill(conn: asyncpg.Connection) -> None:
    """Leave something in every view."""
    await conn.execute(
        """
        select queen.push('orders', '{"orderId": 9137}', 'order-9137', 'created');
        select queen.push('orders', '{"orderId": 9137}', 'order-9137', 'paid');
        select queen.push('orders', '{"orderId": 1}', 'order-1', 'created');
        select queen.seek('orders', 'mailing', 'end', partition => 'order-1');
        select queen.timer_schedule('reminders', 'cart/1', '{"a": 1}', delay => '-1 hour');
        select queen.kv_put('carts', 'c-1', '{"items": 2}', ttl => '15 minutes');
        select queen.kv_put('carts', 'dead', '1', ttl => '1 microsecond');
        """
    )
    row = await conn.fetchrow(
        "select * from queen.pop('orders', 'billing', 'order-1', subscription_mode => 'all')"
    )
    await conn.execute(
        "select queen.nack($1, $2, $3, 'billing', error => 'no such customer', status => 'dlq')",
        *(row[name] for name in ("partition_id", "transaction_id", "lease_id")),
    )
    await conn.execute(
        "select queen.pop('orders', 'billing', batch => 2, subscription_mode => 'all')"
    )


async def test_each_view_shows_what_is_there(conn: asyncpg.Connection) -> None:
    await fill(conn)
    assert await rows(
        conn,
        "select queue, partition, message_offset, transaction_id, payload from queen.message"
        " order by partition, message_offset",
    ) == [
        ("orders", "order-1", 0, "created", '{"orderId": 1}'),
        ("orders", "order-9137", 0, "created", '{"orderId": 9137}'),
        ("orders", "order-9137", 1, "paid", '{"orderId": 9137}'),
    ]
    # A group that has only sought a position waits nowhere else.
    assert await rows(conn, "select queue, consumer_group, partition, waiting from queen.lag") == [
        ("orders", "billing", "order-9137", 2)
    ]
    assert await rows(
        conn, "select consumer_group, partition, first_offset, last_offset from queen.lease"
    ) == [("billing", "order-9137", 0, 1)]
    assert await rows(
        conn, "select queue, consumer_group, partition, error from queen.dead_letter"
    ) == [("orders", "billing", "order-1", "no such customer")]
    assert await rows(conn, "select queue, timer_key, due from queen.timer") == [
        ("reminders", "cart/1", True)
    ]
    assert await rows(conn, "select namespace, key, value from queen.kv_live") == [
        ("carts", "c-1", '{"items": 2}')
    ]
    assert await rows(
        conn, "select queue, partition, messages from queen.partition_state order by 2"
    ) == [("orders", "order-1", 1), ("orders", "order-9137", 2)]
    assert await rows(
        conn, "select queue, partitions, messages, dead_letters from queen.queue_state"
    ) == [("orders", 2, 3, 1)]


async def test_what_retention_took_away_is_shown_to_nobody(conn: asyncpg.Connection) -> None:
    """Its rows may stay for their ids; for everybody they are gone (data-plane 11)."""
    await conn.execute("select queen.push('orders', '1', 'p') from generate_series(1, 5)")
    await conn.execute("select queen.pop('orders', 'g', subscription_mode => 'all')")
    await conn.execute("select queen.seek('orders', 'g', 'beginning')")
    await conn.execute("update queen.partitions set log_start_offset = 3")
    assert await conn.fetchval("select count(*) from queen.messages") == 5
    assert await rows(conn, "select message_offset from queen.message order by 1") == [(3,), (4,)]
    assert await rows(conn, "select waiting from queen.lag") == [(2,)]
    assert await rows(conn, "select messages from queen.partition_state") == [(2,)]
    assert await rows(conn, "select messages from queen.queue_state") == [(2,)]
    [row] = await conn.fetch("select * from queen.pop('orders', 'g')")
    assert row["message_offset"] == 3


async def test_lag_counts_from_where_a_group_begins(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    await conn.execute("select queen.push('orders', '1', 'p') from generate_series(1, 3)")
    await set_clock(conn, NOON + timedelta(minutes=1))
    for group in ("all", "new", "since"):
        await conn.execute(
            "select queen._register_group(1, 'orders', $1, true, $2, $3, false)",
            group,
            "from" if group == "since" else group,
            NOON if group == "since" else None,
        )
    await conn.execute(
        "select queen._register_group(1, 'orders', 'none', false, null, null, false)"
    )
    await set_clock(conn, NOON + timedelta(minutes=2))
    await conn.execute("select queen.push('orders', '1', 'p'), queen.push('orders', '1', 'q')")
    lag = "select consumer_group, partition, waiting, oldest_at from queen.lag order by 1, 2"
    later = NOON + timedelta(minutes=2)
    assert await rows(conn, lag) == [
        ("all", "p", 4, NOON),
        ("all", "q", 1, later),
        ("new", "p", 1, later),
        ("new", "q", 1, later),
        ("since", "p", 4, NOON),
        ("since", "q", 1, later),
    ]
    await set_clock(conn, None)


async def test_a_lease_that_ran_out_is_no_lease(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    await conn.execute("select queen.push('orders', '1', 'p')")
    await conn.execute(
        "select queen.pop('orders', 'g', lease_seconds => 60, subscription_mode => 'all')"
    )
    assert await conn.fetchval("select count(*) from queen.lease") == 1
    await set_clock(conn, NOON + timedelta(seconds=61))
    assert await conn.fetchval("select count(*) from queen.lease") == 0
    await set_clock(conn, None)


@pytest.mark.parametrize("view", VIEWS)
async def test_a_view_fits_into_a_terminal(database: str, view: str) -> None:
    connection = await asyncpg.connect(database)
    await fill(connection)
    await connection.close()
    wide = view not in ("lag", "partition_state", "queue_state")
    options = ("-P", "columns=80", "-P", f"expanded={'auto' if wide else 'off'}")
    output = await asyncio.to_thread(psql, database, f"select * from queen.{view}", *options)
    assert len(output.splitlines()) > 2
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("isolation", ["read_committed", "serializable"])
async def test_a_view_takes_no_lock_but_that_of_every_select(database: str, isolation: str) -> None:
    connection = await asyncpg.connect(database)
    await fill(connection)
    async with connection.transaction(isolation=isolation):
        for view in VIEWS:
            await connection.fetch(f"select * from queen.{view}")
        modes = await connection.fetch(
            "select distinct l.mode from pg_locks l join pg_class c on c.oid = l.relation"
            " where l.pid = pg_backend_pid() and c.relnamespace = 'queen'::regnamespace"
        )
    # Predicate locks are what SERIALIZABLE asks for, and nobody else pays for.
    extra = {"SIReadLock"} if isolation == "serializable" else set()
    assert {row[0] for row in modes} == {"AccessShareLock"} | extra
    await connection.close()


async def test_every_table_view_and_column_has_a_comment(conn: asyncpg.Connection) -> None:
    silent = await rows(
        conn,
        "select c.relname, a.attname from pg_class c"
        " join pg_attribute a on a.attrelid = c.oid and a.attnum >= 0 and not a.attisdropped"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v')"
        " and col_description(c.oid, a.attnum) is null"
        " union all"
        " select c.relname, null from pg_class c"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v')"
        " and obj_description(c.oid, 'pg_class') is null",
    )
    assert silent == []


LARGE = """
insert into queen.queues (uid, tenant_id, name)
select gen_random_uuid(), 1, 'queue-' || n from generate_series(1, {queues}) n;
insert into queen.partitions (queue_id, name, next_offset, last_append_at)
select q.id, 'p-' || n, 1, now() from queen.queues q, generate_series(1, {each}) n;
insert into queen.consumer_groups (queue_id, name, registered_at)
select q.id, 'g', now() from queen.queues q;
insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id, payload)
select p.id, 0, now(), gen_random_uuid(), 't', '1' from queen.partitions p where p.id % 4 = 0;
insert into queen.cursors (partition_id, group_id, committed_offset, updated_at, lease_id,
                           lease_expires_at)
select p.id, g.id, -1, now(), gen_random_uuid(), now() + interval '1 hour'
from queen.partitions p join queen.consumer_groups g using (queue_id) where p.id % 16 = 0;
insert into queen.ready (group_id, partition_id, ready_at, next_offset, lease_id)
select c.group_id, c.partition_id, c.lease_expires_at, 1, c.lease_id from queen.cursors c;
insert into queen.dead_letters (id, queue_id, partition_id, consumer_group, message_offset,
                                message_id, transaction_id, payload, error, retry_count, failed_at)
select gen_random_uuid(), p.queue_id, p.id, 'g', 0, gen_random_uuid(), 't', '1', 'e', 3, now()
from queen.partitions p where p.id % 64 = 0;
insert into queen.timers (tenant_id, queue, timer_key, partition, transaction_id, message_id,
                          payload, deliver_at, fire_at, created_at, updated_at)
select 1, q.name, 'k-' || n, 'p', 't', gen_random_uuid(), '1', now(), now(), now(), now()
from queen.queues q, generate_series(1, 5) n;
insert into queen.kv (tenant_id, namespace, key, version, value, created_at, updated_at)
select 1, q.name, 'k-' || n, 1, '1', now(), now() from queen.queues q, generate_series(1, 5) n;
"""
# Some hundred rows of one queue, among many queues: no more blocks than a few for each of them.
EACH = 100
BLOCKS_MAX = 20 * EACH


@pytest_asyncio.fixture(scope="module")
async def large(databases: Databases) -> AsyncIterator[asyncpg.Connection]:
    """Many partitions in many queues: a hundred thousand, or in the long profile a million."""
    async with databases.clone() as url:
        connection = await asyncpg.connect(url)
        await connection.execute(LARGE.format(queues=10_000 if LONG else 1_000, each=EACH))
        await connection.execute("vacuum analyze")
        yield connection
        await connection.close()


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a plan's nodes."""
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.mark.parametrize(
    ("view", "condition"),
    [
        ("message", "queue = 'queue-77'"),
        ("message", "queue = 'queue-77' and partition = 'p-7'"),
        ("message", "queue = 'queue-77' and payload ->> 0 is null"),
        ("lag", "queue = 'queue-77'"),
        ("lag", "queue = 'queue-77' and consumer_group = 'g' order by oldest_at limit 10"),
        ("lag", "queue = 'queue-77' and partition = 'p-7'"),
        ("lease", "queue = 'queue-77'"),
        ("lease", "queue = 'queue-77' and partition = 'p-7'"),
        ("dead_letter", "queue = 'queue-77' order by failed_at desc limit 10"),
        ("timer", "queue = 'queue-77'"),
        ("timer", "queue = 'queue-77' and timer_key = 'k-1'"),
        ("kv_live", "namespace = 'queue-77' and key >= 'k'"),
        ("partition_state", "queue = 'queue-77'"),
        ("queue_state", "queue = 'queue-77'"),
    ],
)
async def test_a_view_of_one_queue_reads_that_queue_alone(
    large: asyncpg.Connection, view: str, condition: str
) -> None:
    explained = await large.fetchval(
        f"explain (analyze, buffers, format json) select * from queen.{view} where {condition}"
    )
    plan = json.loads(explained)[0]["Plan"]
    whole = {node["Relation Name"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"}
    assert whole == set()
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= BLOCKS_MAX
