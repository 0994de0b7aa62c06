"""Rows and messages that are written in one transaction stay equal, whoever is killed when."""

import asyncio
import json
import secrets
import subprocess
import sys

import asyncpg

from tests.docs.markdown import ROOT
from tests.support.profile import LONG

KILLS = 500 if LONG else 40

UNEQUAL = """
select r.number as row, m.payload::text::bigint as message
from app_row r full join queen.message m on m.payload::text::bigint = r.number
where r.number is null or m.payload is null
"""
GAPS = """
select p.name, p.next_offset, count(*), min(m.message_offset), max(m.message_offset)
from queen.partitions p left join queen.messages m on m.partition_id = p.id
group by p.id
having count(m.*) <> p.next_offset or max(m.message_offset) <> p.next_offset - 1
"""
OPEN = """
select count(*) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_xid is not null
"""


async def killed(url: str) -> int:
    """Run the application until it has been killed often enough; return how often inside."""
    seed = secrets.randbelow(2**31)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.crash.application", url, str(KILLS), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    met: int = json.loads(done.stdout)["met"]
    return met


async def settled(connection: asyncpg.Connection) -> None:
    """Return when the server has noticed the last killed client."""
    async with asyncio.timeout(30):
        while await connection.fetchval(OPEN):
            await asyncio.sleep(0.02)


async def test_killed_applications_leave_equal_counts(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(
        "create table app_row (number bigint generated always as identity primary key)"
    )
    met = await killed(database)
    await settled(connection)
    rows = await connection.fetchval("select count(*) from app_row")
    messages = await connection.fetchval("select count(*) from queen.message")
    assert rows == messages > KILLS
    assert await connection.fetch(UNEQUAL) == []
    assert await connection.fetch(GAPS) == []
    # Else the kills met nobody at work, and showed nothing.
    assert met > KILLS // 10
    await connection.close()


async def test_a_message_outside_the_transaction_would_be_seen(database: str) -> None:
    """The check finds what an application that pushes after its commit loses."""
    connection = await asyncpg.connect(database)
    await connection.execute(
        "create table app_row (number bigint generated always as identity primary key);"
        "insert into app_row default values; insert into app_row default values;"
        "select queen.push('rows', '1'), queen.push('rows', '7')"
    )
    found = {tuple(row) for row in await connection.fetch(UNEQUAL)}
    assert found == {(2, None), (None, 7)}
    await connection.execute("delete from queen.messages where message_offset = 0")
    assert len(await connection.fetch(GAPS)) == 1
    await connection.close()
