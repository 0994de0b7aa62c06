"""Timers in the database: schedule, cancel, read, fire, fail (step 3)."""

import json
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.support.database import set_clock

START = datetime(2030, 1, 1, 12, tzinfo=UTC)
Operation = dict[str, Any]


@pytest_asyncio.fixture(autouse=True)
async def clock(conn: asyncpg.Connection) -> None:
    await set_clock(conn, START)


async def later(conn: asyncpg.Connection, seconds: float) -> None:
    await set_clock(conn, START + timedelta(seconds=seconds))


def schedule(key: str, delay_ms: float = 1000, payload: Any = 1, **more: Any) -> Operation:
    return {
        "op": "schedule",
        "queue": "q",
        "timerKey": key,
        "delayMs": delay_ms,
        "txn": f"txn-{key}",
        "payload": json.dumps(payload),
        **more,
    }


def cancel(key: str, **more: Any) -> Operation:
    return {"op": "cancel", "queue": "q", "timerKey": key, **more}


async def timers(conn: asyncpg.Connection, *operations: Operation) -> list[dict[str, Any]]:
    rows = await conn.fetch(
        "select * from queen._timers(1, $1) order by operation_index", json.dumps(operations)
    )
    assert [row["verdict"] for row in rows] == ["done"] * len(operations)
    return [json.loads(row["result"]) for row in rows]


async def due(conn: asyncpg.Connection, batch_max: int = 256) -> list[asyncpg.Record]:
    return list(await conn.fetch("select * from queen._timers_due($1)", batch_max))


async def fire(
    conn: asyncpg.Connection, found: list[asyncpg.Record] | None = None, *, careful: bool = False
) -> dict[str, int]:
    """Fire what is due, or what was found before."""
    found = await due(conn) if found is None else found
    rows = await conn.fetch(
        "select * from queen._timers_fire(1, $1, $2, $3, $4, $5, 250)",
        [timer["queue"] for timer in found],
        [timer["timer_key"] for timer in found],
        [timer["partition"] for timer in found],
        [timer["partition_id"] for timer in found],
        careful,
    )
    fired: Counter[str] = Counter()
    for row in rows:
        fired[row["fired_queue"]] += row["timer_count"]
    return fired


async def messages(conn: asyncpg.Connection) -> list[asyncpg.Record]:
    return list(
        await conn.fetch(
            "select q.name as queue, p.name as partition, m.* from queen.messages m"
            " join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id order by q.name, p.name, m.message_offset"
        )
    )


async def pending(conn: asyncpg.Connection) -> list[str]:
    rows = await conn.fetch("select timer_key from queen.timers order by timer_key")
    return [row["timer_key"] for row in rows]


# 3.3, 3.4-1: schedule and cancel


async def test_a_schedule_promises_its_message(conn: asyncpg.Connection) -> None:
    """Step 3.3, 3.4-1: deliverAt is now and the delay; the message's id is minted now."""
    [result] = await timers(conn, schedule("k", 1500.25, partition="p"))
    assert result == {
        "ok": True,
        "status": "scheduled",
        "queue": "q",
        "timerKey": "k",
        "txn": "txn-k",
        "messageId": result["messageId"],
        "deliverAt": "2030-01-01T12:00:01.500250Z",
    }
    assert uuid.UUID(result["messageId"]).version == 7


async def test_a_second_schedule_replaces_all_but_the_creation(conn: asyncpg.Connection) -> None:
    """Step 3.4-1: an upsert, whichever name it was sent under; attempts and errors start over."""
    [first] = await timers(conn, schedule("k", 60_000, {"v": 1}, producerSub="a"))
    await conn.execute("update queen.timers set attempts = 3, last_error = 'x', fire_at = now()")
    await later(conn, 5)
    [second] = await timers(
        conn, {**schedule("k", 500, {"v": 2}, partition="p", txn="other"), "op": "reschedule"}
    )
    assert second["status"] == "rescheduled"
    assert second["deliverAt"] < first["deliverAt"]
    assert second["messageId"] != first["messageId"]
    row = await conn.fetchrow("select * from queen.timers")
    assert str(row["message_id"]) == second["messageId"]
    assert (row["partition"], row["transaction_id"], row["payload"]) == ("p", "other", '{"v": 2}')
    assert (row["attempts"], row["last_error"], row["producer_sub"]) == (0, None, None)
    assert row["fire_at"] == row["deliver_at"] == START + timedelta(seconds=5.5)
    assert (row["created_at"], row["updated_at"]) == (START, START + timedelta(seconds=5))


async def test_reschedule_of_nothing_is_a_schedule(conn: asyncpg.Connection) -> None:
    """Step 3.3: `rescheduled` whenever one was pending, and only then."""
    [result] = await timers(conn, {**schedule("k"), "op": "reschedule"})
    assert result["status"] == "scheduled"


async def test_cancel(conn: asyncpg.Connection) -> None:
    """Step 3.3: cancelled with the removed timer's txn; absent with the caller's, or null."""
    await timers(conn, schedule("k"))
    [cancelled, absent, nothing] = await timers(
        conn, cancel("k", txn="other"), cancel("x", txn="mine"), cancel("y")
    )
    assert cancelled == {
        "ok": True,
        "status": "cancelled",
        "queue": "q",
        "timerKey": "k",
        "txn": "txn-k",
    }
    assert absent == {
        "ok": False,
        "status": "absent",
        "queue": "q",
        "timerKey": "x",
        "txn": "mine",
    }
    assert nothing["txn"] is None
    assert await pending(conn) == []


@pytest.mark.parametrize(
    ("delay_ms", "deliver_at"),
    [
        (-10_000, "2030-01-01T11:59:50.000000Z"),
        (0.001, "2030-01-01T12:00:00.000001Z"),
        (1e18, "9999-12-31T23:59:59.999999Z"),
        (-1e18, "0001-01-01T00:00:00.000000Z"),
    ],
)
async def test_any_delay_has_a_moment(
    conn: asyncpg.Connection, delay_ms: float, deliver_at: str
) -> None:
    """Step 0.3, 3.1: texts of moments order as the moments do, so none leaves four-digit years."""
    [result] = await timers(conn, schedule("k", delay_ms))
    assert result["deliverAt"] == deliver_at


async def test_a_payload_keeps_its_text(conn: asyncpg.Connection) -> None:
    """Step 3.4-3: the message's data is the payload, to the letter."""
    text = ' {"b" : 1.0, "b":"\\u0000"} '
    await timers(conn, {**schedule("k", 0), "payload": text})
    await fire(conn)
    assert [message["payload"] for message in await messages(conn)] == [text]


# 3.2: reads


async def test_peek_has_all_fields_and_the_payload(conn: asyncpg.Connection) -> None:
    """Step 3.2: the row's fields; nothing when no such timer is pending."""
    [scheduled] = await timers(conn, schedule("k", 1000, {"v": 1}, producerSub="alice"))
    [row] = await conn.fetch("select * from queen._timer_peek(1, 'q', 'k')")
    assert json.loads(row["fields"]) == {
        "queue": "q",
        "timerKey": "k",
        "partition": "Default",
        "deliverAt": "2030-01-01T12:00:01.000000Z",
        "txn": "txn-k",
        "messageId": scheduled["messageId"],
        "payloadZstd": False,
        "encrypted": False,
        "producerSub": "alice",
        "attempts": 0,
        "lastError": None,
        "claimed": False,
        "createdAt": "2030-01-01T12:00:00.000000Z",
        "updatedAt": "2030-01-01T12:00:00.000000Z",
    }
    assert row["payload"] == '{"v": 1}'
    assert await conn.fetch("select * from queen._timer_peek(1, 'q', 'x')") == []


async def test_list_and_count_are_of_one_queue(conn: asyncpg.Connection) -> None:
    """Step 3.2: key byte order, exclusive after; an exact count under a literal prefix."""
    await timers(conn, *[schedule(key) for key in ("é", "b", "a%", "a_", "a", "B")])
    await timers(conn, {**schedule("a"), "queue": "other"})
    rows = await conn.fetch("select * from queen._timer_list(1, 'q', '', 10)")
    assert [row["timer_key"] for row in rows] == ["B", "a", "a%", "a_", "b", "é"]
    rows = await conn.fetch("select * from queen._timer_list(1, 'q', 'a%', 2)")
    assert [row["timer_key"] for row in rows] == ["a_", "b"]
    count = "select timer_count from queen._timer_count(1, 'q', $1)"
    assert [await conn.fetchval(count, prefix) for prefix in ("a", "a%", "é", "z")] == [3, 1, 1, 0]


# 3.4: firing


async def test_a_timer_fires_at_its_time_and_not_before(conn: asyncpg.Connection) -> None:
    """Step 3.4-2: at or after deliverAt; the append and the removal are one."""
    await timers(conn, schedule("k", 1000))
    await later(conn, 0.999999)
    [wait] = await due(conn)
    assert wait["tenant"] is None
    assert wait["wait_seconds"] == pytest.approx(0.000001)
    await later(conn, 1)
    assert await fire(conn) == {"q": 1}
    assert len(await messages(conn)) == 1
    assert await pending(conn) == []
    assert await due(conn) == []


async def test_a_fire_judges_the_time_again(conn: asyncpg.Connection) -> None:
    """Step 3.4-7: what was found due and has been rescheduled since is left alone."""
    await timers(conn, schedule("k", 0), schedule("moved", 0), schedule("cancelled", 0))
    found = await due(conn)
    await timers(conn, schedule("k", 1000), schedule("moved", 0, partition="p"))
    await timers(conn, cancel("cancelled"))
    assert await fire(conn, found) == {}
    assert await pending(conn) == ["k", "moved"]
    assert await messages(conn) == []


async def test_the_message_is_an_ordinary_one(conn: asyncpg.Connection) -> None:
    """Step 3.4-3: the promised id, the txn, the scheduler's subject, the append's time."""
    [scheduled] = await timers(
        conn, schedule("k", 1000, {"v": 1}, partition="p", producerSub="alice")
    )
    await later(conn, 7)
    await fire(conn)
    [message] = await messages(conn)
    assert (message["queue"], message["partition"], message["message_offset"]) == ("q", "p", 0)
    assert (str(message["id"]), message["transaction_id"]) == (scheduled["messageId"], "txn-k")
    assert (message["payload"], message["producer_sub"]) == ('{"v": 1}', "alice")
    assert message["trace_id"] is None
    assert message["created_at"] == START + timedelta(seconds=7)


async def test_a_known_txn_is_not_pushed_again(conn: asyncpg.Connection) -> None:
    """Step 3.4-4: nothing is appended, and the timer is done."""
    await timers(conn, schedule("a", 0, "first", txn="t"))
    await fire(conn)
    await timers(conn, schedule("b", 0, "second", txn="t"), schedule("c", 0, "third"))
    with pytest.raises(asyncpg.UniqueViolationError) as raised:
        async with conn.transaction():
            await fire(conn)
    assert raised.value.constraint_name == "messages_transaction_id_key"
    assert await fire(conn, careful=True) == {"q": 2}
    assert [message["payload"] for message in await messages(conn)] == ['"first"', '"third"']
    assert await pending(conn) == []


async def test_a_txn_is_pushed_again_after_its_window(conn: asyncpg.Connection) -> None:
    """Step 3.4-10: once the dedup window has passed, it is delivered again."""
    await timers(conn, schedule("a", 0, txn="t"))
    await fire(conn)
    await later(conn, 3601)
    await timers(conn, schedule("a", 0, txn="t"))
    await fire(conn, careful=True)
    assert len(await messages(conn)) == 2


async def test_timers_fire_in_the_order_in_which_they_fell_due(conn: asyncpg.Connection) -> None:
    """Step 3.4-5: by due time, then key; two of one partition enter it in that order."""
    await timers(
        conn,
        schedule("c", 300, "c"),
        schedule("a", 300, "a"),
        schedule("b", 100, "b"),
        schedule("d", 200, "d", partition="p"),
        schedule("e", 50, "e", partition="p"),
    )
    await later(conn, 1)
    assert [timer["timer_key"] for timer in await due(conn)] == ["e", "b", "d", "a", "c"]
    assert await fire(conn) == {"q": 5}
    delivered = [(message["partition"], message["payload"]) for message in await messages(conn)]
    assert delivered == [
        ("Default", '"b"'),
        ("Default", '"a"'),
        ("Default", '"c"'),
        ("p", '"e"'),
        ("p", '"d"'),
    ]


async def test_a_pass_is_bounded(conn: asyncpg.Connection) -> None:
    """Step 3.4-5: so many timers and 4 MiB of payloads; the oldest first, one at least."""
    await timers(conn, *[schedule(f"k{number}", number) for number in range(5)])
    await later(conn, 1)
    assert [timer["timer_key"] for timer in await due(conn, 2)] == ["k0", "k1"]
    # Payloads that do not compress.
    size = "select string_agg(md5(n::text), '') from generate_series(1, 100000) n"
    await conn.execute(f"update queen.timers set payload = to_json(({size}))")
    assert [timer["timer_key"] for timer in await due(conn)] == ["k0"]


async def test_a_pass_goes_on_behind_what_it_found_and_without_what_is_held(
    conn: asyncpg.Connection,
) -> None:
    """Step 3.4-5: the rest comes in due order; what is held comes with the next pass."""
    held = [schedule(f"h{number}", number, partition="held") for number in range(4)]
    free = [schedule(f"f{number}", number, partition="free") for number in range(4)]
    await timers(conn, *held, *free)
    await later(conn, 1)
    found = await due(conn, 3)
    assert [timer["timer_key"] for timer in found] == ["f0", "h0", "f1"]
    last = found[-1]
    rest = await conn.fetch(
        "select * from queen._timers_due(256, $1, $2, $3, $4, '{1}', '{q}', '{held}')",
        *(last[name] for name in ("fire_at", "tenant", "queue", "timer_key")),
    )
    assert [timer["timer_key"] for timer in rest] == ["f2", "f3"]


async def test_one_step_at_a_time_fires(conn: asyncpg.Connection, shared_database: str) -> None:
    """Step 3.4-5: so that a partition's timers enter it in due order; the other is told so."""
    await timers(conn, schedule("k", 0))
    other = await asyncpg.connect(shared_database)
    try:
        async with other.transaction():
            await other.execute("select pg_advisory_xact_lock(hashtext('queen.timers'), 1)")
            with pytest.raises(asyncpg.LockNotAvailableError):
                async with conn.transaction():
                    await fire(conn)
        assert await fire(conn) == {"q": 1}
    finally:
        await other.close()


async def test_a_fire_knows_the_partition_there_is(conn: asyncpg.Connection) -> None:
    """Step 3.4-3: queue and partition are created if missing, and continued if not."""
    await timers(conn, schedule("a", 0))
    [first] = await due(conn)
    assert first["partition_id"] is None
    await fire(conn)
    await timers(conn, schedule("b", 0))
    [second] = await due(conn)
    assert second["partition_id"] is not None
    await fire(conn)
    assert [message["message_offset"] for message in await messages(conn)] == [0, 1]


async def test_a_fired_timer_is_absent(conn: asyncpg.Connection) -> None:
    """Step 3.4-7, 3.4-8: a cancel after the fire finds nothing; a schedule is a new timer."""
    await timers(conn, schedule("k", 0))
    await fire(conn)
    [absent] = await timers(conn, cancel("k"))
    assert (absent["ok"], absent["status"]) == (False, "absent")
    [again] = await timers(conn, schedule("k", 0, txn="again"))
    assert again["status"] == "scheduled"


async def test_a_deleted_partition_is_left_to_the_next_look(conn: asyncpg.Connection) -> None:
    """A fire that knows an id which is gone does nothing; the next one creates the partition."""
    await timers(conn, schedule("a", 0))
    await fire(conn)
    await timers(conn, schedule("b", 0))
    found = await due(conn)
    await conn.execute("delete from queen.messages")
    await conn.execute("delete from queen.partitions")
    assert await fire(conn, found) == {}
    assert await fire(conn) == {"q": 1}


# 3.4-9: failures


async def test_a_failed_timer_waits_longer_each_time_and_ends_as_a_dead_letter(
    conn: asyncpg.Connection,
) -> None:
    """Step 3.4-9: attempts, min(1 s x 2^attempts, 60 s), then the queue's dead letters."""
    await timers(conn, schedule("k", 0, {"v": 1}, partition="p"))
    fail = "select dead from queen._timer_fail(1, 'q', 'k', 'broken', 8)"
    seconds = 0.0
    waits = []
    for attempt in range(1, 8):
        assert await conn.fetchval(fail) is False
        row = await conn.fetchrow("select * from queen.timers")
        assert (row["attempts"], row["last_error"]) == (attempt, "broken")
        assert row["deliver_at"] == START
        wait = (row["fire_at"] - START).total_seconds() - seconds
        waits.append(wait)
        [next_due] = await due(conn)
        assert next_due["wait_seconds"] == wait
        seconds += wait
        await later(conn, seconds)
    assert waits == [2, 4, 8, 16, 32, 60, 60]
    assert await conn.fetchval(fail) is True
    assert await pending(conn) == []
    letter = await conn.fetchrow(
        "select d.*, q.name as queue, p.name as partition from queen.dead_letters d"
        " join queen.queues q on q.id = d.queue_id join queen.partitions p on p.id = d.partition_id"
    )
    assert (letter["queue"], letter["partition"]) == ("q", "p")
    assert (letter["consumer_group"], letter["message_offset"]) == ("__timer__", -1)
    assert (letter["transaction_id"], letter["payload"]) == ("txn-k", '{"v": 1}')
    assert (letter["error"], letter["retry_count"]) == ("broken", 8)
    assert await messages(conn) == []


async def test_a_timer_that_was_rescheduled_is_not_blamed(conn: asyncpg.Connection) -> None:
    """Step 3.4-1: a reschedule is a new timer under an old name."""
    await timers(conn, schedule("k", 1000))
    assert await conn.fetchval("select dead from queen._timer_fail(1, 'q', 'k', 'x', 1)") is False
    assert await conn.fetchval("select dead from queen._timer_fail(1, 'q', 'x', 'x', 1)") is False
    assert await conn.fetchval("select attempts from queen.timers") == 0


# Section 5: the switches


async def test_paused_scheduling_refuses_schedules_only(conn: asyncpg.Connection) -> None:
    """Step 5 timersSchedule: a call with a schedule does nothing; cancels always work."""
    await timers(conn, schedule("k"))
    await conn.execute("select queen._throw_switches(null, false, null)")
    call = json.dumps([cancel("k"), schedule("x")])
    [row] = await conn.fetch("select * from queen._timers(1, $1)", call)
    assert row["verdict"] == "disabled"
    assert await pending(conn) == ["k"]
    [cancelled] = await timers(conn, cancel("k"))
    assert cancelled["ok"]


async def test_paused_firing_loses_nothing(conn: asyncpg.Connection) -> None:
    """Step 5 timersFire: nothing fires; on again, the backlog fires, oldest first."""
    await timers(conn, schedule("a", 0), schedule("b", 0))
    found = await due(conn)
    await conn.execute("select queen._throw_switches(null, null, false)")
    assert await due(conn) == []
    assert await fire(conn, found) == {}
    await conn.execute("select queen._throw_switches(null, null, true)")
    assert await fire(conn) == {"q": 2}


async def test_queues_that_encrypt_are_found(conn: asyncpg.Connection) -> None:
    """Step 3.1 encrypted: refused where the queue encrypts by itself."""
    await timers(conn, schedule("k", 0), {**schedule("k", 0), "queue": "open"})
    await fire(conn)
    await conn.execute("update queen.queues set encryption_enabled = true where name = 'q'")
    rows = await conn.fetch("select * from queen._timers_encrypting(1, '{q,open,unknown}')")
    assert [row["encrypting_queue"] for row in rows] == ["q"]
