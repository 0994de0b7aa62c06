"""What the data plane is supposed to do, in memory.

Written from the wire specification, whose section numbers it names, and from nothing else: it knows
one clock, no concurrency and no database. `push`, `pop`, `ack`, `extend` and `transaction` take
what the broker answered, assert that the answer was allowed, and move on as the specification says.
Which of several partitions a pop takes is the broker's choice; everything else is not.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from uuid import UUID

from queen_pg.broker.ack import QUEUE_MODE, AckItem, AckResult
from queen_pg.broker.pop import Claim, PopAnswer, PopRequest
from queen_pg.broker.push import PushItem, PushResult
from queen_pg.broker.transaction import TransactionAck, Verdict

MICROSECOND = timedelta(microseconds=1)
BATCH_DEFAULT = 200
AUTOPILOT_BATCH = 100
DISCOVERY_LEASE_SECONDS = 60
STRENGTH = ("dlq", "failed", "retry", "completed")
REFUSALS = {"lease": "lease", "unresolvable": "unresolvable", "partition": "no such partition"}


@dataclass
class Options:
    """A queue's options, as far as they concern delivery (9.2)."""

    lease_time: int
    retry_limit: int = 3
    dead_letter_queue: bool = True
    dlq_after_max_retries: bool = True
    delayed_processing: int = 0
    window_buffer: int = 0
    dedup_window: int = 3600

    @property
    def dead_letters(self) -> bool:
        """Whether a message that is given up is kept (8-3)."""
        return self.dead_letter_queue or self.dlq_after_max_retries


@dataclass(frozen=True)
class Stored:
    """A message in its partition."""

    offset: int
    created_at: datetime
    message_id: str
    transaction_id: str
    payload: str


@dataclass
class Log:
    """A partition; `partition_id` is known once a pop has told it, `serial` is never used again."""

    name: str
    partition_id: int = 0
    messages: list[Stored] = field(default_factory=list)
    serial: int = field(default_factory=itertools.count().__next__)

    def first_at(self, moment: datetime) -> int:
        """Return the first offset appended at or after the moment, or the tail."""
        for message in self.messages:
            if message.created_at >= moment:
                return message.offset
        return len(self.messages)

    def visible_end(self, options: Options, now: datetime) -> int:
        """Return the offset at which what may be delivered now ends (10.2, 10.3)."""
        if not self.messages:
            return 0
        quiet_since = self.messages[-1].created_at
        if options.window_buffer and now - quiet_since < timedelta(seconds=options.window_buffer):
            return 0
        if options.delayed_processing:
            return self.first_at(now - timedelta(seconds=options.delayed_processing) + MICROSECOND)
        return len(self.messages)

    def seen(self, transaction_id: str, since: datetime) -> Stored | None:
        """Return the oldest message with the id that was appended since (10.1-2)."""
        for message in self.messages:
            if message.transaction_id == transaction_id and message.created_at >= since:
                return message
        return None


@dataclass(frozen=True)
class Lease:
    """A claim that has not been settled; it stays on its cursor after it expired (6.4)."""

    lease_id: UUID
    start: int
    end: int
    expires_at: datetime
    conflated: bool


@dataclass(frozen=True)
class Cursor:
    """A group's place in a partition; `marker` is (offset, deliveries) of what was last claimed.

    Whether a lease-less ack moves the marker along is left open: `vague` is true after one.
    """

    committed: int
    lease: Lease | None = None
    retries: int = 0
    marker: tuple[int, int] | None = None
    vague: bool = False
    settled: tuple[UUID, int, int] | None = None

    def live(self, now: datetime) -> bool:
        """Whether its lease excludes other claims."""
        return self.lease is not None and self.lease.expires_at > now


@dataclass(frozen=True)
class Subscription:
    """Where a group starts on a partition that it has no cursor on (4.8)."""

    mode: str
    instant: datetime | None = None

    def first_committed(self, log: Log) -> int:
        """Return the offset before the first that the group is to be delivered."""
        return -1 if self.instant is None else log.first_at(self.instant) - 1


@dataclass
class Group:
    """A group on a queue; without a subscription it has only popped single partitions (4.8-2)."""

    name: str
    subscription: Subscription | None = None
    conflation: bool = False
    cursors: dict[str, Cursor] = field(default_factory=dict)


@dataclass(frozen=True)
class DeadLetter:
    """A message that a group gave up."""

    partition: str
    group: str
    offset: int
    error: str | None
    retries: int


@dataclass
class Queue:
    """A queue with everything in it."""

    name: str
    namespace: str
    task: str
    options: Options
    logs: dict[str, Log] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    dead_letters: list[DeadLetter] = field(default_factory=list)


@dataclass
class _Budget:
    """What is left of a pop's budgets as its answer is walked through."""

    messages: int
    partitions: int


@dataclass
class _Told:
    """What an ack should be told."""

    refusal: str | None = None
    lease_released: bool = False
    dlq: bool = False
    noop: bool = False


class Model:
    """Every queue of one test; `now` is the clock that the broker is given too."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.queues: dict[str, Queue] = {}

    def configure(self, name: str, namespace: str, **options: int | bool) -> None:
        """Create a queue with the defaults of configure, or change some of its options (9)."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(name, namespace, "", Options(lease_time=300))
        queue.options = replace(queue.options, **options)  # type: ignore[arg-type]

    def delete(self, name: str) -> bool:
        """Forget a queue; return whether it existed (9.6)."""
        return self.queues.pop(name, None) is not None

    # Push

    def push(self, items: Sequence[PushItem], results: Sequence[PushResult]) -> None:
        """Judge the results of a push, and store what it queued (2.2)."""
        assert len(results) == len(items)
        leaders: dict[tuple[str, str, str], PushResult] = {}
        appends: dict[tuple[str, str], list[tuple[PushItem, PushResult]]] = {}
        for item, result in zip(items, results, strict=True):
            key = (item.queue, item.partition, item.transaction_id or "")
            assert result.transaction_id == (
                result.message_id if item.transaction_id is None else item.transaction_id
            )
            original = self._original(item)
            if original is not None:
                told = ("duplicate", original.message_id, original.offset)
                assert (result.status, result.message_id, result.offset) == told
            elif item.transaction_id is not None and key in leaders:
                leader = leaders[key]
                assert result.status == "duplicate"
                assert (result.message_id, result.offset) == (leader.message_id, leader.offset)
            else:
                assert result.status == "queued"
                leaders[key] = result
                appends.setdefault((item.queue, item.partition), []).append((item, result))
        for (name, partition), append in appends.items():
            self._append(name, partition, append)

    def repeats(self, items: Iterable[PushItem]) -> bool:
        """Whether one of the items is a duplicate of a stored message."""
        return any(self._original(item) is not None for item in items)

    def _original(self, item: PushItem) -> Stored | None:
        queue = self.queues.get(item.queue)
        if queue is None or item.partition not in queue.logs or item.transaction_id is None:
            return None
        window = queue.options.dedup_window
        if window <= 0:
            return None
        since = self.now - timedelta(seconds=window)
        return queue.logs[item.partition].seen(item.transaction_id, since)

    def _append(
        self, name: str, partition: str, append: Sequence[tuple[PushItem, PushResult]]
    ) -> None:
        queue = self._queue(name)
        log = queue.logs.setdefault(partition, Log(partition))
        stamp = self.now
        if log.messages:
            stamp = max(stamp, log.messages[-1].created_at + MICROSECOND)
        for item, result in append:
            assert result.offset == len(log.messages)
            assert result.message_id is not None
            if log.messages:
                assert result.message_id > log.messages[-1].message_id
            log.messages.append(
                Stored(
                    len(log.messages),
                    stamp,
                    result.message_id,
                    result.transaction_id,
                    item.payload.decode(),
                )
            )

    def _queue(self, name: str) -> Queue:
        """Return a queue, created as a first push or pop creates it (2.3)."""
        if name not in self.queues:
            namespace, _, rest = name.partition(".")
            task = rest.partition(".")[0]
            self.queues[name] = Queue(name, namespace, task, Options(lease_time=60))
        return self.queues[name]

    # Pop

    def pop(self, request: PopRequest, answer: PopAnswer) -> None:
        """Judge the answer of a pop, and take what it claimed (4)."""
        name = request.consumer_group or QUEUE_MODE
        assert answer.consumer_group == name
        budget = _Budget(messages=self._batch(request), partitions=self._width(request))
        claims = list(answer.claims)
        leased = bool(claims) and not request.commit_on_delivery
        assert (answer.lease_id is not None) == leased
        policies = []
        for queue, log in self._sources(request):
            group = self._subscribe(queue, log, name, request)
            if budget.messages > 0 and budget.partitions > 0:
                policies.append(group.conflation)
            mine = [claim for claim in claims if queue in self._queues_of(claim, request)]
            for claim in mine:
                claims.remove(claim)
            self._claims(queue, log, group, request, mine, budget, answer.lease_id)
        assert not claims, "claimed where nothing could be claimed"
        if policies:
            conflicts = [request.conflation not in (None, policy) for policy in policies]
            assert answer.conflation == any(policies)
            assert answer.conflation_conflict == any(conflicts)
        elif request.queue is not None:
            policy = self._policy(request.queue, name, bool(request.conflation))
            assert answer.conflation == policy
            assert answer.conflation_conflict == (request.conflation not in (None, policy))

    def _policy(self, queue: str, group: str, asked: bool) -> bool:
        """Return whether a group conflates; one that has not subscribed agrees (4.7-5)."""
        if queue in self.queues and group in self.queues[queue].groups:
            known = self.queues[queue].groups[group]
            if known.subscription is not None:
                return known.conflation
        return asked

    def _batch(self, request: PopRequest) -> int:
        if request.batch is not None:
            return max(request.batch, 1)
        return AUTOPILOT_BATCH if self._on_autopilot(request) else BATCH_DEFAULT

    def _on_autopilot(self, request: PopRequest) -> bool:
        return request.autopilot and request.partition is None and not request.conflation

    def _width(self, request: PopRequest) -> int:
        """Return how many partitions may be claimed; 64 where the broker chooses (4.6)."""
        if request.partition is not None:
            return 1
        if request.partitions is not None:
            return min(max(request.partitions, 1), 64)
        if self._on_autopilot(request):
            return 64
        return min(self._batch(request), 64) if request.conflation else 1

    def _sources(self, request: PopRequest) -> list[tuple[Queue, Log | None]]:
        """Return where a pop looks; only the queue route creates anything (4.3-1 to 4.3-3)."""
        if request.queue is None:
            return [
                (queue, None)
                for _, queue in sorted(self.queues.items())
                if request.namespace in ("", queue.namespace) and request.task in ("", queue.task)
            ]
        if request.partition is None:
            return [(self._queue(request.queue), None)]
        queue = self.queues.get(request.queue)
        if queue is None or request.partition not in queue.logs:
            return []
        return [(queue, queue.logs[request.partition])]

    def _queues_of(self, claim: Claim, request: PopRequest) -> list[Queue]:
        return [
            queue
            for queue, _ in self._sources(request)
            if claim.partition in queue.logs
            and queue.logs[claim.partition].partition_id in (0, claim.partition_id)
            and claim.messages[0].id
            in {message.message_id for message in queue.logs[claim.partition].messages}
        ]

    def _subscribe(self, queue: Queue, log: Log | None, name: str, request: PopRequest) -> Group:
        """Return the group, registered if this pop does that; the first one counts (4.8)."""
        group = queue.groups.setdefault(name, Group(name))
        intent = self._intent(name, request)
        if group.subscription is None and (log is None or request.conflation):
            group.subscription = intent
            group.conflation = bool(request.conflation) and name != QUEUE_MODE
        if (
            log is not None
            and group.subscription is None
            and log.name not in group.cursors
            and intent.mode != "all"
        ):
            # A partition's pop places the group by its own intent (4.8-2).
            tail = len(log.messages) - 1
            group.cursors[log.name] = Cursor(
                tail if intent.mode == "new" else intent.first_committed(log)
            )
        return group

    def _intent(self, name: str, request: PopRequest) -> Subscription:
        if name == QUEUE_MODE:
            return Subscription("all")
        if request.subscription_from == "now":
            return Subscription("new", self.now)
        if request.subscription_from is not None:
            instant = datetime.fromisoformat(request.subscription_from)
            # Instants are read to the millisecond (0.2).
            return Subscription(
                "from", instant.replace(microsecond=instant.microsecond // 1000 * 1000)
            )
        mode = request.subscription_mode
        return Subscription("new", self.now) if mode in (None, "new") else Subscription("all")

    def _claims(
        self,
        queue: Queue,
        log: Log | None,
        group: Group,
        request: PopRequest,
        claims: Sequence[Claim],
        budget: _Budget,
        lease_id: UUID | None,
    ) -> None:
        waiting = {
            each.name
            for each in ([log] if log is not None else queue.logs.values())
            if self._span(queue, each, group) is not None
        }
        autopilot = self._on_autopilot(request) and request.partitions is None
        if autopilot:
            budget.partitions = min(max(len(waiting), 1), 64)
        for claim in claims:
            assert claim.partition in waiting, "claimed what is leased, held back, or not there"
            waiting.remove(claim.partition)
            assert budget.partitions > 0
            assert budget.messages > 0
            self._claim(queue, group, request, claim, budget, lease_id)
        if budget.messages > 0 and budget.partitions > 0:
            assert not waiting, f"there was more to claim: {sorted(waiting)}"

    def _span(self, queue: Queue, log: Log, group: Group) -> range | None:
        """Return the offsets that the group may claim now."""
        cursor = group.cursors.get(log.name)
        if cursor is None:
            start = self._start(group, log)
        elif cursor.live(self.now):
            return None
        else:
            start = cursor.committed + 1
        end = log.visible_end(queue.options, self.now)
        return range(start, end) if start < end else None

    def _start(self, group: Group, log: Log) -> int:
        if group.subscription is None:
            # A pop of the partition whose intent places it before the first message.
            return 0
        return group.subscription.first_committed(log) + 1

    def _claim(
        self,
        queue: Queue,
        group: Group,
        request: PopRequest,
        claim: Claim,
        budget: _Budget,
        lease_id: UUID | None,
    ) -> None:
        log = queue.logs[claim.partition]
        assert log.partition_id in (0, claim.partition_id)
        log.partition_id = claim.partition_id
        span = self._span(queue, log, group)
        assert span is not None
        conflated = group.conflation
        if conflated:
            delivered = log.messages[span[-1] :][:1]
        else:
            span = span[: budget.messages]
            delivered = log.messages[span.start : span.stop]
        got = [
            Stored(m.offset, m.created_at, m.id, m.transaction_id, m.payload)
            for m in claim.messages
        ]
        assert got == delivered
        budget.messages -= len(delivered)
        budget.partitions -= 1

        cursor = group.cursors.get(log.name, Cursor(span.start - 1))
        if request.commit_on_delivery:
            assert claim.delivery_attempt == 1
            group.cursors[log.name] = replace(
                cursor, committed=span[-1], lease=None, marker=None, vague=False
            )
            return
        offset, count = cursor.marker or (-1, 0)
        attempt = count + 1 if offset == span.start else 1
        assert claim.delivery_attempt == attempt or (
            cursor.vague and claim.delivery_attempt in (1, count + 1)
        )
        seconds = max(request.lease_seconds or self._lease_seconds(queue, request), 1)
        assert lease_id is not None
        group.cursors[log.name] = replace(
            cursor,
            lease=Lease(
                lease_id, span.start, span[-1], self.now + timedelta(seconds=seconds), conflated
            ),
            marker=(span.start, claim.delivery_attempt),
            vague=False,
        )

    def _lease_seconds(self, queue: Queue, request: PopRequest) -> int:
        return DISCOVERY_LEASE_SECONDS if request.queue is None else queue.options.lease_time

    # Acks

    def ack(self, group: str, items: Sequence[AckItem], results: Sequence[AckResult]) -> None:
        """Judge the results of an ack call, and settle what it settled (6)."""
        told = self._settle(
            [(item, group) for item in items], in_transaction=False, cursors=(cursors := {})
        )
        self._compare(told, results)
        self._write(cursors)

    def _compare(self, told: Sequence[_Told], results: Sequence[AckResult]) -> None:
        assert len(told) == len(results)
        for one, result in zip(told, results, strict=True):
            assert result.success == (one.refusal is None), (one, result)
            assert (result.lease_released, result.dlq, result.noop) == (
                one.lease_released,
                one.dlq,
                one.noop,
            ), (one, result)
            if one.refusal is None:
                assert result.error is None
            else:
                assert REFUSALS[one.refusal] in (result.error or "")

    def _write(self, cursors: "_Cursors") -> None:
        for (queue_name, partition, group), (cursor, letters) in cursors.items():
            queue = self.queues[queue_name]
            queue.groups[group].cursors[partition] = cursor
            queue.dead_letters += letters

    def _settle(
        self,
        items: Sequence[tuple[AckItem, str]],
        *,
        in_transaction: bool,
        cursors: "_Cursors",
    ) -> list[_Told]:
        """Judge the targets in the order in which they are first seen (6.3)."""
        targets: dict[tuple[int, str, str | None], list[int]] = {}
        for place, (item, group) in enumerate(items):
            targets.setdefault((item.partition_id, group, item.lease_id or None), []).append(place)
        told = [_Told() for _ in items]
        for (partition_id, name, lease_id), places in targets.items():
            found = self.find(partition_id)
            group = None if found is None else found[0].groups.get(name)
            if found is None:
                results = [_Told("partition") for _ in places]
            elif group is None or found[1].name not in group.cursors:
                # Rule 2.
                refusal = "unresolvable" if lease_id is None else "lease"
                results = [_Told(refusal) for _ in places]
            else:
                queue, log = found
                key = (queue.name, log.name, name)
                cursor, letters = cursors.get(key, (group.cursors[log.name], []))
                target = _Target(
                    self.now,
                    queue.options,
                    log,
                    cursor,
                    lease_id,
                    in_transaction,
                    [items[place][0] for place in places],
                )
                after, results, filed = target.judge()
                letters = letters + [
                    DeadLetter(log.name, name, offset, error, cursor.retries)
                    for offset, error in filed
                ]
                cursors[key] = (after, letters)
            for place, result in zip(places, results, strict=True):
                told[place] = result
        return told

    def find(self, partition_id: int) -> tuple[Queue, Log] | None:
        """Return the partition of an id."""
        for queue in self.queues.values():
            for log in queue.logs.values():
                if log.partition_id == partition_id:
                    return queue, log
        return None

    # Leases

    def extend(self, lease_id: UUID, seconds: int) -> tuple[int, datetime | None]:
        """Extend the live leases of an id; return how many, and the earliest expiry (7)."""
        expiries = []
        for queue in self.queues.values():
            for group in queue.groups.values():
                for name, cursor in group.cursors.items():
                    lease = cursor.lease
                    if lease and lease.lease_id == lease_id and lease.expires_at >= self.now:
                        later = max(lease.expires_at, self.now + timedelta(seconds=seconds))
                        group.cursors[name] = replace(
                            cursor, lease=replace(lease, expires_at=later)
                        )
                        expiries.append(later)
        return len(expiries), min(expiries, default=None)

    # Transactions

    def transaction(
        self, acks: Sequence[TransactionAck], items: Sequence[PushItem], verdict: Verdict
    ) -> None:
        """Judge a verdict: all of it happens, or none (step 1.4, 1.8, 1.9)."""
        cursors: _Cursors = {}
        told = self._settle(
            [(item, item.consumer_group) for item in acks], in_transaction=True, cursors=cursors
        )
        if any(one.refusal is not None for one in told):
            assert (verdict.success, verdict.reason) == (False, "rejected_ack")
        elif self.repeats(items):
            assert (verdict.success, verdict.reason) == (False, "duplicate")
        else:
            assert (verdict.success, verdict.reason) == (True, "")
            self._compare(told, verdict.acks)
            self._write(cursors)
            self.push(items, verdict.pushes)


_Cursors = dict[tuple[str, str, str], tuple[Cursor, list[DeadLetter]]]


@dataclass
class _Target:
    """The acks of one lease on one cursor, and the rules of 6.4."""

    now: datetime
    options: Options
    log: Log
    cursor: Cursor
    lease_id: str | None
    in_transaction: bool
    items: list[AckItem]

    def judge(self) -> tuple[Cursor, list[_Told], list[tuple[int, str | None]]]:
        """Return the cursor afterwards, what each ack is told, and the dead letters."""
        lease = self.cursor.lease
        if self.lease_id is not None and (
            lease is None or str(lease.lease_id) != self.lease_id or lease.expires_at < self.now
        ):
            return self.cursor, self._behind_the_fence(), []

        committed = self.cursor.committed
        end = len(self.log.messages) - 1 if lease is None else lease.end
        resolved = [self._lowest(item.transaction_id, committed + 1, end) for item in self.items]
        said: dict[int, str] = {}
        for item, offset in zip(self.items, resolved, strict=True):
            if offset is not None:
                strongest = min(said.get(offset, "completed"), item.status, key=STRENGTH.index)
                said[offset] = strongest
        completed = [
            offset
            for item, offset in zip(self.items, resolved, strict=True)
            if offset is not None and item.status == "completed"
        ]
        signals = [offset for offset, status in said.items() if status != "completed"]

        filed: list[int] = []
        if lease is None:
            # Rule 8.
            after = self._moved(max(completed, default=committed), vague=True)
        elif not signals:
            after = self._without_signal(lease, completed)
        else:
            after, filed = self._with_signal(lease, min(signals), said, completed)

        released = lease is not None and after.lease is None
        told = [
            self._told(item, offset, released, filed)
            for item, offset in zip(self.items, resolved, strict=True)
        ]
        return after, told, [(offset, self._error(offset, resolved)) for offset in filed]

    def _behind_the_fence(self) -> list[_Told]:
        """Rule 3, and its exception, rule 11."""
        settled = self.cursor.settled
        if self.in_transaction or settled is None or str(settled[0]) != self.lease_id:
            return [_Told("lease") for _ in self.items]
        _, low, high = settled
        return [
            _Told("unresolvable")
            if self._lowest(item.transaction_id, low, high) is None
            else _Told(lease_released=True)
            for item in self.items
        ]

    def _lowest(self, transaction_id: str, low: int, high: int) -> int | None:
        """Rule 4."""
        for message in self.log.messages[max(low, 0) : high + 1]:
            if message.transaction_id == transaction_id:
                return message.offset
        return None

    def _without_signal(self, lease: Lease, completed: list[int]) -> Cursor:
        """Rules 5 and 9, no signal."""
        reached = max(completed, default=self.cursor.committed)
        acked = {item.transaction_id for item in self.items}
        left = self.log.messages[self.cursor.committed + 1 : lease.end + 1]
        whole = self.lease_id is not None and all(m.transaction_id in acked for m in left)
        if whole or (lease.conflated and completed):
            reached = lease.end
        if reached >= lease.end:
            return self._released(lease, lease.end, retries=0)
        return self._moved(reached)

    def _with_signal(
        self, lease: Lease, head: int, said: dict[int, str], completed: list[int]
    ) -> tuple[Cursor, list[int]]:
        """Rules 6, 7, 9 and 10."""
        prefix = max(
            (offset for offset in completed if offset < head), default=self.cursor.committed
        )
        spent = self.cursor.retries >= max(self.options.retry_limit, 0)
        if said[head] == "retry":
            return self._released(lease, prefix, retries=self.cursor.retries), []
        if said[head] == "failed" and not spent:
            return self._released(lease, prefix, retries=self.cursor.retries + 1), []

        filed = []
        if said[head] == "dlq" or self.options.dead_letters:
            filed.append(head)
        passed, retries = head, 0
        for offset in range(head + 1, lease.end + 1):
            status = said.get(offset)
            if status == "failed" and not spent:
                retries = self.cursor.retries
                break
            if status == "retry" or (status is None and max(completed, default=-1) < offset):
                break
            if status == "dlq" or (status == "failed" and self.options.dead_letters):
                filed.append(offset)
            passed = offset
        return self._released(lease, passed, retries=retries), filed

    def _released(self, lease: Lease, committed: int, *, retries: int) -> Cursor:
        after = replace(self._moved(committed), lease=None, retries=retries)
        if committed >= lease.end:
            after = replace(
                after, marker=None, vague=False, settled=(lease.lease_id, lease.start, lease.end)
            )
        return after

    def _moved(self, committed: int, *, vague: bool = False) -> Cursor:
        marker = self.cursor.marker
        if marker is not None and marker[0] <= committed:
            # What is left of a batch counts its deliveries on (4.5).
            marker = (committed + 1, marker[1])
            vague = vague or self.cursor.vague
        else:
            vague = self.cursor.vague
        return replace(self.cursor, committed=committed, marker=marker, vague=vague)

    def _told(self, item: AckItem, offset: int | None, released: bool, filed: list[int]) -> _Told:
        """Rule 12."""
        if offset is not None:
            return _Told(
                lease_released=released, dlq=offset in filed and item.status != "completed"
            )
        below = self._lowest(item.transaction_id, 0, self.cursor.committed) is not None
        if below and item.status == "completed":
            return _Told(lease_released=released, noop=True)
        return _Told("unresolvable", lease_released=released)

    def _error(self, filed: int, resolved: list[int | None]) -> str | None:
        """Return the text that a dead letter keeps, None for the default (8-4)."""
        signals = [
            (offset, item.error)
            for item, offset in zip(self.items, resolved, strict=True)
            if item.status != "completed" and item.error is not None
        ]
        own = [error for offset, error in signals if offset == filed]
        return (own + [error for _, error in signals] + [None])[0]
