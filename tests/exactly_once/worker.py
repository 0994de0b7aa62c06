"""A worker process: it takes inputs and commits a step for each, until it is killed.

The step of an input acks it, pushes an output and counts it under its entity. Odd inputs are kept
from being done twice by a marker, even ones only by the lease that their ack names.

    python -m tests.exactly_once.worker    a nursery: a process that has imported everything, forks
                                           a worker for each line of orders, and says when it died
"""

import asyncio
import os
import random
import signal
import sys
import threading
import time
import traceback
from enum import StrEnum
from typing import Any, NoReturn, Protocol

import httpx
import msgspec

from queen_pg.broker.ack import AckItem, ack
from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import PushItem
from queen_pg.broker.transaction import Transaction, TransactionAck, commit
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.wakeup import Waiters

INPUTS, OUTPUTS, GROUP = "inputs", "outputs", "workers"
COUNTS, MARKERS = "counts", "done"
LEASE_SECONDS = 1
WAIT_MS = 1000
BATCH = 3
DONE_BEFORE = ("kv_precondition", "duplicate")


class Moment(StrEnum):
    """What a worker is at."""

    START = "start"
    POP = "pop"
    BEFORE = "before"
    COMMIT = "commit"
    AFTER = "after"
    BETWEEN = "between"


class Fate(msgspec.Struct):
    """When a worker is killed: so long after a moment has come for the nth time.

    A worker may be `stalled` there first: it stands still, long enough for others to get its lease,
    and goes on as if nothing had been.
    """

    moment: Moment
    nth: int
    seconds: float
    stalled: float = 0


class Orders(msgspec.Struct):
    """What a worker is started with; `way` is how it reaches the broker."""

    way: str
    pg_url: str
    base_url: str
    split: bool
    fate: Fate | None


class Life:
    """Ends a worker's process when its moment has come."""

    def __init__(self, fate: Fate | None) -> None:
        self._fate = fate
        self._left = fate.nth if fate else 0

    def at(self, moment: Moment) -> None:
        """Go on, or not."""
        fate = self._fate
        if fate is None or moment is not fate.moment:
            return
        self._left -= 1
        if self._left != 0:
            return
        time.sleep(fate.stalled)
        if fate.seconds:
            threading.Thread(target=_die_in, args=(fate.seconds,), daemon=True).start()
        else:
            _die_in(0)


def _die_in(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


class Input(msgspec.Struct):
    """An input as it was pushed."""

    id: str
    entity: str
    number: int


class Lease(msgspec.Struct):
    """What a pop answered."""

    lease_id: str
    partition_id: int
    inputs: list[Input]


class Way(Protocol):
    """How a worker reaches the broker."""

    async def pop(self) -> Lease | None: ...

    async def commit(self, lease: Lease, one: Input, *, acking: bool, fenced: bool) -> str:
        """Commit the step; return why it was refused, or nothing."""
        ...

    async def ack(self, lease: Lease, one: Input) -> None: ...


def kv(one: Input) -> list[dict[str, Any]]:
    count = {"op": "incr", "ns": COUNTS, "key": one.entity, "delta": 1}
    marker = {"op": "putIfAbsent", "ns": MARKERS, "key": one.id, "value": True, "required": True}
    return [count, marker] if one.number % 2 else [count]


def output_id(one: Input) -> str | None:
    return f"of-{one.id}" if one.number % 2 else None


class Http:
    """By the wire, through a broker process."""

    def __init__(self, http: httpx.AsyncClient, base_url: str) -> None:
        self._http = http
        self._http.base_url = httpx.URL(base_url)

    async def pop(self) -> Lease | None:
        answer = await self._http.get(
            f"/api/v1/pop/queue/{INPUTS}",
            params={
                "consumerGroup": GROUP,
                "subscriptionMode": "all",
                "leaseSeconds": LEASE_SECONDS,
                "batch": BATCH,
                "wait": "true",
                "timeout": WAIT_MS,
            },
        )
        if answer.status_code == 204:
            return None
        messages = answer.raise_for_status().json()["messages"]
        if not messages:
            return None
        return Lease(
            messages[0]["leaseId"],
            int(messages[0]["partitionId"]),
            [msgspec.convert(message["data"], Input) for message in messages],
        )

    async def commit(self, lease: Lease, one: Input, *, acking: bool, fenced: bool) -> str:
        item = {
            "queue": OUTPUTS,
            "partition": one.entity,
            "payload": msgspec.to_builtins(one),
            "transactionId": output_id(one),
        }
        acking_it = {
            "type": "ack",
            "transactionId": one.id,
            "partitionId": str(lease.partition_id),
            "consumerGroup": GROUP,
            "leaseId": lease.lease_id if fenced else None,
        }
        answer = await self._http.post(
            "/api/v1/transaction",
            json={
                "operations": [
                    *([acking_it] if acking else []),
                    {"type": "push", "items": [item]},
                ],
                "requiredLeases": [],
                "kv": [operation | {"forever": True} for operation in kv(one)],
            },
        )
        verdict = answer.raise_for_status().json()
        return "" if verdict["success"] else str(verdict["reason"])

    async def ack(self, lease: Lease, one: Input) -> None:
        answer = await self._http.post(
            "/api/v1/ack",
            json={
                "transactionId": one.id,
                "partitionId": str(lease.partition_id),
                "consumerGroup": GROUP,
                "leaseId": lease.lease_id,
                "status": "completed",
            },
        )
        answer.raise_for_status()


class Doors:
    """By the broker's own functions, in the worker's process."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db = db
        self._waiters = Waiters(db, settings)

    @staticmethod
    def _soon() -> float:
        return asyncio.get_running_loop().time() + 30

    async def pop(self) -> Lease | None:
        answer = await self._waiters.pop(
            1,
            PopRequest(
                queue=INPUTS,
                consumer_group=GROUP,
                subscription_mode="all",
                lease_seconds=LEASE_SECONDS,
                batch=BATCH,
                partitions=1,
                wait=True,
                timeout_ms=WAIT_MS,
            ),
        )
        if not answer.claims:
            return None
        [claim] = answer.claims
        return Lease(
            str(answer.lease_id),
            claim.partition_id,
            [msgspec.json.decode(message.payload, type=Input) for message in claim.messages],
        )

    async def commit(self, lease: Lease, one: Input, *, acking: bool, fenced: bool) -> str:
        acks = [
            TransactionAck(
                lease.partition_id,
                one.id,
                lease_id=lease.lease_id if fenced else None,
                consumer_group=GROUP,
            )
        ]
        verdict = await commit(
            self._db,
            1,
            Transaction(
                acks=acks if acking else [],
                items=[
                    PushItem(OUTPUTS, one.entity, msgspec.json.encode(one), output_id(one)),
                ],
                kv=[
                    operation | ({"value": "true"} if "value" in operation else {})
                    for operation in kv(one)
                ],
            ),
            self._soon(),
        )
        return verdict.reason

    async def ack(self, lease: Lease, one: Input) -> None:
        item = AckItem(lease.partition_id, one.id, lease_id=lease.lease_id)
        await ack(self._db, 1, GROUP, [item], self._soon())


async def work(way: Way, life: Life, *, split: bool) -> None:
    """Take inputs and commit a step for each, for ever."""
    while True:
        life.at(Moment.POP)
        lease = await way.pop()
        for one in lease.inputs if lease else ():
            assert lease is not None
            life.at(Moment.BEFORE)
            life.at(Moment.COMMIT)
            if split:
                # As others do it: the effects, and then the ack. What is done twice is not seen.
                await way.commit(lease, one, acking=False, fenced=False)
                life.at(Moment.BETWEEN)
                await way.ack(lease, one)
                reason = ""
            else:
                reason = await way.commit(lease, one, acking=True, fenced=one.number % 2 == 0)
            life.at(Moment.AFTER)
            if reason in DONE_BEFORE:
                await way.ack(lease, one)
            elif reason == "rejected_ack":
                # The lease is gone, and the rest of the batch with it.
                break
            elif reason:
                raise AssertionError(f"{one} was refused: {reason}")


async def live(orders: Orders, http: httpx.AsyncClient) -> None:
    """Reach the broker as ordered, and work."""
    life = Life(orders.fate)
    life.at(Moment.START)
    if orders.way == "http":
        await work(Http(http, orders.base_url), life, split=orders.split)
        return
    settings = Settings(pg_url=orders.pg_url, pg_pool_size=2)
    db = Database(settings)
    await db.start()
    await work(Doors(db, settings), life, split=orders.split)


def nursery() -> None:
    """Fork a worker for each line of orders, and say how it ended; end with whoever ends this."""
    # Made once, and not connected yet: it is dear to make.
    http = httpx.AsyncClient(timeout=30, verify=False)
    worker = 0

    def leave(*_: object) -> NoReturn:
        # A child that has not been waited for keeps its process id, dead or alive.
        if worker:
            os.kill(worker, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    for line in sys.stdin.buffer:
        orders = msgspec.json.decode(line, type=Orders)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        worker = os.fork()
        if worker == 0:
            _be_a_worker(orders, http)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        ended, worker = worker, 0
        _, status = os.waitpid(ended, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _be_a_worker(orders: Orders, http: httpx.AsyncClient) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    random.seed()
    try:
        asyncio.run(live(orders, http))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    nursery()
