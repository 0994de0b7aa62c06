"""The data plane against a model of it: random histories on a real PostgreSQL.

QUEEN_PG_TEST_EXAMPLES=1000 runs so many histories, each twice as long: by hand, for a good hour.
"""

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from queen_pg.broker.ack import QUEUE_MODE, AckItem, AckStatus
from queen_pg.broker.pop import Claim, PopRequest
from queen_pg.broker.push import PushItem
from queen_pg.broker.transaction import Transaction, TransactionAck
from queen_pg.config import Settings
from tests.property.data_plane_model import MICROSECOND, Model
from tests.support.clock import EPOCH, ClockedDatabase
from tests.support.database import Databases
from tests.support.process import TENANT, Process
from tests.support.server import Server

T = TypeVar("T")

LONG = int(os.environ.get("QUEEN_PG_TEST_EXAMPLES", "0"))
DEFAULT_ERROR = "failed by its consumer"
# How many of the last deliveries a history acks from.
REMEMBERED = 8
# How many of the next edges in time it goes to.
EDGES = 5
NO_PARTITION = 10**12
# The group that asks for conflation, unless it forgets to.
CONFLATING = "c"

PROFILE = settings(
    max_examples=LONG or 40,
    stateful_step_count=80 if LONG else 30,
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    # Explaining costs as many runs again, and the failing history is short already.
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)

partitions = st.sampled_from(["p", "p", "q", "r"])
groups = st.sampled_from([None, "g", "h", CONFLATING])
statuses = st.sampled_from(["failed", "completed", "dlq", "completed", "retry", "failed"])
told = st.sampled_from(["completed", "failed", None, "completed", "dlq", "retry"])
transaction_ids = st.sampled_from([None, None, None, "t0", "t1"])
batches = st.sampled_from([None, None, 1, 2, 3, 5])
modes = st.sampled_from(["all", "all", "all", "new", None])
seconds_leased = st.sampled_from([None, None, None, 1, 20])
errors = st.sampled_from([None, "boom", "bang"])
# A place in a list of the broker's making: what is drawn must not depend on the list, which may
# have another length when the history is run again.
places = st.integers(0, 99)
acks = st.tuples(places, statuses, errors, st.sampled_from([True] * 9 + [False]))
edges = st.sampled_from([-MICROSECOND, timedelta(0), MICROSECOND])


STORED = """
select 'partition' as kind, q.name as queue, p.name as partition, null as consumer_group,
       p.next_offset as place, null::integer as retries, null::bigint as batch_end,
       null::timestamptz as moment, null as id, null as text, null as payload
from queen.queues q join queen.partitions p on p.queue_id = q.id
where q.name = any($1)
union all
select 'message', q.name, p.name, null, m.message_offset, null, null, m.created_at, m.id::text,
       m.transaction_id, m.payload::text
from queen.queues q join queen.partitions p on p.queue_id = q.id
join queen.messages m on m.partition_id = p.id
where q.name = any($1)
union all
select 'cursor', q.name, p.name, g.name, c.committed_offset, c.retry_count, c.batch_end_offset,
       c.lease_expires_at, c.lease_id::text, null, null
from queen.queues q join queen.partitions p on p.queue_id = q.id
join queen.cursors c on c.partition_id = p.id
join queen.consumer_groups g on g.id = c.group_id
where q.name = any($1)
union all
select 'letter', q.name, p.name, d.consumer_group, d.message_offset, d.retry_count, null, null,
       null, d.error, null
from queen.queues q join queen.dead_letters d on d.queue_id = q.id
join queen.partitions p on p.id = d.partition_id
where q.name = any($1)
"""


class Delivery:
    """A claim as a consumer remembers it."""

    def __init__(self, group: str, lease_id: UUID | None, claim: Claim) -> None:
        self.group = group
        self.lease_id = lease_id
        self.claim = claim

    @property
    def lease(self) -> str | None:
        """The lease as an ack names it."""
        return None if self.lease_id is None else str(self.lease_id)

    def __repr__(self) -> str:
        offsets = [message.offset for message in self.claim.messages]
        return f"<{self.group} {self.claim.partition}{offsets}>"


# The options that the model knows: their names on the wire, and values to choose from.
OPTIONS: dict[str, tuple[str, list[Any]]] = {
    "lease_time": ("leaseTime", [0, 10, 60]),
    "retry_limit": ("retryLimit", [0, 1, -1, 2]),
    "dead_letter_queue": ("deadLetterQueue", [True, False]),
    "dlq_after_max_retries": ("dlqAfterMaxRetries", [True, False]),
    "delayed_processing": ("delayedProcessing", [0, 0, 0, 5, 30]),
    "window_buffer": ("windowBuffer", [0, 0, 0, 5]),
    "dedup_window": ("dedupWindowSeconds", [0, 30, 3600]),
}


class World:
    """What all histories of a run share: an event loop, a database, and names not used yet."""

    def __init__(self, server: Server) -> None:
        self._runner = asyncio.Runner()
        self._databases = Databases(server)
        self._name = self.run(self._databases.create())
        url = self._databases.url(self._name)
        self.clock = ClockedDatabase(Settings(pg_url=url, pg_pool_size=4))
        self.broker = Process(url, database=self.clock)
        self.run(self.broker.__aenter__())
        self.sql: asyncpg.Connection = self.run(asyncpg.connect(url))
        self.histories = itertools.count(1)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work on the loop, and let what it left behind there settle."""
        return self._runner.run(work)

    def close(self) -> None:
        """Leave nothing behind."""
        self.run(self.broker.__aexit__(None, None, None))
        self.run(self.sql.close())
        self.run(self._databases.drop(self._name))
        self.run(self._databases.close())
        self._runner.close()


class DataPlane(RuleBasedStateMachine):
    """Random calls, each judged by the model; the tables are compared after each."""

    world: World

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        number = next(self.world.histories)
        self.label = f"h{number}"
        self.queues = [f"{self.label}.a", f"{self.label}.b"]
        self.model = Model(EPOCH)
        self.deliveries: list[Delivery] = []
        self.committed: dict[tuple[int, str], int] = {}
        self.world.clock.moment = self.model.now
        for name in self.queues:
            self._configure(name, data)
        self._push(self._items(data, st.integers(2, 6)))

    # What producers do

    @rule(data=st.data())
    def push_anywhere(self, data: st.DataObject) -> None:
        self._push(self._items(data, st.integers(1, 5)))

    @rule(name=partitions, size=st.integers(1, 6), place=st.integers(0, 1))
    def push_to_one(self, name: str, size: int, place: int) -> None:
        queue = self.queues[place]
        self._push([self.world.broker.item(queue, name) for _ in range(size)])

    def _items(self, data: st.DataObject, size: st.SearchStrategy[int]) -> list[PushItem]:
        return [
            self.world.broker.item(
                data.draw(st.sampled_from(self.queues)),
                data.draw(partitions),
                data.draw(transaction_ids),
            )
            for _ in range(data.draw(size))
        ]

    def _push(self, items: list[PushItem]) -> None:
        results = self.world.run(self.world.broker.push(items))
        self.model.push(items, results)

    # What consumers do

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        self._pop(self._request(data))

    @rule(data=st.data(), told=st.lists(st.tuples(told, errors), min_size=3, max_size=7))
    def consume(self, data: st.DataObject, told: list[tuple[AckStatus | None, str | None]]) -> None:
        """Pop, and say of the messages how they went, or nothing."""
        number = self._pop(self._request(data))
        acks = []
        for turn, delivery in enumerate(self.deliveries[-number:] if number else []):
            for message in delivery.claim.messages:
                status, error = told[(turn + message.offset) % len(told)]
                if status is not None:
                    acks.append(
                        AckItem(
                            delivery.claim.partition_id,
                            message.transaction_id,
                            status,
                            error,
                            delivery.lease,
                        )
                    )
        if acks:
            self._ack(self.deliveries[-1].group, acks)

    def _request(self, data: st.DataObject) -> PopRequest:
        """Draw a pop by one of the three routes."""
        group = data.draw(groups)
        at_once = data.draw(st.sampled_from([False] * 7 + [True]))
        conflation = data.draw(st.sampled_from([None, None, None, True, False]))
        if group == CONFLATING:
            conflation = True if conflation is None else conflation
        since = data.draw(st.sampled_from([None] * 8 + ["now", "before", "after"]))
        offset = {"before": -20, "after": 3600}.get(since or "")
        if offset is not None:
            since = (self.model.now + timedelta(seconds=offset)).isoformat()
        request = PopRequest(
            consumer_group=group,
            batch=data.draw(batches),
            subscription_mode=data.draw(modes),
            subscription_from=since,
            lease_seconds=data.draw(seconds_leased),
            commit_on_delivery=at_once,
        )
        queue = data.draw(st.sampled_from(self.queues))
        name = data.draw(partitions)
        width = data.draw(st.sampled_from([None, 1, 2, 4]))
        autopilot = data.draw(st.booleans())
        if at_once or group is None:
            # The wire refuses these together.
            conflation = None
        route = data.draw(st.sampled_from(["queue"] * 3 + ["partition"] * 2 + ["labels"]))
        if route == "labels":
            return replace(request, namespace=self.label, partitions=width or 2)
        if route == "partition":
            return replace(request, queue=queue, partition=name, conflation=conflation)
        if width is None and not conflation and not autopilot:
            # How wide a pop is that does not say so depends on the stored policy: left open.
            width = 1
        return replace(
            request, queue=queue, partitions=width, conflation=conflation, autopilot=autopilot
        )

    def _pop(self, request: PopRequest) -> int:
        """Pop, and return how many partitions were claimed."""
        answer = self.world.run(self.world.broker.waiters.pop(TENANT, request))
        self.model.pop(request, answer)
        self.deliveries += [
            Delivery(answer.consumer_group, answer.lease_id, claim) for claim in answer.claims
        ]
        return len(answer.claims)

    @rule(place=places, status=statuses)
    def settle(self, place: int, status: AckStatus) -> None:
        """Give a whole delivery one status."""
        delivery = self._delivery(place)
        if delivery is not None:
            self._ack(delivery.group, self._acks(delivery, status))

    @rule(data=st.data())
    def mixed_acks(self, data: st.DataObject) -> None:
        """Ack whatever, of several deliveries at once."""
        group, items = self._drawn_acks(data)
        if items:
            self._ack(group, items)

    def _delivery(self, place: int, group: str | None = None) -> Delivery | None:
        """Return one of the last deliveries, of a group if one is given and has any."""
        last = self.deliveries[-REMEMBERED:]
        mine = [delivery for delivery in last if delivery.group == group] or last
        if not mine:
            return None
        note(f"delivery: {mine[place % len(mine)]}")
        return mine[place % len(mine)]

    def _acks(self, delivery: Delivery, status: AckStatus = "completed") -> list[AckItem]:
        return [
            AckItem(
                delivery.claim.partition_id,
                message.transaction_id,
                status,
                None if status == "completed" else f"error {message.offset}",
                delivery.lease,
            )
            for message in delivery.claim.messages
        ]

    def _drawn_acks(self, data: st.DataObject) -> tuple[str, list[AckItem]]:
        """Return acks that may be right or wrong in every part."""
        group = data.draw(st.sampled_from([None] * 6 + ["g", QUEUE_MODE]))
        items: list[AckItem] = []
        for _ in range(data.draw(st.integers(1, 2))):
            place, which = data.draw(places), data.draw(st.sampled_from("oooonc"))
            drawn = data.draw(st.lists(acks, min_size=1, max_size=5))
            delivery = self._delivery(place, group)
            if delivery is None:
                break
            group = group or delivery.group
            lease = {"o": delivery.lease, "n": None, "c": self._current_lease(delivery)}[which]
            known = [message.transaction_id for message in delivery.claim.messages] * 3
            known += ["t0", "t1", "unknown"]
            items += [
                AckItem(
                    delivery.claim.partition_id if right else NO_PARTITION,
                    known[message % len(known)],
                    status,
                    error,
                    lease,
                )
                for message, status, error, right in drawn
            ]
        note(f"acks of {group}: {items}")
        return group or QUEUE_MODE, items

    def _current_lease(self, delivery: Delivery) -> str:
        """Return the lease that is on the delivery's cursor now, or one that never was."""
        found = self.model.find(delivery.claim.partition_id)
        if found is not None and delivery.group in found[0].groups:
            cursor = found[0].groups[delivery.group].cursors.get(found[1].name)
            if cursor is not None and cursor.lease is not None:
                return str(cursor.lease.lease_id)
        return str(uuid4())

    def _ack(self, group: str, items: list[AckItem]) -> None:
        acked = self.world.run(self.world.broker.ack_items(group, items))
        self.model.ack(group, items, acked.results)

    @rule(place=places, seconds=st.sampled_from([1, 30, 600]))
    def extend(self, place: int, seconds: int) -> None:
        delivery = self._delivery(place)
        lease_id = delivery.lease_id if delivery and delivery.lease_id else uuid4()
        got = self.world.run(self.world.broker.extend(str(lease_id), seconds))
        assert (got.renewed, got.expires_at) == self.model.extend(lease_id, seconds)

    @rule(data=st.data(), whole=st.sampled_from([True, True, False]))
    def step(self, data: st.DataObject, whole: bool) -> None:
        """Ack and push in one transaction."""
        if whole:
            delivery = self._delivery(data.draw(places))
            group = delivery.group if delivery else QUEUE_MODE
            acks = self._acks(delivery) if delivery else []
        else:
            group, acks = self._drawn_acks(data)
        items = self._items(data, st.integers(0, 3))
        one = Transaction(
            acks=[
                TransactionAck(
                    partition_id=item.partition_id,
                    transaction_id=item.transaction_id,
                    status=item.status,
                    error=item.error,
                    lease_id=item.lease_id,
                    consumer_group=group,
                )
                for item in acks
            ],
            items=items,
        )
        verdict = self.world.run(self.world.broker.commit(one))
        self.model.transaction(one.acks, items, verdict)

    # What operators and clocks do

    @rule(data=st.data(), name=st.integers(0, 1), really=st.integers(0, 4))
    def operate(self, data: st.DataObject, name: int, really: int) -> None:
        """Change a queue's options; once in a while delete it."""
        if really:
            self._configure(self.queues[name], data)
            return
        existed = self.world.run(self.world.broker.delete(self.queues[name]))
        assert existed == self.model.delete(self.queues[name])

    def _configure(self, name: str, data: st.DataObject) -> None:
        options = {
            option: data.draw(st.sampled_from(values))
            for option, (_, values) in OPTIONS.items()
            if data.draw(st.booleans())
        }
        sent = {OPTIONS[option][0]: value for option, value in options.items()}
        if name not in self.model.queues:
            sent["namespace"] = self.label
        self.world.run(self.world.broker.configure(name, **sent))
        self.model.configure(name, self.label, **options)

    @rule(seconds=st.sampled_from([0.000001, 1, 1, 5, 5, 20, 61, 4000]))
    def wait(self, seconds: float) -> None:
        self._at(self.model.now + timedelta(seconds=seconds))

    @rule(place=places, off=edges)
    def wait_for_an_edge(self, place: int, off: timedelta) -> None:
        """Go to the very moment at which something changes by itself, or just beside it."""
        ahead = sorted({edge for edge in self._edges() if edge + off > self.model.now})
        if ahead:
            self._at(ahead[place % min(len(ahead), EDGES)] + off)

    def _edges(self) -> Iterator[datetime]:
        for each in self.model.queues.values():
            for group in each.groups.values():
                for cursor in group.cursors.values():
                    if cursor.lease is not None:
                        yield cursor.lease.expires_at
            for log in each.logs.values():
                for message in log.messages[-3:]:
                    yield message.created_at + timedelta(seconds=each.options.delayed_processing)
                    yield message.created_at + timedelta(seconds=each.options.window_buffer)
                    yield message.created_at + timedelta(seconds=each.options.dedup_window)

    def _at(self, moment: datetime) -> None:
        self.model.now = self.world.clock.moment = moment

    # What must hold

    @invariant()
    def tables_agree_with_the_model(self) -> None:
        stored = self.world.run(self.world.sql.fetch(STORED, self.queues))
        assert sorted(map(tuple, stored), key=repr) == sorted(self._expected(), key=repr)

    def _expected(self) -> Iterator[tuple[Any, ...]]:
        """The rows that STORED should find."""
        for name, each in self.model.queues.items():
            for log in each.logs.values():
                yield ("partition", name, log.name, None, len(log.messages), *[None] * 6)
                for m in log.messages:
                    of = (m.transaction_id, m.payload)
                    yield (
                        "message",
                        name,
                        log.name,
                        None,
                        m.offset,
                        None,
                        None,
                        m.created_at,
                        m.message_id,
                        *of,
                    )
            for group in each.groups.values():
                for partition, cursor in group.cursors.items():
                    lease = cursor.lease
                    yield (
                        "cursor",
                        name,
                        partition,
                        group.name,
                        cursor.committed,
                        cursor.retries,
                        *(
                            (None, None, None)
                            if lease is None
                            else (lease.end, lease.expires_at, str(lease.lease_id))
                        ),
                        None,
                        None,
                    )
            for letter in each.dead_letters:
                yield (
                    "letter",
                    name,
                    letter.partition,
                    letter.group,
                    letter.offset,
                    letter.retries,
                    None,
                    None,
                    None,
                    letter.error or DEFAULT_ERROR,
                    None,
                )

    @invariant()
    def no_cursor_moves_back(self) -> None:
        committed = {
            (each.logs[partition].serial, group.name): cursor.committed
            for each in self.model.queues.values()
            for group in each.groups.values()
            for partition, cursor in group.cursors.items()
        }
        for key, offset in committed.items():
            assert offset >= self.committed.get(key, -1)
        self.committed = committed

    def teardown(self) -> None:
        """Consume everything: what was pushed is delivered, or the model says where it went."""
        if not hasattr(self, "model"):
            return
        self._at(self.model.now + timedelta(days=1))
        for name, each in list(self.model.queues.items()):
            for group in list(each.groups.values()):
                for partition in [None] if group.subscription else list(each.logs):
                    self._drain(name, partition, group.name)
        self.tables_agree_with_the_model()

    def _drain(self, name: str, partition: str | None, group: str) -> None:
        consumer_group = None if group == QUEUE_MODE else group
        while self._pop(
            PopRequest(
                queue=name,
                partition=partition,
                consumer_group=consumer_group,
                partitions=64,
                subscription_mode="all",
            )
        ):
            for delivery in self.deliveries:
                if delivery.lease_id == self.deliveries[-1].lease_id:
                    self._ack(group, self._acks(delivery))


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    """The world of all histories."""
    made = World(server)
    yield made
    made.close()


def test_random_histories_of_the_data_plane_agree_with_its_specification(world: World) -> None:
    class InThisWorld(DataPlane):
        pass

    InThisWorld.world = world
    run_state_machine_as_test(InThisWorld, settings=PROFILE)
