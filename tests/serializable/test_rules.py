"""What every step keeps to at any size of the tables, so that SERIALIZABLE aborts no stranger."""

import ast
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

import queen_pg
from queen_pg.broker import kv, lock, timer, timer_document
from queen_pg.broker.ack import AckItem, ack
from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import push
from queen_pg.broker.transaction import Transaction, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.wakeup import Waiters
from tests.serializable.exercise import exercise, item
from tests.support.database import Databases
from tests.support.isolation import Watched, soon

PARTITIONS = 10_000
LARGE = f"""
insert into queen.queues (uid, tenant_id, name) values (gen_random_uuid(), 1, 'many');
insert into queen.consumer_groups (queue_id, name, registered_at)
select q.id, 'workers', clock_timestamp() from queen.queues q where q.name = 'many';
insert into queen.partitions (queue_id, name, next_offset, last_append_at)
select q.id, 'p-' || n, 2, clock_timestamp()
from queen.queues q, generate_series(1, {PARTITIONS}) n where q.name = 'many';
insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id, payload)
select p.id, n, p.last_append_at, gen_random_uuid(), 'message-' || n, '{{}}'
from queen.partitions p, generate_series(0, 1) n where p.name like 'p-%';
insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)
select p.id, g.id, 1, clock_timestamp()
from queen.partitions p join queen.consumer_groups g using (queue_id) where p.name like 'p-%';
insert into queen.ready (group_id, partition_id, ready_at, next_offset)
select c.group_id, c.partition_id, 'infinity', 2
from queen.cursors c join queen.partitions p on p.id = c.partition_id where p.name like 'p-%';
insert into queen.kv (tenant_id, namespace, key, version, value, created_at, updated_at)
select 1, 'state', 'key-' || n, n, '1', clock_timestamp(), clock_timestamp()
from generate_series(1, {PARTITIONS}) n;
insert into queen.timers (tenant_id, queue, timer_key, partition, transaction_id, message_id,
                          payload, deliver_at, fire_at, created_at, updated_at)
select 1, 'many', 'key-' || n, 'p-' || n, 'timer-' || n, gen_random_uuid(), '{{}}',
       now() + interval '1 day', now() + interval '1 day', now(), now()
from generate_series(1, {PARTITIONS}) n;
"""
SIZES = {"small": "", "large": LARGE, "large and analyzed": f"{LARGE} analyze"}

BIG = {"partitions", "messages", "cursors", "ready", "kv", "timers"}
HINTS = {
    "ready_pkey",
    "ready_group_id_ready_at_idx",
    "ready_lease_id_idx",
    "timers_fire_at_idx",
}


# Written for READ COMMITTED: they keep hints, sweep what is dead, enter a tenant, or wait for
# steps under way.
AT_READ_COMMITTED = {
    "_claimable",
    "_delete_queue",
    "_kv_sweep",
    "_next_ready",
    "_rearm",
    "_seed_ready",
    "_tenant_id",
    "_throw_switches",
    "_walk_ready",
}
# Pages that are written to when a queue, a group or a tenant is made, or a server: seldom.
QUIET = {
    "epoch_pkey",
    "tenants_pkey",
    "queues_pkey",
    "queues_tenant_id_name_key",
    "consumer_groups_pkey",
    "consumer_groups_queue_id_name_key",
    "switches_pkey",
}


@pytest_asyncio.fixture(scope="module", params=SIZES)
async def watched(request: pytest.FixtureRequest, databases: Databases) -> AsyncIterator[Watched]:
    """A door through which everything has been called, on tables of some size."""
    async with databases.clone() as url:
        db = Watched(Settings(pg_url=url))
        await db.start()
        # What is planned while the tables are empty stays in use: those plans are under test too.
        await exercise(db, "first")
        if SIZES[request.param]:
            connection = await asyncpg.connect(url)
            await connection.execute(SIZES[request.param])
            await connection.close()
            db.reads.clear()
        await exercise(db, "many")
        yield db
        await db.close()


def test_no_step_locks_a_relation(watched: Watched) -> None:
    assert {step.name: step.relations for step in watched.steps if step.relations} == {}


def test_no_step_reads_an_index_of_hints(watched: Watched) -> None:
    reading = {step.name: step.pages & HINTS for step in watched.steps if step.pages & HINTS}
    # The sweep that deletes partitions takes their hints along, by key.
    assert reading.pop("_delete_partitions") == {"ready_pkey"}
    assert reading == {}


def test_no_step_scans_a_table(watched: Watched) -> None:
    assert {step.name: step.scans for step in watched.steps if step.scans} == {}


async def test_every_step_is_watched(watched: Watched, conn: asyncpg.Connection) -> None:
    changing = await conn.fetch(
        "select proname from pg_proc"
        " where pronamespace = 'queen'::regnamespace and provolatile = 'v'"
    )
    called = {name for (name,) in changing if name.startswith("_")} & words_of_the_broker()
    assert called - {step.function for step in watched.steps} == AT_READ_COMMITTED


def words_of_the_broker() -> set[str]:
    """Return every text in the package's source: among them are the functions that it calls."""
    return {
        node.value
        for path in Path(queen_pg.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("watched", ["large and analyzed"], indirect=True)
def test_no_read_scans_a_big_table(watched: Watched) -> None:
    assert {read.name: read.scans & BIG for read in watched.reads if read.scans & BIG} == {}


@pytest_asyncio.fixture
async def fresh(database: str) -> AsyncIterator[Watched]:
    """A door to a database in which nothing has happened yet."""
    db = Watched(Settings(pg_url=database))
    await db.start()
    yield db
    await db.close()


KEY = {"ns": "state", "key": "of-nothing"}
NOTHING_TO_FIND: dict[str, tuple[Callable[[Watched], Awaitable[Any]], set[str]]] = {
    "check": (lambda db: run_kv(db, {"op": "check", **KEY, "expect": 0}), {"kv_pkey"}),
    "delete": (lambda db: run_kv(db, {"op": "delete", **KEY}), {"kv_pkey"}),
    "required": (
        lambda db: run_kv(db, {"op": "check", **KEY, "expect": 1, "required": True}),
        {"kv_pkey"},
    ),
    "put": (lambda db: run_kv(db, {"op": "put", **KEY, "value": "1"}), set()),
    "incr": (lambda db: run_kv(db, {"op": "incr", **KEY, "delta": 1}), set()),
    "acquire": (
        lambda db: lock.run(db, 1, [{"op": "acquire", "name": "door", "ttlSeconds": 9}], soon()),
        set(),
    ),
    "release": (
        lambda db: lock.run(db, 1, [{"op": "release", "name": "door", "token": 1}], soon()),
        {"kv_pkey"},
    ),
    "cancel": (
        lambda db: timer.run(db, 1, [timer_document.cancel("bell", "noon", None)], soon()),
        {"timers_pkey"},
    ),
    "schedule": (lambda db: timer.run(db, 1, [NOON], soon()), set()),
    "ack": (
        lambda db: ack(db, 1, "workers", [AckItem(1, "message")], soon()),
        {"partitions_pkey"},
    ),
    "push": (
        lambda db: push(db, 1, [item("orders", "order-1", "placed")], soon()),
        {"queues_tenant_id_name_key", "consumer_groups_queue_id_name_key"},
    ),
}
NOON = {
    "op": "schedule",
    "queue": "bell",
    "timerKey": "noon",
    "delayMs": 60_000,
    "txn": "noon-1",
    "payload": "{}",
}


async def run_kv(db: Database, operation: dict[str, Any]) -> None:
    # Two, so that it is a step, whatever it is.
    await kv.run(db, 1, [operation, operation | {"key": "another"}], soon())


@pytest.mark.parametrize("call", NOTHING_TO_FIND)
async def test_an_index_is_locked_whole_only_until_its_first_entry(
    fresh: Watched, call: str
) -> None:
    # It has no page yet that a search could lock. One entry, even one that is gone, ends this.
    run, expected = NOTHING_TO_FIND[call]
    await run(fresh)
    assert {name for step in fresh.steps for name in step.barren_indexes} == expected
    assert {step.name: step.relations for step in fresh.steps if step.relations} == {}


async def test_a_step_that_only_makes_new_things_reads_no_page_that_others_write_to(
    fresh: Watched, database: str
) -> None:
    connection = await asyncpg.connect(database)
    # As if somebody else drew a version at every moment: a key's row then draws its own once more.
    await connection.execute(
        """
        create function queen.draw() returns trigger language plpgsql as
        $$ begin perform nextval('queen.kv_version'); return new; end $$;
        create trigger draw before insert on queen.kv for each row execute function queen.draw();
        """
    )
    await connection.close()
    await exercise(fresh, "first")
    fresh.steps.clear()
    verdict = await commit(
        fresh,
        1,
        Transaction(
            items=[item("first", "born-now", "a"), item("first", "born-too", "a")],
            kv=[
                {"op": "putIfAbsent", **KEY, "value": "1", "required": True},
                {"op": "put", "ns": "state", "key": "b", "value": "1"},
                {"op": "incr", "ns": "state", "key": "c", "delta": 1},
            ],
            timers=[NOON],
        ),
        soon(),
    )
    assert verdict.success
    [step] = fresh.steps
    assert step.pages <= QUIET


async def test_a_first_claim_reads_no_page_that_others_write_to(fresh: Watched) -> None:
    await exercise(fresh, "first")
    await push(fresh, 1, [item("second", f"born-{n}") for n in range(3)], soon())
    waiters = Waiters(fresh, Settings())
    answer = await waiters.pop(
        1,
        PopRequest(queue="second", consumer_group="workers", partitions=3, subscription_mode="all"),
    )
    await waiters.close()
    assert len(answer.claims) == 3
    step = fresh.steps[-1]
    assert step.function == "_claim"
    assert step.pages <= QUIET


async def test_a_scan_would_be_seen(fresh: Watched, database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(
        "alter function queen._extend_lease set enable_indexscan = off;"
        "alter function queen._extend_lease set enable_seqscan = on"
    )
    await connection.close()
    await exercise(fresh, "first")
    [step] = [step for step in fresh.steps if step.function == "_extend_lease"]
    assert (step.relations, step.scans) == ({"cursors"}, {"cursors"})
