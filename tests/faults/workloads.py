"""The workloads: what clients do during a round, and what is read when the faults are over.

Each has clients that run until they are told to stop, and a `finish` that completes the history
with the state of the world, read from the database or drained through the API.
"""

import asyncio
import base64
import json
import random
from collections import defaultdict
from typing import Any, ClassVar

import asyncpg

from tests.faults.api import Api

PARTITIONS = 4
CLIENTS = 4
DRAIN_SECONDS = 40.0


class Workload:
    """A round of one kind of work."""

    queue: ClassVar[str] = "work"
    # What the checker needs of the queue; the rest are the defaults.
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, api: Api, rng: random.Random) -> None:
        self.api = api
        self.rng = rng
        self.stopping = asyncio.Event()

    async def prepare(self) -> None:
        """Set up what the clients need, before any fault."""
        await self.api.send(
            "configure",
            "POST",
            "/api/v1/configure",
            {"queue": self.queue, "options": {"retryLimit": 1000, **self.options}},
        )

    async def run(self, seconds: float) -> None:
        """Run the clients for a while."""
        clients = [asyncio.create_task(self._repeat(number)) for number in range(CLIENTS)]
        await asyncio.sleep(seconds)
        self.stopping.set()
        await asyncio.gather(*clients)

    async def _repeat(self, number: int) -> None:
        while not self.stopping.is_set():
            await self.client(number)
            await asyncio.sleep(self.rng.uniform(0, 0.02))

    async def client(self, number: int) -> None:
        """Do one piece of work."""
        raise NotImplementedError

    async def finish(self, database: asyncpg.Connection) -> None:
        """Complete the history; nothing is broken any more."""
        raise NotImplementedError

    def partition(self) -> str:
        """Return one of the few partitions that all clients share."""
        return f"p{self.rng.randrange(PARTITIONS)}"

    def name(self, prefix: str) -> str:
        """Return an id that nobody else has."""
        return f"{prefix}{self.api.history.number()}"

    async def stored(self, database: asyncpg.Connection) -> None:
        """Record what the queue's partitions hold."""
        rows = await database.fetch(
            "select p.name, m.message_offset, m.transaction_id from queen.messages m"
            " join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id"
            " where q.name = $1 and m.message_offset >= p.log_start_offset"
            " order by p.id, m.message_offset",
            self.queue,
        )
        answer: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for partition, offset, name in rows:
            answer[partition].append((offset, name))
        self.record("stored", dict(answer))

    def record(self, kind: str, answer: Any, **asked: Any) -> None:
        """Record what was found at the end."""
        self.api.history.end(self.api.history.begin(kind, **asked), "ok", answer)

    async def drain(self, group: str, lease_seconds: int = 5) -> dict[str, list[str]]:
        """Consume all that is left, acking each batch; return the ids by partition."""
        drained: dict[str, list[str]] = defaultdict(list)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_SECONDS
        quiet = 0
        while loop.time() < deadline and quiet < lease_seconds * 10:
            pop = await self.api.pop(self.queue, group, lease_seconds=lease_seconds, batch=100)
            if pop.outcome == "ok" and pop.answer:
                quiet = 0
                for message in pop.answer:
                    drained[message["partition"]].append(message["id"])
                await self.api.ack(group, pop.answer)
            else:
                quiet += 1
                await asyncio.sleep(0.1)
        return dict(drained)


class Log(Workload):
    """Pushes of one and of several messages; two readers afterwards."""

    async def client(self, number: int) -> None:
        await self.api.push(
            self.queue,
            [
                {"id": self.name("m"), "partition": self.partition()}
                for _ in range(self.rng.choice((1, 1, 1, 5)))
            ],
        )

    async def finish(self, database: asyncpg.Connection) -> None:
        await self.stored(database)
        for reader in ("first", "second"):
            self.record("read", await self.drain(reader, lease_seconds=1), reader=reader)


class Queue(Workload):
    """Producers, and consumers that lease, work and ack; some leases run out."""

    lease_seconds = 2

    async def client(self, number: int) -> None:
        if number == 0:
            await self.api.push(self.queue, [{"id": self.name("m"), "partition": self.partition()}])
            return
        pop = await self.api.pop(self.queue, "g", lease_seconds=self.lease_seconds)
        if pop.outcome == "ok" and pop.answer and self.rng.random() < 0.9:
            await asyncio.sleep(self.rng.uniform(0, 0.05))
            await self.api.ack("g", pop.answer[: self.rng.randint(1, len(pop.answer))])

    async def finish(self, database: asyncpg.Connection) -> None:
        await self.drain("g", self.lease_seconds)


class Pipeline(Workload):
    """Steps: take an input, push its output, count it, all in one transaction."""

    async def client(self, number: int) -> None:
        if number == 0:
            await self.api.push(
                self.queue, [{"id": self.name("in"), "partition": self.partition()}]
            )
            return
        await self._step(await self.api.pop(self.queue, "g", lease_seconds=2, batch=2))

    async def _step(self, pop: Any) -> None:
        if pop.outcome != "ok" or not pop.answer:
            return
        await self.api.send(
            "step",
            "POST",
            "/api/v1/transaction",
            {
                "operations": [
                    *(
                        {
                            "type": "ack",
                            "transactionId": message["id"],
                            "partitionId": message["partition_id"],
                            "consumerGroup": "g",
                            "leaseId": message["lease"],
                        }
                        for message in pop.answer
                    ),
                    {
                        "type": "push",
                        "items": [
                            {
                                "queue": "out",
                                "partition": message["partition"],
                                "payload": message["id"],
                            }
                            for message in pop.answer
                        ],
                    },
                ],
                "kv": [
                    {"op": "incr", "ns": "done", "key": message["id"], "delta": 1, "forever": True}
                    for message in pop.answer
                ],
            },
        )

    async def finish(self, database: asyncpg.Connection) -> None:
        quiet = 0
        while quiet < 30:
            pop = await self.api.pop(self.queue, "g", lease_seconds=2, batch=50)
            quiet = 0 if pop.outcome == "ok" and pop.answer else quiet + 1
            await self._step(pop)
            await asyncio.sleep(0.1 if quiet else 0)
        outputs: dict[str, int] = defaultdict(int)
        for [payload] in await database.fetch(
            "select m.payload::text from queen.messages m"
            " join queen.partitions p on p.id = m.partition_id"
            " join queen.queues q on q.id = p.queue_id where q.name = 'out'"
        ):
            outputs[json.loads(payload)] += 1
        rows = await database.fetch(
            "select key, value::text from queen.kv where namespace = 'done'"
        )
        self.record("state", {"outputs": dict(outputs), "counts": {k: int(v) for k, v in rows}})


class Register(Workload):
    """Conditional writes and reads of a few keys."""

    async def client(self, number: int) -> None:
        key = f"k{self.rng.randrange(3)}"
        read = await self.api.kv("read", {"op": "get", "ns": "r", "key": key}, key=key)
        if read.outcome != "ok":
            return
        found = read.answer["found"]
        read.answer = {
            "version": read.answer["version"] if found else 0,
            "value": read.answer["value"] if found else None,
        }
        value, expect = self.name("v"), read.answer["version"]
        put = {"op": "put", "ns": "r", "key": key, "value": value, "expect": expect}
        await self.api.kv("write", {**put, "forever": True}, key=key, value=value, expect=expect)

    async def finish(self, database: asyncpg.Connection) -> None:
        for key in ("k0", "k1", "k2"):
            read = await self.api.kv("read", {"op": "get", "ns": "r", "key": key}, key=key)
            found = read.answer["found"]
            read.answer = {
                "version": read.answer["version"] if found else 0,
                "value": read.answer["value"] if found else None,
            }


class Counter(Workload):
    """Increments of a few keys."""

    async def client(self, number: int) -> None:
        key = f"c{self.rng.randrange(3)}"
        incr = {"op": "incr", "ns": "c", "key": key, "delta": 1, "forever": True}
        operation = await self.api.kv("incr", incr, key=key)
        if operation.outcome == "ok":
            operation.answer = operation.answer["value"]

    async def finish(self, database: asyncpg.Connection) -> None:
        rows = await database.fetch("select key, value::text from queen.kv where namespace = 'c'")
        self.record("state", {key: int(value) for key, value in rows})


class Claim(Workload):
    """All clients race for the same new key, again and again."""

    async def client(self, number: int) -> None:
        key = f"claim{self.api.history.number() // CLIENTS}"
        by = f"client{number}"
        claim = {"op": "putIfAbsent", "ns": "claims", "key": key, "value": by, "forever": True}
        await self.api.kv("claim", claim, key=key, by=by)

    async def finish(self, database: asyncpg.Connection) -> None:
        for key in {each.asked["key"] for each in self.api.history.of("claim")}:
            claim = {"op": "putIfAbsent", "ns": "claims", "key": key, "value": "nobody"}
            await self.api.kv("claim", {**claim, "forever": True}, key=key, by="nobody")


class MultiKey(Workload):
    """Transfers between accounts, each conditional on the versions that it read."""

    accounts = ("a", "b", "c", "d")
    opening = 100

    async def prepare(self) -> None:
        await super().prepare()
        operations = [
            {"op": "put", "ns": "bank", "key": key, "value": self.opening, "forever": True}
            for key in self.accounts
        ]
        await self.api.send("open", "POST", "/api/v1/kv", {"operations": operations})

    async def client(self, number: int) -> None:
        read = await self.api.kv(
            "balance", {"op": "getMany", "ns": "bank", "keys": list(self.accounts)}
        )
        if read.outcome != "ok":
            return
        rows = {row["key"]: row for row in read.answer["rows"]}
        source, target, watched = self.rng.sample(self.accounts, 3)
        amount = self.rng.randint(1, 5)
        transfer = await self.api.send(
            "transfer",
            "POST",
            "/api/v1/transaction",
            {
                "operations": [],
                "kv": [
                    _put(source, rows[source]["value"] - amount, rows[source]["version"]),
                    _put(target, rows[target]["value"] + amount, rows[target]["version"]),
                    {
                        "op": "check",
                        "ns": "bank",
                        "key": watched,
                        "required": True,
                        "expect": rows[watched]["version"],
                    },
                ],
            },
            read={key: rows[key]["version"] for key in (source, target, watched)},
        )
        if transfer.outcome == "ok":
            results = transfer.answer["results"]
            transfer.answer = (
                transfer.answer["success"]
                and {"wrote": {result["key"]: result["version"] for result in results[:2]}}
            ) or None

    async def finish(self, database: asyncpg.Connection) -> None:
        rows = await database.fetch("select value::text from queen.kv where namespace = 'bank'")
        total = self.opening * len(self.accounts)
        self.record("state", {"sum": sum(int(value) for [value] in rows)}, sum=total)


def _put(key: str, value: int, version: int) -> dict[str, Any]:
    return {
        "op": "put",
        "ns": "bank",
        "key": key,
        "value": value,
        "expect": version,
        "required": True,
        "forever": True,
    }


class Dedup(Workload):
    """The same ids over and over, from several clients, and again after every doubt."""

    async def client(self, number: int) -> None:
        name = f"id{self.api.history.number() // (2 * CLIENTS)}"
        item = {"id": name, "partition": f"p{hash(name) % PARTITIONS}", "payload": 1}
        while not self.stopping.is_set():
            push = await self.api.push(self.queue, [item])
            if push.outcome == "ok":
                return

    async def finish(self, database: asyncpg.Connection) -> None:
        for push in self.api.history.of("push"):
            if push.outcome != "ok":
                await self.api.push(self.queue, push.asked["items"])
        await self.stored(database)


class Timers(Workload):
    """Timers for a moment later, some of them cancelled in time or too late."""

    async def client(self, number: int) -> None:
        name = self.name("t")
        delay_ms = self.rng.randint(0, 1500)
        schedule = await self.api.send(
            "schedule",
            "POST",
            "/api/v1/timers",
            {
                "operations": [
                    {
                        "op": "schedule",
                        "queue": self.queue,
                        "timerKey": name,
                        "txn": name,
                        "delayMs": delay_ms,
                        "partition": self.partition(),
                        "payload": base64.b64encode(b"1").decode(),
                    }
                ]
            },
            id=name,
        )
        if schedule.outcome == "ok":
            schedule.answer = schedule.answer["results"][0]
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.uniform(0, delay_ms / 700))
            path = f"/api/v1/timers/{self.queue}/{name}"
            cancel = await self.api.send("cancel", "DELETE", path, None, id=name)
            if cancel.outcome == "ok":
                cancel.answer = cancel.answer["ok"]

    async def finish(self, database: asyncpg.Connection) -> None:
        waiting = (
            "select exists (select from queen.timers where deliver_at < now() + interval '2 s')"
        )
        for _ in range(200):
            if not await database.fetchval(waiting):
                break
            await asyncio.sleep(0.1)
        fired: dict[str, list[str]] = defaultdict(list)
        for name, moment in await database.fetch(
            "select m.transaction_id, to_char(m.created_at at time zone 'UTC',"
            ' \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') from queen.messages m'
        ):
            fired[name].append(moment)
        self.record("state", {"fired": dict(fired)})


class DeadLetters(Workload):
    """Messages that every consumer gives up, and their replay."""

    options: ClassVar[dict[str, Any]] = {"retryLimit": 0}

    async def client(self, number: int) -> None:
        if number == 0:
            name = self.name("m")
            await self.api.push(
                self.queue,
                [{"id": name, "partition": self.partition(), "payload": {"of": name}}],
            )
            return
        pop = await self.api.pop(self.queue, "g", lease_seconds=2, batch=1)
        if pop.outcome != "ok" or not pop.answer:
            return
        [message] = pop.answer
        error = f"no good: {message['id']}"
        nack = self.api.history.begin(
            "nack", id=message["id"], payload=message["payload"], error=error
        )
        results = await self.api.ack("g", [message], "failed", error)
        self.api.history.end(
            nack,
            "unknown" if results is None else "ok",
            bool(results and results[0]["success"] and results[0]["dlq"]),
        )

    async def finish(self, database: asyncpg.Connection) -> None:
        letters: dict[str, list[dict[str, Any]]] = defaultdict(list)
        rows = await database.fetch(
            "select id, transaction_id, payload::text, error from queen.dead_letters"
        )
        for _, name, payload, error in rows:
            letters[name].append({"payload": json.loads(payload), "error": error})
        replays = {}
        for letter, *_ in rows[:20]:
            for _ in range(2):
                await database.fetch("select queen.dlq_replay($1)", letter)
            replays[str(letter)] = await database.fetchval(
                "select count(*) from queen.messages where transaction_id = $1", f"dlq:{letter}"
            )
        self.record("state", {"letters": dict(letters), "replayed": replays})


class Locks(Workload):
    """Holders of one lock, who write under its guard and sometimes outlive it."""

    async def client(self, number: int) -> None:
        acquire = await self.api.send(
            "acquire",
            "POST",
            "/api/v1/locks",
            {
                "operations": [
                    {"op": "acquire", "name": "l", "ttlSeconds": 1, "owner": self.name("w")}
                ]
            },
        )
        if acquire.outcome != "ok":
            return
        [result] = acquire.answer["results"]
        acquire.answer = result["token"] if result["acquired"] else None
        if not result["acquired"]:
            return
        await asyncio.sleep(self.rng.choice((0, 0, 0.1, 1.2)))
        guarded = await self.api.send(
            "guarded",
            "POST",
            "/api/v1/transaction",
            {
                "operations": [],
                "kv": [
                    result["guard"],
                    {"op": "put", "ns": "work", "key": "k", "value": 1, "forever": True},
                ],
            },
            token=result["token"],
        )
        if guarded.outcome == "ok":
            guarded.answer = guarded.answer["success"] and guarded.answer["results"][1]["version"]
        release = {"op": "release", "name": "l", "token": result["token"]}
        await self.api.send("release", "POST", "/api/v1/locks", {"operations": [release]})

    async def finish(self, database: asyncpg.Connection) -> None:
        return


class Retention(Workload):
    """Pushes to a queue that keeps nothing for longer than a second."""

    options: ClassVar[dict[str, Any]] = {"maxWaitTimeSeconds": 1, "dedupWindowSeconds": 0}

    async def client(self, number: int) -> None:
        await self.api.push(self.queue, [{"id": self.name("m"), "partition": self.partition()}])

    async def finish(self, database: asyncpg.Connection) -> None:
        await self.stored(database)
        rows = await database.fetch("select name, next_offset from queen.partitions")
        self.record("state", dict(rows))


WORKLOADS: dict[str, type[Workload]] = {
    "log": Log,
    "queue": Queue,
    "pipeline": Pipeline,
    "register": Register,
    "counter": Counter,
    "claim": Claim,
    "multikey": MultiKey,
    "dedup": Dedup,
    "timers": Timers,
    "dead_letters": DeadLetters,
    "locks": Locks,
    "retention": Retention,
}
