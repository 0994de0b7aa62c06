"""`POST /api/v1/transaction`: a worker's step in one call, as JSON or as the binary body `QTB1`.

A refusal of this route has a body of its own, with the transaction's id and a reason; only what
concerns the broker as a whole (a name over budget, an outage) looks as on the other routes. Results
share one flat index space: acks and pushed items in the order of the operations, then the riders
(step 1.8).
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from litestar.response.base import ASGIResponse

from queen_pg import frames, limits
from queen_pg.broker import kv, switch, timer, timer_document
from queen_pg.broker import transaction as broker
from queen_pg.broker.ack import QUEUE_MODE, AckResult, released
from queen_pg.broker.append import appends
from queen_pg.broker.identity import uuid_v7
from queen_pg.broker.push import Batch, PushItem, PushResult
from queen_pg.broker.quota import Quotas
from queen_pg.broker.transaction import Position, Transaction, TransactionAck, Verdict
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import BadBody, Declined, PayloadTooLarge
from queen_pg.routes import surface, wire

POSITIONS_MAX = 16_384
METADATA_BYTES_MAX = 4096
OFFSET_MAX = 2**63 - 1

DISABLED_REASONS = ("kv_disabled", "timers_disabled")


class _Refused(Exception):
    """The call is answered with a reason; nothing was written."""

    def __init__(self, reason: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


class _Item(msgspec.Struct, rename="camel"):
    queue: str
    payload: msgspec.Raw
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None


class _Push(msgspec.Struct, tag="push", tag_field="type", rename="camel"):
    """Items to push, or one item inline."""

    items: list[_Item] | None = None
    queue: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None


class _Ack(msgspec.Struct, tag="ack", tag_field="type", rename="camel"):
    transaction_id: str = ""
    partition_id: str | None = None
    consumer_group: str | None = None
    lease_id: str | None = None
    status: str | None = None
    error: str | None = None


class _Position(msgspec.Struct, rename="camel"):
    queue: str
    consumer_group: str
    offset: int | None
    partition: str | None = None
    metadata: str | None = None


class _Body(msgspec.Struct, rename="camel"):
    operations: list[_Ack | _Push] | None = None
    required_leases: list[str] | None = None
    kv: list[msgspec.Raw] | None = None
    timers: list[msgspec.Raw] | None = None
    positions: list[msgspec.Raw] | None = None


_body = msgspec.json.Decoder(_Body)
_position = msgspec.json.Decoder(_Position)


class _Call:
    """What one request asks for, with the slots of its operations in the order of the answer."""

    def __init__(
        self, body: _Body, framed: Sequence[frames.Item], settings: Settings, *, counts: bool
    ) -> None:
        self.counts = counts
        self.timers = timer_document.validate(body.timers or [], timer_document.Limits())
        self.kv = kv.validate(body.kv or [], kv.Limits.of_transaction(settings))
        self.positions = _positions(body.positions or [])
        operations = body.operations or []
        if not (operations or framed or self.kv or self.timers or self.positions):
            raise _Refused("bad_request", "the transaction has no parts", 200)
        self.acks: list[TransactionAck] = []
        self.items: list[PushItem] = []
        self.slots: list[type[_Ack] | type[_Push]] = []
        lent = _lent_lease(operations, body.required_leases or [])
        for place, operation in enumerate(operations):
            field = f"operations[{place}]."
            if isinstance(operation, _Ack):
                self.acks.append(_ack(field, operation, lent))
                self.slots.append(_Ack)
            else:
                self._push(_pushed(field, operation))
        for place, item in enumerate(framed):
            self._push([_framed(f"items[{place}].", item)])

    def _push(self, items: Sequence[PushItem]) -> None:
        self.items.extend(items)
        self.slots.extend([_Push] * len(items))


async def transaction(request: wire.AnyRequest) -> ASGIResponse:
    """Carry out acks, pushes, KV operations and timers in one commit, or none of them."""
    transaction_id = uuid_v7()
    tenant = wire.tenant(request)
    database = wire.database(request)
    try:
        body, framed, counts = _parsed(await wire.read_body(request))
        async with _switches_first(database, body):
            _check_quotas(surface.quotas(request), tenant, body)
            call = _Call(body, framed, wire.settings(request), counts=counts)
        if Batch(call.items).too_large():
            raise _Refused("too_large", "the pushes to one partition are too large", 200)
        await _check_encryption(database, tenant, call)
    except _Refused as refusal:
        return _refusal(str(transaction_id), refusal.reason, str(refusal), refusal.status)
    verdict = await wire.conveyor(request).commit(
        tenant,
        Transaction(
            acks=call.acks,
            items=call.items,
            kv=call.kv,
            timers=call.timers,
            positions=call.positions,
        ),
        wire.deadline(),
    )
    if not verdict.success:
        return _rolled_back(str(transaction_id), call, verdict)
    waiters = wire.waiters(request)
    waiters.pushed_to(tenant, appends(call.items, verdict.pushes))
    waiters.freed(verdict.woken)
    waiters.settled(released(call.acks, verdict.acks))
    if (seconds := timer_document.seconds_ahead(call.timers)) is not None:
        surface.scheduler(request).wake(seconds)
    return wire.answer(_committed(str(transaction_id), call, verdict))


def _parsed(body: bytes) -> tuple[_Body, list[frames.Item], bool]:
    framed: list[frames.Item] = []
    counts = False
    try:
        if body.startswith(frames.TRANSACTION_MAGIC):
            decoded = frames.decode_transaction(body)
            framed, counts = decoded.items, decoded.counts
            body = decoded.head or b"{}"
        return wire.parse(_body, body), framed, counts
    except (frames.Malformed, BadBody) as error:
        raise _Refused("bad_request", str(error)) from None
    except frames.Oversize as error:
        raise PayloadTooLarge(str(error)) from None


@contextlib.asynccontextmanager
async def _switches_first(db: Database, body: _Body) -> AsyncIterator[None]:
    """Let a paused surface answer so before any other refusal (step 1.11-2).

    The step reads the switches; only a call that is refused before it has to ask for them.
    """
    try:
        yield
    except (Declined, _Refused) as error:
        switches = await switch.read(db)
        if body.kv and not switches.kv:
            raise _disabled("kv_disabled") from None
        if timer_document.is_schedule(body.timers or []) and not switches.timers_schedule:
            raise _disabled("timers_disabled") from None
        if isinstance(error, _Refused):
            raise
        reason = error.reason
        if not reason.startswith("kv_") and reason != "timers_server_owned_field":
            reason = "bad_request"
        raise _Refused(reason, error.message, error.status) from None


def _check_quotas(quotas: Quotas, tenant: int, body: _Body) -> None:
    """Refuse as a paused surface does: what is over its quota may not be in a transaction."""
    try:
        if kv.is_growth(body.kv or []):
            quotas.check_kv(tenant)
        if timer_document.is_schedule(body.timers or []):
            quotas.check_timers(tenant)
    except Declined as error:
        raise _Refused(error.code, error.message, error.status) from None


def _disabled(reason: str) -> _Refused:
    return _Refused(reason, broker.ROLLED_BACK[reason], 403)


async def _check_encryption(db: Database, tenant: int, call: _Call) -> None:
    try:
        await timer.check_encryption(db, tenant, call.timers, wire.deadline())
    except Declined as error:
        raise _Refused("bad_request", error.message, 200) from None


def _lent_lease(operations: Sequence[_Ack | _Push], required: Sequence[str]) -> str | None:
    """Return the one lease that the call names, for acks without their own (step 1.4)."""
    named = {operation.lease_id for operation in operations if isinstance(operation, _Ack)}
    leases = {lease for lease in (*named, *required) if lease}
    return leases.pop() if len(leases) == 1 else None


def _ack(field: str, ack: _Ack, lent: str | None) -> TransactionAck:
    partition_id = wire.partition_id(ack.partition_id or "")
    if partition_id is None:
        raise _Refused("bad_request", f"{field}partitionId must be a decimal id", 200)
    group = limits.check_text(f"{field}consumerGroup", ack.consumer_group or QUEUE_MODE)
    limits.check_names("", group)
    limits.check_transaction_id(f"{field}transactionId", ack.transaction_id)
    limits.check_text(f"{field}error", ack.error or "")
    return TransactionAck(
        partition_id=partition_id,
        transaction_id=ack.transaction_id,
        status=wire.ack_status(ack.status),
        error=ack.error,
        lease_id=limits.check_text(f"{field}leaseId", ack.lease_id or lent or "") or None,
        consumer_group=group,
    )


def _pushed(field: str, push: _Push) -> list[PushItem]:
    if push.items is None:
        if push.queue is None or bytes(push.payload) == b"null":
            raise _Refused("bad_request", f"{field}queue and payload are needed", 200)
        return [_item(field, push, push.queue)]
    return [
        _item(f"{field}items[{place}].", item, item.queue) for place, item in enumerate(push.items)
    ]


def _item(field: str, item: _Item | _Push, queue: str) -> PushItem:
    return wire.pushed_item(
        field,
        queue=queue,
        partition=item.partition,
        payload=bytes(item.payload),
        transaction_id=item.transaction_id,
        trace_id=item.trace_id,
    )


def _framed(field: str, item: frames.Item) -> PushItem:
    return wire.pushed_item(
        field,
        queue=item.queue,
        partition=item.partition,
        payload=item.payload,
        transaction_id=item.transaction_id,
        message_id=item.message_id,
    )


def _positions(sent: Sequence[msgspec.Raw]) -> list[Position]:
    if len(sent) > POSITIONS_MAX:
        raise _Refused("bad_request", f"there are more than {POSITIONS_MAX} positions", 200)
    positions = []
    for place, document in enumerate(sent):
        field = f"positions[{place}]"
        try:
            position = _position.decode(document)
        except msgspec.DecodeError as error:
            raise _Refused("bad_request", f"{field}: {error}", 200) from None
        if position.offset is not None and not 0 <= position.offset <= OFFSET_MAX:
            raise _Refused("bad_request", f"{field}.offset is not an offset", 200)
        if len((position.metadata or "").encode()) > METADATA_BYTES_MAX:
            message = f"{field}.metadata is over {METADATA_BYTES_MAX} bytes"
            raise _Refused("bad_request", message, 200)
        partition = position.partition or wire.DEFAULT_PARTITION
        group = position.consumer_group or QUEUE_MODE
        limits.check_names(position.queue, partition, group)
        positions.append(
            Position(
                queue=limits.check_text(f"{field}.queue", position.queue),
                consumer_group=limits.check_text(f"{field}.consumerGroup", group),
                partition=limits.check_text(f"{field}.partition", partition),
                offset=position.offset,
                metadata=position.metadata
                and limits.check_text(f"{field}.metadata", position.metadata),
            )
        )
    return positions


def _refusal(
    transaction_id: str, reason: str, message: str, status: int, **more: object
) -> ASGIResponse:
    return wire.answer(
        {
            "transactionId": transaction_id,
            "success": False,
            "reason": reason,
            "error": message,
            "results": [],
            **more,
        },
        status,
    )


def _rolled_back(transaction_id: str, call: _Call, verdict: Verdict) -> ASGIResponse:
    status = 403 if verdict.reason in DISABLED_REASONS else 200
    failure = verdict.failure
    if failure is None:
        return _refusal(transaction_id, verdict.reason, verdict.error, status)
    return _refusal(
        transaction_id,
        verdict.reason,
        verdict.error,
        status,
        ok=False,
        failedIndex=len(call.slots) + failure.failed_index,
        kvReason=failure.kv_reason,
        version=failure.version,
        value=None if failure.value is None else msgspec.Raw(failure.value),
    )


def _committed(transaction_id: str, call: _Call, verdict: Verdict) -> dict[str, object]:
    answer: dict[str, object] = {"transactionId": transaction_id, "success": True}
    results: list[object] = []
    if call.counts:
        duplicates = sum(push.status == "duplicate" for push in verdict.pushes)
        answer["pushed"] = len(verdict.pushes) - duplicates
        answer["duplicate"] = duplicates
        answer["acked"] = len(verdict.acks)
    else:
        acks = iter(zip(call.acks, verdict.acks, strict=True))
        pushes = iter(zip(call.items, verdict.pushes, strict=True))
        results += [
            _ack_result(index, *next(acks)) if slot is _Ack else _push_result(index, *next(pushes))
            for index, slot in enumerate(call.slots)
        ]
    index = len(call.slots)
    for kind, elements in (("kv", verdict.kv), ("timer", verdict.timers)):
        for place, element in enumerate(elements):
            results.append(_rider(index, place, kind, element))
            index += 1
    for place in range(len(call.positions)):
        results.append(_rider(index, place, "position", '{"success":true}'))
        index += 1
    answer["results"] = results
    return answer


def _ack_result(index: int, ack: TransactionAck, result: AckResult) -> dict[str, object]:
    return {
        "index": index,
        "type": "ack",
        "success": True,
        "transactionId": ack.transaction_id,
        "error": None,
        "dlq": result.dlq,
    }


def _push_result(index: int, item: PushItem, result: PushResult) -> dict[str, object]:
    return {
        "index": index,
        "type": "push",
        "success": True,
        "transactionId": result.transaction_id,
        "messageId": result.message_id,
        "queueName": item.queue,
        **({"duplicate": True} if result.status == "duplicate" else {}),
    }


def _rider(index: int, place: int, kind: str, element: str) -> msgspec.Raw:
    """Put its place in front of an operation's own result, whose text stays as it is."""
    return msgspec.Raw(f'{{"index":{index},"opIndex":{place},"type":"{kind}",{element[1:]}')


ROUTES = [wire.bare("POST", "/api/v1/transaction", transaction)]
