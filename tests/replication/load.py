"""Load on a log through two brokers, and what must be true of it whatever happened meanwhile.

Pushers push numbered events. Workers take them under leases, and commit for each a step: the ack, a
message without a transaction id (so nothing but the step's own atomicity keeps it single), a count
in KV, and now and then a timer. What was answered is noted; whatever failed is tried again.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import httpx

PARTITIONS = 5
PUSHERS = 4
WORKERS = 4
CALL_SECONDS = 40.0
PAUSE_SECONDS = 0.02
SETTLE_SECONDS = 60.0
LEASE_SECONDS = 2
TIMER_EVERY = 5
TIMER_MS = 500


class Load:
    """One round's load; its queues are named after the round."""

    def __init__(self, base_urls: Sequence[str], name: str) -> None:
        self.events = f"events-{name}"
        self.done = f"done-{name}"
        self.fired = f"fired-{name}"
        self.namespace = f"load-{name}"
        self.pushed: dict[str, int] = {}
        self.stepped: set[str] = set()
        self.unknown: set[str] = set()
        self.timers: set[str] = set()
        self.refusals: Counter[str] = Counter()
        self.answered_at: list[float] = []
        self._urls = list(base_urls)
        self._turn = itertools.count()
        self._pushing = True
        self._working = True
        self._tasks: list[asyncio.Task[None]] = []
        self._http = httpx.AsyncClient(
            timeout=CALL_SECONDS, limits=httpx.Limits(max_connections=None)
        )

    async def start(self) -> None:
        """Begin, and wait until something has been answered."""
        self._tasks = [
            *(asyncio.create_task(self._push(number)) for number in range(PUSHERS)),
            *(asyncio.create_task(self._work()) for _ in range(WORKERS)),
        ]
        await self.flow()

    async def flow(self, answers: int = 10) -> float:
        """Wait until some more pushes are answered; return the moment of the first of them."""
        before = len(self.answered_at)
        deadline = time.monotonic() + SETTLE_SECONDS
        while len(self.answered_at) < before + answers:
            assert time.monotonic() < deadline, f"nothing is answered: {self.refusals}"
            await asyncio.sleep(PAUSE_SECONDS)
        return self.answered_at[before]

    async def finish(self) -> None:
        """Push no more, work off what is there, wait for the timers, and stop."""
        self._pushing = False
        await asyncio.gather(*self._tasks[:PUSHERS])
        deadline = time.monotonic() + SETTLE_SECONDS
        while not set(self.pushed) <= self.stepped | self.unknown:
            assert time.monotonic() < deadline, f"not worked off: {self.refusals}"
            await asyncio.sleep(PAUSE_SECONDS)
        if not set(self.pushed) <= self.stepped:
            # A step that did not happen after all comes again when its lease has run out.
            await asyncio.sleep(2 * LEASE_SECONDS)
        self._working = False
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Stop at once, whatever was reached."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _push(self, number: int) -> None:
        for place in itertools.count():
            if not self._pushing:
                return
            event = f"{number}-{place}"
            item = {
                "queue": self.events,
                "partition": f"entity-{place % PARTITIONS}",
                "transactionId": event,
                "payload": {"event": event},
            }
            while True:
                answer = await self._call("POST", "/api/v1/push", json={"items": [item]})
                if answer is not None:
                    self.pushed[event] = answer[0].get("offset", -1)
                    self.answered_at.append(time.monotonic())
                    break

    async def _work(self) -> None:
        while self._working:
            params = {
                "consumerGroup": "load", "subscriptionMode": "all", "batch": 5, "partitions": 1,
                "leaseSeconds": LEASE_SECONDS, "wait": "true", "timeout": 200,
            }  # fmt: skip
            path = f"/api/v1/pop/queue/{self.events}"
            popped = await self._call("GET", path, params=params)
            for message in (popped or {}).get("messages", []):
                if not await self._step(popped, message):
                    break

    async def _step(self, popped: dict[str, Any], message: dict[str, Any]) -> bool:
        event = message["transactionId"]
        partition = message["partition"]
        body: dict[str, Any] = {
            "operations": [
                {
                    "type": "ack", "transactionId": event, "partitionId": message["partitionId"],
                    "consumerGroup": "load", "leaseId": message["leaseId"], "status": "completed",
                },
                {"type": "push", "items": [
                    {"queue": self.done, "partition": partition, "payload": {"event": event}},
                ]},
            ],
            "kv": [{"op": "incr", "ns": self.namespace, "key": partition, "delta": 1,
                    "forever": True}],
        }  # fmt: skip
        timed = int(event.rpartition("-")[2]) % TIMER_EVERY == 0
        if timed:
            body["timers"] = [{
                "op": "schedule", "queue": self.fired, "timerKey": event, "txn": event,
                "delayMs": TIMER_MS, "payload": "bnVsbA==",
            }]  # fmt: skip
        verdict = await self._call("POST", "/api/v1/transaction", json=body)
        if verdict is None:
            self.unknown.add(event)
        if verdict is None or not verdict["success"]:
            self.refusals[(verdict or {}).get("reason", "no answer")] += 1
            return False
        assert event not in self.stepped, f"{event} was worked on twice"
        self.stepped.add(event)
        if timed:
            self.timers.add(event)
        return True

    async def _call(self, method: str, path: str, **arguments: Any) -> Any:
        """Call one of the brokers in turn; None where it did not succeed, after a pause."""
        url = self._urls[next(self._turn) % len(self._urls)] + path
        try:
            response = await self._http.request(method, url, **arguments)
        except httpx.TransportError as error:
            self.refusals[type(error).__name__] += 1
        else:
            if response.status_code == 204:
                return {}
            if response.is_success:
                return response.json()
            assert response.status_code >= 500, response.text
            self.refusals[f"{response.status_code} {response.json().get('code')}"] += 1
        await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def check(self, connection: asyncpg.Connection) -> None:
        """Judge what a node holds: nothing answered is lost, doubled, out of order or early."""
        events = await self._messages(connection, self.events)
        found = Counter(row["transaction_id"] for row in events)
        assert set(self.pushed) <= set(found), "an answered push is lost"
        assert max(found.values()) == 1, "a push is there twice"
        for row in events:
            expected = self.pushed.get(row["transaction_id"], -1)
            assert expected in (-1, row["message_offset"]), "a push has moved"
        done = Counter(row["event"] for row in await self._messages(connection, self.done))
        assert self.stepped <= set(done), "an answered step is lost"
        assert set(self.pushed) <= set(done), "an event was never worked on"
        assert max(done.values()) == 1, "a step happened twice"
        assert set(done) <= set(found)
        counted = await connection.fetchval(
            "select coalesce(sum(value::text::bigint), 0) from queen.kv where namespace = $1",
            self.namespace,
        )
        assert counted == sum(done.values()), "a step's count and its message differ"
        await self._check_offsets(connection)
        await self._check_timers(connection, set(done))

    async def _check_offsets(self, connection: asyncpg.Connection) -> None:
        holes = await connection.fetch(
            "select p.name from queen.partitions p join queen.queues q on q.id = p.queue_id"
            " left join queen.messages m on m.partition_id = p.id where q.name = any($1)"
            " group by p.id having count(m.*) <> p.next_offset"
            " or coalesce(min(m.message_offset), 0) <> 0"
            " or coalesce(max(m.message_offset), -1) <> p.next_offset - 1",
            [self.events, self.done, self.fired],
        )
        assert not holes, f"offsets have gaps: {holes}"
        unordered = await connection.fetchval(
            "select count(*) from (select m.id < lag(m.id) over w or m.created_at < lag("
            " m.created_at) over w as wrong from queen.messages m window w as"
            " (partition by m.partition_id order by m.message_offset)) o where wrong"
        )
        assert not unordered, "ids or stamps fall along a partition"

    async def _check_timers(self, connection: asyncpg.Connection, done: set[str]) -> None:
        """A timer of a step that happened fires once, and one of a step that did not, never."""
        due = {event for event in done if int(event.rpartition("-")[2]) % TIMER_EVERY == 0}
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            fired = await connection.fetch(
                "select m.created_at, m.transaction_id from queen.messages m"
                " join queen.partitions p on p.id = m.partition_id"
                " join queen.queues q on q.id = p.queue_id where q.name = $1",
                self.fired,
            )
            waiting = await connection.fetch(
                "select timer_key from queen.timers where queue = $1", self.fired
            )
            assert len(fired) + len(waiting) <= len(due), "a timer fired twice"
            if len(fired) == len(due):
                return
            assert time.monotonic() < deadline, "timers do not fire"
            await asyncio.sleep(PAUSE_SECONDS)

    async def _messages(self, connection: asyncpg.Connection, queue: str) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await connection.fetch(
            "select m.transaction_id, m.message_offset, m.payload::jsonb ->> 'event' as event"
            " from queen.messages m join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id where q.name = $1"
            " order by p.id, m.message_offset",
            queue,
        )
        return rows
