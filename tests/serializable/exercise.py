"""Every state-changing function of the broker, run at least once through the broker's own doors."""

from typing import Any

import msgspec

from queen_pg.broker import kv, lease, lock, queue, timer, timer_document, timer_fire
from queen_pg.broker.ack import AckItem, ack
from queen_pg.broker.partition import PartitionIds, resolve
from queen_pg.broker.pop import PopAnswer, PopRequest
from queen_pg.broker.push import PushItem, push
from queen_pg.broker.transaction import Position, Transaction, TransactionAck, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Signal
from queen_pg.wakeup import Waiters
from tests.support.isolation import soon

TTL = {"ttlSeconds": 600}


def item(queue_name: str, partition: str, transaction_id: str | None = None) -> PushItem:
    return PushItem(queue_name, partition, b'{"n": 1}', transaction_id)


async def exercise(db: Database, queue_name: str) -> None:
    """Run all there is on a queue, which may exist and hold anything."""
    waiters = Waiters(db, Settings())
    try:
        await _push(db, queue_name)
        await _consume(db, waiters, queue_name)
        await _step(db, waiters, queue_name)
        await _keep_state(db, queue_name)
        await _wait_for_time(db, queue_name)
        await _administer(db, queue_name)
    finally:
        await waiters.close()


async def _push(db: Database, queue_name: str) -> None:
    names = [f"{queue_name}-{number}" for number in range(6)]
    await push(db, 1, [item(queue_name, name, "first") for name in names], soon())
    await push(db, 1, [item(queue_name, name) for name in names], soon())
    again = [item(queue_name, name, "first") for name in names]
    new = [item(queue_name, f"{queue_name}-new", name) for name in ("a", "a", "b")]
    results = await push(db, 1, [*again, *new], soon())
    assert [result.status for result in results] == ["duplicate"] * 6 + [
        "queued",
        "duplicate",
        "queued",
    ]
    ids = await PartitionIds(db).ensure(1, [(queue_name, "ahead"), (queue_name, names[0])], soon())
    assert len(ids) == 2


async def _pop(waiters: Waiters, queue_name: str, group: str | None, **more: Any) -> PopAnswer:
    answer = await waiters.pop(
        1,
        PopRequest(
            queue=queue_name,
            consumer_group=group,
            subscription_mode="all",
            **{"batch": 100, "partitions": 10} | more,
        ),
    )
    assert answer.claims
    return answer


async def _consume(db: Database, waiters: Waiters, queue_name: str) -> None:
    answer = await _pop(waiters, queue_name, "workers")
    await _pop(waiters, queue_name, None)
    await _pop(waiters, queue_name, "single", partition=f"{queue_name}-1", partitions=1)
    await _pop(waiters, queue_name, "newest", conflation=True)
    await _pop(waiters, queue_name, "fast", commit_on_delivery=True)
    late = PopRequest(
        queue=queue_name,
        partition=f"{queue_name}-1",
        consumer_group="late",
        subscription_mode="new",
    )
    assert not (await waiters.pop(1, late)).claims
    lease_id = str(answer.lease_id)
    assert (await lease.extend(db, 1, lease_id, 120, soon())).renewed == len(answer.claims)
    for claim, status in zip(
        answer.claims, ("completed", "failed", "dlq", "retry", "completed"), strict=False
    ):
        acks = [
            AckItem(claim.partition_id, message.transaction_id, status, "why", lease_id)
            for message in claim.messages
        ]
        acked = await ack(db, 1, "workers", acks, soon())
        assert all(result.success for result in acked.results)
    await ack(db, 1, "workers", [AckItem(2**62, "of no partition")], soon())

    answer = await _pop(waiters, queue_name, "workers")
    assert answer.lease_id is not None
    await lease.give_back(
        db,
        answer.lease_id,
        [claim.partition_id for claim in answer.claims],
        await _group_id(db, queue_name),
        soon(),
    )


async def _group_id(db: Database, queue_name: str) -> int:
    [row] = await db.read("_subscription", tenant=1, queue=queue_name, consumer_group="workers")
    group_id: int = row["group_id"]
    return group_id


async def _step(db: Database, waiters: Waiters, queue_name: str) -> None:
    answer = await _pop(waiters, queue_name, "workers", partitions=2)
    claim = answer.claims[0]
    step = Transaction(
        acks=[
            TransactionAck(
                claim.partition_id,
                message.transaction_id,
                lease_id=str(answer.lease_id),
                consumer_group="workers",
            )
            for message in claim.messages
        ],
        items=[
            item(queue_name, f"{queue_name}-1", "out"),
            item(f"{queue_name}-out", "new", "out"),
            item(f"{queue_name}-out", "new", "out"),
        ],
        kv=[
            {"op": "check", "ns": "steps", "key": f"{queue_name}-absent", "expect": 0},
            {"op": "delete", "ns": "steps", "key": f"{queue_name}-absent-too"},
            {"op": "get", "ns": "steps", "key": f"{queue_name}-unknown"},
            {"op": "getMany", "ns": "steps", "keys": ["one", "two"]},
            {"op": "incr", "ns": "steps", "key": "count", "delta": 1, **TTL},
            {"op": "put", "ns": "steps", "key": queue_name, "value": "1", **TTL},
            {"op": "putIfAbsent", "ns": "gates", "key": queue_name, "value": "1", "required": True},
        ],
        timers=[
            *_schedules(queue_name),
            {"op": "cancel", "queue": queue_name, "timerKey": "none"},
        ],
        positions=[
            Position(queue_name, "workers", f"{queue_name}-3", 1),
            Position(queue_name, "readers", f"{queue_name}-4", 1),
            Position(queue_name, "workers", f"{queue_name}-5", None),
        ],
    )  # fmt: skip
    assert (await commit(db, 1, step, soon())).success
    assert (await commit(db, 1, step, soon())).reason == "rejected_ack"
    again = Transaction(items=step.items)
    assert (await commit(db, 1, again, soon())).reason == "duplicate"
    gated = Transaction(items=[item(queue_name, f"{queue_name}-2", "gated")], kv=step.kv)
    assert (await commit(db, 1, gated, soon())).reason == "kv_precondition"
    twice = Transaction(
        items=[item(queue_name, f"{queue_name}-2", "twice")] * 2,
        kv=step.kv[:-1],
        timers=step.timers,
    )
    assert (await commit(db, 1, twice, soon())).success
    answer = await _pop(waiters, queue_name, "workers", partitions=2)
    common = Transaction(
        acks=[
            TransactionAck(
                claim.partition_id,
                message.transaction_id,
                lease_id=str(answer.lease_id),
                consumer_group="workers",
            )
            for claim in answer.claims
            for message in claim.messages
        ],
        items=[item(queue_name, f"{queue_name}-2", "common")],
        kv=step.kv[:-1],
        timers=step.timers,
    )
    assert (await commit(db, 1, common, soon())).success


def _schedules(queue_name: str) -> list[dict[str, Any]]:
    return [
        {
            "op": "schedule",
            "queue": queue_name,
            "timerKey": f"timer-{number}",
            "delayMs": -10,
            "txn": f"timer-{number}-{queue_name}",
            "payload": "{}",
            "partition": f"{queue_name}-{number}",
        }
        for number in range(3)
    ]


async def _keep_state(db: Database, queue_name: str) -> None:
    key = {"ns": "state", "key": queue_name}
    calls: list[dict[str, Any]] = [
        {"op": "check", **key, "expect": 0},
        {"op": "delete", **key},
        {"op": "get", **key},
        {"op": "getMany", "ns": "state", "keys": [queue_name, "other"]},
        {"op": "putIfAbsent", **key, "value": "1", **TTL},
        {"op": "putIfAbsent", **key, "value": "1", **TTL, "required": True},
        {"op": "incr", **key, "delta": 2, **TTL},
        {"op": "incr", **key, "delta": 2, "max": 4, **TTL},
        {"op": "put", **key, "value": "{}", **TTL},
        {"op": "put", **key, "value": "{}", "expect": 1, **TTL},
        {"op": "check", **key, "expect": 1},
        {"op": "delete", **key},
        {"op": "put", **key, "value": "{}", "expect": 1, **TTL},
    ]
    for call in calls:
        # Two, so that a get is not alone: alone it is no step.
        await kv.run(db, 1, [call, {"op": "get", "ns": "state", "key": "beside"}], soon())
        try:
            await _run(db, "_kv", [call], careful=True)
        except Signal as signal:
            raise AssertionError(f"{call} refused in a careful run") from signal
    tokens: dict[str, int] = {}
    for operation in (
        {"op": "acquire", "name": queue_name, "owner": "me", **TTL},
        {"op": "acquire", "name": queue_name, "owner": "you", **TTL},
        {"op": "acquire", "name": f"{queue_name}-many", "owner": "me", "limit": 3, **TTL},
        {"op": "renew", "name": queue_name, "owner": "me", **TTL},
        {"op": "get", "name": queue_name},
        {"op": "release", "name": queue_name},
        {"op": "renew", "name": queue_name, **TTL},
    ):
        if operation["op"] in ("renew", "release"):
            operation["token"] = tokens.get(queue_name, 1)
        [result] = await lock.run(db, 1, [operation], soon())
        answer = msgspec.json.decode(result)
        if "token" in answer:
            tokens[answer["name"]] = answer["token"]


async def _run(db: Database, function: str, operations: list[dict[str, Any]], **more: Any) -> None:
    await db.step(
        function,
        deadline=soon(),
        tenant=1,
        operations=msgspec.json.encode(operations).decode(),
        **more,
    )


async def _wait_for_time(db: Database, queue_name: str) -> None:
    await timer.run(db, 1, _schedules(queue_name), soon())
    await _fire(db)
    # Their ids are known already: fired carefully, they add nothing.
    await timer.run(db, 1, _schedules(queue_name), soon())
    await _fire(db)
    await timer.run(db, 1, _schedules(queue_name), soon())
    for attempts_max in (2, 2):
        await db.step(
            "_timer_fail",
            deadline=soon(),
            tenant=1,
            queue=queue_name,
            timer_key="timer-0",
            error="why",
            attempts_max=attempts_max,
        )
    await db.step(
        "_timer_fail",
        deadline=soon(),
        tenant=1,
        queue=queue_name,
        timer_key="timer-1",
        error="why",
        attempts_max=1,
    )
    await timer.run(
        db,
        1,
        [timer_document.cancel(queue_name, f"timer-{number}", None) for number in range(3)],
        soon(),
    )


async def _fire(db: Database) -> None:
    timers, _ = await timer_fire.due(db)
    mine = [due for due in timers if due["tenant"] == 1]
    assert mine
    await timer_fire.fire(db, 1, mine, 5, soon())


async def _administer(db: Database, queue_name: str) -> None:
    await queue.configure(db, 1, queue_name, {"leaseTime": 30}, soon(), replace=False)
    await queue.configure(db, 1, f"{queue_name}-set", {"leaseTime": 30}, soon(), replace=True)
    name = (queue_name, f"{queue_name}-0")
    partition_id = (await resolve(db, 1, [name], soon()))[name]
    await db.step("_raise_log_start", deadline=soon(), partition_id=[partition_id], keep_from=[1])
    await db.step(
        "_forget_messages",
        deadline=soon(),
        partition_id=[partition_id],
        forget_below=[1],
        batch_max=10,
    )
    ahead = (await resolve(db, 1, [(queue_name, "ahead")], soon()))[queue_name, "ahead"]
    await db.step("_delete_partitions", deadline=soon(), partition_id=[ahead], cleanup_days=0)
