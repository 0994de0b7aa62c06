"""Steps that name the same rows in opposite orders: they wait for each other, and never in a ring.

Each kind of row is tried as it is, and with the order of its locks broken on purpose: the checker
must find a deadlock then.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import msgspec
import pytest

from queen_pg import turns
from queen_pg.broker import lock, timer_document, timer_fire
from queen_pg.broker.ack import AckItem, ack
from queen_pg.broker.partition import resolve
from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import PushItem, push
from queen_pg.broker.transaction import Position, Transaction, TransactionAck, commit
from queen_pg.config import Settings
from queen_pg.errors import Held
from queen_pg.wakeup import Waiters
from tests.anomaly.conftest import Opener
from tests.support.isolation import Counting, soon, weaken

ROWS = 20
CLIENTS = 4
ROUNDS = 4
MESSAGES = 60
# How long a broken order is given to show itself; it takes the server a second to tell.
PATIENCE_SECONDS = 20.0

# Each lock takes its time, so that two steps are among theirs together. The first ten rows of a
# loop over a query are locked in one go, hence the number of rows.
LINGER = """
create function queen.linger() returns trigger language plpgsql as
$$ begin perform pg_sleep(0.0005); return coalesce(new, old); end $$;
create trigger linger before update on queen.cursors
for each row execute function queen.linger();
create trigger linger before insert or update or delete on queen.partitions
for each row execute function queen.linger();
create trigger linger before insert or update on queen.kv
for each row execute function queen.linger();
create trigger linger before insert or update or delete on queen.timers
for each row execute function queen.linger();
"""
LINGER_IN = {
    "_judge_acks": "cursors := cursors || v_cursor;",
    "_transaction": "v_judged := queen._judge_acks(",
    "_duplicates": "v_windows[v_row.place] := greatest(",
}

# How a firing takes its partitions before its timers.
HELD_PARTITIONS = """v_held := array(
        select p.id
        from queen.partitions p
        where p.id = any(_timers_fire.partition_id)
        order by p.id
        for no key update skip locked
    );
    if v_held = '{}' and _timers_fire.wait_ms > 0 then"""

SWITCHES = "reason := queen._switched_off(_transaction.kv, _transaction.timers);"
KEYS_FIRST = "if random() < 0.5 then perform from queen.kv for update; end if;"

NAMES = [f"entity-{number:02d}" for number in range(ROWS)]


@pytest.fixture(autouse=True)
def _nobody_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns keep steps that have met once from meeting again."""
    monkeypatch.setattr(turns, "LOST_SECONDS", 0.0)


class Field:
    """What the steps fight for: partitions that a group reads, keys and timers."""

    def __init__(self, db: Counting, ids: dict[str, int], lease_id: str | None) -> None:
        self.db = db
        self.ids = ids
        # None when it was given back: what is acked without one moves the cursor up to itself.
        self.lease_id = lease_id
        self.numbers = itertools.count()
        self._acked = itertools.count()

    async def commit(
        self,
        *,
        acks: Sequence[str] = (),
        pushes: Sequence[str] = (),
        positions: Sequence[str] = (),
        keys: Sequence[str] = (),
        timers: Sequence[str] = (),
        cancel: bool = False,
    ) -> None:
        """Commit a step on the named rows, in the order in which they are named."""
        number = next(self.numbers)
        message = self.next_message()
        verdict = await commit(
            self.db,
            1,
            Transaction(
                acks=[
                    TransactionAck(
                        self.ids[name], message, lease_id=self.lease_id, consumer_group="workers"
                    )
                    for name in acks
                ],
                items=[PushItem("in", name, b"{}", f"step-{number}") for name in pushes],
                positions=[Position("in", "workers", name, 1) for name in positions],
                kv=[{"op": "incr", "ns": "state", "key": name, "delta": 1} for name in keys],
                timers=[self._timer(name, number, cancel=cancel) for name in timers],
            ),
            soon(),
        )
        assert verdict.success

    def next_message(self) -> str:
        """Return a message to ack; others may have acked one behind it by then."""
        return f"message-{next(self._acked) % MESSAGES}"

    def _timer(self, name: str, number: int, *, cancel: bool) -> dict[str, Any]:
        if cancel:
            return timer_document.cancel("in", name, None)
        return {
            "op": "schedule",
            "queue": "in",
            "timerKey": name,
            "partition": name,
            "delayMs": -1,
            "txn": f"timer-{number}",
            "payload": "{}",
        }


async def prepare(db: Counting, sql: asyncpg.Connection, work: "Work") -> Field:
    await sql.execute(LINGER)
    for function, text in LINGER_IN.items():
        await weaken(sql, function, text, f"perform pg_sleep(0.0005); {text}")
    items = [
        PushItem("in", name, b"{}", f"message-{number}")
        for number in range(MESSAGES)
        for name in NAMES
    ]
    await push(db, 1, items, soon())
    waiters = Waiters(db, Settings())
    answer = await waiters.pop(
        1,
        PopRequest(
            queue="in",
            consumer_group="workers",
            subscription_mode="all",
            partitions=ROWS,
            batch=ROWS * MESSAGES,
        ),
    )
    await waiters.close()
    assert len(answer.claims) == ROWS
    lease_id = str(answer.lease_id)
    if work is not leased_acks:
        items = [
            AckItem(claim.partition_id, claim.messages[0].transaction_id, "retry")
            for claim in answer.claims
        ]
        await ack(db, 1, "workers", items, soon())
    ids = await resolve(db, 1, [("in", name) for name in NAMES], soon())
    return Field(
        db,
        {name: ids["in", name] for name in NAMES},
        lease_id if work is leased_acks else None,
    )


Work = Callable[[Field, list[str]], Awaitable[None]]


async def acks(field: Field, names: list[str]) -> None:
    await field.commit(acks=names)
    message = field.next_message()
    items = [AckItem(field.ids[name], message, lease_id=field.lease_id) for name in names]
    await ack(field.db, 1, "workers", items, soon())


async def leased_acks(field: Field, names: list[str]) -> None:
    await acks(field, names)


async def pushes(field: Field, names: list[str]) -> None:
    await field.commit(pushes=names)
    await push(field.db, 1, [PushItem("in", name, b"{}") for name in names], soon())


async def repeats(field: Field, names: list[str]) -> None:
    # What repeats a message is judged carefully, with what comes beside it.
    items = [PushItem("in", name, b"{}", each) for name in names for each in ("message-0", None)]
    results = await push(field.db, 1, items, soon())
    assert [result.status for result in results] == ["duplicate", "queued"] * len(names)


async def keys(field: Field, names: list[str]) -> None:
    await field.commit(keys=names)


async def gates(field: Field, names: list[str]) -> None:
    # One that is lost has all judged carefully before it. The first of as many steps as there are
    # clients wins it: were there one for all, nothing would change after its first step, and steps
    # that did not meet that one would never meet.
    number = next(field.numbers)
    writes = [{"op": "incr", "ns": "state", "key": name, "delta": 1} for name in names]
    key = f"~gate-{number // CLIENTS}"
    gate = {"op": "putIfAbsent", "ns": "state", "key": key, "value": "1", "required": True}
    items = [PushItem("in", name, b"{}", f"gate-{number}") for name in names]
    await commit(field.db, 1, Transaction(items=items, kv=[*writes, gate]), soon())


async def permits(field: Field, names: list[str]) -> None:
    owner = f"owner-{next(field.numbers)}"
    acquired = [
        msgspec.json.decode(result)
        for result in await lock.run(
            field.db,
            1,
            [
                {"op": "acquire", "name": name, "ttlSeconds": 60, "owner": owner, "limit": 1}
                for name in names
            ],
            soon(),
        )
    ]
    release = [
        {"op": "release", "name": permit["name"], "token": permit["token"]}
        for permit in acquired
        if permit["acquired"]
    ]
    await lock.run(field.db, 1, release, soon())


async def timers(field: Field, names: list[str]) -> None:
    await field.commit(timers=names)
    await field.commit(timers=names, cancel=True)


async def positions(field: Field, names: list[str]) -> None:
    half = len(names) // 2
    await field.commit(positions=names[:half], acks=names[half:])


async def everything(field: Field, names: list[str]) -> None:
    await field.commit(acks=names, pushes=names, keys=names, timers=names)


async def firing(field: Field, names: list[str]) -> None:
    await field.commit(timers=names)
    due, _ = await timer_fire.due(field.db)
    if due:
        # Another one may be firing.
        with contextlib.suppress(Held):
            await timer_fire.fire(field.db, 1, due, 5, soon(), patient=True)
    await field.commit(pushes=names, timers=names, cancel=True)


async def race(field: Field, work: Work) -> None:
    """Let clients do the work at the same time, half of them with the names turned round."""

    async def client(number: int) -> None:
        for _ in range(ROUNDS):
            await work(field, NAMES if number % 2 else NAMES[::-1])

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


async def race_until_deadlocked(field: Field, work: Work) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not field.db.deadlocks:
            racing = asyncio.create_task(race(field, work))
            while not (racing.done() or field.db.deadlocks):
                await asyncio.wait([racing], timeout=0.01)
            racing.cancel()
            await asyncio.wait([racing])


@pytest.mark.parametrize(
    "work",
    [
        *(acks, leased_acks, pushes, repeats, keys, gates, permits, timers, positions),
        *(everything, firing),
    ],
    ids=lambda work: work.__name__,
)
async def test_crosswise_steps_all_commit_and_none_is_deadlocked(
    open_door: Opener, sql: asyncpg.Connection, work: Work
) -> None:
    async with open_door(connections=CLIENTS) as db:
        field = await prepare(db, sql, work)
        async with asyncio.timeout(PATIENCE_SECONDS):
            # Until they have met.
            while not db.lost:
                await race(field, work)
        assert db.deadlocks == 0


@pytest.mark.parametrize(
    ("work", "function", "text", "instead"),
    [
        (acks, "_judge_acks", "order by t.partition_id, t.group_id", "order by random()"),
        (
            leased_acks,
            "_complete",
            "from unnest(_complete.partition_id, _complete.group_id, _complete.lease_id,"
            " _complete.first_offset, _complete.last_offset)\n"
            "             with ordinality u ",
            "from (select * from unnest(_complete.partition_id, _complete.group_id,"
            " _complete.lease_id, _complete.first_offset, _complete.last_offset)"
            " with ordinality order by random()) u ",
        ),
        (
            pushes,
            "_append",
            "from unnest(_append.group_partition_id, _append.group_first, _append.group_size)"
            " with ordinality u (id, first, size, place)",
            "from (select * from unnest(_append.group_partition_id, _append.group_first,"
            " _append.group_size) with ordinality r (id, first, size, place)"
            " order by random()) u",
        ),
        (repeats, "_duplicates", "order by g.id", "order by random()"),
        (gates, "_duplicates", "order by g.id", "order by random()"),
        (keys, "_kv_in_order", "order by o.operation", "order by random(), o.operation"),
        (
            permits,
            "_locks",
            "order by queen._lock_key(o.operation->>'name', 0) collate \"C\"",
            "order by random()",
        ),
        # The acks' cursors before those of positions.
        (positions, "_transaction", "for update of c) held", ") held"),
        # Every second step has its keys before its cursors and partitions.
        (everything, "_transaction", SWITCHES, f"{SWITCHES} {KEYS_FIRST}"),
        (timers, "_timers_apply", "order by o.operation", "order by random(), o.operation"),
        (
            firing,
            "_timers_fire",
            HELD_PARTITIONS,
            "v_held := _timers_fire.partition_id; if false then",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_a_broken_order_would_be_seen(
    open_door: Opener,
    sql: asyncpg.Connection,
    work: Work,
    function: str,
    text: str,
    instead: str,
) -> None:
    await weaken(sql, function, text, instead)
    async with open_door(connections=CLIENTS) as db:
        await race_until_deadlocked(await prepare(db, sql, work), work)
