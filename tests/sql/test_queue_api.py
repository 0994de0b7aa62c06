"""queen.configure, queen.delete_queue, queen.seek and queen.dlq_replay."""

import asyncio
import json
from datetime import datetime, timedelta

import asyncpg
import pytest

from tests.support.database import set_clock
from tests.support.sessions import sessions, until_waiting

POP = (
    "select * from queen.pop('orders', 'g', batch => 10, partitions => 5,"
    " subscription_mode => 'all')"
)
NOON = datetime.fromisoformat("2031-01-01T12:00:00+00:00")


async def fill(conn: asyncpg.Connection) -> None:
    """Push a, b, c to p and d to q, a minute apart."""
    for minute, (name, partition) in enumerate((("a", "p"), ("b", "p"), ("c", "p"), ("d", "q"))):
        await set_clock(conn, NOON + timedelta(minutes=minute))
        await conn.execute("select queen.push('orders', '1', $2, $1)", name, partition)


async def popped(conn: asyncpg.Connection) -> list[str]:
    return sorted(row["transaction_id"] for row in await conn.fetch(POP))


async def test_configure_creates_changes_and_replaces(conn: asyncpg.Connection) -> None:
    configure = "select * from queen.configure('orders', $1, $2)"
    made = await conn.fetchrow(configure, '{"leaseTime": 7, "namespace": "shop"}', False)
    assert (made["namespace"], json.loads(made["settings"])["leaseTime"]) == ("shop", 7)
    changed = await conn.fetchrow(configure, '{"retryLimit": 9}', False)
    settings = json.loads(changed["settings"])
    assert (changed["queue_id"], settings["leaseTime"], settings["retryLimit"]) == (
        made["queue_id"],
        7,
        9,
    )
    replaced = await conn.fetchrow(configure, '{"retryLimit": 2}', True)
    settings = json.loads(replaced["settings"])
    assert (replaced["namespace"], settings["leaseTime"], settings["retryLimit"]) == ("", 300, 2)


async def test_seek_to_the_beginning_and_the_end(conn: asyncpg.Connection) -> None:
    await fill(conn)
    assert await popped(conn) == ["a", "b", "c", "d"]
    # A seek revokes the lease.
    assert await conn.fetchval("select queen.seek('orders', 'g', 'beginning')") == 2
    assert await popped(conn) == ["a", "b", "c", "d"]
    assert await conn.fetchval("select queen.seek('orders', 'g', 'end')") == 2
    assert await popped(conn) == []
    await conn.execute("select queen.push('orders', '1', 'p', 'e')")
    assert await popped(conn) == ["e"]


async def test_seek_to_a_moment_and_an_offset(conn: asyncpg.Connection) -> None:
    await fill(conn)
    seek = "select queen.seek('orders', 'g', moment => $1)"
    assert await conn.fetchval(seek, NOON + timedelta(minutes=2)) == 2
    assert await popped(conn) == ["c", "d"]
    await conn.execute("select queen.seek('orders', 'g', next_offset => 1, partition => 'p')")
    assert await popped(conn) == ["b", "c"]
    # Beyond the end is the end.
    await conn.execute("select queen.seek('orders', 'g', next_offset => 99, partition => 'p')")
    await conn.execute("select queen.push('orders', '1', 'p', 'e')")
    assert await popped(conn) == ["e"]


async def test_seek_works_for_a_group_that_never_was_there(conn: asyncpg.Connection) -> None:
    await fill(conn)
    assert await conn.fetchval("select queen.seek('orders', 'g', 'end', partition => 'p')") == 1
    assert await popped(conn) == ["d"]


async def test_seek_does_not_go_below_what_retention_left(conn: asyncpg.Connection) -> None:
    await fill(conn)
    await conn.execute("update queen.partitions set log_start_offset = 2 where name = 'p'")
    for target in ("target => 'beginning'", "next_offset => 0, partition => 'p'"):
        await conn.execute(f"select queen.seek('orders', 'g', {target})")
        committed = await conn.fetchval(
            "select c.committed_offset from queen.cursors c"
            " join queen.partitions p on p.id = c.partition_id where p.name = 'p'"
        )
        assert committed == 1


@pytest.mark.parametrize(
    ("call", "sqlstate", "argument"),
    [
        ("seek('orders', 'g')", "QU000", "target"),
        ("seek('orders', 'g', 'end', now())", "QU000", "target"),
        ("seek('orders', 'g', 'middle')", "QU000", "target"),
        ("seek('orders', 'g', next_offset => 1)", "QU000", "partition"),
        ("seek('nothing', 'g', 'end')", "QU100", "queue"),
        ("seek('orders', 'g', 'end', partition => 'x')", "QU100", "partition"),
        ("configure('orders', '{\"leasetime\": 1}')", "QU000", "options.leasetime"),
        ("configure('orders', '{\"leaseTime\": 1.5}')", "QU000", "options.leaseTime"),
        ("configure('orders', '{\"leaseTime\": true}')", "QU000", "options.leaseTime"),
        ("configure('orders', '[]')", "QU000", "options"),
        ("configure('', '{}')", "QU000", "queue"),
        ("delete_queue('')", "QU000", "queue"),
        ("dlq_replay(null)", "QU000", "id"),
        ("dlq_replay(gen_random_uuid(), '')", "QU000", "queue"),
        ("dlq_replay(gen_random_uuid(), partition => '')", "QU000", "partition"),
    ],
)
async def test_a_refusal_names_the_argument(
    conn: asyncpg.Connection, call: str, sqlstate: str, argument: str
) -> None:
    await conn.execute("select queen.push('orders', '1')")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen.{call}")
    assert caught.value.sqlstate == sqlstate
    assert json.loads(caught.value.detail)["argument"] == argument


async def dead_letter(conn: asyncpg.Connection) -> str:
    """File a message as a dead letter and return the record's id."""
    await conn.execute("select queen.push('orders', '{\"n\":  1}', 'p', 'bad')")
    row = await conn.fetchrow(POP)
    await conn.execute(
        "select queen.nack($1, 'bad', $2, 'g', status => 'dlq')",
        row["partition_id"],
        row["lease_id"],
    )
    return str(await conn.fetchval("select id from queen.dead_letters"))


async def test_a_replay_moves_the_message_to_the_end(conn: asyncpg.Connection) -> None:
    """data-plane 8-6."""
    letter = await dead_letter(conn)
    replayed = await conn.fetchrow("select * from queen.dlq_replay($1)", letter)
    assert (replayed["result"], replayed["message_offset"]) == ("moved", 1)
    [row] = await conn.fetch(POP)
    assert (row["transaction_id"], row["payload"]) == (f"dlq:{letter}", '{"n":  1}')
    assert await conn.fetchval("select result from queen.dlq_replay($1)", letter) == "gone"


async def test_a_replay_elsewhere_that_is_known_there_keeps_the_record(
    conn: asyncpg.Connection,
) -> None:
    letter = await dead_letter(conn)
    await conn.execute("select queen.push('fixed', '1', 'x', $1)", f"dlq:{letter}")
    replayed = await conn.fetchrow("select * from queen.dlq_replay($1, 'fixed', 'x')", letter)
    assert (replayed["result"], replayed["message_offset"]) == ("duplicate", 0)
    replayed = await conn.fetchrow("select * from queen.dlq_replay($1, 'fixed', 'y')", letter)
    assert replayed["result"] == "moved"
    assert await conn.fetchval("select count(*) from queen.dead_letters") == 0


async def test_of_two_replays_at_once_one_moves(database: str) -> None:
    async with sessions(database) as (first, second):
        letter = await dead_letter(first)
        replay = "select result from queen.dlq_replay($1)"
        async with first.transaction():
            assert await first.fetchval(replay, letter) == "moved"
            rival = asyncio.create_task(second.fetchval(replay, letter))
            await until_waiting(first, second)
        assert await rival == "gone"
        assert await first.fetchval("select count(*) from queen.messages") == 2


async def test_a_seek_that_waited_for_an_ack_has_the_last_word(database: str) -> None:
    async with sessions(database) as (first, second):
        await first.execute("select queen.push('orders', '1', 'p', 'a')")
        row = await first.fetchrow(POP)
        async with first.transaction():
            await first.execute(
                "select queen.ack($1, 'a', $2, 'g')", row["partition_id"], row["lease_id"]
            )
            seeking = asyncio.create_task(
                second.fetchval("select queen.seek('orders', 'g', 'beginning')")
            )
            await until_waiting(first, second)
        assert await seeking == 1
        assert await popped(first) == ["a"]


async def test_what_is_pushed_while_a_group_seeks_to_the_end_is_read(database: str) -> None:
    async with sessions(database) as (first, second):
        await first.execute("select queen.push('orders', '1', 'p', 'a')")
        await first.fetch(POP)
        async with first.transaction():
            await first.execute("select queen.push('orders', '1', 'p', 'b')")
            seeking = asyncio.create_task(
                second.fetchval("select queen.seek('orders', 'g', 'end')")
            )
            await until_waiting(first, second)
        await seeking
        assert await popped(first) == ["b"]
