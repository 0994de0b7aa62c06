"""The client over every kind of connection, inside the caller's transaction."""

import inspect
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from queen_pg import client as queen
from tests.client.conftest import Door

FUNCTIONS = {
    name: value for name, value in vars(queen).items() if isinstance(value, queen._Function)
}


async def test_a_push_commits_with_the_caller_and_not_before(door: Door, database: str) -> None:
    beside = await asyncpg.connect(database)
    count = "select count(*) from queen.messages"
    pushed = await door.call(
        queen.push, "orders", {"orderId": 9137}, partition="order-9137", transaction_id="t"
    )
    assert (pushed.status, pushed.message_offset) == ("queued", 0)
    assert isinstance(pushed.message_id, UUID)
    again = await door.call(queen.push, "orders", None, "order-9137", "t")
    assert (again.status, again.message_id) == ("duplicate", pushed.message_id)
    assert await beside.fetchval(count) == 0
    await door.commit()
    assert await beside.fetchval(count) == 1
    await door.call(queen.push, "orders", [1, 2.5, "ü%s", None])
    await door.rollback()
    assert await beside.fetchval(count) == 1
    await beside.close()


async def test_a_worker_s_day(door: Door) -> None:
    await door.call(
        queen.push_many,
        [
            {"queue": "orders", "partition": "a", "payload": {"n": 1}, "transactionId": "t1"},
            {"queue": "orders", "partition": "a", "payload": None, "transactionId": "t2"},
            {"queue": "orders", "partition": "b", "payload": "%(x)s :y"},
        ],
    )
    messages = await door.call(
        queen.pop, "orders", "g", batch=10, partitions=5, subscription_mode="all"
    )
    assert [message.payload for message in messages] == [{"n": 1}, None, "%(x)s :y"]
    first, second, third = messages
    assert (first.partition_name, first.delivery_attempt) == ("a", 1)
    assert first.created_at.tzinfo is not None
    renewed = await door.call(queen.extend_lease, first.lease_id, 600)
    assert renewed.renewed == 2
    nacked = await door.call(
        queen.nack,
        third.partition_id,
        third.transaction_id,
        third.lease_id,
        "g",
        error="broken",
        status="dlq",
    )
    assert nacked.dead_lettered
    answer = await door.call(
        queen.transaction,
        {
            "operations": [
                {
                    "type": "ack",
                    "transactionId": "t2",
                    "partitionId": str(second.partition_id),
                    "leaseId": str(second.lease_id),
                    "consumerGroup": "g",
                },
                {"type": "push", "items": [{"queue": "receipts", "payload": {"n": 2}}]},
            ]
        },
    )
    assert answer["success"]
    late = await door.call(queen.ack, first.partition_id, "t1", UUID(int=1), "g")
    assert (late.success, "lease" in late.refusal) == (False, True)
    assert await door.call(queen.seek, "orders", "g", "beginning") == 2
    assert await door.call(queen.seek, "orders", "g", moment=datetime.now(UTC)) == 2
    gone = await door.call(queen.dlq_replay, UUID(int=0))
    assert (gone.result, gone.message_id) == ("gone", None)
    await door.commit()


async def test_a_batch_of_any_texts(door: Door) -> None:
    names = ['a"b', "c\\d", "{e,f}", None, "NULL"]
    rows = await door.call(
        queen.push_batch, "orders", [*names, {"%s": ":x"}], partitions=[*names, "g"]
    )
    assert [row.status for row in rows] == ["queued"] * 6
    rows = await door.call(
        queen.push_batch, "orders", [1, 2], "g", transaction_ids=["t", None], notify=False
    )
    assert [row.message_offset for row in rows] == [1, 2]
    popped = await door.call(
        queen.pop, "orders", "g", batch=10, partitions=10, subscription_mode="all"
    )
    assert {message.partition_name: message.payload for message in popped} == {
        **{name: name for name in names if name}, "Default": None, "g": 2,
    }  # fmt: skip
    assert await door.call(queen.push_batch, "orders", []) == []
    await door.rollback()


async def test_keys_timers_locks_and_queues(door: Door) -> None:
    hour = timedelta(hours=1)
    put = await door.call(queen.kv_put, "n", "k", {"a": None}, ttl=hour, expect=0)
    assert (put.applied, put.stored) == (True, {"a": None})
    got = await door.call(queen.kv_get, "n", "k")
    assert (got.value, got.version) == ({"a": None}, put.version)
    assert got.expires_at - got.updated_at == hour
    assert await door.call(queen.kv_get, "n", "nothing") is None
    lost = await door.call(queen.kv_put, "n", "k", 1, expect=put.version + 1)
    assert (lost.applied, lost.reason) == (False, "version")
    assert (await door.call(queen.kv_check, "n", "k", put.version)).applied
    assert (await door.call(queen.kv_incr, "n", "c", 1.5, maximum=2)).stored == 1.5
    assert [row.key for row in await door.call(queen.kv_list, "n", "k")] == ["k"]
    assert [await door.call(queen.kv_once, "n", "o") for _ in range(2)] == [True, False]
    assert (await door.call(queen.kv_delete, "n", "k")).applied

    scheduled = await door.call(queen.timer_schedule, "orders", "k", {"a": 1}, delay=hour)
    assert scheduled.status == "scheduled"
    moment = datetime(2031, 1, 1, tzinfo=UTC)
    again = await door.call(queen.timer_schedule, "orders", "k", None, deliver_at=moment)
    assert (again.status, again.due_at) == ("rescheduled", moment)
    assert [await door.call(queen.timer_cancel, "orders", "k") for _ in range(2)] == [True, False]

    permit = await door.call(queen.lock_acquire, "l", hour, owner="me")
    assert (permit.acquired, permit.slot) == (True, 0)
    assert not (await door.call(queen.lock_acquire, "l", hour, owner="you")).acquired
    assert [holder.owner for holder in await door.call(queen.lock_holders, "l")] == ["me"]
    renewed = await door.call(queen.lock_renew, "l", permit.token, hour)
    assert not await door.call(queen.lock_check, "l", permit.token)
    assert await door.call(queen.lock_check, "l", renewed.new_token)
    assert await door.call(queen.lock_release, "l", renewed.new_token)

    made = await door.call(queen.configure, "orders", {"leaseTime": 7})
    assert made.settings["leaseTime"] == 7
    assert (await door.call(queen.configure, "orders")).settings["leaseTime"] == 7
    assert await door.call(queen.delete_queue, "orders")
    await door.commit()


async def test_an_error_is_the_driver_s_own(door: Door) -> None:
    with pytest.raises(Exception, match="a queue needs a name"):
        await door.call(queen.push, "", 1)
    await door.rollback()


def test_a_moment_without_a_time_zone_is_refused() -> None:
    connection: Any = object()
    with pytest.raises(ValueError, match="time zone"):
        queen.seek(connection, "orders", "g", moment=datetime(2031, 1, 1))


async def test_the_functions_and_their_arguments_are_those_of_the_database(
    conn: asyncpg.Connection,
) -> None:
    rows = await conn.fetch(
        "select p.proname, p.proargnames[1:p.pronargs] as arguments from pg_proc p"
        " where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_'"
        " and p.proname not in ('now', 'current_tenant')"
    )
    theirs = {row["proname"]: list(row["arguments"]) for row in rows}
    ours = {
        name: list(inspect.signature(function).parameters) for name, function in FUNCTIONS.items()
    }
    assert ours == theirs
