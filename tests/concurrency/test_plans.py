"""Nothing walks through a table that was empty when its statements were planned."""

import asyncio

import asyncpg
import pytest

from queen_pg import plans
from queen_pg.broker.transaction import Transaction, TransactionAck
from tests.concurrency.test_waiters import SEEDED
from tests.support.process import Process, offsets

ROWS = 5000
PATIENCE_SECONDS = 20.0

# Every partition has been read, and every timer is for another day.
GROWTH = f"""
with grown as (
    insert into queen.partitions (queue_id, name, next_offset, last_append_at, created_at)
    select q.id, 'grown ' || n, 1, queen.now(), queen.now()
    from queen.queues q, generate_series(1, {ROWS}) n where q.name = 'mail' order by n
    returning id
), groups as (
    select g.id from queen.consumer_groups g
), messages as (
    insert into queen.messages (
        partition_id, message_offset, created_at, id, transaction_id, payload
    )
    select g.id, 0, queen.now(), gen_random_uuid(), 'grown', '1' from grown g
), cursors as (
    insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)
    select p.id, g.id, 0, queen.now() from grown p, groups g
), ready as (
    insert into queen.ready (group_id, partition_id, ready_at, next_offset)
    select g.id, p.id, 'infinity', 1 from grown p, groups g
), kv as (
    insert into queen.kv (tenant_id, namespace, key, version, value, created_at, updated_at)
    select 1, 'n', 'grown ' || n, 1, '1', queen.now(), queen.now() from generate_series(1, {ROWS}) n
)
insert into queen.timers (tenant_id, queue, timer_key, partition, transaction_id, message_id,
                          payload, deliver_at, fire_at, created_at, updated_at)
select 1, 'mail', 'grown ' || n, 'p', n, gen_random_uuid(), '1', queen.now() + interval '1 day',
       queen.now() + interval '1 day', queen.now(), queen.now()
from generate_series(1, {ROWS}) n
"""

SESSIONS = """
select pid from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""
# A session tells of what it has read when it ends, at the latest.
READ = """
select t.relname, t.seq_tup_read + coalesce(sum(i.idx_tup_read), 0)::bigint
from pg_stat_user_tables t left join pg_stat_user_indexes i using (relid)
group by t.relname, t.seq_tup_read
"""


async def read(session: asyncpg.Connection) -> dict[str, int]:
    """Return how many rows and index entries of each table have been read."""
    await session.execute("select pg_stat_force_next_flush()")
    return dict(await session.fetch(READ))


async def walked(session: asyncpg.Connection, before: dict[str, int]) -> dict[str, int]:
    """Return what was read since then, once the sessions of the process have ended."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await session.fetch(SESSIONS):
            await asyncio.sleep(0.05)
    return {name: count - before[name] for name, count in (await read(session)).items()}


async def every_call(one: Process) -> None:
    """Push, pop, ack and nack, several partitions at once and one alone, and commit steps."""
    await one.push([one.item("mail", partition) for partition in "abcabc"])
    await one.push_one("mail", "d", "told")
    assert (await one.push_one("mail", "d", "told")).status == "duplicate"
    answer = await one.pop("mail", batch=10, partitions=10)
    assert answer.lease_id is not None
    await one.extend(str(answer.lease_id), 60)
    await one.ack(answer, claims=answer.claims[:2])
    await one.ack(answer, "retry", claims=answer.claims[2:])
    answer = await one.pop("mail", batch=10, partitions=10)
    one_claim = await one.pop("mail", partition="a")
    assert offsets(one_claim) == []
    acks = [
        TransactionAck(
            claim.partition_id, message.transaction_id,
            lease_id=str(answer.lease_id), consumer_group=answer.consumer_group,
        )
        for claim in answer.claims
        for message in claim.messages
    ]  # fmt: skip
    verdict = await one.commit(
        Transaction(
            acks=acks,
            items=[one.item("mail", "a"), one.item("mail", "b")],
            kv=[{"op": "put", "ns": "n", "key": "k", "value": "1"}],
            timers=[
                {
                    "op": "schedule", "queue": "mail", "timerKey": "t", "partition": "p",
                    "txn": "timed", "payload": "1", "delayMs": 3_600_000,
                },
                {"op": "cancel", "queue": "mail", "timerKey": "t"},
            ],
        )
    )  # fmt: skip
    assert verdict.success, verdict
    await one.ack(await one.pop("mail", batch=10, partitions=10))


async def test_a_process_plans_anew_when_the_tables_have_grown(
    database: str, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "LOOK_SECONDS", 0.05)
    await session.execute("vacuum analyze")
    async with Process(database) as one:
        for _ in range(6):
            # A custom plan is made for each of the first five calls.
            await every_call(one)
        await session.execute(SEEDED)
        await session.execute(GROWTH)
        reign = one.db._reign
        assert reign is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not reign._early:
                await asyncio.sleep(0.01)
        before = await read(session)
        await every_call(one)
    assert {name: n for name, n in (await walked(session, before)).items() if n > ROWS / 2} == {}


async def test_a_group_that_no_plan_knows_of_is_seeded_by_key(
    database: str, session: asyncpg.Connection
) -> None:
    async with Process(database) as one:
        await every_call(one)
        await session.execute(SEEDED)
        await session.execute(GROWTH)
        await session.execute("analyze")
        before = await read(session)
        for _ in range(10):
            answer = await one.pop("mail", consumer_group="another", batch=64, partitions=64)
            assert answer.claims
            await one.ack(answer)
    # Those that were entered before are not read with each round of the seeding.
    assert (await walked(session, before))["ready"] < ROWS
