"""Whole transactions against a model in memory: every verdict, every result, every row.

The model is data-plane 6.4 for acks and step 1.11 for the whole: acks are judged first, then
pushes, then KV, and the first refusal decides. A refused transaction leaves every table as it was.
The broker's own door runs both ways: optimistically, and carefully from the start where the draw
says so.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import asyncpg
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from queen_pg.broker import queue
from queen_pg.broker.identity import uuid_v7
from queen_pg.broker.pop import Demand, Source, Subscription, serve
from queen_pg.broker.push import PushItem, push
from queen_pg.broker.transaction import Transaction, TransactionAck, Verdict, commit
from queen_pg.database import Database, call_text, translate
from queen_pg.errors import Refused
from tests.property.test_kv_model import CHANGING, Store, in_order, name_of
from tests.support.database import set_clock

START = datetime(2030, 1, 1, tzinfo=UTC)
GROUP = "workers"
INPUT, OUTPUT = "in", "out"
ENTITIES = ("a", "b")
LEASE_SECONDS = 30
NO_LEASE = "018f0000-0000-7000-8000-000000000000"
BEYOND = 9
DEDUP_SECONDS = 60
# Never come to a lease or a window exactly, in whatever number.
LAPSES = (0.0, 0.0, 7.3, 31.7, 61.1)
STRENGTH = ("dlq", "failed", "retry", "completed")

Key = tuple[str, str]
Operation = dict[str, Any]
T = TypeVar("T")


class Message(NamedTuple):
    """A stored message, as far as a transaction can tell."""

    transaction_id: str
    payload: Any
    created_at: datetime


@dataclass(frozen=True)
class Cursor:
    """A group's place in a partition, and its lease if it has one."""

    committed: int = -1
    lease_id: str | None = None
    end: int = -1
    expires_at: datetime = START
    retries: int = 0


class Ack(NamedTuple):
    """An ack, with the one offset that its transaction id has."""

    entity: str
    offset: int | None
    status: str
    lease_id: str | None


@dataclass
class Judged:
    """What the acks of a step come to."""

    cursors: dict[str, Cursor]
    filed: list[tuple[str, int]] = field(default_factory=list)
    results: dict[int, tuple[bool, bool]] = field(default_factory=dict)


class Model:
    """Everything that a transaction can change."""

    def __init__(self) -> None:
        self.now = START
        self.retry_limit = 0
        self.logs: dict[Key, list[Message]] = defaultdict(list)
        self.cursors: dict[str, Cursor] = {}
        # The last lease that was taken on each partition, whatever became of it.
        self.former: dict[str, str] = {}
        self.dead: list[tuple[str, int]] = []
        self.kv = Store()
        self.timers: dict[str, tuple[str, str, Any]] = {}

    def judge_acks(self, acks: list[Ack]) -> Judged:
        """Decide every target, those of one cursor after each other (step 1.4)."""
        judged = Judged(dict(self.cursors))
        targets: dict[tuple[str, str | None], list[int]] = {}
        for place, ack in enumerate(acks):
            targets.setdefault((ack.entity, ack.lease_id), []).append(place)
        for (entity, lease_id), places in targets.items():
            self._judge_target(judged, entity, lease_id, {place: acks[place] for place in places})
        return judged

    def _judge_target(
        self, judged: Judged, entity: str, lease_id: str | None, acks: dict[int, Ack]
    ) -> None:
        cursor = judged.cursors.get(entity)
        fenced_off = lease_id is not None and (
            cursor is None or cursor.lease_id != lease_id or cursor.expires_at < self.now
        )
        if cursor is None or fenced_off:
            judged.results |= dict.fromkeys(acks, (False, False))
            return
        leased = cursor.lease_id is not None
        end = cursor.end if leased else len(self.logs[INPUT, entity]) - 1
        said: dict[int, str] = {}
        for ack in acks.values():
            if ack.offset is not None and cursor.committed < ack.offset <= end:
                said[ack.offset] = min(
                    said.get(ack.offset, ack.status), ack.status, key=STRENGTH.index
                )
        after, filed = self._settle(cursor, said, {ack.offset for ack in acks.values()}, acks)
        judged.cursors[entity] = after
        judged.filed += [(entity, offset) for offset in filed]
        for place, ack in acks.items():
            in_span = ack.offset in said
            below = ack.offset is not None and ack.offset <= cursor.committed
            judged.results[place] = (
                in_span or (below and ack.status == "completed"),
                ack.offset in filed and ack.status != "completed",
            )

    def _settle(
        self, cursor: Cursor, said: dict[int, str], named: set[int | None], acks: dict[int, Ack]
    ) -> tuple[Cursor, list[int]]:
        """Data-plane 6.4, rules 5 to 10."""
        # An offset named as completed counts as such beside a stronger word for it.
        completed = {
            ack.offset
            for ack in acks.values()
            if ack.status == "completed" and ack.offset in said and ack.offset is not None
        }
        head = min((offset for offset, word in said.items() if word != "completed"), default=None)
        prefix = max(
            (offset for offset in completed if head is None or offset < head),
            default=cursor.committed,
        )
        highest = max(completed, default=cursor.committed)
        if cursor.lease_id is None:
            return replace(cursor, committed=highest), []
        if head is None:
            if prefix >= cursor.end:
                return Cursor(prefix), []
            return replace(cursor, committed=prefix), []
        spent = cursor.retries >= self.retry_limit
        if said[head] == "retry":
            return Cursor(prefix, retries=cursor.retries), []
        if said[head] == "failed" and not spent:
            return Cursor(prefix, retries=cursor.retries + 1), []
        filed, at, retries = [head], head, 0
        while at < cursor.end:
            word = said.get(at + 1)
            if word == "retry" or (word is None and highest <= at):
                break
            if word == "failed" and not spent:
                retries = cursor.retries
                break
            at += 1
            if word in ("dlq", "failed"):
                filed.append(at)
        return Cursor(at, retries=retries), filed

    def repeats(self, key: Key, transaction_id: str) -> bool:
        """Whether the partition still remembers the id (step 1.11-7)."""
        since = self.now - timedelta(seconds=DEDUP_SECONDS)
        return any(
            message.transaction_id == transaction_id and message.created_at >= since
            for message in self.logs[key]
        )


class Push(NamedTuple):
    """A message to push."""

    key: Key
    transaction_id: str | None
    payload: int


class Step(NamedTuple):
    """A transaction, drawn: what it names is looked up when it runs."""

    acks: list[tuple[str, int, str, str]]
    pushes: list[Push]
    kv: list[Operation]
    timers: list[tuple[str, int | None]]
    careful: bool


class Door(Database):
    """The broker's door on one connection, whose clock is the model's."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.careful = False

    async def read(
        self, function: str, /, *, deadline: float | None = None, **arguments: Any
    ) -> list[asyncpg.Record]:
        return await self._run("read_committed", function, arguments)

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        if self.careful and function == "_transact":
            raise Refused("carefully, please", sqlstate="QU901")
        if function == "_transaction":
            arguments["careful"] |= self.careful
        return await self._run("serializable", function, arguments)

    def turn(self, partitions: Collection[int]) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def retry(
        self, name: str, deadline: float, attempt: Callable[[], Awaitable[T]], *_: Any, **__: Any
    ) -> T:
        return await attempt()

    async def _run(
        self, isolation: str, function: str, arguments: dict[str, Any]
    ) -> list[asyncpg.Record]:
        text = call_text(function, arguments)
        try:
            async with self._connection.transaction(isolation=isolation):
                rows: list[asyncpg.Record] = await self._connection.fetch(text, *arguments.values())
                return rows
        except asyncpg.PostgresError as error:
            raise translate(error, function, in_flight=True, changes=True) from error


TABLES = (
    "queues", "partitions", "messages", "consumer_groups", "cursors", "ready", "dead_letters", "kv",
    "timers",
)  # fmt: skip
EVERYTHING = " union all ".join(
    f"select '{table}', t::text from queen.{table} t" for table in TABLES
)
FORGET = "; ".join(f"delete from queen.{table}" for table in TABLES[::-1])

identifiers = st.sampled_from(("one", "two", "three"))
lifetimes = st.sampled_from(({}, {}, {"ttlSeconds": 20}))


@st.composite
def changes(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from((*CHANGING, "get")))
    operation: Operation = {"op": kind, "ns": "n", "key": draw(st.sampled_from(("k", "l", "m")))}
    if kind in CHANGING:
        operation["required"] = draw(st.sampled_from((False, False, True)))
    if kind in ("put", "putIfAbsent"):
        operation["value"] = json.dumps(draw(st.integers(0, 9)))
    if kind == "incr":
        operation |= {"delta": draw(st.integers(-2, 3)), "max": 4}
    elif kind in ("put", "delete", "check"):
        operation["expect"] = draw(st.sampled_from(("none", "last", "last", "zero", "stale")))
    if kind in ("put", "putIfAbsent", "incr"):
        operation |= draw(lifetimes)
    return operation


def acks(entities: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, int, str, str]]:
    return st.tuples(
        entities,
        st.sampled_from((1, 2, 3, 4) * 5 + (0, BEYOND)),
        st.sampled_from(("completed",) * 4 + ("failed", "failed", "retry", "dlq", "dlq")),
        st.sampled_from(("own",) * 24 + ("none", "none", "former", "former", "wrong")),
    )


steps = st.builds(
    Step,
    acks=st.one_of(
        st.just([]),
        st.lists(acks(st.sampled_from(ENTITIES)), min_size=1, max_size=3),
        *(st.lists(acks(st.just(entity)), min_size=2, max_size=4) for entity in ENTITIES),
    ),
    pushes=st.lists(
        st.builds(
            Push,
            key=st.tuples(st.just(OUTPUT), st.sampled_from(("x", "y"))),
            transaction_id=st.one_of(st.none(), identifiers),
            payload=st.integers(0, 99),
        ),
        max_size=3,
    ),
    kv=st.lists(changes(), max_size=3),
    timers=st.lists(
        st.tuples(st.sampled_from(("t", "u")), st.one_of(st.none(), st.integers(1, 9))),
        max_size=2,
        unique_by=lambda pair: pair[0],
    ),
    careful=st.booleans(),
)


class TransactionMachine(RuleBasedStateMachine):
    """Calls a database and the model alike."""

    def __init__(self, runner: asyncio.Runner, connection: asyncpg.Connection) -> None:
        super().__init__()
        self._run = runner.run
        self.connection = connection
        self.db = Door(connection)
        self.model = Model()
        self.pushed = 0
        self.partition_ids: dict[str, int] = {}
        self.outcomes: list[str] = []

    @initialize(retry_limit=st.integers(0, 1))
    def prepare(self, retry_limit: int) -> None:
        self.model.retry_limit = retry_limit
        self._run(self._prepare())

    async def _prepare(self) -> None:
        await self.connection.execute(FORGET)
        await self._set_clock()
        for name, options in (
            (INPUT, {"retryLimit": self.model.retry_limit}),
            (OUTPUT, {"dedupWindowSeconds": DEDUP_SECONDS}),
        ):
            await queue.configure(self.db, 1, name, options, 0, replace=False)
        for entity in ENTITIES:
            await self._push_inputs(entity, 4)
            await self._pop(entity, 3)

    async def _set_clock(self) -> None:
        self.model.kv.now = self.model.now
        await set_clock(self.connection, self.model.now)

    async def _push_inputs(self, entity: str, count: int) -> None:
        names = [f"input-{self.pushed + number}" for number in range(count)]
        self.pushed += count
        items = [PushItem(INPUT, entity, b"{}", name) for name in names]
        await push(self.db, 1, items, 0)
        self.model.logs[INPUT, entity] += [Message(name, {}, self.model.now) for name in names]
        self.partition_ids[entity] = await self.connection.fetchval(
            "select p.id from queen.partitions p join queen.queues q on q.id = p.queue_id"
            " where q.name = $1 and p.name = $2",
            INPUT, entity,
        )  # fmt: skip

    @rule(lapse=st.sampled_from(LAPSES), entity=st.sampled_from(ENTITIES), count=st.integers(0, 3))
    def time_passes_and_inputs_come(self, lapse: float, entity: str, count: int) -> None:
        async def run() -> None:
            self.model.now += timedelta(seconds=lapse)
            await self._set_clock()
            if count:
                await self._push_inputs(entity, count)

        self._run(run())

    @rule(entity=st.sampled_from(ENTITIES), batch=st.integers(1, 4))
    def pop(self, entity: str, batch: int) -> None:
        self._run(self._pop(entity, batch))

    async def _pop(self, entity: str, batch: int) -> None:
        demand = Demand(uuid_v7(), Subscription("all"), batch, 1, LEASE_SECONDS)
        served = await serve(self.db, Source(1, INPUT, GROUP, entity), [demand], 1, 0)
        cursor = self.model.cursors.get(entity, Cursor())
        log = self.model.logs[INPUT, entity]
        leased = cursor.lease_id is not None and cursor.expires_at > self.model.now
        first = cursor.committed + 1
        if leased or first == len(log):
            assert served.claims == [[]]
            return
        [[claim]] = served.claims
        last = min(first + batch, len(log)) - 1
        assert [message.offset for message in claim.messages] == list(range(first, last + 1))
        self.model.cursors[entity] = Cursor(
            cursor.committed,
            str(demand.lease_id),
            last,
            self.model.now + timedelta(seconds=LEASE_SECONDS),
            cursor.retries,
        )
        self.model.former[entity] = str(demand.lease_id)

    @rule(first=steps, second=steps)
    def transact(self, first: Step, second: Step) -> None:
        for step in (first, second):
            self._transact(step)

    def _transact(self, step: Step) -> None:
        acks = [self._made_real(*ack) for ack in step.acks]
        kv = list(self._operations(step.kv))
        if not (acks or step.pushes or kv or step.timers):
            return
        before = self._rows()
        verdict = self._run(self._commit(step, acks, kv))
        judged = self.model.judge_acks(acks)
        lost = self.model.kv.verdict(kv)
        if any(not success for success, _ in judged.results.values()):
            expected = "rejected_ack"
        elif any(
            one.transaction_id is not None and self.model.repeats(one.key, one.transaction_id)
            for one in step.pushes
        ):
            expected = "duplicate"
        elif lost is not None:
            expected = "kv_precondition"
        else:
            expected = ""
        assert (verdict.success, verdict.reason) == (not expected, expected)
        self.outcomes.append(expected)
        if expected:
            assert self._rows() == before
            assert (verdict.acks, verdict.pushes, verdict.kv, verdict.timers) == ([], [], [], [])
        if expected == "kv_precondition":
            assert lost is not None
            assert verdict.failure is not None
            assert verdict.failure.failed_index == lost[0]
            value = verdict.failure.value
            assert lost[1] == {
                "kvReason": verdict.failure.kv_reason,
                "version": verdict.failure.version,
                "value": None if value is None else json.loads(value),
            }
        elif not expected:
            self._committed(step, kv, judged, verdict)

    def _made_real(self, entity: str, back: int, status: str, lease: str) -> Ack:
        """Name a message in the span, or seldom one below or beyond it, and a lease."""
        cursor = self.model.cursors[entity]
        size = len(self.model.logs[INPUT, entity])
        end = cursor.end if cursor.lease_id else size - 1
        span = end - cursor.committed
        offset = cursor.committed
        if back == BEYOND:
            offset = end + 1
        elif back and span and lease != "former":
            offset += 1 + (back - 1) % span
        known = 0 <= offset < size
        lease_id = {
            "own": cursor.lease_id,
            "none": None,
            "former": self.model.former.get(entity, NO_LEASE),
            "wrong": NO_LEASE,
        }[lease]
        return Ack(entity, offset if known else None, status, lease_id)

    def _operations(self, drawn: list[Operation]) -> Iterator[Operation]:
        """Turn expectations into versions, and leave a key's first write or check of the call."""
        taken = set()
        for given in drawn:
            operation = dict(given)
            name = name_of(operation)
            if operation["op"] in CHANGING:
                if name in taken:
                    continue
                taken.add(name)
            last = self.model.kv.last.get(name, 0)
            expectation = operation.pop("expect", "none")
            if expectation != "none" or operation["op"] == "check":
                operation["expect"] = {"last": last, "stale": max(1, last - 1)}.get(expectation, 0)
            yield operation

    async def _commit(self, step: Step, acks: list[Ack], kv: list[Operation]) -> Verdict:
        self.db.careful = step.careful
        return await commit(
            self.db,
            1,
            Transaction(
                acks=[
                    TransactionAck(
                        self.partition_ids[ack.entity],
                        "of no message"
                        if ack.offset is None
                        else self.model.logs[INPUT, ack.entity][ack.offset].transaction_id,
                        ack.status,
                        lease_id=ack.lease_id,
                        consumer_group=GROUP,
                    )
                    for ack in acks
                ],
                items=[
                    PushItem(*one.key, msgspec.json.encode(one.payload), one.transaction_id)
                    for one in step.pushes
                ],
                kv=kv,
                timers=[self._timer(key, minutes) for key, minutes in step.timers],
            ),
            asyncio.get_running_loop().time() + 60,
        )

    def _timer(self, key: str, minutes: int | None) -> Operation:
        if minutes is None:
            return {"op": "cancel", "queue": "bells", "timerKey": key, "txn": None}
        return {
            "op": "schedule",
            "queue": "bells",
            "timerKey": key,
            "partition": "p",
            "delayMs": minutes * 60_000,
            "txn": f"in-{minutes}",
            "payload": json.dumps(minutes),
        }

    def _committed(self, step: Step, kv: list[Operation], judged: Judged, verdict: Verdict) -> None:
        assert [(result.success, result.dlq) for result in verdict.acks] == [
            judged.results[place] for place in range(len(step.acks))
        ]
        self.model.cursors = judged.cursors
        self.model.dead += judged.filed
        self._pushed(step.pushes, verdict)
        assert len(verdict.kv) == len(kv)
        for index, operation in in_order(kv):
            answered = json.loads(verdict.kv[index])
            assert answered == self.model.kv.apply(operation, answered)
        statuses = [json.loads(result)["status"] for result in verdict.timers]
        for (key, minutes), status in zip(step.timers, statuses, strict=True):
            pending = self.model.timers.pop(key, None)
            if minutes is None:
                assert status == ("absent" if pending is None else "cancelled")
                continue
            assert status == ("scheduled" if pending is None else "rescheduled")
            due = self.model.now + timedelta(minutes=minutes)
            self.model.timers[key] = (f"in-{minutes}", json.dumps(minutes), due)

    def _pushed(self, pushes: list[Push], verdict: Verdict) -> None:
        leaders: dict[tuple[Key, str], UUID | None] = {}
        assert len(verdict.pushes) == len(pushes)
        for one, result in zip(pushes, verdict.pushes, strict=True):
            log = self.model.logs[one.key]
            leader = None if one.transaction_id is None else (one.key, one.transaction_id)
            if leader is not None and leader in leaders:
                assert (result.status, result.message_id) == ("duplicate", leaders[leader])
                continue
            assert (result.status, result.offset) == ("queued", len(log))
            transaction_id = one.transaction_id or str(result.message_id)
            assert result.transaction_id == transaction_id
            if leader is not None:
                leaders[leader] = result.message_id
            log.append(Message(transaction_id, one.payload, self.model.now))

    def _rows(self) -> list[tuple[str, str]]:
        rows = self._run(self.connection.fetch(EVERYTHING))
        return sorted((table, row) for table, row in rows)

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        self._run(self._compare())

    async def _compare(self) -> None:
        logs = defaultdict(list)
        for name, partition, *message in await self.connection.fetch(
            "select q.name, p.name, m.message_offset, m.transaction_id, m.payload::text"
            " from queen.messages m join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id order by m.message_offset"
        ):
            logs[name, partition].append((message[0], message[1], json.loads(message[2])))
        assert logs == {
            key: [(offset, one.transaction_id, one.payload) for offset, one in enumerate(log)]
            for key, log in self.model.logs.items()
            if log
        }
        cursors = await self.connection.fetch(
            "select p.name, c.committed_offset, c.lease_id::text, c.batch_end_offset,"
            " c.lease_expires_at, c.retry_count"
            " from queen.cursors c join queen.partitions p on p.id = c.partition_id"
        )
        assert {
            name: Cursor(committed, lease_id, end, expires_at, retries)
            if lease_id
            else Cursor(committed, retries=retries)
            for name, committed, lease_id, end, expires_at, retries in cursors
        } == self.model.cursors
        dead = await self.connection.fetch(
            "select p.name, d.message_offset from queen.dead_letters d"
            " join queen.partitions p on p.id = d.partition_id"
        )
        assert sorted(tuple(row) for row in dead) == sorted(self.model.dead)
        timers = await self.connection.fetch(
            "select timer_key, transaction_id, payload::text, fire_at from queen.timers"
        )
        assert {key: tuple(rest) for key, *rest in timers} == self.model.timers
        stored = await self.connection.fetch(
            "select namespace, key, version, value::text from queen.kv"
            " where queen._kv_live(expires_at, queen.now())"
        )
        assert {(ns, key): (version, json.loads(value)) for ns, key, version, value in stored} == {
            name: (row.version, row.value)
            for name in self.model.kv.rows
            if (row := self.model.kv.live(name)).version
        }


def test_a_transaction_is_its_model(database: str) -> None:
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(database))
        seen: set[str] = set()

        class Machine(TransactionMachine):
            def __init__(self) -> None:
                super().__init__(runner, connection)

            def teardown(self) -> None:
                seen.update(self.outcomes)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=60,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(connection.close())
    assert seen == {"", "rejected_ack", "duplicate", "kv_precondition"}
