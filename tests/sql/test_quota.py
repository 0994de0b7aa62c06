"""What tenants keep, as it is counted for their quotas (step 2.12)."""

import json
from datetime import UTC, datetime, timedelta

import asyncpg

from tests.support.database import set_clock

START = datetime(2030, 1, 1, tzinfo=UTC)


async def usage(conn: asyncpg.Connection, *, kv: bool = True, timers: bool = True) -> set[object]:
    rows = await conn.fetch("select * from queen._usage($1, $2)", kv, timers)
    return {tuple(row) for row in rows}


async def test_live_keys_their_bytes_and_pending_timers_are_counted_by_tenant(
    conn: asyncpg.Connection,
) -> None:
    await set_clock(conn, START)
    other = await conn.fetchval("insert into queen.tenants (name) values ('other') returning id")
    assert await usage(conn) == set()
    for tenant, key, ttl in ((1, "a", 60), (1, "b", None), (other, "c", None)):
        put = {"op": "put", "ns": "n", "key": key, "value": '"vv"', "ttlSeconds": ttl}
        await conn.execute("select queen._kv($1, $2, false)", tenant, json.dumps([put]))
    schedule = {
        "op": "schedule",
        "queue": "q",
        "timerKey": "k",
        "delayMs": 1,
        "txn": "t",
        "payload": "1",
    }
    await conn.execute("select queen._timers($1, $2)", other, json.dumps([schedule]))
    size = await conn.fetchval("select 2 + pg_column_size(value) from queen.kv where key = 'a'")
    assert await usage(conn) == {(1, 2, 2 * size, 0), (other, 1, size, 1)}
    assert await usage(conn, timers=False) == {(1, 2, 2 * size, 0), (other, 1, size, 0)}
    assert await usage(conn, kv=False) == {(other, 0, 0, 1)}

    await set_clock(conn, START + timedelta(seconds=60))
    assert (1, 1, size, 0) in await usage(conn)
