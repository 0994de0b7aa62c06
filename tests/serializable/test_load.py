"""Steps with nothing in common hardly ever send each other back, and their updates are HOT."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.broker.partition import PartitionIds
from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import PushItem, push
from queen_pg.broker.transaction import Transaction, TransactionAck, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.wakeup import Waiters
from tests.support.database import Databases
from tests.support.isolation import Counting, soon

WORKERS = 4
ROUNDS = 60
# Each worker's own entities, and others beside them: a database that is not newborn.
ENTITIES = 10
BYSTANDERS = 1000
RETRIED_MAX = 0.02
HOT_MIN = 0.95


async def work(db: Database, waiters: Waiters, worker: int) -> None:
    """Push to an old and to a new entity, and take a whole step on each."""
    for number in range(ROUNDS):
        old, new = f"old-{worker}-{number % ENTITIES}", f"new-{worker}-{number}"
        await push(
            db, 1, [PushItem("in", old, b"{}", f"event-{number}-{n}") for n in range(3)], soon()
        )
        await push(db, 1, [PushItem("in", new, b"{}", f"event-{number}")], soon())
        for entity in (old, new):
            await step(db, waiters, worker, number, entity)


async def step(db: Database, waiters: Waiters, worker: int, number: int, entity: str) -> None:
    answer = await waiters.pop(
        1,
        PopRequest(queue="in", partition=entity, consumer_group="workers", subscription_mode="all"),
    )
    [claim] = answer.claims
    event = f"{number:06d}-{entity}"
    verdict = await commit(
        db,
        1,
        Transaction(
            acks=[
                TransactionAck(
                    claim.partition_id,
                    message.transaction_id,
                    lease_id=str(answer.lease_id),
                    consumer_group="workers",
                )
                for message in claim.messages
            ],
            items=[
                PushItem("out", f"out-{worker}-{number % ENTITIES}", b"{}", event),
                PushItem("out", f"out-{event}", b"{}", event),
            ],
            kv=[
                # Gates whose keys rise, as ids and dates do: all workers' next ones are neighbours.
                {"op": "putIfAbsent", "ns": "once", "key": event, "value": "1", "required": True},
                {"op": "put", "ns": "state", "key": entity, "value": '{"seen": true}'},
                {"op": "incr", "ns": "counts", "key": f"worker-{worker}", "delta": 1},
            ],
            timers=[
                {
                    "op": "schedule",
                    "queue": "reminders",
                    "timerKey": entity,
                    "delayMs": 86_400_000,
                    "txn": f"remind-{event}",
                    "payload": "{}",
                }
            ],
        ),
        soon(),
    )
    assert verdict.success


@pytest_asyncio.fixture(scope="module")
async def loaded(databases: Databases) -> AsyncIterator[tuple[Counting, asyncpg.Connection]]:
    """What was counted under the load, and a connection to the database that carried it."""
    async with databases.clone() as url:
        settings = Settings(pg_url=url, pg_pool_size=WORKERS)
        db = Counting(settings)
        await db.start()
        waiters = Waiters(db, settings)
        ids = PartitionIds(db)
        for queue, name in (("in", "old"), ("out", "out")):
            own = [(queue, f"{name}-{n}-{m}") for n in range(WORKERS) for m in range(ENTITIES)]
            await ids.ensure(1, own, soon())
            await ids.ensure(1, [(queue, f"bystander-{n}") for n in range(BYSTANDERS)], soon())
        await asyncio.gather(*(work(db, waiters, worker) for worker in range(WORKERS)))
        await waiters.close()
        # Connections that end hand over their statistics.
        await db.close()
        connection = await asyncpg.connect(url)
        yield db, connection
        await connection.close()


def test_steps_on_disjoint_partitions_are_hardly_ever_retried(
    loaded: tuple[Counting, asyncpg.Connection],
) -> None:
    db, _ = loaded
    steps = WORKERS * ROUNDS * 2
    assert db.committed["_transact"] == db.committed["_claim"] == steps
    share = {name: db.lost[name] / db.committed[name] for name in db.committed}
    print(share)
    hot = {name: lost for name, lost in share.items() if db.committed[name] >= steps}
    assert {name: lost for name, lost in hot.items() if lost >= RETRIED_MAX} == {}
    assert db.deadlocks == 0


@pytest.mark.parametrize("table", ["partitions", "cursors", "kv"])
async def test_updates_of_what_steps_read_are_hot(
    loaded: tuple[Counting, asyncpg.Connection], table: str
) -> None:
    _, connection = loaded
    updates, hot = await connection.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables"
        " where schemaname = 'queen' and relname = $1",
        table,
    )
    assert updates >= WORKERS * ROUNDS
    assert hot >= HOT_MIN * updates
