"""KV in the database: conditions, results, order, versions and expiry (step 2.1 to 2.8)."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.support.database import set_clock

START = datetime(2030, 1, 1, 12, tzinfo=UTC)
MEBIBYTE = 1024 * 1024

Operation = dict[str, Any]


@pytest_asyncio.fixture(autouse=True)
async def clock(conn: asyncpg.Connection) -> None:
    await set_clock(conn, START)


@pytest.fixture(params=[False, True], ids=["optimistic", "careful"])
def careful(request: pytest.FixtureRequest) -> bool:
    """Every rule holds for both ways of carrying a call out."""
    return bool(request.param)


async def later(conn: asyncpg.Connection, seconds: float) -> None:
    await set_clock(conn, START + timedelta(seconds=seconds))


async def raw(
    conn: asyncpg.Connection, *operations: Operation, careful: bool = False
) -> list[asyncpg.Record]:
    rows = await conn.fetch(
        "select * from queen._kv(1, $1, $2) order by operation_index",
        json.dumps(operations),
        careful,
    )
    return list(rows)


async def kv(
    conn: asyncpg.Connection, *operations: Operation, careful: bool = False
) -> list[dict[str, Any]]:
    """Carry out a call whose operations must all be answered, and return the elements."""
    rows = await raw(conn, *operations, careful=careful)
    assert [row["verdict"] for row in rows] == ["done"] * len(operations)
    assert [row["operation_index"] for row in rows] == list(range(len(operations)))
    return [json.loads(row["result"]) for row in rows]


def put(key: str, value: Any = 1, ttl: Any = 60, **more: Any) -> Operation:
    return {
        "op": "put",
        "ns": "n",
        "key": key,
        "value": json.dumps(value),
        "ttlSeconds": ttl,
        **more,
    }


def once(key: str, value: Any = 1, ttl: Any = 60, **more: Any) -> Operation:
    return {**put(key, value, ttl, **more), "op": "putIfAbsent"}


def incr(key: str, delta: Any = 1, ttl: Any = 60, **more: Any) -> Operation:
    return {"op": "incr", "ns": "n", "key": key, "delta": delta, "ttlSeconds": ttl, **more}


def check(key: str, expect: int, **more: Any) -> Operation:
    return {"op": "check", "ns": "n", "key": key, "expect": expect, **more}


def delete(key: str, **more: Any) -> Operation:
    return {"op": "delete", "ns": "n", "key": key, **more}


def get(key: str) -> Operation:
    return {"op": "get", "ns": "n", "key": key}


async def version_of(conn: asyncpg.Connection, key: str) -> int:
    [found] = await kv(conn, get(key))
    version: int = found.get("version", 0)
    return version


# 2.4: what applies, and what is answered when it does not


async def test_put_writes_always_and_gives_a_new_expiry(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.4 put without expect: always applies; the lifetime is this operation's."""
    [first] = await kv(conn, put("k", {"a": 1}, ttl=60), careful=careful)
    assert first == {
        "op": "put",
        "applied": True,
        "key": "k",
        "value": {"a": 1},
        "version": first["version"],
    }
    [second] = await kv(conn, put("k", 2, ttl=None), careful=careful)
    assert second["version"] > first["version"]
    [found] = await kv(conn, get("k"))
    assert (found["value"], found["expiresAt"]) == (2, None)


@pytest.mark.parametrize("operation", [once, lambda key, **more: put(key, expect=0, **more)])
async def test_put_where_nothing_is(
    conn: asyncpg.Connection, careful: bool, operation: Any
) -> None:
    """Step 2.4 put expect 0 and putIfAbsent: only where no row is alive."""
    [won] = await kv(conn, operation("k", value="first"), careful=careful)
    assert won["applied"]
    [lost] = await kv(conn, operation("k", value="second"), careful=careful)
    assert lost == {
        "op": won["op"],
        "applied": False,
        "reason": "exists",
        "key": "k",
        "value": "first",
        "version": won["version"],
    }
    await later(conn, 60)
    [again] = await kv(conn, operation("k", value="third"), careful=careful)
    assert again["applied"]
    assert again["version"] > won["version"]


async def test_put_over_a_version(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4 put expect N: updates a live row at that version, and never creates one."""
    [absent] = await kv(conn, put("k", expect=42), careful=True)
    assert absent == {
        "op": "put",
        "applied": False,
        "reason": "absent",
        "key": "k",
        "value": None,
        "version": 0,
    }
    assert await version_of(conn, "k") == 0
    [first] = await kv(conn, put("k", "old"), careful=careful)
    [second] = await kv(conn, put("k", "new", expect=first["version"]), careful=careful)
    assert second["applied"]
    [stale] = await kv(conn, put("k", "late", expect=first["version"]), careful=careful)
    assert (stale["reason"], stale["value"], stale["version"]) == (
        "version",
        "new",
        second["version"],
    )
    await later(conn, 60)
    [dead] = await kv(conn, put("k", "late", expect=second["version"]), careful=careful)
    assert (dead["reason"], dead["value"], dead["version"]) == ("absent", None, 0)


async def test_an_optimistic_put_that_expects_a_version_creates_nothing(
    conn: asyncpg.Connection,
) -> None:
    """Step 2.4 put expect N: where no row is, the optimistic run undoes itself and is repeated."""
    with pytest.raises(asyncpg.PostgresError) as raised:
        async with conn.transaction():
            await kv(conn, put("k", expect=42))
    assert raised.value.sqlstate == "QU901"
    assert await conn.fetchval("select count(*) from queen.kv") == 0


async def test_delete(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4 delete: removes a live row and answers with what it held; else absent."""
    [written] = await kv(conn, put("k", [1]))
    [removed] = await kv(conn, delete("k"), careful=careful)
    assert removed == {**written, "op": "delete"}
    [absent] = await kv(conn, delete("k"), careful=careful)
    assert (absent["reason"], absent["value"], absent["version"]) == ("absent", None, 0)


async def test_delete_removes_a_dead_row_on_the_way(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.4 delete of an expired row: absent, and the row is gone."""
    await kv(conn, put("k", ttl=1))
    await later(conn, 1)
    [absent] = await kv(conn, delete("k"), careful=careful)
    assert absent["reason"] == "absent"
    assert await conn.fetchval("select count(*) from queen.kv") == 0


async def test_delete_where_nothing_is(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4 delete expect 0: applies as a no-op where no row is alive, else exists."""
    [nothing] = await kv(conn, delete("k", expect=0), careful=careful)
    assert nothing == {"op": "delete", "applied": True, "key": "k", "value": None, "version": 0}
    [written] = await kv(conn, put("k", "v"))
    [exists] = await kv(conn, delete("k", expect=0), careful=careful)
    assert (exists["reason"], exists["value"], exists["version"]) == (
        "exists",
        "v",
        written["version"],
    )


async def test_delete_at_a_version(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4 delete expect N: version, absent, or removed."""
    [absent] = await kv(conn, delete("k", expect=7), careful=careful)
    assert absent["reason"] == "absent"
    [written] = await kv(conn, put("k"))
    [lost] = await kv(conn, delete("k", expect=written["version"] + 1), careful=careful)
    assert (lost["reason"], lost["version"]) == ("version", written["version"])
    [removed] = await kv(conn, delete("k", expect=written["version"]), careful=careful)
    assert removed["applied"]


async def test_check(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4 check: judges and never writes; applied it carries no value, lost it does."""
    [free] = await kv(conn, check("k", 0), careful=careful)
    assert free == {"op": "check", "applied": True, "key": "k", "version": 0}
    [absent] = await kv(conn, check("k", 3), careful=careful)
    assert absent == {
        "op": "check",
        "applied": False,
        "reason": "absent",
        "key": "k",
        "value": None,
        "version": 0,
    }
    [written] = await kv(conn, put("k", "v"))
    version = written["version"]
    [held, exists] = [
        (await kv(conn, check("k", expect), careful=careful))[0] for expect in (version, 0)
    ]
    assert held == {"op": "check", "applied": True, "key": "k", "version": version}
    assert (exists["reason"], exists["value"], exists["version"]) == ("exists", "v", version)
    [lost] = await kv(conn, check("k", version + 1), careful=careful)
    assert (lost["reason"], lost["value"], lost["version"]) == ("version", "v", version)
    await later(conn, 60)
    [dead] = await kv(conn, check("k", version), careful=careful)
    assert dead["reason"] == "absent"


async def test_incr_counts_and_keeps_a_live_counters_expiry(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.4 incr: absent counts as 0 and starts a window; a live row keeps its expiry."""
    [first] = await kv(conn, incr("k", ttl=60), careful=careful)
    assert (first["value"], first["applied"]) == (1, True)
    before = (await kv(conn, get("k")))[0]["expiresAt"]
    await later(conn, 30)
    [second] = await kv(conn, incr("k", 2, ttl=600), careful=careful)
    assert (second["value"], second["version"] > first["version"]) == (3, True)
    assert (await kv(conn, get("k")))[0]["expiresAt"] == before
    await later(conn, 60)
    [fresh] = await kv(conn, incr("k", 5, ttl=600), careful=careful)
    assert fresh["value"] == 5
    assert (await kv(conn, get("k")))[0]["expiresAt"] != before


@pytest.mark.parametrize(
    ("start", "bounds", "reason"),
    [
        (None, {"max": 5}, None),
        (None, {"max": 4}, "limit"),
        (None, {"min": 5}, None),
        (None, {"min": 6}, "limit"),
        (1, {"max": 6}, None),
        (1, {"max": 5}, "limit"),
        (1, {"min": 6, "max": 6}, None),
        (1, {"min": 7}, "limit"),
        ("text", {}, "type"),
        (None, {}, None),
    ],
)
async def test_the_bounds_of_incr(
    conn: asyncpg.Connection, careful: bool, start: Any, bounds: dict[str, int], reason: str | None
) -> None:
    """Step 2.4 incr: inclusive bounds guard every sum, the first one too, and never saturate."""
    version = 0
    if start is not None:
        version = (await kv(conn, put("k", start)))[0]["version"]
    [result] = await kv(conn, incr("k", 5, **bounds), careful=careful)
    assert result.get("reason") == reason
    if reason is not None:
        assert (result["value"], result["version"]) == (start if start == 1 else 0, version)
        [found] = await kv(conn, get("k"))
        assert found["found"] is (start is not None)


async def test_incr_over_a_dead_row_counts_from_zero(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.4 incr: what an expired row held does not matter, a number or not."""
    await kv(conn, put("k", {"no": "number"}, ttl=1))
    await later(conn, 1)
    [refused] = await kv(conn, incr("k", 10, max=5), careful=careful)
    assert (refused["reason"], refused["value"], refused["version"]) == ("limit", 0, 0)
    [result] = await kv(conn, incr("k", 4, max=5), careful=careful)
    assert result["value"] == 4


@pytest.mark.parametrize(
    ("start", "delta", "text"),
    [
        ("1.50", "1.50", "3"),
        ("0.1", "0.2", "0.3"),
        ("9007199254740993", "1", "9007199254740994"),
        ("1e2", "-100.0", "0"),
        ("-0", "-0.25", "-0.25"),
        ("123456789012345678901234567890", "0.000000000000001", None),
    ],
)
async def test_incr_is_exact(
    conn: asyncpg.Connection, start: str, delta: str, text: str | None
) -> None:
    """Step 2.4 incr: exact decimals, stored as the shortest exact number."""
    await kv(conn, {**put("k"), "value": start})
    operations = f'[{{"op":"incr","ns":"n","key":"k","delta":{delta}}}]'
    await conn.fetch("select * from queen._kv(1, $1, false)", operations)
    stored = await conn.fetchval("select value::text from queen.kv")
    assert stored == text or text is None
    assert stored == (text or "123456789012345678901234567890.000000000000001")


# 2.5: the elements


async def test_a_get_answers_found_or_not(conn: asyncpg.Connection) -> None:
    """Step 2.5 get, 0.3: the element, and moments with a fraction only where there is one."""
    assert await kv(conn, get("k")) == [{"op": "get", "found": False, "key": "k"}]
    [written] = await kv(conn, put("k", None, ttl=61))
    [found] = await kv(conn, get("k"))
    assert found == {
        "op": "get",
        "found": True,
        "key": "k",
        "value": None,
        "version": written["version"],
        "expiresAt": "2030-01-01T12:01:01+00:00",
        "updatedAt": "2030-01-01T12:00:00+00:00",
    }
    await set_clock(conn, START + timedelta(microseconds=250_000))
    await kv(conn, put("k"))
    assert (await kv(conn, get("k")))[0]["updatedAt"] == "2030-01-01T12:00:00.25+00:00"


@pytest.mark.parametrize(
    "text", ['{"b" : 1,  "a":1.0, "a":2}', '"\\u0000"', '"\\ud83d\\ude00"', " [1e400] "]
)
async def test_values_keep_their_text(conn: asyncpg.Connection, careful: bool, text: str) -> None:
    """Q14: key order, repeated keys, number spelling, NUL escapes and spaces stay as sent."""
    [row] = await raw(conn, {**put("k"), "value": text}, careful=careful)
    assert f'"value" : {text}' in row["result"]
    [row] = await raw(conn, get("k"))
    assert f'"value" : {text}' in row["result"]
    [row] = await raw(conn, once("k", required=True), careful=True)
    assert f'"value" : {text}' in row["result"]
    [row] = await raw(conn, {"op": "getPrefix", "ns": "n", "prefix": "k"})
    assert f'"value":{text}' in row["result"]


async def test_get_many(conn: asyncpg.Connection) -> None:
    """Step 2.5 getMany: rows in byte order of the keys, missing in the order asked for."""
    await kv(conn, put("ä"), put("a"), put("B"), put("dead", ttl=1))
    await later(conn, 1)
    keys = ["nope", "ä", "dead", "a", "B"]
    [many] = await kv(conn, {"op": "getMany", "ns": "n", "keys": keys})
    assert [row["key"] for row in many["rows"]] == ["B", "a", "ä"]
    assert set(many["rows"][0]) == {"key", "value", "version", "expiresAt", "updatedAt"}
    assert (many["missing"], many["truncated"]) == (["nope", "dead"], False)


async def test_a_get_many_of_nothing_is_empty(conn: asyncpg.Connection) -> None:
    """Step 2.3: no keys, no names to check."""
    [many] = await kv(conn, {"op": "getMany", "keys": []})
    assert many == {"op": "getMany", "rows": [], "missing": [], "truncated": False}


async def test_get_prefix_walks_in_pages(conn: asyncpg.Connection) -> None:
    """Step 2.5 getPrefix: exclusive after, truncated, nextAfter; dead rows are not there."""
    await kv(conn, *[put(f"p:{number}") for number in range(5)], put("p:2x", ttl=1), put("q"))
    await later(conn, 1)
    keys: list[str] = []
    after = ""
    pages = 0
    while True:
        [page] = await kv(
            conn, {"op": "getPrefix", "ns": "n", "prefix": "p:", "after": after, "limit": 2}
        )
        keys += [row["key"] for row in page["rows"]]
        pages += 1
        if not page["truncated"]:
            break
        after = page["nextAfter"]
        assert after == keys[-1]
    assert keys == ["p:0", "p:1", "p:2", "p:3", "p:4"]
    assert (pages, page["nextAfter"]) == (3, None)


@pytest.mark.parametrize("prefix", ["a%", "a_", "a", "a\U0010ffff", "a\ud7ff", "\U0010ffff", "é"])
async def test_a_prefix_is_literal_bytes(conn: asyncpg.Connection, prefix: str) -> None:
    """Step 2.5: no character is a pattern, and the range ends where the prefix does."""
    keys = ["a%1", "a_1", "ab", "a", "a\U0010ffff1", "a\ud7ffz", "a\ue000", "b", "\U0010ffff9", "é"]
    await kv(conn, *[put(key) for key in keys])
    [page] = await kv(conn, {"op": "getPrefix", "ns": "n", "prefix": prefix})
    expected = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
    assert [row["key"] for row in page["rows"]] == expected


async def test_keys_only_has_no_values_and_costs_nothing(conn: asyncpg.Connection) -> None:
    """Step 2.5 keysOnly: rows without values, charged no bytes."""
    big = "x" * (3 * MEBIBYTE)
    await kv(conn, put("a", big), put("b", big), put("c", big))
    page = {"op": "getPrefix", "ns": "n", "prefix": ""}
    [keys, values] = await kv(
        conn, {**page, "prefix": "", "keysOnly": True, "ns": "n"}, {**page, "ns": "n"}
    )
    assert [set(row) for row in keys["rows"]] == [{"key", "version", "expiresAt", "updatedAt"}] * 3
    assert (len(values["rows"]), values["truncated"], values["nextAfter"]) == (2, True, "b")


async def test_one_budget_of_bytes_for_all_reads_of_a_call(conn: asyncpg.Connection) -> None:
    """Step 2.5: spent in apply order; the row that crosses the line is returned, a get always."""
    big = "x" * (3 * MEBIBYTE)
    await kv(conn, put("a", big), put("b", big), put("c", "small"))
    [many, single, page] = await kv(
        conn,
        {"op": "getMany", "ns": "n", "keys": ["a", "b", "c", "d"]},
        get("a"),
        {"op": "getPrefix", "ns": "n", "prefix": "c"},
    )
    assert single["found"]
    assert [row["key"] for row in many["rows"]] == ["a"]
    assert (many["missing"], many["truncated"]) == (["d"], True)
    assert (page["rows"], page["truncated"]) == ([], True)


# 2.6: order and visibility


async def test_operations_apply_in_the_order_of_their_keys(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.6-1: by namespace and key in byte order; results stay at their place."""
    results = await kv(
        conn,
        put("b"),
        {**put("a"), "ns": "o"},
        put("é"),
        put("a"),
        put("Z"),
        careful=careful,
    )
    versions = {(index, result["version"]) for index, result in enumerate(results)}
    order = [index for index, _ in sorted(versions, key=lambda pair: pair[1])]
    assert order == [4, 3, 0, 2, 1]


async def test_a_get_sees_a_write_only_behind_it(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.6-2: before a write of its key it answers what was there."""
    await kv(conn, put("k", "old"))
    results = await kv(
        conn,
        get("k"),
        {"op": "getMany", "ns": "n", "keys": ["k", "x"]},
        put("k", "new"),
        get("k"),
        put("x", 1),
        careful=careful,
    )
    assert (results[0]["value"], results[3]["value"]) == ("old", "new")
    assert [row["value"] for row in results[1]["rows"]] == ["new", 1]


async def test_a_lost_required_operation_undoes_the_call(conn: asyncpg.Connection) -> None:
    """Step 2.2, 2.6-3: the optimistic run raises; the careful one answers and writes nothing."""
    [written] = await kv(conn, put("k", "v"))
    call = (put("a"), once("k", required=True), get("a"))
    with pytest.raises(asyncpg.PostgresError) as raised:
        async with conn.transaction():
            await kv(conn, *call)
    assert raised.value.sqlstate == "QU901"
    [row] = await raw(conn, *call, careful=True)
    assert (row["operation_index"], row["verdict"]) == (1, "refused")
    assert json.loads(row["result"]) == {
        "kvReason": "exists",
        "version": written["version"],
        "value": "v",
    }
    assert await version_of(conn, "a") == 0


async def test_the_reported_loser_is_the_first_in_apply_order(conn: asyncpg.Connection) -> None:
    """Step 1.11-8, 2.6-2: not the first in the array; an unrequired loser is none."""
    await kv(conn, put("a"), put("b"), put("c", "text"))
    call = (
        incr("c", required=True),
        once("b", required=True),
        once("a"),
        check("b2", 9, required=True),
    )
    [row] = await raw(conn, *call, careful=True)
    assert (row["operation_index"], json.loads(row["result"])["kvReason"]) == (1, "exists")


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (once("live", required=True), "exists"),
        (put("absent", expect=9, required=True), "absent"),
        (put("live", expect=1, required=True), "version"),
        (incr("live", required=True), "type"),
        (incr("absent", 5, max=4, required=True), "limit"),
        (check("dead", 5, required=True), "absent"),
        (delete("dead", required=True), "absent"),
    ],
)
async def test_every_reason_of_a_precondition(
    conn: asyncpg.Connection, operation: Operation, reason: str
) -> None:
    """Step 1.9: kvReason with what a reader would see now, 0 and null when nothing is alive."""
    [_, live] = await kv(conn, put("dead", 5, ttl=1), put("live", "text"))
    await later(conn, 1)
    [row] = await raw(conn, operation, careful=True)
    verdict = json.loads(row["result"])
    seen = (live["version"], "text") if operation["key"] == "live" else (0, None)
    assert (verdict["kvReason"], verdict["version"], verdict["value"]) == (reason, *seen)
    assert await conn.fetchval("select count(*) from queen.kv") == 2


async def test_unrequired_losses_do_not_stop_the_rest(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 1.11-5: they answer applied false, and the rest is written."""
    await kv(conn, put("a"))
    results = await kv(conn, once("a"), once("b"), delete("c"), careful=careful)
    assert [result["applied"] for result in results] == [False, True, False]


# 2.7, 2.8: versions and expiry


async def test_versions_rise_over_deletion_expiry_and_creation(
    conn: asyncpg.Connection, careful: bool
) -> None:
    """Step 2.7: per key strictly, whatever happens to the row; never 0, never twice."""
    versions = []
    for second in range(0, 30, 3):
        await later(conn, second)
        for operation in (put("k", ttl=2), put("k", 2, ttl=2), incr("k", ttl=2)):
            [result] = await kv(conn, operation, careful=careful)
            versions.append(result["version"])
        if second % 2:
            await kv(conn, delete("k"), careful=careful)
    assert versions == sorted(set(versions))
    assert versions[0] >= 1


async def test_a_new_rows_version_is_drawn_again_when_one_was_drawn_since(
    conn: asyncpg.Connection,
) -> None:
    """Step 2.7: a version drawn before its row was there may be older than another's."""
    drawn = await conn.fetchval("select nextval('queen.kv_version')")
    settle = "select queen._kv_settle(ctid, $1) from queen.kv"
    await kv(conn, put("k"))
    newest = await version_of(conn, "k")
    assert await conn.fetchval(settle, newest) == newest
    settled = await conn.fetchval(settle, drawn)
    assert settled > newest
    assert await version_of(conn, "k") == settled


async def test_a_row_is_dead_at_its_expiry(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.8: alive before its expiry, dead at it, swept or not."""
    await kv(conn, put("k", ttl=10))
    await later(conn, 9.999999)
    assert (await kv(conn, get("k"), careful=careful))[0]["found"]
    await later(conn, 10)
    assert not (await kv(conn, get("k"), careful=careful))[0]["found"]
    assert await conn.fetchval("select count(*) from queen.kv") == 1


@pytest.mark.parametrize("ttl", [9_100_000_000_000, 10**13, 10**30])
async def test_a_lifetime_beyond_time_is_for_ever(conn: asyncpg.Connection, ttl: int) -> None:
    """Q16: what no timestamp can hold never ends."""
    await kv(conn, put("k", ttl=ttl))
    [found] = await kv(conn, get("k"))
    assert (found["expiresAt"] is None) == (ttl > 9_100_000_000_000)


async def test_a_new_lineage_starts_over(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 2.4: a write keeps a live row's creation; over a dead one it is the creation."""
    await kv(conn, put("k", ttl=10), careful=careful)
    created = "select created_at from queen.kv"
    await later(conn, 5)
    await kv(conn, put("k", ttl=10), careful=careful)
    assert await conn.fetchval(created) == START
    await later(conn, 15)
    await kv(conn, once("k", ttl=10), careful=careful)
    assert await conn.fetchval(created) == START + timedelta(seconds=15)


# The sweep


async def test_the_sweep_removes_the_dead_a_stretch_at_a_time(conn: asyncpg.Connection) -> None:
    """Step 2.8: only space is freed, in bounded stretches of the primary key."""
    await kv(conn, *[put(f"k{n}", ttl=1 if n % 2 else 60) for n in range(10)])
    await later(conn, 1)
    place: tuple[Any, ...] = (0, "", "")
    removed = []
    while place[0] is not None:
        [row] = await conn.fetch("select * from queen._kv_sweep($1, $2, $3, 4)", *place)
        removed.append(row["removed"])
        place = tuple(row)[1:]
    assert removed == [2, 2, 1]
    left = await conn.fetch("select key from queen.kv order by key")
    assert [row["key"] for row in left] == ["k0", "k2", "k4", "k6", "k8"]


# The switch


async def test_a_paused_kv_does_nothing(conn: asyncpg.Connection, careful: bool) -> None:
    """Step 5 kv: read by the step itself, so a paused surface writes nothing from then on."""
    await conn.execute("select queen._throw_switches(false, null, null)")
    [row] = await raw(conn, put("k"), get("k"), careful=careful)
    assert row["verdict"] == "disabled"
    assert await conn.fetchval("select count(*) from queen.kv") == 0


# The console's reads


async def test_the_console_lists_namespaces_and_their_rows(conn: asyncpg.Connection) -> None:
    """Step 2.10: counts include dead rows; the list shows them on request, with six digits."""
    await kv(conn, put("a"), put("b", ttl=1), {**put("a"), "ns": "m"})
    await later(conn, 1)
    spaces = await conn.fetch("select * from queen._kv_namespaces(1)")
    assert [tuple(row) for row in spaces] == [("m", 1), ("n", 2)]
    listing = "select * from queen._kv_list(1, $1)"
    [alive] = await conn.fetch(listing, json.dumps({"ns": "n"}))
    [row] = json.loads(alive["page"])
    assert (row["key"], row["expiresAt"]) == ("a", "2030-01-01T12:01:00.000000Z")
    assert "expired" not in row
    assert alive["bytes"] == 1
    [every] = await conn.fetch(
        listing, json.dumps({"ns": "n", "includeExpired": True, "keysOnly": True})
    )
    rows = json.loads(every["page"])
    assert [(row["key"], row["expired"]) for row in rows] == [("a", False), ("b", True)]
    assert all("value" not in row for row in rows)
    assert every["bytes"] == 0


async def test_tenants_do_not_see_each_other(conn: asyncpg.Connection) -> None:
    """Step 2.1: a row belongs to a tenant."""
    await kv(conn, put("k"))
    other = await conn.fetch("select * from queen._kv(2, $1, false)", json.dumps([get("k")]))
    assert json.loads(other[0]["result"])["found"] is False
