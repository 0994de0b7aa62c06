"""A process that drives a broker over HTTP; see `window` for how it is told what to do.

Each kind of load is a function that makes the programs of its connections. Where latency is judged
the load is an open loop: each connection has instants at which its next request is due, and the
latency counts from that instant, however late the request could be sent.
"""

import itertools
import math
import random
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from . import window
from .client import Engine, Program, request
from .window import Tally, clock

PAYLOAD_BYTES = 256
# How long a consumer's pop waits at the broker, in milliseconds.
WAIT_MS = 5000


class Sent(msgspec.Struct):
    """What a payload says: the instant at which it was sent, or due."""

    at: float


class _Message(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    lease_id: str
    data: Sent


class _Popped(msgspec.Struct):
    messages: list[_Message]


_popped = msgspec.json.Decoder(_Popped)


def payload(at: float) -> str:
    """Return a JSON document of the usual size that carries an instant."""
    head = f'{{"at":{at:.6f},"pad":"'
    return f'{head}{"x" * (PAYLOAD_BYTES - len(head) - 2)}"}}'


def transaction_ids() -> Iterator[str]:
    """Yield ids as a client would make them: unique, and without an order."""
    while True:
        head = uuid.uuid4().hex
        for number in range(4096):
            yield f"{head[:8]}-{head[8:12]}-4{head[12:15]}-{head[15:19]}-{head[19:28]}{number:03x}"


def instants(task: dict[str, Any], place: int) -> Iterator[float]:
    """Yield the instants at which a connection's requests are due; without a rate, at once."""
    rate = task.get("rate")
    if rate is None:
        while True:
            yield 0.0
    every = task["clients"] / rate
    start = clock() + every * place / task["clients"]
    for number in itertools.count():
        yield start + every * number


def push(task: dict[str, Any], place: int, tally: Tally) -> Program:
    """Push `batch` messages a call, to one partition or each to another (`spread`)."""
    ids = transaction_ids()
    batch, count, queue = task["batch"], task["partitions"], task["queue"]
    total = task.get("total", math.inf) / task["clients"]
    chosen = random.Random(place)
    pushed = 0
    for due in instants(task, place):
        if pushed >= total:
            return
        if due > clock():
            yield due
        started = due or clock()
        document = payload(started)
        pushed += batch
        places = (
            chosen.sample(range(count), batch)
            if task["spread"]
            else [chosen.randrange(count)] * batch
        )
        items = [
            f'{{"queue":"{queue}","partition":"p-{at}","transactionId":"{transaction_id}",'
            f'"payload":{document}}}'
            for at, transaction_id in zip(places, ids, strict=False)
        ]
        body = f'{{"items":[{",".join(items)}]}}'.encode()
        response = yield request("POST", "/api/v1/push", body)
        now = clock()
        if response.status == 201:
            tally.add(now, batch, now - started)
        else:
            tally.errors[f"push {response.status}"] += 1


def work(task: dict[str, Any], _: int, tally: Tally) -> Program:
    """Pop, ack what was popped, and count it; latencies are from the push to the delivery."""
    queue, batch = task["queue"], task["batch"]
    query = f"batch={batch}&partitions={task['width']}&wait=true&timeout={WAIT_MS}"
    pop = request("GET", f"/api/v1/pop/queue/{queue}?{query}")
    while True:
        response = yield pop
        if response.status == 204:
            continue
        if response.status != 200:
            tally.errors[f"pop {response.status}"] += 1
            yield clock() + 0.1
            continue
        messages = _popped.decode(response.body).messages
        delivered = clock()
        acks = ",".join(
            f'{{"transactionId":"{message.transaction_id}","partitionId":"{message.partition_id}",'
            f'"leaseId":"{message.lease_id}","status":"completed"}}'
            for message in messages
        )
        body = f'{{"acknowledgments":[{acks}]}}'.encode()
        response = yield request("POST", "/api/v1/ack/batch", body)
        now = clock()
        done = response.body.count(b'"success":true')
        tally.errors["ack refused"] += len(messages) - done
        if done == len(messages):
            for message in messages:
                tally.add(now, 1, delivered - message.data.at)
        else:
            tally.add(now, done)


def step(task: dict[str, Any], place: int, tally: Tally) -> Program:
    """Pop a batch, and settle each message in a transaction: ack 1, push 1, KV 1, timer 1."""
    ids = transaction_ids()
    queue, batch = task["queue"], task["batch"]
    pop = request("GET", f"/api/v1/pop/queue/{queue}?batch={batch}&wait=true&timeout={WAIT_MS}")
    number = 0
    while True:
        response = yield pop
        if response.status != 200:
            continue
        for message in _popped.decode(response.body).messages:
            number += 1
            # A worker's own keys; `first` keeps the workers of several brokers apart.
            key = f"{task.get('first', 0) + place}-{number % 10}"
            started = clock()
            body = (
                f'{{"operations":[{{"type":"ack","transactionId":"{message.transaction_id}",'
                f'"partitionId":"{message.partition_id}","leaseId":"{message.lease_id}",'
                '"status":"completed"},'
                f'{{"type":"push","queue":"{queue}-out","partition":"p-{key}",'
                f'"transactionId":"{next(ids)}","payload":{payload(started)}}}],'
                f'"kv":[{{"op":"put","ns":"bench","key":"{key}","value":{payload(0)},'
                '"forever":true}],'
                f'"timers":[{{"op":"schedule","queue":"{queue}-out","timerKey":"{key}",'
                f'"delayMs":3600000,"txn":"{next(ids)}","payload":"e30="}}]}}'
            )
            response = yield request("POST", "/api/v1/transaction", body.encode())
            now = clock()
            if b'"success":true' in response.body[:100]:
                tally.add(now, 1, now - started)
            else:
                tally.errors[f"transaction {response.status} {response.body[:200]!r}"] += 1


def kv(task: dict[str, Any], place: int, tally: Tally) -> Program:
    """Read and write single keys in turn."""
    keys = random.Random(place)
    for number in itertools.count():
        started = clock()
        key = f"k-{keys.randrange(task['keys'])}"
        if number % 2:
            operation = f'{{"op":"get","ns":"bench","key":"{key}"}}'
        else:
            operation = (
                f'{{"op":"put","ns":"bench","key":"{key}","value":{payload(0)},"forever":true}}'
            )
        response = yield request("POST", "/api/v1/kv", f'{{"operations":[{operation}]}}'.encode())
        now = clock()
        if response.status == 200:
            tally.add(now, 1, now - started)
        else:
            tally.errors[f"kv {response.status} {response.body[:200]!r}"] += 1


def park(task: dict[str, Any], place: int, tally: Tally) -> Program:
    """Wait for messages that never come, each connection in a consumer group of its own."""
    query = f"consumerGroup=g-{place % task['groups']}&wait=true&timeout=60000"
    pop = request("GET", f"/api/v1/pop/queue/{task['queue']}?{query}")
    while True:
        response = yield pop
        tally.add(clock(), 1)
        if response.status != 204:
            tally.errors[f"parked {response.status}"] += 1


def health(task: dict[str, Any], place: int, tally: Tally) -> Program:
    """Ask for the broker's health, which asks the database nothing: HTTP alone."""
    message = request("GET", "/status")
    for due in instants(task, place):
        if due > clock():
            yield due
        started = due or clock()
        yield message
        now = clock()
        tally.add(now, 1, now - started)


KINDS = {"push": push, "work": work, "step": step, "kv": kv, "park": park, "health": health}


def main() -> None:
    """Run the load that the command line describes."""
    task = window.task()
    tally = Tally()
    programs = [KINDS[task["kind"]](task, place, tally) for place in range(task["clients"])]
    engine = Engine(programs, (task["host"], task["port"]))
    window.opened(tally)
    engine.run(tally.until + task.get("linger", 0.0))
    window.close(tally)


if __name__ == "__main__":
    main()
