"""The broker inside your own transaction: its SQL functions, called over the connection you have.

    from queen_pg import client as queen

    with engine.begin() as connection:                       # SQLAlchemy; also Session and psycopg
        connection.execute(insert(orders).values(id=9137))
        queen.push(connection, "orders", {"orderId": 9137}, partition="order-9137")

    async with connection.transaction():                     # asyncpg; also every other async one
        await queen.push(connection, "orders", {"orderId": 9137}, partition="order-9137")

The first argument is a connection of asyncpg, of psycopg 3, of SQLAlchemy (a connection or a
session) or of Django; with an async one the result is to be awaited. Nothing here begins, commits
or rolls back. The other arguments are those of the function of the same name in docs/sql.md: JSON
goes in and comes out as Python values, lifetimes are timedeltas. Errors are the driver's own; their
SQLSTATE and detail say what is wrong.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

import msgspec

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", covariant=True)


class AsyncConnection(Protocol):
    """A connection whose calls are awaited."""

    def close(self) -> Awaitable[None]:
        """Close it."""


class SyncConnection(Protocol):
    """A connection whose calls block."""

    def close(self) -> None:
        """Close it."""


class Pushed(msgspec.Struct, frozen=True):
    """What became of a message; of a duplicate, the id and offset of the original."""

    status: Literal["queued", "duplicate"]
    message_id: UUID
    message_offset: int


class Message(msgspec.Struct, frozen=True):
    """A message that was popped, with what its ack needs."""

    partition_id: int
    partition_name: str
    message_offset: int
    message_id: UUID
    transaction_id: str
    payload: Any
    created_at: datetime
    lease_id: UUID | None
    delivery_attempt: int
    trace_id: UUID | None
    producer_sub: str | None


class Acked(msgspec.Struct, frozen=True):
    """What became of an ack or nack; `refusal` is a sentence, or None for success."""

    success: bool
    refusal: str | None
    lease_released: bool
    dead_lettered: bool
    noop: bool


class Extension(msgspec.Struct, frozen=True):
    """On how many partitions a lease was renewed, and the earliest moment at which it ends."""

    renewed: int
    expires_at: datetime | None


class Entry(msgspec.Struct, frozen=True):
    """A live key."""

    value: Any
    version: int
    expires_at: datetime | None
    updated_at: datetime


class ListedEntry(Entry, frozen=True, kw_only=True):
    """A live key among others."""

    key: str


class Written(msgspec.Struct, frozen=True):
    """Whether a key was written; `stored` is what is there now, or stands in the way."""

    applied: bool
    reason: str | None
    version: int
    stored: Any


class Scheduled(msgspec.Struct, frozen=True):
    """A pending timer: the id that its message will have, and when it is due."""

    status: Literal["scheduled", "rescheduled"]
    message_id: UUID
    due_at: datetime


class Permit(msgspec.Struct, frozen=True):
    """Whether a lock was acquired; the token proves it."""

    acquired: bool
    token: int | None
    slot: int | None
    already: bool


class Renewed(msgspec.Struct, frozen=True):
    """Whether a permit was renewed; it has another token then."""

    renewed: bool
    new_token: int | None


class Holder(msgspec.Struct, frozen=True):
    """Who holds a slot of a lock."""

    slot: int
    owner: str | None
    token: int
    renewed_at: datetime
    expires_at: datetime | None


class Queue(msgspec.Struct, frozen=True):
    """A queue and its options, under their names on the wire."""

    queue_id: UUID
    namespace: str
    task: str
    settings: dict[str, Any]


class Replayed(msgspec.Struct, frozen=True):
    """What became of a dead letter: of a duplicate the record stays."""

    result: Literal["moved", "duplicate", "gone"]
    message_id: UUID | None
    message_offset: int | None


class _Call(Generic[R]):
    """A call of a SQL function: its arguments as text, and how its rows are read."""

    def __init__(
        self, function: str, read: Callable[[list[str]], R], **arguments: tuple[str, object]
    ) -> None:
        self.read = read
        self.values = {
            name: _text(kind, value)
            for name, (kind, value) in arguments.items()
            # What is not given has the function's own default.
            if value is not None
        }
        self._function = function
        self._kinds = {name: arguments[name][0] for name in self.values}

    def statement(self, place: Callable[[str, int], str]) -> str:
        """Return the statement, with each argument where `place` puts it (its name, its number).

        Every argument goes as text, which all drivers send alike, and each row comes as text.
        """
        arguments = ", ".join(
            f"{name} => cast(cast({place(name, number)} as text) as {kind})"
            for number, (name, kind) in enumerate(self._kinds.items(), 1)
        )
        return f"select cast(to_json(r) as text) from queen.{self._function}({arguments}) r"


class _Function(Generic[P, T]):
    """One of the functions below, for connections of either kind."""

    def __init__(self, build: Callable[P, _Call[T]]) -> None:
        self._build = build
        functools.update_wrapper(self, build)

    @overload
    def __call__(
        self, connection: AsyncConnection, /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]: ...
    @overload
    def __call__(self, connection: SyncConnection, /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def __call__(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> T | Awaitable[T]:
        call = self._build(*args, **kwargs)
        libraries = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
        if "asyncpg" in libraries:
            return _asyncpg(connection, call)
        if "sqlalchemy" in libraries:
            return _sqlalchemy(connection, call)
        if "psycopg" in libraries and hasattr(connection, "__aenter__"):
            return _psycopg(connection, call)
        return _dbapi(connection, call, {"psycopg"} & libraries)


@_Function
def push(
    queue: str,
    payload: Any,
    partition: str | None = None,
    transaction_id: str | None = None,
    trace_id: UUID | None = None,
    notify: bool | None = None,
) -> _Call[Pushed]:
    """Push a message to a partition of a queue."""
    return _Call(
        "push",
        _one(Pushed),
        queue=("text", queue),
        payload=("json", _Json(payload)),
        partition=("text", partition),
        transaction_id=("text", transaction_id),
        trace_id=("uuid", trace_id),
        notify=("boolean", notify),
    )


@_Function
def push_batch(
    queue: str,
    payloads: Sequence[Any],
    partition: str | None = None,
    transaction_ids: Sequence[str | None] | None = None,
    partitions: Sequence[str | None] | None = None,
    notify: bool | None = None,
) -> _Call[list[Pushed]]:
    """Push payloads to a partition of a queue, or each to its own."""
    return _Call(
        "push_batch",
        _all(Pushed),
        queue=("text", queue),
        payloads=("json[]", _Array([_Json(payload).text for payload in payloads])),
        partition=("text", partition),
        transaction_ids=("text[]", None if transaction_ids is None else _Array(transaction_ids)),
        partitions=("text[]", None if partitions is None else _Array(partitions)),
        notify=("boolean", notify),
    )


@_Function
def push_many(
    messages: Sequence[Mapping[str, Any]], notify: bool | None = None
) -> _Call[list[Pushed]]:
    """Push messages, each a dict of queue, payload, partition, transactionId and traceId."""
    return _Call(
        "push_many",
        _all(Pushed),
        messages=("json", _Json(messages)),
        notify=("boolean", notify),
    )


@_Function
def pop(
    queue: str,
    consumer_group: str | None = None,
    partition: str | None = None,
    batch: int | None = None,
    partitions: int | None = None,
    lease_seconds: int | None = None,
    subscription_mode: Literal["all", "new"] | None = None,
    subscription_from: datetime | None = None,
    commit_on_delivery: bool | None = None,
    conflation: bool | None = None,
) -> _Call[list[Message]]:
    """Lease a consumer group's next messages; commit at once."""
    return _Call(
        "pop",
        _all(Message),
        queue=("text", queue),
        consumer_group=("text", consumer_group),
        partition=("text", partition),
        batch=("integer", batch),
        partitions=("integer", partitions),
        lease_seconds=("integer", lease_seconds),
        subscription_mode=("text", subscription_mode),
        subscription_from=("timestamptz", subscription_from),
        commit_on_delivery=("boolean", commit_on_delivery),
        conflation=("boolean", conflation),
    )


@_Function
def ack(
    partition_id: int,
    transaction_id: str,
    lease_id: UUID | None = None,
    consumer_group: str | None = None,
    notify: bool | None = None,
) -> _Call[Acked]:
    """Settle a message and all before it in its partition."""
    return _Call(
        "ack",
        _one(Acked),
        partition_id=("bigint", partition_id),
        transaction_id=("text", transaction_id),
        lease_id=("uuid", lease_id),
        consumer_group=("text", consumer_group),
        notify=("boolean", notify),
    )


@_Function
def nack(
    partition_id: int,
    transaction_id: str,
    lease_id: UUID | None = None,
    consumer_group: str | None = None,
    error: str | None = None,
    status: Literal["failed", "retry", "dlq"] | None = None,
    notify: bool | None = None,
) -> _Call[Acked]:
    """Give a message back."""
    return _Call(
        "nack",
        _one(Acked),
        partition_id=("bigint", partition_id),
        transaction_id=("text", transaction_id),
        lease_id=("uuid", lease_id),
        consumer_group=("text", consumer_group),
        error=("text", error),
        status=("text", status),
        notify=("boolean", notify),
    )


@_Function
def extend_lease(lease_id: UUID, seconds: int | None = None) -> _Call[Extension]:
    """Let a lease last at least so many seconds from now."""
    return _Call(
        "extend_lease", _one(Extension), lease_id=("uuid", lease_id), seconds=("integer", seconds)
    )


@_Function
def transaction(step: Mapping[str, Any], notify: bool | None = None) -> _Call[dict[str, Any]]:
    """Carry out one step; the answer's `success` tells whether it was, and `reason` why not."""
    return _Call("transaction", _value, step=("json", _Json(step)), notify=("boolean", notify))


@_Function
def kv_get(namespace: str, key: str) -> _Call[Entry | None]:
    """Read a key."""
    return _Call("kv_get", _perhaps(Entry), namespace=("text", namespace), key=("text", key))


@_Function
def kv_put(
    namespace: str,
    key: str,
    value: Any,
    ttl: timedelta | None = None,
    expect: int | None = None,
) -> _Call[Written]:
    """Write a key."""
    return _Call(
        "kv_put",
        _one(Written),
        namespace=("text", namespace),
        key=("text", key),
        value=("json", _Json(value)),
        ttl=("interval", ttl),
        expect=("bigint", expect),
    )


@_Function
def kv_delete(namespace: str, key: str, expect: int | None = None) -> _Call[Written]:
    """Remove a key."""
    return _Call(
        "kv_delete",
        _one(Written),
        namespace=("text", namespace),
        key=("text", key),
        expect=("bigint", expect),
    )


@_Function
def kv_incr(
    namespace: str,
    key: str,
    delta: float | None = None,
    ttl: timedelta | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> _Call[Written]:
    """Add to a counter unless the sum would leave the bounds."""
    return _Call(
        "kv_incr",
        _one(Written),
        namespace=("text", namespace),
        key=("text", key),
        delta=("numeric", delta),
        ttl=("interval", ttl),
        minimum=("numeric", minimum),
        maximum=("numeric", maximum),
    )


@_Function
def kv_check(namespace: str, key: str, expect: int) -> _Call[Written]:
    """Tell whether a key is at a version, and keep it there until the transaction ends."""
    return _Call(
        "kv_check",
        _one(Written),
        namespace=("text", namespace),
        key=("text", key),
        expect=("bigint", expect),
    )


@_Function
def kv_once(namespace: str, key: str, ttl: timedelta | None = None) -> _Call[bool]:
    """Return True to the first transaction that asks for the key."""
    return _Call(
        "kv_once", _value, namespace=("text", namespace), key=("text", key), ttl=("interval", ttl)
    )


@_Function
def kv_list(
    namespace: str,
    prefix: str | None = None,
    after: str | None = None,
    row_max: int | None = None,
) -> _Call[list[ListedEntry]]:
    """Return the live keys that begin with a prefix."""
    return _Call(
        "kv_list",
        _all(ListedEntry),
        namespace=("text", namespace),
        prefix=("text", prefix),
        after=("text", after),
        row_max=("integer", row_max),
    )


@_Function
def timer_schedule(
    queue: str,
    timer_key: str,
    payload: Any,
    delay: timedelta | None = None,
    deliver_at: datetime | None = None,
    partition: str | None = None,
    transaction_id: str | None = None,
) -> _Call[Scheduled]:
    """Have a message pushed after a delay or at a moment."""
    return _Call(
        "timer_schedule",
        _one(Scheduled),
        queue=("text", queue),
        timer_key=("text", timer_key),
        payload=("json", _Json(payload)),
        delay=("interval", delay),
        deliver_at=("timestamptz", deliver_at),
        partition=("text", partition),
        transaction_id=("text", transaction_id),
    )


@_Function
def timer_cancel(queue: str, timer_key: str) -> _Call[bool]:
    """Cancel a pending timer, and tell whether there was one."""
    return _Call("timer_cancel", _value, queue=("text", queue), timer_key=("text", timer_key))


@_Function
def lock_acquire(
    name: str, ttl: timedelta, owner: str | None = None, slots: int | None = None
) -> _Call[Permit]:
    """Take a lock, or one of a semaphore's slots."""
    return _Call(
        "lock_acquire",
        _one(Permit),
        name=("text", name),
        ttl=("interval", ttl),
        owner=("text", owner),
        slots=("integer", slots),
    )


@_Function
def lock_renew(
    name: str, token: int, ttl: timedelta, owner: str | None = None, slot: int | None = None
) -> _Call[Renewed]:
    """Give a permit a new lifetime and a new token."""
    return _Call(
        "lock_renew",
        _one(Renewed),
        name=("text", name),
        token=("bigint", token),
        ttl=("interval", ttl),
        owner=("text", owner),
        slot=("integer", slot),
    )


@_Function
def lock_release(name: str, token: int, slot: int | None = None) -> _Call[bool]:
    """Give a permit back, and tell whether it was still its token's."""
    return _Call(
        "lock_release",
        _value,
        name=("text", name),
        token=("bigint", token),
        slot=("integer", slot),
    )


@_Function
def lock_check(name: str, token: int, slot: int | None = None) -> _Call[bool]:
    """Tell whether a permit is still its token's, and keep it so until the transaction ends."""
    return _Call(
        "lock_check", _value, name=("text", name), token=("bigint", token), slot=("integer", slot)
    )


@_Function
def lock_holders(name: str) -> _Call[list[Holder]]:
    """Return who holds a lock, or a semaphore's slots."""
    return _Call("lock_holders", _all(Holder), name=("text", name))


@_Function
def configure(
    queue: str, options: Mapping[str, Any] | None = None, replace: bool | None = None
) -> _Call[Queue]:
    """Create a queue or change its options, under their names on the wire."""
    return _Call(
        "configure",
        _one(Queue),
        queue=("text", queue),
        options=("jsonb", None if options is None else _Json(options)),
        replace=("boolean", replace),
    )


@_Function
def delete_queue(queue: str) -> _Call[bool]:
    """Delete a queue with all that is in it, and tell whether there was one."""
    return _Call("delete_queue", _value, queue=("text", queue))


@_Function
def seek(
    queue: str,
    consumer_group: str,
    target: Literal["beginning", "end"] | None = None,
    moment: datetime | None = None,
    next_offset: int | None = None,
    partition: str | None = None,
    notify: bool | None = None,
) -> _Call[int]:
    """Have a consumer group read on elsewhere; return in how many partitions."""
    return _Call(
        "seek",
        _value,
        queue=("text", queue),
        consumer_group=("text", consumer_group),
        target=("text", target),
        moment=("timestamptz", moment),
        next_offset=("bigint", next_offset),
        partition=("text", partition),
        notify=("boolean", notify),
    )


@_Function
def dlq_replay(
    id: UUID, queue: str | None = None, partition: str | None = None, notify: bool | None = None
) -> _Call[Replayed]:
    """Push a dead letter again and remove its record."""
    return _Call(
        "dlq_replay",
        _one(Replayed),
        id=("uuid", id),
        queue=("text", queue),
        partition=("text", partition),
        notify=("boolean", notify),
    )


class _Json:
    """A value to send as JSON; None too is one."""

    def __init__(self, value: Any) -> None:
        self.text = msgspec.json.encode(value).decode()


class _Array:
    """Texts to send as one array; None is a null in it."""

    def __init__(self, items: Sequence[str | None]) -> None:
        # In PostgreSQL's form, quoted as strings of JSON are, but with nothing else escaped.
        quoted = (
            "NULL" if item is None else '"' + re.sub(r'(["\\])', r"\\\1", item) + '"'
            for item in items
        )
        self.text = f"{{{','.join(quoted)}}}"


def _text(kind: str, value: object) -> str:
    if isinstance(value, _Json | _Array):
        return value.text
    if isinstance(value, timedelta):
        return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a moment needs a time zone")
        return value.isoformat()
    return str(value).lower() if kind == "boolean" else str(value)


def _value(rows: list[str]) -> Any:
    return msgspec.json.decode(rows[0])


def _one(kind: type[T]) -> Callable[[list[str]], T]:
    return lambda rows: msgspec.json.decode(rows[0], type=kind)


def _perhaps(kind: type[T]) -> Callable[[list[str]], T | None]:
    return lambda rows: msgspec.json.decode(rows[0], type=kind) if rows else None


def _all(kind: type[T]) -> Callable[[list[str]], list[T]]:
    return lambda rows: [msgspec.json.decode(row, type=kind) for row in rows]


async def _asyncpg(connection: Any, call: _Call[T]) -> T:
    rows = await connection.fetch(
        call.statement(lambda _, number: f"${number}"), *call.values.values()
    )
    return call.read([row[0] for row in rows])


def _sqlalchemy(connection: Any, call: _Call[T]) -> T | Awaitable[T]:
    from sqlalchemy import text

    statement = text(call.statement(lambda name, _: f":{name}"))
    found = connection.execute(statement, call.values)
    if not hasattr(found, "__await__"):
        return call.read(list(found.scalars()))

    async def answer() -> T:
        return call.read(list((await found).scalars()))

    return answer()


async def _psycopg(connection: Any, call: _Call[T]) -> T:
    from psycopg.rows import tuple_row

    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(_pyformat(call), call.values)
        return call.read([row[0] for row in await cursor.fetchall()])


def _dbapi(connection: Any, call: _Call[T], psycopg: object) -> T:
    options = {}
    if psycopg:
        from psycopg.rows import tuple_row

        options["row_factory"] = tuple_row
    with connection.cursor(**options) as cursor:
        cursor.execute(_pyformat(call), call.values)
        return call.read([row[0] for row in cursor.fetchall()])


def _pyformat(call: _Call[Any]) -> str:
    return call.statement(lambda name, _: f"%({name})s")
