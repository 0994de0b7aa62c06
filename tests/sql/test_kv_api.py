"""KV for SQL users: the functions, and their races at READ COMMITTED."""

import asyncio
import json
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

WAITING = "select exists (select from pg_locks where pid = $1 and not granted)"


@pytest_asyncio.fixture
async def sessions(database: str) -> AsyncIterator[list[asyncpg.Connection]]:
    opened = [await asyncpg.connect(database) for _ in range(3)]
    yield opened
    for session in opened:
        await session.close()


async def until_waiting(watcher: asyncpg.Connection, session: asyncpg.Connection) -> None:
    async with asyncio.timeout(10):
        while not await watcher.fetchval(WAITING, session.get_server_pid()):
            await asyncio.sleep(0.005)


async def test_a_key_is_written_read_and_removed(conn: asyncpg.Connection) -> None:
    put = await conn.fetchrow("select * from queen.kv_put('n', 'k', '{\"a\": 1}', ttl => '1 hour')")
    assert (put["applied"], put["reason"], put["stored"]) == (True, None, '{"a": 1}')
    got = await conn.fetchrow(
        "select *, expires_at - updated_at as ttl from queen.kv_get('n', 'k')"
    )
    assert (got["value"], got["version"]) == ('{"a": 1}', put["version"])
    assert got["ttl"].total_seconds() == 3600
    removed = await conn.fetchrow("select * from queen.kv_delete('n', 'k')")
    assert (removed["applied"], removed["version"]) == (True, put["version"])
    assert await conn.fetchrow("select * from queen.kv_get('n', 'k')") is None
    absent = await conn.fetchrow("select * from queen.kv_delete('n', 'k')")
    assert (absent["applied"], absent["reason"], absent["version"]) == (False, "absent", 0)


async def test_conditions_are_those_of_the_wire(conn: asyncpg.Connection) -> None:
    first = await conn.fetchrow("select * from queen.kv_put('n', 'k', '1', expect => 0)")
    assert first["applied"]
    lost = await conn.fetchrow("select * from queen.kv_put('n', 'k', '2', expect => 0)")
    assert (lost["reason"], lost["stored"], lost["version"]) == ("exists", "1", first["version"])
    stale = await conn.fetchrow(
        "select * from queen.kv_put('n', 'k', '2', expect => $1)", first["version"] + 1
    )
    assert stale["reason"] == "version"
    nothing = await conn.fetchrow("select * from queen.kv_put('n', 'other', '2', expect => 7)")
    assert nothing["reason"] == "absent"


async def test_a_counter_keeps_to_its_bounds(conn: asyncpg.Connection) -> None:
    add = "select * from queen.kv_incr('n', 'k', 1.5, maximum => 3)"
    results = [await conn.fetchrow(add) for _ in range(3)]
    assert [result["stored"] for result in results] == ["1.5", "3", "3"]
    assert [result["reason"] for result in results] == [None, None, "limit"]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ("kv_put('N', 'k', '1')", "namespace"),
        ("kv_put(null, 'k', '1')", "namespace"),
        ("kv_put('n', '', '1')", "key"),
        ("kv_put('n', repeat('k', 513), '1')", "key"),
        ("kv_put('n', 'k', null)", "value"),
        ("kv_put('n', 'k', to_json(repeat('v', 65536)))", "value"),
        ("kv_put('n', 'k', '1', ttl => '0')", "ttl"),
        ("kv_put('n', 'k', '1', expect => -1)", "expect"),
        ("kv_delete('n', 'k', expect => -1)", "expect"),
        ("kv_incr('n', 'k', null)", "delta"),
        ("kv_incr('n', 'k', 'NaN')", "delta"),
    ],
)
async def test_a_refusal_names_its_argument(
    conn: asyncpg.Connection, call: str, argument: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await conn.execute(f"select queen.{call}")
    assert raised.value.sqlstate in ("QU000", "QU001")
    assert json.loads(raised.value.detail)["argument"] == argument


async def test_the_insert_is_the_lock_of_an_absent_key(
    sessions: list[asyncpg.Connection],
) -> None:
    """The loser of a race for an absent key waits, and judges the winner's row."""
    first, second, watcher = sessions
    async with first.transaction():
        won = await first.fetchrow("select * from queen.kv_put('n', 'k', '1', expect => 0)")
        race = asyncio.create_task(
            second.fetchrow("select * from queen.kv_put('n', 'k', '2', expect => 0)")
        )
        await until_waiting(watcher, second)
    lost = await race
    assert won["applied"]
    assert (lost["reason"], lost["stored"], lost["version"]) == ("exists", "1", won["version"])


async def test_no_update_is_lost(sessions: list[asyncpg.Connection]) -> None:
    """A sum waits for the one before it, and adds to what that has left."""
    first, second, watcher = sessions
    await first.execute("select queen.kv_incr('n', 'k', 1)")
    async with first.transaction():
        await first.execute("select queen.kv_incr('n', 'k', 10)")
        race = asyncio.create_task(second.fetchrow("select * from queen.kv_incr('n', 'k', 100)"))
        await until_waiting(watcher, second)
    assert (await race)["stored"] == "111"


async def test_a_version_drawn_before_a_wait_is_drawn_again(
    sessions: list[asyncpg.Connection],
) -> None:
    """Step 2.7: meanwhile the key was created and deleted with versions that are higher."""
    first, second, watcher = sessions
    async with first.transaction():
        await first.execute("select queen.kv_put('n', 'k', '1')")
        race = asyncio.create_task(second.fetchrow("select * from queen.kv_put('n', 'k', '2')"))
        await until_waiting(watcher, second)
        await first.execute("select queen.kv_delete('n', 'k')")
        highest = await first.fetchval("select version from queen.kv_put('n', 'k', '1')")
        await first.execute("select queen.kv_delete('n', 'k')")
    result = await race
    assert result["applied"]
    assert result["version"] > highest
    assert await watcher.fetchval("select version from queen.kv") == result["version"]


async def test_a_check_compares_and_changes_nothing(conn: asyncpg.Connection) -> None:
    version = await conn.fetchval("select version from queen.kv_put('n', 'k', '1')")
    check = "select * from queen.kv_check('n', $1, $2)"
    assert (await conn.fetchrow(check, "k", version))["applied"]
    lost = await conn.fetchrow(check, "k", version + 1)
    assert (lost["applied"], lost["reason"], lost["stored"]) == (False, "version", "1")
    assert (await conn.fetchrow(check, "k", 0))["reason"] == "exists"
    assert (await conn.fetchrow(check, "absent", 0))["applied"]
    assert (await conn.fetchrow(check, "absent", 1))["reason"] == "absent"


async def test_a_checked_absence_holds_until_the_commit(
    sessions: list[asyncpg.Connection],
) -> None:
    first, second, watcher = sessions
    async with first.transaction():
        assert (await first.fetchrow("select * from queen.kv_check('n', 'k', 0)"))["applied"]
        put = asyncio.create_task(
            second.fetchrow("select * from queen.kv_put('n', 'k', '1', expect => 0)")
        )
        await until_waiting(watcher, second)
        assert await first.fetch("select * from queen.kv_list('n')") == []
    assert (await put)["applied"]


async def test_once_is_once_until_it_is_rolled_back_or_over(conn: asyncpg.Connection) -> None:
    once = "select queen.kv_once('n', 'k', '1 hour')"
    rolled_back = conn.transaction()
    await rolled_back.start()
    assert await conn.fetchval(once)
    await rolled_back.rollback()
    assert [await conn.fetchval(once) for _ in range(3)] == [True, False, False]
    await conn.execute("select set_config('queen.fake_now', '2099-01-01', true)")
    assert await conn.fetchval(once)
    await conn.execute("select set_config('queen.fake_now', '', true)")


async def test_a_list_has_the_live_keys_of_a_prefix_in_byte_order(
    conn: asyncpg.Connection,
) -> None:
    for key in ("a:2", "a:1", "a:%", "b", "a:é"):
        await conn.execute("select queen.kv_put('n', $1, '1')", key)
    await conn.execute("select queen.kv_put('n', 'a:dead', '1', ttl => '1 microsecond')")
    keys = "select key from queen.kv_list('n', 'a:', $1, $2)"
    assert [row[0] for row in await conn.fetch(keys, None, 100)] == ["a:%", "a:1", "a:2", "a:é"]
    assert [row[0] for row in await conn.fetch(keys, "a:%", 2)] == ["a:1", "a:2"]
    assert len(await conn.fetch("select * from queen.kv_list('n')")) == 5
