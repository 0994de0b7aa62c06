"""queen.pop, queen.ack, queen.nack and queen.extend_lease."""

import asyncio
import json
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from tests.support.database import set_clock
from tests.support.sessions import sessions, until_waiting

POP = (
    "select * from queen.pop('orders', 'g', batch => 10, partitions => 5,"
    " subscription_mode => 'all')"
)
NOON = datetime.fromisoformat("2031-01-01T12:00:00+00:00")
LATER = datetime.fromisoformat("2031-01-01T12:05:00+00:00")


async def push(conn: asyncpg.Connection, *names: str, partition: str = "p") -> None:
    for name in names:
        await conn.execute(
            "select queen.push('orders', to_json($1::text), $2, $1)", name, partition
        )


async def ack(conn: asyncpg.Connection, row: asyncpg.Record, group: str = "g") -> asyncpg.Record:
    return await conn.fetchrow(
        "select * from queen.ack($1, $2, $3, $4)",
        row["partition_id"],
        row["transaction_id"],
        row["lease_id"],
        group,
    )


async def test_a_pop_leases_messages_in_their_order(conn: asyncpg.Connection) -> None:
    await push(conn, "a", "b")
    await push(conn, "c", partition="q")
    rows = await conn.fetch(POP)
    assert [(row["partition_name"], row["message_offset"], row["payload"]) for row in rows] == [
        ("p", 0, '"a"'),
        ("p", 1, '"b"'),
        ("q", 0, '"c"'),
    ]
    assert len({row["lease_id"] for row in rows}) == 1
    assert {row["delivery_attempt"] for row in rows} == {1}
    assert await conn.fetch(POP) == []


async def test_batch_and_partitions_are_budgets(conn: asyncpg.Connection) -> None:
    await push(conn, "a", "b", "c")
    await push(conn, "d", partition="q")
    one = await conn.fetch("select * from queen.pop('orders', 'one', subscription_mode => 'all')")
    assert [row["transaction_id"] for row in one] == ["a"]
    two = await conn.fetch(
        "select * from queen.pop('orders', 'two', batch => 10, subscription_mode => 'all')"
    )
    assert [row["transaction_id"] for row in two] == ["a", "b", "c"]
    over = await conn.fetch(
        "select * from queen.pop('orders', 'over', batch => 2, partitions => 9,"
        " subscription_mode => 'all')"
    )
    assert [row["transaction_id"] for row in over] == ["a", "b"]


async def test_a_group_begins_at_new_messages_unless_it_says_otherwise(
    conn: asyncpg.Connection,
) -> None:
    await set_clock(conn, NOON)
    await push(conn, "old")
    await set_clock(conn, NOON + timedelta(minutes=1))
    assert await conn.fetch("select * from queen.pop('orders', 'new')") == []
    await set_clock(conn, LATER)
    await push(conn, "young")
    [row] = await conn.fetch("select * from queen.pop('orders', 'new', batch => 9)")
    assert row["transaction_id"] == "young"
    [row] = await conn.fetch(
        "select * from queen.pop('orders', 'since', batch => 9, subscription_from => $1)", LATER
    )
    assert row["transaction_id"] == "young"
    rows = await conn.fetch("select * from queen.pop('orders', batch => 9)")
    assert [row["transaction_id"] for row in rows] == ["old", "young"]
    await set_clock(conn, None)


async def test_one_partition_can_be_popped_alone(conn: asyncpg.Connection) -> None:
    await push(conn, "a")
    await push(conn, "b", partition="q")
    pop = "select * from queen.pop('orders', 'g', $1, subscription_mode => 'all')"
    assert [row["transaction_id"] for row in await conn.fetch(pop, "q")] == ["b"]
    assert await conn.fetch(pop, "nowhere") == []
    # Neither the partition nor a queue is made by looking for it.
    assert await conn.fetch("select * from queen.pop('nothing', 'g', 'p')") == []
    assert await conn.fetchval("select count(*) from queen.queues where name = 'nothing'") == 0


async def test_commit_on_delivery_settles_at_once(conn: asyncpg.Connection) -> None:
    await push(conn, "a", "b")
    pop = (
        "select * from queen.pop('orders', 'g', batch => 1, subscription_mode => 'all',"
        " commit_on_delivery => true)"
    )
    assert [(await conn.fetchrow(pop))["transaction_id"] for _ in "ab"] == ["a", "b"]
    assert await conn.fetch(pop) == []


async def test_a_conflating_group_gets_the_newest(conn: asyncpg.Connection) -> None:
    await push(conn, "a", "b", "c")
    pop = "select * from queen.pop('orders', 'g', subscription_mode => 'all', conflation => true)"
    [row] = await conn.fetch(pop)
    assert row["transaction_id"] == "c"
    assert (await ack(conn, row))["success"]
    assert await conn.fetchval("select count(*) from queen.lag") == 0


async def test_an_ack_settles_all_before_it_and_the_last_one_releases(
    conn: asyncpg.Connection,
) -> None:
    await push(conn, "a", "b", "c")
    rows = await conn.fetch(POP)
    assert tuple(await ack(conn, rows[1])) == (True, None, False, False, False)
    assert tuple(await ack(conn, rows[0])) == (True, None, False, False, True)
    assert tuple(await ack(conn, rows[2])) == (True, None, True, False, False)


async def test_an_ack_under_another_lease_is_refused(conn: asyncpg.Connection) -> None:
    await push(conn, "a")
    [row] = await conn.fetch(POP)
    refused = await conn.fetchrow(
        "select * from queen.ack($1, 'a', $2, 'g')", row["partition_id"], UUID(int=1)
    )
    assert not refused["success"]
    assert "lease" in refused["refusal"]
    unknown = await conn.fetchrow(
        "select * from queen.ack($1, 'x', $2, 'g')", row["partition_id"], row["lease_id"]
    )
    assert "unresolv" in unknown["refusal"]
    nowhere = await conn.fetchrow("select * from queen.ack(4711, 'a')")
    assert "partition" in nowhere["refusal"]


@pytest.mark.parametrize(
    ("status", "retries", "dead"), [("failed", 1, 0), ("retry", 0, 0), ("dlq", 0, 1)]
)
async def test_a_nack_gives_back_or_files(
    conn: asyncpg.Connection, status: str, retries: int, dead: int
) -> None:
    await push(conn, "a", "b")
    rows = await conn.fetch(POP)
    nacked = await conn.fetchrow(
        "select * from queen.nack($1, 'a', $2, 'g', error => 'broken', status => $3)",
        rows[0]["partition_id"],
        rows[0]["lease_id"],
        status,
    )
    assert (nacked["success"], nacked["dead_lettered"]) == (True, bool(dead))
    again = await conn.fetch(POP)
    assert [row["transaction_id"] for row in again] == ["a", "b"][dead:]
    assert await conn.fetchval("select retry_count from queen.cursors") == retries
    assert await conn.fetchval("select count(*) from queen.dead_letters") == dead


async def test_a_lease_that_ran_out_is_nobody_s(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    await push(conn, "a")
    [row] = await conn.fetch(POP)
    renewed = await conn.fetchrow("select * from queen.extend_lease($1, 240)", row["lease_id"])
    assert (renewed["renewed"], (renewed["expires_at"] - NOON).total_seconds()) == (1, 240)
    await set_clock(conn, LATER)
    gone = await conn.fetchrow("select * from queen.extend_lease($1)", row["lease_id"])
    assert tuple(gone) == (0, None)
    assert not (await ack(conn, row))["success"]
    [again] = await conn.fetch(POP)
    assert again["delivery_attempt"] == 2
    assert (await ack(conn, again))["success"]
    await set_clock(conn, None)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("pop(null)", "queue"),
        ("pop('q', subscription_mode => 'some', consumer_group => 'g')", "subscription_mode"),
        ("pop('q', conflation => true)", "conflation"),
        ("pop('q', 'g', conflation => true, commit_on_delivery => true)", "conflation"),
        ("ack(null, 't')", "partition_id"),
        ("ack(1, null)", "transaction_id"),
        ("nack(1, 't', status => 'completed')", "status"),
        ("nack(1, 't', status => null)", "status"),
        ("extend_lease(null)", "lease_id"),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, call: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.{call}")
    assert caught.value.sqlstate == "QU000"
    assert json.loads(caught.value.detail)["argument"] == argument


async def test_rivals_never_get_the_same_partition(database: str) -> None:
    """At READ COMMITTED, where the second waits for the first one's very first cursor."""
    async with sessions(database) as (first, second):
        await push(first, "a")
        async with first.transaction():
            assert len(await first.fetch(POP)) == 1
            rival = asyncio.create_task(second.fetch(POP))
            await until_waiting(first, second)
        assert await rival == []


async def test_a_rival_gets_what_a_rolled_back_pop_let_go(database: str) -> None:
    async with sessions(database) as (first, second):
        await push(first, "a")
        await second.fetch(POP)
        await first.execute("select queen.seek('orders', 'g', 'beginning')")
        transaction = first.transaction()
        await transaction.start()
        assert len(await first.fetch(POP)) == 1
        # The cursor is there by now: who finds it locked passes over it.
        assert await second.fetch(POP) == []
        await transaction.rollback()
        assert len(await second.fetch(POP)) == 1


async def test_an_ack_that_waited_for_a_push_leaves_its_message_ready(database: str) -> None:
    async with sessions(database) as (first, second):
        await push(first, "a")
        [row] = await first.fetch(POP)
        async with first.transaction():
            await push(first, "b")
            settling = asyncio.create_task(ack(second, row))
            await until_waiting(first, second)
        assert (await settling)["lease_released"]
        assert [row["transaction_id"] for row in await second.fetch(POP)] == ["b"]


async def test_a_pop_and_a_delete_of_the_queue_exclude_each_other(database: str) -> None:
    async with sessions(database) as (first, second):
        await push(first, "a")
        async with first.transaction():
            assert len(await first.fetch(POP)) == 1
            deleting = asyncio.create_task(second.fetchval("select queen.delete_queue('orders')"))
            await until_waiting(first, second)
        assert await deleting
        left = (
            "select (select count(*) from queen.cursors), (select count(*) from queen.ready),"
            " (select count(*) from queen.consumer_groups)"
        )
        assert tuple(await first.fetchrow(left)) == (0, 0, 0)


async def test_an_ack_that_is_repeated_says_so(conn: asyncpg.Connection) -> None:
    """As by a transaction that is run again because its outcome was unknown."""
    await push(conn, "a")
    [row] = await conn.fetch(POP)
    assert tuple(await ack(conn, row)) == (True, None, True, False, False)
    assert tuple(await ack(conn, row)) == (True, None, True, False, True)
    await push(conn, "b")
    [row] = await conn.fetch(POP)
    nack = "select * from queen.nack($1, 'b', $2, 'g', status => 'dlq')"
    arguments = (row["partition_id"], row["lease_id"])
    assert tuple(await conn.fetchrow(nack, *arguments)) == (True, None, True, True, False)
    assert tuple(await conn.fetchrow(nack, *arguments)) == (True, None, True, False, True)
