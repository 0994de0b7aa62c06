"""Timers against a list of what was promised: any operations, at any time (step 3.3, 3.4)."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import namedtuple_row

START = datetime(2030, 1, 1, tzinfo=UTC)
DEDUP_WINDOW = timedelta(seconds=3600)
QUEUES = ("q", "r")
KEYS = ("a", "b/1", "c%")
PARTITIONS = ("Default", "p")
ATTEMPTS_MAX = 3

Operation = dict[str, Any]
Place = tuple[str, str]


@dataclass
class Timer:
    """A pending timer, as the model knows it."""

    partition: str
    txn: str
    message_id: str
    payload: int
    deliver_at: datetime
    fire_at: datetime
    attempts: int = 0


@dataclass
class Log:
    """What a partition holds, and when each transaction id was last pushed to it."""

    messages: list[tuple[str, str, int]] = field(default_factory=list)
    pushed_at: dict[str, datetime] = field(default_factory=dict)
    last_append_at: datetime = START


class TimerMachine(RuleBasedStateMachine):
    """Calls a database and the model alike, in one transaction that is rolled back."""

    def __init__(self, connection: psycopg.Connection) -> None:
        super().__init__()
        self.cursor = connection.cursor(row_factory=namedtuple_row)
        self.connection = connection
        self.now = START
        self.timers: dict[Place, Timer] = {}
        self.logs: dict[Place, Log] = {}
        self.dead: list[tuple[str, str]] = []
        self.found: list[Any] = []
        self.payloads = 0
        self._set_clock()

    def teardown(self) -> None:
        self.connection.rollback()

    @rule(
        seconds=st.sampled_from([0, 0, 0.001, 1, 5, 60, 3600]),
        changes=st.lists(
            st.tuples(
                st.sampled_from(QUEUES),
                st.sampled_from(KEYS),
                st.one_of(st.none(), st.integers(-2000, 5000)),
                st.sampled_from(PARTITIONS),
                st.sampled_from(("t1", "t2", "t3")),
            ),
            min_size=1,
            max_size=4,
            unique_by=lambda change: change[:2],
        ),
    )
    def change(self, seconds: float, changes: list[tuple[str, str, int | None, str, str]]) -> None:
        """Schedule and cancel in one call, after a while; no delay means a cancel."""
        self.now += timedelta(seconds=seconds)
        self._set_clock()
        operations = [self._operation(*change) for change in changes]
        rows = self.cursor.execute(
            "select * from queen._timers(1, %s::jsonb) order by operation_index",
            (json.dumps(operations),),
        ).fetchall()
        assert [row.verdict for row in rows] == ["done"] * len(operations)
        for operation, row in zip(operations, rows, strict=True):
            self._changed(operation, row.result)

    @rule(
        size=st.integers(1, 4), queue=st.sampled_from(QUEUES), partition=st.sampled_from(PARTITIONS)
    )
    def look_past(self, size: int, queue: str, partition: str) -> None:
        """Find what is due a few at a time, but for one partition: a pass that it holds up."""
        found: list[Any] = [None]
        seen = []
        while found:
            last = found[-1]
            place = (None,) * 4 if last is None else (last.fire_at, 1, last.queue, last.timer_key)
            found = self.cursor.execute(
                "select * from queen._timers_due(%s, %s, %s, %s, %s, '{1}', %s, %s)",
                (size, *place, [queue], [partition]),
            ).fetchall()
            found = [row for row in found if row.tenant is not None]
            assert len(found) <= size
            seen += [(row.fire_at, row.queue, row.timer_key) for row in found]
        assert seen == sorted(
            (timer.fire_at, *place)
            for place, timer in self.timers.items()
            if timer.fire_at <= self.now and (place[0], timer.partition) != (queue, partition)
        )

    @rule(size=st.integers(1, 4))
    def look(self, size: int) -> None:
        """Find what is due, oldest first; or how long it is until something is."""
        rows = self.cursor.execute("select * from queen._timers_due(%s)", (size,)).fetchall()
        due = sorted(
            (timer.fire_at, *place)
            for place, timer in self.timers.items()
            if timer.fire_at <= self.now
        )
        if due:
            assert [(row.queue, row.timer_key) for row in rows] == [one[1:] for one in due[:size]]
            self.found = rows
            return
        waits = [(timer.fire_at - self.now).total_seconds() for timer in self.timers.values()]
        assert [row.wait_seconds for row in rows] == sorted(waits)[:1]
        self.found = []

    @precondition(lambda self: self.found)
    @rule()
    def fire(self) -> None:
        """Fire what was found, which may be long ago: only what is still due there goes."""
        ids = self._partition_ids()
        rows = self.cursor.execute(
            "select * from queen._timers_fire(1, %s, %s, %s, %s, true, 250)",
            (
                [row.queue for row in self.found],
                [row.timer_key for row in self.found],
                [row.partition for row in self.found],
                [ids[row.queue, row.partition] for row in self.found],
            ),
        ).fetchall()
        going = sorted(
            (timer.fire_at, row.timer_key, row.queue)
            for row in self.found
            if (timer := self.timers.get((row.queue, row.timer_key))) is not None
            and timer.fire_at <= self.now
            and timer.partition == row.partition
        )
        counts = Counter((one[2], self.timers[one[2], one[1]].partition) for one in going)
        assert {(row.fired_queue, row.fired_partition): row.timer_count for row in rows} == counts
        moments = self._moments({(one[2], self.timers[one[2], one[1]].partition) for one in going})
        for _, key, queue in going:
            timer = self.timers.pop((queue, key))
            self._push((queue, timer.partition), timer, moments[queue, timer.partition])

    @rule(size=st.integers(1, 4))
    def look_and_fire(self, size: int) -> None:
        self.look(size)
        if self.found:
            self.fire()

    @rule(place=st.integers(0, 5))
    def fail(self, place: int) -> None:
        """A timer, mostly one that is due, could not be fired."""
        places = sorted(self.timers, key=lambda place: self.timers[place].fire_at)
        queue, key = places[place] if place < len(places) else (QUEUES[0], KEYS[0])
        timer = self.timers.get((queue, key))
        row = self.cursor.execute(
            "select dead from queen._timer_fail(1, %s, %s, 'broken', %s)",
            (queue, key, ATTEMPTS_MAX),
        ).fetchone()
        assert row is not None
        if timer is None or timer.fire_at > self.now:
            assert not row.dead
            return
        timer.attempts += 1
        timer.fire_at = self.now + timedelta(seconds=2**timer.attempts)
        assert row.dead == (timer.attempts == ATTEMPTS_MAX)
        if row.dead:
            del self.timers[queue, key]
            self.dead.append((queue, timer.message_id))

    @invariant()
    def what_is_pending_is_what_the_model_has(self) -> None:
        rows = self.cursor.execute("select * from queen.timers").fetchall()
        assert {
            (row.queue, row.timer_key): Timer(
                row.partition,
                row.transaction_id,
                str(row.message_id),
                row.payload,
                row.deliver_at,
                row.fire_at,
                row.attempts,
            )
            for row in rows
        } == self.timers

    @invariant()
    def what_was_delivered_is_what_fell_due(self) -> None:
        rows = self.cursor.execute(
            "select q.name as queue, p.name as partition, m.id, m.transaction_id, m.payload"
            " from queen.messages m join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id order by m.partition_id, m.message_offset"
        ).fetchall()
        logs: dict[Place, list[tuple[str, str, int]]] = {}
        for row in rows:
            logs.setdefault((row.queue, row.partition), []).append(
                (str(row.id), row.transaction_id, row.payload)
            )
        assert logs == {place: log.messages for place, log in self.logs.items() if log.messages}
        dead = self.cursor.execute(
            "select q.name as queue, d.message_id from queen.dead_letters d"
            " join queen.queues q on q.id = d.queue_id"
        ).fetchall()
        assert sorted((row.queue, str(row.message_id)) for row in dead) == sorted(self.dead)

    @invariant()
    def lists_and_counts_agree(self) -> None:
        for queue in QUEUES:
            rows = self.cursor.execute(
                "select timer_key from queen._timer_list(1, %s, 'a', 100)", (queue,)
            ).fetchall()
            keys = [key for place, key in self.timers if place == queue]
            assert [row.timer_key for row in rows] == sorted(key for key in keys if key > "a")
            count = self.cursor.execute(
                "select timer_count from queen._timer_count(1, %s, 'c%%')", (queue,)
            ).fetchone()
            assert count is not None
            assert count.timer_count == keys.count("c%")

    def _operation(
        self, queue: str, key: str, delay_ms: int | None, partition: str, txn: str
    ) -> Operation:
        if delay_ms is None:
            return {"op": "cancel", "queue": queue, "timerKey": key, "txn": txn}
        self.payloads += 1
        return {
            "op": "schedule",
            "queue": queue,
            "timerKey": key,
            "delayMs": delay_ms,
            "partition": partition,
            "txn": txn,
            "payload": str(self.payloads),
        }

    def _changed(self, operation: Operation, result: dict[str, Any]) -> None:
        place = (operation["queue"], operation["timerKey"])
        pending = self.timers.get(place)
        if operation["op"] == "cancel":
            self.timers.pop(place, None)
            status = "absent" if pending is None else "cancelled"
            assert result == {
                "ok": pending is not None,
                "status": status,
                "queue": place[0],
                "timerKey": place[1],
                "txn": operation["txn"] if pending is None else pending.txn,
            }
            return
        deliver_at = self.now + timedelta(milliseconds=operation["delayMs"])
        assert result["status"] == ("scheduled" if pending is None else "rescheduled")
        assert datetime.fromisoformat(result["deliverAt"]) == deliver_at
        self.timers[place] = Timer(
            operation["partition"],
            operation["txn"],
            result["messageId"],
            int(operation["payload"]),
            deliver_at,
            deliver_at,
        )

    def _partition_ids(self) -> dict[Place, int]:
        """The ids of the partitions of what was found, created where they are missing."""
        places = sorted({(row.queue, row.partition) for row in self.found})
        names = [list(name) for name in zip(*places, strict=True)]
        self.cursor.execute("select queen._create_partitions(1, %s, %s)", names)
        rows = self.cursor.execute(
            "select * from queen._resolve_partitions(1, %s, %s)", names
        ).fetchall()
        return {places[row.place - 1]: row.partition_id for row in rows}

    def _moments(self, places: set[Place]) -> dict[Place, datetime]:
        """When each partition's messages are appended: now, but behind what is there."""
        moments = {}
        for place in places:
            log = self.logs.setdefault(place, Log())
            moments[place] = max(self.now, log.last_append_at + timedelta(microseconds=1))
        return moments

    def _push(self, place: Place, timer: Timer, moment: datetime) -> None:
        log = self.logs[place]
        stored = log.pushed_at.get(timer.txn)
        # Inside one append too: the first of an id is pushed.
        if stored is not None and (stored == moment or stored >= self.now - DEDUP_WINDOW):
            return
        log.messages.append((timer.message_id, timer.txn, timer.payload))
        log.pushed_at[timer.txn] = moment
        log.last_append_at = moment

    def _set_clock(self) -> None:
        self.cursor.execute(
            "select set_config('queen.fake_now', %s, false)", (self.now.isoformat(),)
        )


def test_timers_are_their_model(shared_database: str) -> None:
    with psycopg.connect(shared_database) as connection:
        run_state_machine_as_test(
            lambda: TimerMachine(connection),
            settings=settings(
                max_examples=60,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
