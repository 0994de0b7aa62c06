"""queen.push_batch: arrays of messages in the caller's own transaction."""

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from tests.support.sessions import sessions, until_waiting

ONE = "select * from queen.push_batch('orders', $1, 'p', transaction_ids => $2)"
MANY = "select * from queen.push_batch('orders', $1, transaction_ids => $2, partitions => $3)"
STORED = """
select partition, json_agg(payload order by message_offset) as payloads,
       json_agg(message_offset order by message_offset) as offsets
from queen.message where queue = 'orders' group by partition
"""


async def stored(conn: asyncpg.Connection) -> dict[str, Any]:
    """Return the payloads of each partition, whose offsets must have no gap."""
    found = {}
    for row in await conn.fetch(STORED):
        found[row["partition"]] = json.loads(row["payloads"])
        assert json.loads(row["offsets"]) == list(range(len(found[row["partition"]])))
    return found


def outcomes(rows: list[asyncpg.Record]) -> list[tuple[str, int]]:
    """Return what became of each message, whose places must be those of the call."""
    assert [row["place"] for row in rows] == list(range(1, len(rows) + 1))
    return [(row["status"], row["message_offset"]) for row in rows]


async def test_a_batch_goes_to_one_partition_in_its_order(conn: asyncpg.Connection) -> None:
    payloads = ['{"n": 1.50,  "n": 2}', '"\\u0000"', "null"]
    rows = await conn.fetch(ONE, payloads, ["a", None, "c"])
    rows += await conn.fetch("select * from queen.push_batch('orders', '{4}', 'p')")
    assert [row["message_offset"] for row in rows] == [0, 1, 2, 3]
    assert {row["status"] for row in rows} == {"queued"}
    ids = [row["message_id"] for row in rows]
    assert ids == sorted(set(ids))
    kept = await conn.fetch(
        "select m.id, m.transaction_id, m.payload::text, m.created_at = p.last_append_at as newest"
        " from queen.messages m join queen.partitions p on p.id = m.partition_id order by 1"
    )
    expected = zip(ids, ["a", str(ids[1]), "c", str(ids[3])], [*payloads, "4"], strict=True)
    assert [tuple(row)[:3] for row in kept] == list(expected)
    assert [row["newest"] for row in kept] == [False, False, False, True]


async def test_each_message_goes_to_its_own_partition(conn: asyncpg.Connection) -> None:
    await conn.execute("select queen.push('orders', '0', 'b')")
    names = ["c", "b", "a", None, "b", "", "c"]
    rows = await conn.fetch(MANY, [str(n) for n in range(1, 8)], None, names)
    assert outcomes(rows) == [
        *(("queued", 0), ("queued", 1), ("queued", 0), ("queued", 0)),
        *(("queued", 2), ("queued", 1), ("queued", 1)),
    ]
    assert await stored(conn) == {"a": [3], "b": [0, 2, 5], "c": [1, 7], "Default": [4, 6]}
    ids = [row["message_id"] for row in rows]
    assert ids == sorted(set(ids))


async def test_what_names_no_partition_goes_to_the_one_for_all(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "select queen.push_batch('orders', '{1,2,3}', 'all', partitions => '{null,a,\"\"}')"
    )
    assert await stored(conn) == {"all": [1, 3], "a": [2]}


async def test_an_empty_batch_leaves_nothing_behind(conn: asyncpg.Connection) -> None:
    assert await conn.fetch(ONE, [], []) == []
    assert await conn.fetch(MANY, [], None, []) == []
    assert await conn.fetchval("select count(*) from queen.queues") == 0


async def test_a_repeated_id_is_a_duplicate_of_the_first(conn: asyncpg.Connection) -> None:
    first = await conn.fetch(ONE, ["1", "2", "3"], ["a", "b", "a"])
    assert outcomes(first) == [("queued", 0), ("queued", 1), ("duplicate", 0)]
    assert first[2]["message_id"] == first[0]["message_id"]
    again = await conn.fetch(ONE, ["4", "5", "6"], ["b", None, "c"])
    assert outcomes(again) == [("duplicate", 1), ("queued", 2), ("queued", 3)]
    assert again[0]["message_id"] == first[1]["message_id"]
    whole = await conn.fetch(ONE, ["7", "8"], ["c", "a"])
    assert outcomes(whole) == [("duplicate", 3), ("duplicate", 0)]
    assert await stored(conn) == {"p": [1, 2, 5, 6]}


async def test_ids_are_each_partition_s_own(conn: asyncpg.Connection) -> None:
    rows = await conn.fetch(MANY, ["1", "2", "3"], ["a", "a", "a"], ["p", "q", "p"])
    assert outcomes(rows) == [("queued", 0), ("queued", 0), ("duplicate", 0)]
    rows = await conn.fetch(MANY, ["4", "5", "6"], ["a", "a", "b"], ["q", "new", "p"])
    assert outcomes(rows) == [("duplicate", 0), ("queued", 0), ("queued", 1)]
    assert await stored(conn) == {"p": [1, 6], "q": [2], "new": [5]}


@pytest.mark.parametrize("partitions", [None, ["p", "q"]])
async def test_behind_the_dedup_window_ids_are_stored_again(
    conn: asyncpg.Connection, partitions: list[str] | None
) -> None:
    for moment in ("2031-01-01T00:00:00Z", "2031-01-01T01:00:01Z"):
        await conn.execute("select set_config('queen.fake_now', $1, true)", moment)
        call = [["1", "2"], ["a", "b"], partitions]
        assert {row["status"] for row in await conn.fetch(MANY, *call)} == {"queued"}
        assert {row["status"] for row in await conn.fetch(MANY, *call)} == {"duplicate"}


async def test_all_ways_of_pushing_leave_the_same_rows(conn: asyncpg.Connection) -> None:
    await conn.execute("select set_config('queen.fake_now', '2031-01-01T00:00:00Z', true)")
    document = json.dumps(
        [
            {"queue": "document", "payload": n, "partition": name, "transactionId": f"t{n}"}
            for n, name in ((1, "p"), (2, "r"))
        ]
    )
    ways = {
        "one": "select queen.push('one', '1', 'p', 't1'), queen.push('one', '2', 'r', 't2')",
        "batch": "select queen.push_batch('batch', '{1}', 'p', '{t1}'),"
        " queen.push_batch('batch', '{2}', 'r', '{t2}')",
        "shares": "select queen.push_batch('shares', '{1,2}', transaction_ids => '{t1,t2}',"
        " partitions => '{p,r}')",
        "document": f"select queen.push_many('{document}')",
    }
    for queue, call in ways.items():
        await conn.execute(
            f"select queen._configure(1, '{queue}', '{{\"delayedProcessing\": 7}}', false);"
            f"select queen._register_group(1, '{queue}', 'g', true, 'all', null, false);"
            f"{call}; {call.replace('t1', 't3').replace('t2', 't4')}"
        )
    rows = await conn.fetch(
        "select q.name, array_agg((p.name, p.next_offset, p.log_start_offset, p.last_append_at,"
        " m.message_offset, m.created_at, m.repeat, m.trace_id, m.transaction_id, m.producer_sub,"
        " m.payload::text, substr(m.id::text, 1, 18), r.ready_at, r.next_offset, r.lease_id)::text"
        " order by p.name, m.message_offset) as rows"
        " from queen.queues q join queen.partitions p on p.queue_id = q.id"
        " join queen.messages m on m.partition_id = p.id"
        " join queen.ready r on r.partition_id = p.id"
        " group by q.name"
    )
    assert {row["name"] for row in rows} == set(ways)
    assert {len(row["rows"]) for row in rows} == {4}
    assert len({tuple(row["rows"]) for row in rows}) == 1


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "argument"),
    [
        ("null, '{1}'", "QU000", "queue"),
        ("'q', null", "QU000", "payloads"),
        ("'q', '{1,null}'", "QU000", "payloads[2]"),
        ("'q', array['1', to_json(repeat('x', 16777216))]", "QU001", "payloads[2]"),
        ("'q', '{1,2}', transaction_ids => '{a}'", "QU000", "transaction_ids"),
        ("'q', '{}', transaction_ids => '{a}'", "QU000", "transaction_ids"),
        ("'q', '{1}', transaction_ids => '{}'", "QU000", "transaction_ids"),
        ("'q', '{1}', transaction_ids => array[repeat('t', 65536)]", "QU001", "transaction_ids[1]"),
        ("'q', '{1,2}', partitions => '{a,b,c}'", "QU000", "partitions"),
        ("'q', '{1,2}', partitions => array['a', repeat('p', 411)]", "QU001", "queue"),
        ("'q', '{1}', repeat('p', 411)", "QU001", "queue"),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, arguments: str, sqlstate: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.push_batch({arguments})")
    assert caught.value.sqlstate == sqlstate
    assert json.loads(caught.value.detail)["argument"] == argument


async def test_what_is_just_inside_the_limits_is_stored(conn: asyncpg.Connection) -> None:
    rows = await conn.fetch(
        "select * from queen.push_batch('q', array['1', to_json(repeat('x', 16777214))],"
        " transaction_ids => array[repeat('t', 65535), null],"
        " partitions => array['a', repeat('p', 410)])"
    )
    assert outcomes(rows) == [("queued", 0), ("queued", 0)]


async def test_brokers_are_told_when_they_are_to_be(database: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with sessions(database) as (first, second):
        await second.add_listener("queen", lambda *call: heard.put_nowait(str(call[-1])))
        await first.execute("select queen.push_batch('orders', '{1,2}', notify => true)")
        told = await asyncio.wait_for(heard.get(), 10)
        assert json.loads(told)[::2] == ["pushed", "orders"]


@pytest.mark.parametrize("names", [["p", "p"], ["p", "q"], ["q", "p"]])
async def test_a_rival_waits_and_comes_behind(database: str, names: list[str]) -> None:
    async with sessions(database) as (first, second):
        async with first.transaction():
            await first.fetch(MANY, ["1", "2"], ["a", "b"], ["p", "q"])
            rival = asyncio.create_task(second.fetch(MANY, ["3", "4"], ["a", "c"], names))
            await until_waiting(first, second)
        expected = ("duplicate", 0) if names[0] == "p" else ("queued", 1)
        assert outcomes(await rival)[0] == expected
        await stored(first)


async def test_rivals_leave_no_gap_and_follow_the_commits(database: str) -> None:
    """Each numbers its calls in the order of its commits; no partition may show another order."""
    async with sessions(database, 4) as connections:
        names = ["p", *(f"p{n}" for n in range(4))]
        await connections[0].fetch(MANY, ["[9]"] * 5, None, names)

        async def push(place: int, connection: asyncpg.Connection) -> None:
            for number in range(25):
                payloads = [f"[{place}, {number}, {n}]" for n in range(3)]
                names = [f"p{(place * number + n) % 4}" for n in range(3)]
                if number % 2:
                    await connection.fetch(MANY, payloads, None, names)
                else:
                    await connection.fetch(ONE, payloads, [f"{place}-{number}-{n}" for n in "abc"])

        await asyncio.gather(*(push(*each) for each in enumerate(connections)))
        found = await stored(connections[0])
        assert sum(len(payloads) for payloads in found.values()) == 5 + 4 * 25 * 3
        for payloads in found.values():
            for place in range(4):
                mine = [payload for payload in payloads if payload[0] == place]
                assert mine == sorted(mine)


@pytest.mark.parametrize(
    "call",
    [
        "select queen.push('orders', '1', 'p', $1)",
        "select queen.push_batch('orders', '{1,2}', 'p', array[$1, $1 || '-2'])",
        "select queen.push_batch('orders', '{1,2}', null, array[$1, $1], '{p,q}')",
        "select queen.push_many(json_build_array(json_build_object("
        "'queue', 'orders', 'partition', 'p', 'payload', 1, 'transactionId', $1::text)))",
    ],
)
async def test_a_search_for_duplicates_reads_no_more_than_it_finds(
    database: str, call: str
) -> None:
    """Planned while the table is known to be empty, the statements keep their plans."""
    read = (
        "select idx_tup_fetch from pg_catalog.pg_stat_xact_user_tables"
        " where relid = 'queen.messages'::regclass"
    )
    async with sessions(database) as (session, _):
        await session.execute("vacuum analyze queen.messages")
        async with session.transaction():
            for transaction_id in ("first", "first"):
                await session.execute(call, transaction_id)
            await session.execute(
                "select queen.push_batch('orders', array_fill('1'::json, array[1000]), name)"
                " from unnest('{p,q}'::text[]) name"
            )
            before = await session.fetchval(read)
            for transaction_id in ("second", "first", "second"):
                await session.execute(call, transaction_id)
            assert await session.fetchval(read) - before < 50
