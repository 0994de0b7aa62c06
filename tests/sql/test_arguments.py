"""Whatever an argument is given, a public function answers, or refuses it by name."""

import json
from collections.abc import Iterator

import asyncpg
import pytest

FUNCTIONS = """
select p.proname as name, p.pronargs - p.pronargdefaults as required, p.proargnames as arguments,
       array(select format_type(t, null) from unnest(p.proargtypes) with ordinality u (t, place)
             order by place) as types
from pg_proc p
where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_' and p.pronargs > 0 order by 1
"""
# What each argument without a default is given while another one is strange.
ORDINARY = {
    "queue": "'orders'", "payload": "'1'", "payloads": "'{1}'", "messages": "'[]'",
    "partition_id": "1",
    "transaction_id": "'t'", "lease_id": "gen_random_uuid()", "namespace": "'n'", "key": "'k'",
    "value": "'1'", "expect": "0", "timer_key": "'k'", "name": "'l'", "ttl": "'1 minute'",
    "token": "1", "id": "gen_random_uuid()", "consumer_group": "'g'", "step": "'{}'",
}  # fmt: skip
# What else a call needs to be about the strange argument.
BESIDE = {
    "timer_schedule": {"delay": "'1 hour'"},
    "seek": {"target": "'end'", "partition": "'p'"},
}
INSTEAD = {"deliver_at": "delay", "moment": "target", "next_offset": "target"}
STRANGE = {
    "text": (
        *("null", "''", "' '", "'_x'", "'a/b'", "E'a\\x01b'"),
        *("repeat('x', 500)", "repeat('ü', 300)", "repeat('x', 70000)"),
    ),
    "json": (
        *("null", "'null'", "'[]'", "'{}'", "'\"a\"'", "'[1]'", "'[null]'", "'[{}]'"),
        *("'[{\"queue\": \"q\", \"payload\": \"\\u0000\"}]'", "'[{\"queue\": \"\\ud800\"}]'"),
        *("'{\"kv\": 1}'", "'{\"kv\": [{\"op\": \"x\"}]}'", "'{\"positions\": [1]}'"),
        "'{\"kv\": [{\"op\": \"put\", \"ns\": \"n\", \"key\": \"\\u0000\", \"value\": 1}]}'",
        "'{\"kv\": [{\"op\": \"put\", \"ns\": \"n\", \"key\": \"k\", \"value\": 1,"
        " \"ttlSeconds\": 1e300}]}'",
        "'{\"timers\": [{\"op\": \"schedule\", \"queue\": \"q\", \"timerKey\": \"k\","
        " \"txn\": \"t\", \"delayMs\": -1e300, \"payload\": {}}]}'",
        "'{\"operations\": [{\"type\": \"ack\", \"transactionId\": \"t\","
        " \"partitionId\": \"99999999999999999999\"}]}'",
    ),
    "json[]": (
        *("null", "'{}'", "'{null}'", "'{1,null}'", "'{{1,2},{3,4}}'", "'[5:5]={1}'"),
        *("array[to_json(repeat('x', 1000001))]", "array[to_json(repeat('x', 16777216))]"),
    ),
    "text[]": (
        *("null", "'{}'", "'{null}'", "'{\"\"}'", "'{a,b}'", "'{{a}}'", "'[5:5]={a}'"),
        *("array[repeat('x', 500)]", "array[repeat('ü', 300)]", "array[repeat('x', 70000)]"),
    ),
    "jsonb": (
        *("null", "'null'", "'[]'", "'{\"x\": 1}'", "'{\"leaseTime\": \"x\"}'"),
        *("'{\"leaseTime\": 1e99}'", "'{\"retryLimit\": 1.5}'", "'{\"namespace\": 5}'"),
    ),
    "integer": ("null", "0", "-1", "2147483647", "-2147483648"),
    "bigint": ("null", "0", "-1", "9223372036854775807", "-9223372036854775808"),
    "numeric": ("null", "0", "'NaN'", "'Infinity'", "1e131000", "1e-300"),
    "interval": ("null", "'0'", "'-1 second'", "'1 microsecond'", "'1000000 years'",
                 "'-1000000 years'"),
    "timestamp with time zone": ("null", "'infinity'", "'-infinity'", "'4000-01-01 BC'",
                                 "'200000-01-01'"),
    "uuid": ("null", "'00000000-0000-0000-0000-000000000000'"),
    "boolean": ("null", "true", "false"),
}  # fmt: skip


def calls(function: asyncpg.Record) -> Iterator[str]:
    """Yield calls in which one argument after the other is strange, in each way of its type."""
    types = dict(zip(function["arguments"], function["types"], strict=False))
    ordinary = {name: ORDINARY[name] for name in function["arguments"][: function["required"]]}
    for name, kind in types.items():
        for value in STRANGE[kind]:
            given = {**ordinary, **BESIDE.get(function["name"], {}), name: value}
            given.pop(INSTEAD.get(name, ""), None)
            arguments = ", ".join(f"{n} => ({v})::{types[n]}" for n, v in given.items())
            yield f"select * from queen.{function['name']}({arguments})"


async def error_of(conn: asyncpg.Connection, call: str) -> asyncpg.PostgresError | None:
    """Return how a call fails, if it does, and leave nothing behind."""
    attempt = conn.transaction()
    await attempt.start()
    try:
        await conn.fetch(call)
    except asyncpg.PostgresError as error:
        return error
    finally:
        await attempt.rollback()
    return None


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
async def test_no_argument_leads_to_an_error_of_postgresql(
    conn: asyncpg.Connection, plans: str
) -> None:
    """In both ways of planning: what the planner works out early is not behind any condition."""
    await conn.execute(f"set plan_cache_mode = {plans}")
    await conn.execute("select queen.push('orders', '1', 'p')")
    refused = 0
    for function in await conn.fetch(FUNCTIONS):
        for call in calls(function):
            error = await error_of(conn, call)
            if error is not None:
                assert error.sqlstate.startswith("QU"), f"{call}: {error.sqlstate} {error}"
                assert json.loads(error.detail).get("argument"), call
                refused += 1
    assert refused > 100


async def test_a_document_may_hold_any_escape_of_a_character(conn: asyncpg.Connection) -> None:
    text = r'[{"queue":"q","payload":"\ud83d\ude00 \\u0000 \\ud800"}]'
    await conn.execute("select queen.push_many($1)", text)
    stored = await conn.fetchval("select payload from queen.message where queue = 'q'")
    assert stored == r'"\ud83d\ude00 \\u0000 \\ud800"'


async def test_a_refused_document_says_what_would_do(conn: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute(r"""select queen.push_many('[{"queue":"q","payload":"\u0000"}]')""")
    assert refused.value.sqlstate == "QU000"
    assert "queen.push" in refused.value.hint
