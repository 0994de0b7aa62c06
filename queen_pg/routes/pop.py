"""`GET /api/v1/pop…`: the queue, the partition and the discovery route (data-plane 4 and 5).

One handler for the three: they differ in where they look, and answer alike. The answer is JSON, or
the binary form `QPF1` for a client that asked for frames.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import cast
from uuid import UUID

import msgspec
from litestar.response.base import ASGIResponse

from queen_pg import frames, limits
from queen_pg.broker.ack import QUEUE_MODE
from queen_pg.broker.pop import Claim, PopAnswer, PopRequest
from queen_pg.errors import Unavailable, UnavailableCode
from queen_pg.routes import wire

PATH = "/api/v1/pop"
QUEUE_PATH = "/api/v1/pop/queue/{queue}"
PARTITION_PATH = "/api/v1/pop/queue/{queue}/partition/{partition}"

DEFAULT_TIMEOUT_MS = 30_000
TIMEOUT_MAX_MS = 60_000
PARTITIONS_MAX = 64

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Refused(Exception):
    """The parameters contradict one another; a pop has a body of its own for this."""


class _Message(msgspec.Struct, rename="camel"):
    id: str
    transaction_id: str
    trace_id: UUID | None
    data: msgspec.Raw
    producer_sub: str | None
    created_at: str
    partition_id: str
    partition: str
    lease_id: str
    consumer_group: str
    delivery_attempt: int
    offset: int


class _Autopilot(msgspec.Struct):
    partitions: int
    batch: int


class _Own(msgspec.Struct, rename="camel", omit_defaults=True):
    """The keys that are there only when they apply."""

    conflation: bool = False
    conflation_conflict: bool = False
    autopilot: _Autopilot | None = None


class _Answer(_Own, rename="camel", omit_defaults=True, kw_only=True):
    success: bool
    queue: str
    partition: str
    partition_id: str
    lease_id: str
    consumer_group: str
    messages: list[_Message]
    partitions_claimed: int


async def pop(request: wire.AnyRequest) -> ASGIResponse:
    """Deliver what a consumer group has not had yet, waiting for it if the request says so."""
    query = wire.Query(request)
    try:
        wanted = _wanted(request, query)
    except _Refused as refusal:
        return wire.answer({"success": False, "error": str(refusal), "messages": []}, 400)
    framed = query.flag("frames") is True
    try:
        async with _presence(request) as gone:
            answer = await wire.waiters(request).pop(wire.tenant(request), wanted, gone)
    except Unavailable as error:
        # Consumers pause and go on when an error speaks of the connection (data-plane 1-5).
        code = cast(UnavailableCode, error.code)
        raise Unavailable(code, f"database connection: {error.message}") from error

    echo = answer.conflation or answer.conflation_conflict
    if not answer.claims and not echo:
        return wire.no_content()
    if framed and not answer.conflation:
        return wire.Answer(_framed(wanted, answer), 200, frames.POP_CONTENT_TYPE)
    return wire.answer(_rendered(wanted, answer))


def _wanted(request: wire.AnyRequest, query: wire.Query) -> PopRequest:
    """Read what the request asks for; raise _Refused when that makes no sense."""
    names: dict[str, str] = {}
    if request.scope["raw_path"] != PATH.encode():
        names = wire.match(request, QUEUE_PATH) or wire.names(request, PARTITION_PATH)
    queue, partition = names.get("queue"), names.get("partition")
    group = query.text("consumerGroup")
    limits.check_names(queue or "", partition or "", group or QUEUE_MODE)

    # Evaluated whatever the route: a bad value is an error even where it has no effect.
    batch, partitions = query.integer("batch"), query.integer("partitions")
    lease_seconds = query.integer("leaseSeconds")
    timeout_ms = query.integer("timeout")
    wait = query.flag("wait")
    autopilot = query.flag("autopilot")
    conflation = query.flag("conflation")
    deliver_once = [query.flag("commitOnDelivery"), query.flag("autoAck")]
    commit_on_delivery = True in deliver_once
    namespace, task = query.text("namespace") or "", query.text("task") or ""

    if queue is None and not namespace and not task:
        raise _Refused("a pop without a queue needs namespace or task")
    if conflation and group is None:
        raise _Refused("conflation needs a consumerGroup")
    if conflation and commit_on_delivery:
        raise _Refused("conflation and commitOnDelivery (autoAck) exclude each other")
    return PopRequest(
        queue=queue,
        partition=partition,
        namespace=namespace if queue is None else "",
        task=task if queue is None else "",
        consumer_group=group,
        batch=None if batch is None else max(batch, 1),
        partitions=None if partitions is None else max(1, min(partitions, PARTITIONS_MAX)),
        wait=wait is True and queue is not None,
        timeout_ms=max(1, min(_or(timeout_ms, DEFAULT_TIMEOUT_MS), TIMEOUT_MAX_MS)),
        subscription_mode=query.text("subscriptionMode"),
        subscription_from=query.text("subscriptionFrom"),
        lease_seconds=lease_seconds if lease_seconds is not None and lease_seconds > 0 else None,
        commit_on_delivery=commit_on_delivery,
        conflation=conflation,
        autopilot=autopilot is True and queue is not None and partition is None,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


@contextlib.asynccontextmanager
async def _presence(request: wire.AnyRequest) -> AsyncIterator[Callable[[], bool]]:
    """Watch the connection meanwhile, and yield a function that says whether the client is gone."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(watch())
    try:
        yield watcher.done
    finally:
        watcher.cancel()


def _rendered(wanted: PopRequest, answer: PopAnswer) -> _Answer:
    lease_id = "" if answer.lease_id is None else str(answer.lease_id)
    first = answer.claims[0] if answer.claims else None
    own = _own(answer)
    return _Answer(
        success=True,
        queue=wanted.queue or "",
        partition=first.partition if first else "",
        partition_id=str(first.partition_id) if first else "",
        lease_id=lease_id,
        consumer_group=answer.consumer_group,
        messages=[
            message
            for claim in answer.claims
            for message in _messages(claim, lease_id, answer.consumer_group)
        ],
        partitions_claimed=len(answer.claims),
        conflation=own.conflation,
        conflation_conflict=own.conflation_conflict,
        autopilot=own.autopilot,
    )


def _messages(claim: Claim, lease_id: str, consumer_group: str) -> list[_Message]:
    partition_id = str(claim.partition_id)
    return [
        _Message(
            id=message.id,
            transaction_id=message.transaction_id,
            trace_id=message.trace_id,
            data=msgspec.Raw(message.payload),
            producer_sub=message.producer_sub,
            created_at=wire.iso_milliseconds(message.created_at),
            partition_id=partition_id,
            partition=claim.partition,
            lease_id=lease_id,
            consumer_group=consumer_group,
            delivery_attempt=claim.delivery_attempt,
            offset=message.offset,
        )
        for message in claim.messages
    ]


def _own(answer: PopAnswer) -> _Own:
    return _Own(
        conflation=answer.conflation,
        conflation_conflict=answer.conflation_conflict,
        autopilot=_Autopilot(*answer.autopilot) if answer.autopilot is not None else None,
    )


def _framed(wanted: PopRequest, answer: PopAnswer) -> bytes:
    return frames.encode_pop(
        msgspec.json.encode(_own(answer)),
        wanted.queue or "",
        "" if answer.lease_id is None else str(answer.lease_id),
        answer.consumer_group,
        [_framed_claim(claim) for claim in answer.claims],
    )


def _framed_claim(claim: Claim) -> frames.Claim:
    return frames.Claim(
        claim.partition_id,
        claim.partition,
        claim.delivery_attempt,
        [
            frames.Delivery(
                offset=message.offset,
                created_at_us=_microseconds(message.created_at),
                message_id=UUID(message.id),
                trace_id=message.trace_id,
                transaction_id=message.transaction_id,
                producer_sub=message.producer_sub,
                payload=message.payload.encode(),
            )
            for message in claim.messages
        ],
    )


def _microseconds(moment: datetime) -> int:
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


ROUTES = [wire.bare("GET", PATH, pop, mount=True)]
