"""Every guide does what it says, when its blocks are run one after the other."""

import asyncio
import re

import asyncpg
import pytest_asyncio

from tests.docs.markdown import ROOT, blocks, psql, run
from tests.support.sessions import sessions, until_waiting


def test_there_is_a_test_for_every_guide() -> None:
    names = {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")}
    assert names == {"transactional-enqueue", "trigger", "worker", "stuck-order"}


async def fetch(url: str, query: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def test_enqueuing_in_the_application_s_transaction(database: str) -> None:
    await asyncio.to_thread(run, "guides/transactional-enqueue.md", database)
    customers = await fetch(
        database,
        "select o.customer from shop_order o"
        " join queen.message m on m.queue = 'orders' and m.partition = 'order-' || o.id"
        " order by o.id",
    )
    assert [row[0] for row in customers] == ["anna", "bert", "carla", "emil", "fritz"]
    counts = "select (select count(*) from shop_order), (select count(*) from queen.message)"
    assert await fetch(database, counts) == [(5, 5)]


async def test_pushing_from_a_trigger(database: str) -> None:
    await asyncio.to_thread(run, "guides/trigger.md", database)
    events = "select payload ->> 'operation', count(*) from queen.message group by 1 order by 1"
    # One of a row alone, a thousand by one statement, none for a statement that changed nothing.
    assert await fetch(database, events) == [("delete", 1), ("insert", 1), ("update", 1001)]


async def test_a_worker_whose_writes_share_the_step_s_commit(database: str) -> None:
    await asyncio.to_thread(run, "guides/worker.md", database)
    invoices = await fetch(database, "select order_id, total from invoice order by 1")
    assert invoices == [(1, 4300), (2, 900), (4, 60), (5, 80)]
    receipts = "select count(*) from queen.message where queue = 'receipts'"
    assert await fetch(database, receipts) == [(4,)]
    dead = await fetch(database, "select error, retry_count from queen.dead_letter")
    assert dead == [("order 3 has a negative total", 3)]
    assert await fetch(database, "select count(*) from queen.lag where queue = 'orders'") == [(0,)]
    assert await fetch(database, "select key from queen.kv_live where namespace = 'orders'") == [
        ("4",)
    ]
    assert await fetch(database, "select timer_key from queen.timer") == [("4",)]


@pytest_asyncio.fixture
async def stuck(database: str) -> str:
    """A database in which order 9137 is stuck in every way that the guide knows."""
    connection = await asyncpg.connect(database)
    await connection.execute("select queen.configure('orders', '{\"retryLimit\": 0}')")
    for event in ("placed", "paid", "packed", "sent"):
        await connection.execute(
            "select queen.push('orders', json_build_object('event', $1::text), 'order-9137')", event
        )
    await connection.execute("select queen.push('orders', '{}', 'order-1')")
    pop = (
        "select * from queen.pop('orders', 'billing', 'order-9137', subscription_mode => 'all',"
        " lease_seconds => 600)"
    )
    first = await connection.fetchrow(pop)
    await connection.execute(
        "select queen.ack($1, $2, $3, 'billing')",
        *(first[name] for name in ("partition_id", "transaction_id", "lease_id")),
    )
    second = await connection.fetchrow(pop)
    await connection.execute(
        "select queen.nack($1, $2, $3, 'billing', error => 'no such customer')",
        *(second[name] for name in ("partition_id", "transaction_id", "lease_id")),
    )
    for status in ("retry", None):
        third = await connection.fetchrow(pop)
        if status:
            await connection.execute(
                "select queen.nack($1, $2, $3, 'billing', status => $4)",
                *(third[name] for name in ("partition_id", "transaction_id", "lease_id")),
                status,
            )
    await connection.execute(
        "select queen.timer_schedule('reminders', 'order-9137', '1', delay => '1 hour');"
        "select queen.kv_put('orders', '9137', '{\"status\": \"paid\"}');"
        "select queen.pop('orders', 'mailing', subscription_mode => 'all')"
    )
    await connection.close()
    return database


async def test_each_query_finds_the_stuck_order(stuck: str) -> None:
    queries = [text for language, text in blocks("guides/stuck-order.md") if language == "sql"]
    assert len(queries) == 10
    async with sessions(stuck) as (holder, waiter):
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("select queen.push('orders', '{}', 'order-9137')")
        waiting = asyncio.create_task(
            waiter.execute("select queen.push('orders', '{}', 'order-9137')")
        )
        await until_waiting(holder, waiter)
        answers = [await asyncio.to_thread(psql, stuck, text, "-At") for text in queries]
        await transaction.rollback()
        await waiting
    for query, answer in zip(queries, answers, strict=True):
        assert answer.strip(), f"no row from\n{query}"
    states = [line.rsplit("|", 1)[1] for line in answers[2].splitlines()]
    assert states == ["settled", "settled", "leased", "waiting"]
    assert answers[3].startswith("billing|2|2|")
    assert "orders|billing|order-9137|2|" in answers[4]
    assert "no such customer|1|" in answers[6]
    assert "idle in transaction" in answers[9]


async def test_each_remedy_works(stuck: str) -> None:
    page = (ROOT / "docs" / "guides" / "stuck-order.md").read_text()
    remedies = re.findall(r"`(select [^`]*queen[^`]*)`", page.partition("## Then")[2])
    assert len(remedies) == 4
    [[letter]] = await fetch(stuck, "select id from queen.dead_letter")
    for remedy in remedies:
        answer = await asyncio.to_thread(psql, stuck, remedy.replace("…", str(letter)), "-At")
        assert answer.startswith("moved|" if "dlq" in remedy else ("1", "2"))
