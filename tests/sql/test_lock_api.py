"""queen.lock_acquire, lock_renew, lock_release, lock_check and lock_holders."""

import asyncio
import json
from datetime import datetime, timedelta

import asyncpg
import pytest

from tests.support.database import set_clock
from tests.support.sessions import sessions, until_waiting

NOON = datetime.fromisoformat("2031-01-01T12:00:00+00:00")


async def acquire(conn: asyncpg.Connection, owner: str, slots: int = 1) -> asyncpg.Record:
    return await conn.fetchrow(
        "select * from queen.lock_acquire('l', '1 minute', owner => $1, slots => $2)", owner, slots
    )


async def test_a_lock_has_one_holder_and_rising_tokens(conn: asyncpg.Connection) -> None:
    mine = await acquire(conn, "me")
    assert (mine["acquired"], mine["slot"], mine["already"]) == (True, 0, False)
    assert tuple(await acquire(conn, "you")) == (False, None, None, False)
    again = await acquire(conn, "me")
    assert (again["token"], again["already"]) == (mine["token"], True)
    [holder] = await conn.fetch("select * from queen.lock_holders('l')")
    assert (holder["owner"], holder["token"]) == ("me", mine["token"])
    renewed = await conn.fetchrow(
        "select * from queen.lock_renew('l', $1, '1 minute')", mine["token"]
    )
    assert renewed["new_token"] > mine["token"]
    assert not await conn.fetchval("select queen.lock_release('l', $1)", mine["token"])
    assert await conn.fetchval("select queen.lock_release('l', $1)", renewed["new_token"])
    assert (await acquire(conn, "you"))["token"] > renewed["new_token"]


async def test_a_semaphore_has_as_many_holders_as_slots(conn: asyncpg.Connection) -> None:
    granted = [await acquire(conn, f"w{number}", 3) for number in range(4)]
    assert [row["acquired"] for row in granted] == [True, True, True, False]
    assert {row["slot"] for row in granted[:3]} == {0, 1, 2}
    freed = granted[1]
    assert await conn.fetchval(
        "select queen.lock_release('l', $1, $2)", freed["token"], freed["slot"]
    )
    assert (await acquire(conn, "late", 3))["slot"] == freed["slot"]


async def test_a_lifetime_that_is_over_is_over(conn: asyncpg.Connection) -> None:
    await set_clock(conn, NOON)
    mine = await acquire(conn, "me")
    check = "select queen.lock_check('l', $1)"
    assert await conn.fetchval(check, mine["token"])
    await set_clock(conn, NOON + timedelta(minutes=1))
    assert not await conn.fetchval(check, mine["token"])
    assert await conn.fetch("select * from queen.lock_holders('l')") == []
    renewed = await conn.fetchrow(
        "select * from queen.lock_renew('l', $1, '1 minute', 'me')", mine["token"]
    )
    assert tuple(renewed) == (False, None)
    assert (await acquire(conn, "you"))["token"] > mine["token"]
    await set_clock(conn, None)


async def test_a_check_keeps_the_lock_until_the_commit(database: str) -> None:
    """The fence: whoever checks, writes and commits did so as the holder."""
    async with sessions(database) as (first, second):
        mine = await acquire(first, "me")
        async with first.transaction():
            assert await first.fetchval("select queen.lock_check('l', $1)", mine["token"])
            taking = asyncio.create_task(
                second.fetchval("select queen.lock_release('l', $1)", mine["token"])
            )
            await until_waiting(first, second)
        assert await taking
        assert not await first.fetchval("select queen.lock_check('l', $1)", mine["token"])


async def test_of_two_that_acquire_at_once_one_does(database: str) -> None:
    async with sessions(database) as (first, second):
        async with first.transaction():
            assert (await acquire(first, "me"))["acquired"]
            rival = asyncio.create_task(acquire(second, "you"))
            await until_waiting(first, second)
        assert not (await rival)["acquired"]


async def test_locks_are_paused_with_kv(conn: asyncpg.Connection) -> None:
    await conn.execute("update queen.switches set enabled = false where name = 'kv'")
    for call in ("lock_acquire('l', '1 minute')", "kv_get('n', 'k')", "kv_put('n', 'k', '1')"):
        with pytest.raises(asyncpg.PostgresError) as caught:
            async with conn.transaction():
                await conn.execute(f"select queen.{call}")
        assert caught.value.sqlstate == "QU200"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("lock_acquire('', '1 minute')", "name"),
        ("lock_acquire('a#1', '1 minute')", "name"),
        ("lock_acquire(E'a\\n', '1 minute')", "name"),
        ("lock_acquire(repeat('l', 257), '1 minute')", "name"),
        ("lock_acquire('l', '0')", "ttl"),
        ("lock_acquire('l', null)", "ttl"),
        ("lock_acquire('l', '1 minute', '')", "owner"),
        ("lock_acquire('l', '1 minute', slots => 0)", "slots"),
        ("lock_acquire('l', '1 minute', slots => 1025)", "slots"),
        ("lock_renew('l', 1, '1 minute', slot => 1024)", "slot"),
        ("lock_release('l', 1, -1)", "slot"),
        ("lock_check(null, 1)", "name"),
        ("lock_holders('')", "name"),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, call: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.{call}")
    assert caught.value.sqlstate == "QU000"
    assert json.loads(caught.value.detail)["argument"] == argument
