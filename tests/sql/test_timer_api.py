"""queen.timer_schedule and queen.timer_cancel."""

import asyncio
import json
from datetime import datetime, timedelta

import asyncpg
import pytest

from tests.support.database import set_clock
from tests.support.sessions import sessions, until_waiting

NOON = datetime.fromisoformat("2031-01-01T12:00:00+00:00")
HOUR = timedelta(hours=1)


async def test_a_timer_is_due_after_a_delay_or_at_a_moment(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    after = await conn.fetchrow(
        "select * from queen.timer_schedule('q', 'k', '{\"a\":  1}', delay => $1,"
        " partition => 'p', transaction_id => 't')",
        HOUR,
    )
    assert (after["status"], after["due_at"]) == ("scheduled", NOON + HOUR)
    at = await conn.fetchrow(
        "select * from queen.timer_schedule('q', 'k', '2', deliver_at => $1)", NOON - HOUR
    )
    assert (at["status"], at["due_at"]) == ("rescheduled", NOON - HOUR)
    assert at["message_id"] != after["message_id"]
    await set_clock(conn, None)


async def test_what_was_scheduled_is_what_will_be_pushed(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    promised = await conn.fetchrow(
        "select * from queen.timer_schedule('q', 'k', '{\"a\":  1}', delay => '0',"
        " partition => 'p', transaction_id => 't')"
    )
    await conn.execute("select queen._create_partitions(1, '{q}', '{p}')")
    await conn.execute(
        "select queen._timers_fire(1, '{q}', '{k}', '{p}',"
        " array(select id from queen.partitions), true, 250)"
    )
    stored = await conn.fetchrow("select id, transaction_id, payload from queen.messages")
    assert tuple(stored) == (promised["message_id"], "t", '{"a":  1}')
    assert not await conn.fetchval("select queen.timer_cancel('q', 'k')")
    await set_clock(conn, None)


async def test_a_timer_without_a_transaction_id_gets_one(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen.timer_schedule('q', 'k', 'null', delay => '1 hour')")
    row = await conn.fetchrow("select partition, transaction_id from queen.timer")
    assert row["partition"] == "Default"
    assert len(row["transaction_id"]) == 36


async def test_a_cancel_says_whether_there_was_a_timer(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen.timer_schedule('q', 'k', '1', delay => '1 hour')")
    cancel = "select queen.timer_cancel('q', 'k')"
    assert [await conn.fetchval(cancel) for _ in range(2)] == [True, False]


async def test_scheduling_can_be_paused_and_cancelling_cannot(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen.timer_schedule('q', 'k', '1', delay => '1 hour')")
    await conn.execute("update queen.switches set enabled = false where name = 'timers_schedule'")
    assert await conn.fetchval("select queen.timer_cancel('q', 'k')")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute("select queen.timer_schedule('q', 'k', '1', delay => '1 hour')")
    assert (caught.value.sqlstate, json.loads(caught.value.detail)) == (
        "QU200",
        {"reason": "timers_disabled"},
    )


@pytest.mark.parametrize(
    ("call", "sqlstate", "argument"),
    [
        ("timer_schedule('q', 'k', '1')", "QU000", "delay"),
        ("timer_schedule('q', 'k', '1', '1 hour', now())", "QU000", "delay"),
        ("timer_schedule('q', 'k', '1', deliver_at => 'infinity')", "QU000", "deliver_at"),
        ("timer_schedule('', 'k', '1', '1 hour')", "QU000", "queue"),
        ("timer_schedule('q', '', '1', '1 hour')", "QU000", "timer_key"),
        ("timer_schedule('q', repeat('k', 2049), '1', '1 hour')", "QU000", "timer_key"),
        ("timer_schedule('q', 'k', null, '1 hour')", "QU000", "payload"),
        (
            "timer_schedule('q', 'k', '1', '1 hour', transaction_id => '')",
            "QU000",
            "transaction_id",
        ),
        (
            "timer_schedule('q', 'k', '1', '1 hour', partition => repeat('p', 411))",
            "QU001",
            "queue",
        ),
        ("timer_cancel('q', null)", "QU000", "timer_key"),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, call: str, sqlstate: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.{call}")
    assert caught.value.sqlstate == sqlstate
    assert json.loads(caught.value.detail)["argument"] == argument


async def test_two_that_schedule_one_timer_take_turns(database: str) -> None:
    async with sessions(database) as (first, second):
        schedule = "select status from queen.timer_schedule('q', 'k', $1, delay => '1 hour')"
        async with first.transaction():
            assert await first.fetchval(schedule, "1") == "scheduled"
            rival = asyncio.create_task(second.fetchval(schedule, "2"))
            await until_waiting(first, second)
        assert await rival == "rescheduled"
        assert await first.fetchval("select payload::text from queen.timers") == "2"
