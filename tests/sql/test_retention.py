"""Retention (data-plane 11): whole appends from the front, and what stays known of them."""

from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
import pytest_asyncio

from tests.support.database import set_clock

START = datetime(2030, 1, 1, tzinfo=UTC)


@pytest_asyncio.fixture
async def partition(conn: asyncpg.Connection) -> int:
    """A partition with appends of two messages at minutes 0, 10 and 20."""
    for minute in (0, 10, 20):
        await set_clock(conn, START + timedelta(minutes=minute))
        await push(conn, [f"t{minute}a", f"t{minute}b"])
    return await conn.fetchval("select id from queen.partitions")


async def push(
    conn: asyncpg.Connection, transaction_ids: list[str], *, careful: bool = False
) -> list[asyncpg.Record]:
    known = await conn.fetchval("select id from queen.partitions where name = 'p'")
    size = len(transaction_ids)
    return await conn.fetch(
        "select * from queen._push(1, array['q'], array['p'], array[$1]::bigint[], $2, $3, $4, $3,"
        " $5, $6, $7)",
        known,
        [1] * size,
        [None] * size,
        transaction_ids,
        [None] * size,
        ["{}"] * size,
        careful,
    )


async def due(conn: asyncpg.Connection, *, cleanup_days: int = 30) -> asyncpg.Record:
    [row] = await conn.fetch(
        "select * from queen._retention_due(0, '', null, 100, $1)", cleanup_days
    )
    return row


async def configure(conn: asyncpg.Connection, **options: object) -> None:
    for option, value in options.items():
        await conn.execute(f"update queen.queues set {option} = $1", value)


async def read(conn: asyncpg.Connection, partition: int) -> None:
    """Give a group a cursor that has read the first append and half of the second."""
    await conn.execute(
        "insert into queen.consumer_groups (queue_id, name) select id, 'g' from queen.queues"
    )
    await conn.execute(
        "insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)"
        " select $1, id, 2, queen.now() from queen.consumer_groups",
        partition,
    )


async def test_only_queues_with_a_rule_are_walked_for_it(
    conn: asyncpg.Connection, partition: int
) -> None:
    find = "select queue_id from queen._next_retaining(0)"
    assert await conn.fetchval(find) is None
    await configure(conn, retention_seconds=60, completed_retention_seconds=60)
    assert await conn.fetchval(find) is None
    await configure(conn, max_wait_time_seconds=60)
    assert await conn.fetchval(find) == await conn.fetchval("select id from queen.queues")


async def test_nothing_is_removed_by_default(conn: asyncpg.Connection, partition: int) -> None:
    await set_clock(conn, START + timedelta(days=1000))
    row = await due(conn)
    assert (row["keep_from"], row["forget_below"], row["expired"]) == (None, None, False)


@pytest.mark.parametrize(
    "options",
    [{"retention_enabled": True, "retention_seconds": 300}, {"max_wait_time_seconds": 300}],
)
async def test_age_takes_whole_appends_from_the_front(
    conn: asyncpg.Connection, partition: int, options: dict[str, object]
) -> None:
    await configure(conn, **options)
    await set_clock(conn, START + timedelta(minutes=15, seconds=1))
    assert (await due(conn))["keep_from"] == 4


async def test_retention_seconds_needs_its_gate(conn: asyncpg.Connection, partition: int) -> None:
    await configure(conn, retention_seconds=300)
    await set_clock(conn, START + timedelta(hours=1))
    assert (await due(conn))["keep_from"] is None


async def test_completed_retention_stops_at_the_append_that_a_group_has_not_read_whole(
    conn: asyncpg.Connection, partition: int
) -> None:
    await configure(conn, retention_enabled=True, completed_retention_seconds=60)
    await set_clock(conn, START + timedelta(hours=1))
    assert (await due(conn))["keep_from"] is None, "no group has a cursor yet"
    await read(conn, partition)
    assert (await due(conn))["keep_from"] == 2


async def test_removed_messages_are_gone_for_readers_and_stay_known_to_dedup(
    conn: asyncpg.Connection, partition: int
) -> None:
    await configure(conn, max_wait_time_seconds=60)
    await set_clock(conn, START + timedelta(minutes=20, seconds=30))
    row = await due(conn)
    assert await conn.fetchval(
        "select queen._raise_log_start(array[$1::bigint], array[$2::bigint])",
        partition,
        row["keep_from"],
    )
    assert row["forget_below"] is None, "inside the dedup window the rows stay"
    [repeat] = await push(conn, ["t0a"], careful=True)
    assert (repeat["status"], repeat["message_offset"]) == ("duplicate", 0)

    group = await conn.fetchval(
        "select queen._register_group(1, 'q', 'g', true, 'all', null, false)"
    )
    await conn.execute("select queen._seed_ready($1, 10)", group)
    [candidate] = await conn.fetch(
        "select * from queen._candidates((select id from queen.queues), $1, null, 'all', null,"
        " false, array[10], array[10])",
        group,
    )
    assert candidate["start_offset"] == row["keep_from"]


async def test_rows_go_when_their_ids_need_not_be_known_any_more(
    conn: asyncpg.Connection, partition: int
) -> None:
    await configure(conn, max_wait_time_seconds=60, dedup_window_seconds=3600)
    await set_clock(conn, START + timedelta(minutes=70, seconds=1))
    row = await due(conn)
    assert (row["keep_from"], row["forget_below"]) == (6, 4)
    await conn.execute(
        "select queen._raise_log_start(array[$1::bigint], array[6::bigint])", partition
    )
    forget = "select queen._forget_messages(array[$1::bigint], array[4::bigint], $2)"
    assert await conn.fetchval(forget, partition, 3) == 3
    assert await conn.fetchval(forget, partition, 3) == 1
    assert await conn.fetchval("select min(message_offset) from queen.messages") == 4
    [again] = await push(conn, ["t0a"])
    assert (again["status"], again["message_offset"]) == ("queued", 6)


async def test_a_partition_that_holds_nothing_goes_after_the_cleanup_days(
    conn: asyncpg.Connection, partition: int
) -> None:
    await read(conn, partition)
    await conn.execute("update queen.partitions set log_start_offset = 6")
    await conn.execute("delete from queen.messages")
    await set_clock(conn, START + timedelta(days=29))
    assert not (await due(conn))["expired"]
    await set_clock(conn, START + timedelta(days=31))
    assert (await due(conn))["expired"]
    delete = "select queen._delete_partitions(array[$1::bigint], 30)"
    await conn.execute("update queen.cursors set lease_expires_at = queen.now() + interval '1 min'")
    assert not (await due(conn))["expired"]
    assert await conn.fetchval(delete, partition) == 0
    await conn.execute("update queen.cursors set lease_expires_at = null")
    assert await conn.fetchval(delete, partition) == 1
    assert await conn.fetchval("select count(*) from queen.partitions") == 0
    assert await conn.fetchval("select count(*) from queen.cursors") == 0
