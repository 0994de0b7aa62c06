"""queen.transaction: one step in the caller's transaction, and what it says of a bad document."""

import asyncio
import base64
import json
from typing import Any

import asyncpg
import pytest

from tests.support.sessions import sessions, until_waiting

FOREVER = {"forever": True}


async def run(conn: asyncpg.Connection, **step: Any) -> dict[str, Any]:
    answer = await conn.fetchval("select queen.transaction($1)", json.dumps(step))
    return dict(json.loads(answer))


def push(*items: dict[str, Any], queue: str = "out") -> dict[str, Any]:
    return {"type": "push", "items": [{"queue": queue, "payload": 1} | item for item in items]}


def put(key: str, **more: Any) -> dict[str, Any]:
    return {"op": "put", "ns": "n", "key": key, "value": 1} | FOREVER | more


def schedule(key: str, **more: Any) -> dict[str, Any]:
    fields = {"queue": "later", "timerKey": key, "delayMs": 60_000, "txn": "t", "payload": {}}
    return {"op": "schedule"} | fields | more


async def popped(conn: asyncpg.Connection, count: int = 1) -> list[asyncpg.Record]:
    for number in range(count):
        await conn.execute("select queen.push('in', '1', 'p', $1)", f"t{number}")
    return list(
        await conn.fetch(
            "select * from queen.pop('in', 'g', batch => 99, subscription_mode => 'all')"
        )
    )


def ack(row: asyncpg.Record, **more: Any) -> dict[str, Any]:
    return {
        "type": "ack",
        "transactionId": row["transaction_id"],
        "partitionId": str(row["partition_id"]),
        "leaseId": str(row["lease_id"]),
        "consumerGroup": "g",
    } | more


WRITTEN = """
select (select count(*) from queen.messages m join queen.partitions p on p.id = m.partition_id
        join queen.queues q on q.id = p.queue_id where q.name <> 'in') as messages,
       (select count(*) from queen.kv_live) as keys, (select count(*) from queen.timers) as timers,
       (select count(*) from queen.partitions) as partitions,
       (select count(*) from queen.queues) as queues,
       (select count(*) from queen.consumer_groups) as groups
"""


async def test_a_step_answers_one_result_for_each_part(conn: asyncpg.Connection) -> None:
    [row] = await popped(conn)
    answer = await run(
        conn,
        operations=[push({"transactionId": "a"}, {"transactionId": "a"}), ack(row), push({})],
        kv=[put("k"), {"op": "get", "ns": "n", "key": "k"}],
        timers=[schedule("k"), {"op": "cancel", "queue": "later", "timerKey": "x"}],
        positions=[{"queue": "in", "consumerGroup": "other", "partition": "p", "offset": 1}],
    )
    assert answer["success"]
    results = answer["results"]
    assert [result["index"] for result in results] == list(range(9))
    assert [result["type"] for result in results] == [
        *("push", "push", "ack", "push", "kv", "kv", "timer", "timer", "position")
    ]
    first, again, acked, minted = results[:4]
    assert again == first | {"index": 1, "duplicate": True}
    assert acked == {
        **{"index": 2, "type": "ack", "success": True, "transactionId": "t0"},
        **{"error": None, "dlq": False},
    }
    assert minted["transactionId"] == minted["messageId"]
    assert (results[4]["opIndex"], results[5]["opIndex"], results[5]["found"]) == (0, 1, True)
    assert (results[6]["status"], results[7]["status"]) == ("scheduled", "absent")
    assert results[8] == {"index": 8, "opIndex": 0, "type": "position", "success": True}


async def test_payloads_and_values_stay_as_they_were_sent(conn: asyncpg.Connection) -> None:
    step = (
        '{"operations": [{"type": "push", "items": [{"queue": "q",'
        ' "payload":  {"b": 1.50, "b": 2}}]},'
        ' {"type": "push", "queue": "q", "payload": 1E2}],'
        ' "kv": [{"op": "put", "ns": "n", "key": "k", "forever": true, "value":  [1.0,  2]}],'
        ' "timers": [{"op": "schedule", "queue": "q", "timerKey": "k", "delayMs": 1, "txn": "t",'
        f' "payload": "{base64.b64encode(b"[1.0,  2]").decode()}"}}]}}'
    )
    assert json.loads(await conn.fetchval("select queen.transaction($1)", step))["success"]
    payloads = await conn.fetch("select payload::text from queen.message order by message_offset")
    assert [row[0] for row in payloads] == ['{"b": 1.50, "b": 2}', "1E2"]
    assert await conn.fetchval("select value::text from queen.kv") == "[1.0,  2]"
    assert await conn.fetchval("select payload::text from queen.timers") == "[1.0,  2]"


async def test_the_same_step_again_is_refused_and_the_caller_goes_on(
    conn: asyncpg.Connection,
) -> None:
    [row] = await popped(conn)
    step = {"operations": [ack(row), push({})], "kv": [put("k")]}
    assert (await run(conn, **step))["success"]
    before = await conn.fetchrow(WRITTEN)
    again = await run(conn, **step)
    assert (again["success"], again["reason"], again["results"]) == (False, "rejected_ack", [])
    assert "rolled back" in again["error"]
    assert await conn.fetchrow(WRITTEN) == before


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"operations": [push({"transactionId": "known"}, {}, {"partition": "new"})]}, "duplicate"),
        (
            {
                "operations": [push({}, queue="new")],
                "kv": [put("a"), put("taken", expect=0, required=True)],
                "timers": [schedule("k")],
            },
            "kv_precondition",
        ),
        (
            {
                "positions": [
                    {"queue": "out", "consumerGroup": "g", "offset": 0},
                    {"queue": "none", "consumerGroup": "g", "offset": 0},
                ]
            },
            "queue_not_found",
        ),
        (
            {
                "operations": [{"type": "ack", "transactionId": "x", "partitionId": "4711"}],
                "kv": [put("a")],
            },
            "rejected_ack",
        ),
    ],
)
async def test_a_refused_step_leaves_nothing_behind(
    conn: asyncpg.Connection, step: dict[str, Any], reason: str
) -> None:
    assert (await run(conn, operations=[push({"transactionId": "known"})], kv=[put("taken")]))[
        "success"
    ]
    before = await conn.fetchrow(WRITTEN)
    answer = await run(conn, **step)
    assert (answer["success"], answer["reason"]) == (False, reason)
    assert await conn.fetchrow(WRITTEN) == before


async def test_a_lost_condition_says_which_and_why(conn: asyncpg.Connection) -> None:
    await run(conn, kv=[put("taken", value={"by": "me"})])
    answer = await run(
        conn,
        operations=[push({}, {})],
        kv=[put("a"), {"op": "check", "ns": "n", "key": "taken", "expect": 99, "required": True}],
    )
    assert (answer["ok"], answer["failedIndex"], answer["kvReason"]) == (False, 3, "version")
    assert answer["version"] > 0
    assert answer["value"] == {"by": "me"}


async def test_a_condition_that_is_not_required_loses_alone(conn: asyncpg.Connection) -> None:
    await run(conn, kv=[put("taken")])
    answer = await run(conn, operations=[push({})], kv=[put("taken", expect=0)])
    assert answer["success"]
    assert (answer["results"][1]["applied"], answer["results"][1]["reason"]) == (False, "exists")


async def test_an_ack_without_a_lease_gets_the_one_that_the_step_names(
    conn: asyncpg.Connection,
) -> None:
    rows = await popped(conn, 2)
    lent = str(rows[0]["lease_id"])
    answer = await run(
        conn,
        operations=[ack(rows[0], leaseId=""), ack(rows[1], leaseId=None, status="FAILED")],
        requiredLeases=[lent],
    )
    assert answer["success"]
    assert await conn.fetchval("select retry_count from queen.cursors") == 1


@pytest.mark.parametrize("surface", ["kv", "timers_schedule"])
async def test_a_surface_that_is_paused_refuses_the_step(
    conn: asyncpg.Connection, surface: str
) -> None:
    await conn.execute("update queen.switches set enabled = false where name = $1", surface)
    parts = {"kv": [put("k")]} if surface == "kv" else {"timers": [schedule("k")]}
    answer = await run(conn, operations=[push({})], **parts)
    assert (answer["success"], answer["reason"]) == (
        False,
        "kv_disabled" if surface == "kv" else "timers_disabled",
    )
    assert (await run(conn, timers=[{"op": "cancel", "queue": "q", "timerKey": "k"}]))["success"]


BAD: list[tuple[Any, str, str]] = [
    ({}, "step", "bad_request"),
    ({"operations": {}}, "operations", "bad_request"),
    ({"operations": [{"type": "kv"}]}, "operations[0].type", "bad_request"),
    ({"operations": [1]}, "operations[0].type", "bad_request"),
    (
        {"operations": [{"type": "push", "items": [{}]}]},
        "operations[0].items[0].queue",
        "bad_request",
    ),
    ({"operations": [{"type": "push", "items": [1]}]}, "operations[0].items[0]", "bad_request"),
    ({"operations": [push({"queue": 1})]}, "operations[0].items[0].queue", "bad_request"),
    ({"operations": [{"type": "push", "queue": "q"}]}, "operations[0].payload", ""),
    (
        {"operations": [{"type": "ack", "transactionId": "t"}]},
        "operations[0].partitionId",
        "bad_request",
    ),
    (
        {"operations": [{"type": "ack", "partitionId": "1", "error": 1}]},
        "operations[0].error",
        "bad_request",
    ),
    ({"kv": [1]}, "kv[0]", "kv_bad_request"),
    ({"kv": [{"op": "swap"}]}, "kv[0].op", "kv_unknown_op"),
    ({"kv": [{"op": "getPrefix"}]}, "kv[0].op", "kv_get_prefix_not_allowed_in_transaction"),
    ({"kv": [put("k", tenant=1)]}, "kv[0].tenant", "kv_tenant_not_an_input"),
    ({"kv": [put("k", ns="N")]}, "kv[0].ns", "kv_bad_namespace"),
    ({"kv": [put("")]}, "kv[0].key", "kv_bad_key"),
    ({"kv": [put("k" * 513)]}, "kv[0].key", "kv_key_too_large"),
    ({"kv": [put("k", ttlSeconds=0)]}, "kv[0].ttlSeconds", "kv_bad_ttl"),
    ({"kv": [put("k", ttlSeconds=1)]}, "kv[0].ttlSeconds", "kv_expiry_not_specified"),
    ({"kv": [put("k", forever=False)]}, "kv[0].ttlSeconds", "kv_expiry_not_specified"),
    ({"kv": [{"op": "put", "ns": "n", "key": "k"} | FOREVER]}, "kv[0].value", "kv_bad_request"),
    ({"kv": [put("k", value="v" * 65535)]}, "kv[0].value", "kv_value_too_large"),
    ({"kv": [put("k", expect=-1)]}, "kv[0].expect", "kv_bad_expect"),
    ({"kv": [put("k", expect=1.5)]}, "kv[0].expect", "kv_bad_expect"),
    ({"kv": [put("k", op="putIfAbsent", expect=1)]}, "kv[0].expect", "kv_bad_expect"),
    ({"kv": [{"op": "check", "ns": "n", "key": "k"}]}, "kv[0].expect", "kv_bad_expect"),
    ({"kv": [put("k", op="incr")]}, "kv[0].delta", "kv_bad_request"),
    ({"kv": [put("k", op="incr", delta="1")]}, "kv[0].delta", "kv_bad_request"),
    ({"kv": [put("k", op="incr", delta=1, max="x")]}, "kv[0].max", "kv_bad_request"),
    ({"kv": [put("k", op="incr", delta=1, expect=1)]}, "kv[0].expect", "kv_bad_request"),
    ({"kv": [put("k", required=1)]}, "kv[0].required", "kv_bad_request"),
    ({"kv": [{"op": "getMany", "ns": "n", "keys": 1}]}, "kv[0].keys", "kv_bad_request"),
    ({"kv": [put("k"), {"op": "delete", "ns": "n", "key": "k"}]}, "kv", "kv_duplicate_key_in_call"),
    ({"kv": [put(f"k{n}") for n in range(65)]}, "kv", "kv_too_many_ops"),
    (
        {"kv": [{"op": "getMany", "ns": "n", "keys": [f"k{n}" for n in range(257)]}]},
        "kv",
        "kv_too_many_keys",
    ),
    ({"timers": [1]}, "timers[0]", "timers_bad_op"),
    ({"timers": [schedule("k", _x=1)]}, "timers[0]._x", "timers_server_owned_field"),
    (
        {"timers": [schedule("k", producerSub="me")]},
        "timers[0].producerSub",
        "timers_server_owned_field",
    ),
    ({"timers": [schedule("k", deliverAt=1)]}, "timers[0].deliverAt", "timers_field_not_allowed"),
    ({"timers": [schedule("k", op="fire")]}, "timers[0].op", "timers_unknown_op"),
    ({"timers": [schedule("")]}, "timers[0].timerKey", "timers_key_required"),
    ({"timers": [schedule("k" * 2049)]}, "timers[0].timerKey", "timers_key_too_long"),
    ({"timers": [schedule("k", queue="")]}, "timers[0].queue", ""),
    ({"operations": [push({"queue": "q" * 412})]}, "operations[0].items[0].queue", ""),
    (
        {"operations": [push({"transactionId": "t" * 65536})]},
        "operations[0].items[0].transactionId",
        "",
    ),
    ({"timers": [schedule("k", partition="")]}, "timers[0].partition", "timers_bad_partition"),
    ({"timers": [schedule("k", delayMs="1")]}, "timers[0].delayMs", "timers_delay_required"),
    ({"timers": [schedule("k", txn="")]}, "timers[0].txn", "timers_txn_required"),
    ({"timers": [schedule("k", encrypted=1)]}, "timers[0].encrypted", "timers_bad_encrypted"),
    ({"timers": [schedule("k", payload="%")]}, "timers[0].payload", "timers_payload_not_base64"),
    ({"timers": [schedule("k", payload="e30x")]}, "timers[0].payload", "timers_payload_not_json"),
    ({"timers": [schedule("k"), schedule("k")]}, "timers", "timers_duplicate_key"),
    ({"positions": [1]}, "positions[0]", "bad_request"),
    ({"positions": [{"queue": "q"}]}, "positions[0]", "bad_request"),
    (
        {"positions": [{"queue": "q", "consumerGroup": "g", "offset": -1}]},
        "positions[0].offset",
        "bad_request",
    ),
    ({"positions": [{"queue": "q", "consumerGroup": "g"}]}, "positions[0].offset", "bad_request"),
    (
        {"positions": [{"queue": "q", "consumerGroup": "g", "offset": 1, "metadata": "m" * 4097}]},
        "positions[0].metadata",
        "bad_request",
    ),
]


@pytest.mark.parametrize(("step", "argument", "reason"), BAD, ids=[bad[1] + bad[2] for bad in BAD])
async def test_a_document_that_cannot_be_is_an_error_that_says_where(
    conn: asyncpg.Connection, step: dict[str, Any], argument: str, reason: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await run(conn, **step)
    assert caught.value.sqlstate in ("QU000", "QU001")
    detail = json.loads(caught.value.detail)
    assert detail["argument"] == argument
    assert detail.get("reason", "") == reason


async def test_an_encrypted_payload_is_said_so_and_not_encrypted_twice(
    conn: asyncpg.Connection,
) -> None:
    """Step 3.1 encrypted."""
    await run(conn, timers=[schedule("k", encrypted=True), schedule("l")])
    rows = await conn.fetch("select encrypted from queen.timers order by timer_key")
    assert [row["encrypted"] for row in rows] == [True, False]
    await conn.execute("select queen.configure('vault', '{\"encryptionEnabled\": true}')")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await run(conn, timers=[schedule("k", queue="vault", encrypted=True)])
    assert json.loads(caught.value.detail) == {
        "argument": "timers",
        "reason": "timers_encrypted_conflict",
    }


@pytest.mark.parametrize("document", ["null", "[]", "1"])
async def test_a_step_is_an_object(conn: asyncpg.Connection, document: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute("select queen.transaction($1)", document)
    assert json.loads(caught.value.detail)["argument"] == "step"


@pytest.mark.parametrize(
    ("messages", "argument"),
    [
        ("null", "messages"),
        ("{}", "messages"),
        ("[1]", "messages[0]"),
        ('[{"queue": "q", "payload": 1}, {"payload": 1}]', "messages[1].queue"),
        ('[{"queue": "q"}]', "messages[0].payload"),
    ],
)
async def test_push_many_says_which_message_is_wrong(
    conn: asyncpg.Connection, messages: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute("select queen.push_many($1)", messages)
    assert json.loads(caught.value.detail)["argument"] == argument


async def test_push_many_keeps_each_partition_in_the_array_s_order(
    conn: asyncpg.Connection,
) -> None:
    names = [(f"q{n % 2}", f"p{n % 3}") for n in range(20)]
    messages = [{"queue": q, "partition": p, "payload": n} for n, (q, p) in enumerate(names)]
    rows = await conn.fetch("select * from queen.push_many($1)", json.dumps(messages))
    assert [row["place"] for row in rows] == list(range(1, 21))
    stored = await conn.fetch(
        "select queue, partition, json_agg(payload order by message_offset) as numbers"
        " from queen.message group by 1, 2"
    )
    for row in stored:
        mine = [n for n, name in enumerate(names) if name == (row["queue"], row["partition"])]
        assert json.loads(row["numbers"]) == mine
    assert await conn.fetch("select * from queen.push_many('[]')") == []


async def test_a_step_s_push_that_meets_a_rival_s_is_judged_again(database: str) -> None:
    """The rival creates the partition, with the same transaction id in it."""
    async with sessions(database) as (first, second):
        step = {
            "operations": [push({"partition": "new", "transactionId": "same"})],
            "kv": [put("k")],
        }
        async with first.transaction():
            assert (await run(first, **step))["success"]
            rival = asyncio.create_task(run(second, **step))
            await until_waiting(first, second)
        answer = await rival
        assert (answer["success"], answer["reason"]) == (False, "duplicate")


async def test_a_step_s_gate_that_meets_a_rival_s_is_judged_again(database: str) -> None:
    async with sessions(database) as (first, second):
        gate = put("gate", op="putIfAbsent", required=True)
        async with first.transaction():
            assert (await run(first, operations=[push({})], kv=[gate]))["success"]
            # The rival's own writes come first, and must go again.
            rival = asyncio.create_task(
                run(second, operations=[push({"partition": "other"})], kv=[gate])
            )
            await until_waiting(first, second)
        answer = await rival
        assert (answer["reason"], answer["kvReason"]) == ("kv_precondition", "exists")
        assert await first.fetchval("select count(*) from queen.messages") == 1


async def test_a_checked_absence_holds_until_the_commit(database: str) -> None:
    """Below SERIALIZABLE nothing but a row keeps a key from being created meanwhile."""
    async with sessions(database) as (first, second):
        check = {"op": "check", "ns": "n", "key": "absent", "expect": 0, "required": True}
        async with first.transaction():
            assert (await run(first, kv=[check]))["success"]
            writing = asyncio.create_task(
                second.fetchrow("select * from queen.kv_put('n', 'absent', '1', expect => 0)")
            )
            await until_waiting(first, second)
            assert await first.fetchrow("select * from queen.kv_get('n', 'absent')") is None
        assert (await writing)["applied"]


async def test_rivals_for_one_message_settle_it_once(database: str) -> None:
    async with sessions(database) as (first, second):
        [row] = await popped(first)
        step = {"operations": [ack(row), push({})]}
        async with first.transaction():
            assert (await run(first, **step))["success"]
            rival = asyncio.create_task(run(second, **step))
            await until_waiting(first, second)
        assert (await rival)["reason"] == "rejected_ack"


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_above_read_committed_a_lost_race_asks_for_another_run(
    database: str, isolation: str
) -> None:
    async with sessions(database) as (first, second):
        await run(first, operations=[push({"partition": "p"})])
        transaction = second.transaction(isolation=isolation)
        await transaction.start()
        await second.fetchval("select count(*) from queen.queues")
        step = {"operations": [push({"partition": "new", "transactionId": "same"})]}
        assert (await run(first, **step))["success"]
        with pytest.raises(asyncpg.SerializationError):
            await run(second, **step)
        await transaction.rollback()
        assert (await run(second, **step))["reason"] == "duplicate"
