"""queen.push: a message in the caller's own transaction."""

import asyncio
import json

import asyncpg
import pytest

from tests.support.sessions import sessions, until_waiting

PUSH = "select * from queen.push($1, $2, partition => $3, transaction_id => $4)"


async def test_a_push_answers_what_it_stored(conn: asyncpg.Connection) -> None:
    row = await conn.fetchrow(PUSH, "orders", '{"n": 1.50,  "n": 2}', "order-1", "t1")
    assert (row["status"], row["message_offset"]) == ("queued", 0)
    stored = await conn.fetchrow(
        "select m.id, m.transaction_id, m.payload, q.namespace, q.lease_time_seconds"
        " from queen.messages m join queen.partitions p on p.id = m.partition_id"
        " join queen.queues q on q.id = p.queue_id where q.name = 'orders' and p.name = 'order-1'"
    )
    # The payload is kept to the byte; the queue has the options of a first push.
    assert tuple(stored) == (row["message_id"], "t1", '{"n": 1.50,  "n": 2}', "orders", 60)


async def test_offsets_rise_and_ids_rise_with_them(conn: asyncpg.Connection) -> None:
    rows = [await conn.fetchrow(PUSH, "orders", "1", "p", None) for _ in range(5)]
    assert [row["message_offset"] for row in rows] == [0, 1, 2, 3, 4]
    ids = [row["message_id"] for row in rows]
    assert ids == sorted(ids)
    assert ids[0].version == 7


async def test_no_partition_means_default_and_no_transaction_id_means_the_message_id(
    conn: asyncpg.Connection,
) -> None:
    row = await conn.fetchrow("select * from queen.push('orders', 'null', partition => '')")
    stored = await conn.fetchrow(
        "select p.name, m.transaction_id, m.payload from queen.messages m"
        " join queen.partitions p on p.id = m.partition_id where m.id = $1",
        row["message_id"],
    )
    assert tuple(stored) == ("Default", str(row["message_id"]), "null")


async def test_a_repeated_transaction_id_is_a_duplicate_of_the_first(
    conn: asyncpg.Connection,
) -> None:
    first = await conn.fetchrow(PUSH, "orders", "1", "p", "same")
    await conn.fetchrow(PUSH, "orders", "2", "p", None)
    again = await conn.fetchrow(PUSH, "orders", "3", "p", "same")
    elsewhere = await conn.fetchrow(PUSH, "orders", "3", "other", "same")
    assert tuple(again) == ("duplicate", first["message_id"], first["message_offset"])
    assert elsewhere["status"] == "queued"


async def test_behind_the_dedup_window_an_id_is_stored_again(conn: asyncpg.Connection) -> None:
    await conn.execute("select set_config('queen.fake_now', '2031-01-01T00:00:00Z', true)")
    await conn.fetchrow(PUSH, "orders", "1", "p", "same")
    await conn.execute("select set_config('queen.fake_now', '2031-01-01T01:00:01Z', true)")
    assert (await conn.fetchrow(PUSH, "orders", "2", "p", "same"))["status"] == "queued"
    again = await conn.fetchrow(PUSH, "orders", "3", "p", "same")
    assert (again["status"], again["message_offset"]) == ("duplicate", 1)


async def test_without_a_dedup_window_every_message_is_stored(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "select * from queen._configure(1, 'orders', '{\"dedupWindowSeconds\": 0}', false)"
    )
    rows = [await conn.fetchrow(PUSH, "orders", "1", "p", "same") for _ in range(3)]
    assert [row["status"] for row in rows] == ["queued"] * 3


async def test_the_one_message_path_leaves_the_same_rows_as_the_broker_s(
    conn: asyncpg.Connection,
) -> None:
    await conn.execute(
        "select set_config('queen.fake_now', '2031-01-01T00:00:00Z', true);"
        "select queen._configure(1, 'a', '{\"delayedProcessing\": 7}', false);"
        "select queen._configure(1, 'b', '{\"delayedProcessing\": 7}', false);"
        "select queen._register_group(1, 'a', 'g', true, 'all', null, false);"
        "select queen._register_group(1, 'b', 'g', true, 'all', null, false);"
    )
    for _ in range(2):
        await conn.execute("select queen.push('a', '[1]', 'p', 't')")
        await conn.execute(
            "select queen._push(1, '{b}', '{p}', queen._hold_partitions(1, '{b}', '{p}'),"
            " '{1}', '{null}', '{t}', '{null}', '{null}', '{[1]}', true)"
        )
    for table, columns in (
        ("queen.partitions t", "next_offset, log_start_offset, last_append_at"),
        (
            "queen.partitions p join queen.messages t on t.partition_id = p.id",
            "message_offset, t.created_at, repeat, trace_id, transaction_id, producer_sub,"
            " payload::text, substr(t.id::text, 1, 18)",
        ),
        (
            "queen.partitions p join queen.ready t on t.partition_id = p.id",
            "ready_at, t.next_offset, lease_id",
        ),
    ):
        alias = table.split()[1]
        rows = await conn.fetch(
            f"select {columns} from {table} join queen.queues q on q.id = {alias}.queue_id"
            " where q.name in ('a', 'b') order by q.name"
        )
        assert len(rows) == 2
        assert tuple(rows[0]) == tuple(rows[1])


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "detail"),
    [
        ("null, '1'", "QU000", {"argument": "queue"}),
        ("'', '1'", "QU000", {"argument": "queue"}),
        ("'q', null", "QU000", {"argument": "payload"}),
        ("repeat('q', 412), '1'", "QU001", {"argument": "queue", "maximum_bytes": 411}),
        ("'q', '1', repeat('p', 411)", "QU001", {"argument": "queue", "maximum_bytes": 411}),
        (
            "'q', '1', 'p', repeat('t', 65536)",
            "QU001",
            {"argument": "transaction_id", "maximum_bytes": 65535},
        ),
        (
            "'q', to_json(repeat('x', 16777216))",
            "QU001",
            {"argument": "payload", "maximum_bytes": 16777216},
        ),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, arguments: str, sqlstate: str, detail: dict[str, object]
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.push({arguments})")
    assert caught.value.sqlstate == sqlstate
    assert json.loads(caught.value.detail) == detail


async def test_a_message_and_a_row_are_there_together_or_not_at_all(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("create table app_order (id integer primary key)")
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("insert into app_order values (1)")
    await connection.execute(PUSH, "orders", "1", "order-1", "created-1")
    await transaction.rollback()
    # Neither the queue nor the partition is left behind.
    assert await connection.fetchval("select count(*) from queen.queues") == 0
    async with connection.transaction():
        await connection.execute("insert into app_order values (1)")
        await connection.execute(PUSH, "orders", "1", "order-1", "created-1")
    assert await connection.fetchval("select count(*) from queen.messages") == 1
    await connection.close()


async def test_a_rival_for_a_new_partition_and_an_id_gets_a_duplicate_and_no_error(
    database: str,
) -> None:
    async with sessions(database) as (first, second):
        async with first.transaction():
            stored = await first.fetchrow(PUSH, "orders", "1", "new", "same")
            rival = asyncio.create_task(second.fetchrow(PUSH, "orders", "2", "new", "same"))
            await until_waiting(first, second)
        answer = await rival
        assert tuple(answer) == ("duplicate", stored["message_id"], 0)


async def test_a_rival_takes_the_place_of_one_that_rolls_back(database: str) -> None:
    async with sessions(database) as (first, second):
        transaction = first.transaction()
        await transaction.start()
        await first.fetchrow(PUSH, "orders", "1", "new", "same")
        rival = asyncio.create_task(second.fetchrow(PUSH, "orders", "2", "new", "same"))
        await until_waiting(first, second)
        await transaction.rollback()
        answer = await rival
        assert (answer["status"], answer["message_offset"]) == ("queued", 0)


async def test_a_push_that_meets_a_delete_of_its_queue_goes_to_the_next_one(database: str) -> None:
    async with sessions(database) as (first, second):
        await first.execute(PUSH, "orders", "1", "p", None)
        async with first.transaction():
            await first.execute("select queen._delete_queue(1, 'orders')")
            rival = asyncio.create_task(second.fetchrow(PUSH, "orders", "2", "p", None))
            await until_waiting(first, second)
        answer = await rival
        assert (answer["status"], answer["message_offset"]) == ("queued", 0)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_above_read_committed_a_lost_race_is_a_serialization_failure(
    database: str, isolation: str
) -> None:
    async with sessions(database) as (first, second):
        await first.execute(PUSH, "orders", "1", "p", "before")
        transaction = second.transaction(isolation=isolation)
        await transaction.start()
        await second.fetchval("select count(*) from queen.queues")
        await first.execute(PUSH, "orders", "1", "p", "same")
        with pytest.raises(asyncpg.SerializationError):
            await second.execute(PUSH, "orders", "1", "p", "same")
        await transaction.rollback()
        async with second.transaction(isolation=isolation):
            again = await second.fetchrow(PUSH, "orders", "1", "p", "same")
        assert again["status"] == "duplicate"
