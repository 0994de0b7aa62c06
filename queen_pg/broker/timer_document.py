"""The operations of a timers call: read from the wire and validated (step 3.1)."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import zstandard

from queen_pg import limits
from queen_pg.broker import operation as op
from queen_pg.broker.operation import Fields
from queen_pg.config import Settings
from queen_pg.errors import BadRequest, Declined

OPERATIONS = ("schedule", "reschedule", "cancel")
OPERATIONS_MAX = 256
CALL_BYTES_MAX = 64 * 1024 * 1024
"""How much the payloads of one call may come to, decoded."""

KEY_BYTES_MAX = 2048
"""A timer's key and its queue's name share an index entry with room for 2,700 bytes."""

DEFAULT_PARTITION = "Default"
PROVENANCE = ("producerSub", "producer_sub")
FOREIGN_FIELDS = (
    "messageId",
    "message_id",
    *("tenant", "tenantId", "tenant_id"),
    *("deliverAt", "deliver_at", "delaySeconds", "delay_seconds"),
    *("attempts", "claimToken", "claim_token", "claimedUntil", "claimed_until"),
)
"""What the broker decides, or what somebody might send instead of `delayMs`: refused by name."""

# Beyond this the moment is moved to the first or last one that the wire can write.
DELAY_MS_MAX = Decimal(10) ** 18
MICROSECOND = Decimal("0.001")

_any_json = msgspec.json.Decoder(msgspec.Raw)


class Limits(msgspec.Struct, frozen=True):
    """What one call may hold; None sets no limit (step 1.6)."""

    operations: int | None = None
    payload_bytes: int = limits.MESSAGE_BYTES_MAX
    call_bytes: int = CALL_BYTES_MAX
    horizon_seconds: int | None = None

    @classmethod
    def of_call(cls, settings: Settings) -> "Limits":
        """Return the limits of the timers route; a transaction's are the defaults."""
        return cls(
            operations=OPERATIONS_MAX,
            payload_bytes=settings.timers_max_payload_bytes,
            horizon_seconds=settings.timers_max_horizon_seconds,
        )


def is_schedule(operations: Sequence[msgspec.Raw]) -> bool:
    """Return whether a call schedules anything, and so can be paused and spends a token."""
    return any(
        op.string((op.fields(document) or {}).get("op")) != "cancel" for document in operations
    )


def check_provenance(operations: Sequence[msgspec.Raw]) -> None:
    """Refuse fields that only the broker may set, which comes before all other checks."""
    for document in operations:
        for field in op.fields(document) or ():
            if field.startswith("_") or field in PROVENANCE:
                raise _bad("timers_server_owned_field", f"{field} is the broker's to set")


def validate(
    operations: Sequence[msgspec.Raw], within: Limits, producer_sub: str | None = None
) -> list[dict[str, Any]]:
    """Return the operations as the database takes them; raise Declined for the first bad one.

    `producer_sub` is the authenticated subject that schedules. A name that no queue or partition
    can have raises NameTooLong, so that a timer never waits for a push that must fail.
    """
    if within.operations is not None and len(operations) > within.operations:
        raise _bad("timers_too_many_ops", f"a call has at most {within.operations} operations")
    check_provenance(operations)
    validated = [_validated(document, within, producer_sub) for document in operations]
    names = {(operation["queue"], operation["timerKey"]) for operation in validated}
    if len(names) < len(validated):
        raise _bad("timers_duplicate_key", "a call names each timer once")
    if sum(len(operation.get("payload", "")) for operation in validated) > within.call_bytes:
        raise _too_large("timers_call_too_large", "the payloads of the call are too large")
    return validated


def seconds_ahead(operations: Sequence[dict[str, Any]]) -> float | None:
    """Return in how many seconds the first of some validated operations is due; None if none is."""
    return min(
        (
            float(bytes(operation["delayMs"])) / 1000
            for operation in operations
            if operation["op"] != "cancel"
        ),
        default=None,
    )


def cancel(queue: str, timer_key: str, txn: str | None) -> dict[str, Any]:
    """Return the operation that removes a timer."""
    return {
        "op": "cancel",
        "queue": _name("queue", "timers_queue_required", queue),
        "timerKey": _key(timer_key),
        "txn": txn,
    }


def _validated(document: msgspec.Raw, within: Limits, producer_sub: str | None) -> dict[str, Any]:
    operation = op.fields(document)
    if operation is None:
        raise _bad("timers_bad_op", "an operation must be an object")
    for field in operation:
        if field in FOREIGN_FIELDS:
            raise _bad("timers_field_not_allowed", f"{field} cannot be sent: delays are delayMs")
    name = op.string(operation.get("op"))
    if name not in OPERATIONS:
        raise _bad("timers_unknown_op", f"op must be one of {', '.join(OPERATIONS)}")
    queue = _name("queue", "timers_queue_required", op.string(operation.get("queue")))
    timer_key = _key(op.string(operation.get("timerKey")))
    txn = op.present(operation, "txn")
    if name == "cancel":
        if txn and op.string(txn) is None:
            raise _bad("timers_bad_txn", "txn must be a string")
        return cancel(queue, timer_key, op.string(txn))
    return {
        "op": name,
        "queue": queue,
        "timerKey": timer_key,
        "producerSub": producer_sub,
        **dict(_schedule(operation, queue, within)),
    }


def _schedule(operation: Fields, queue: str, within: Limits) -> Iterator[tuple[str, Any]]:
    """Yield what a schedule holds besides its names, checked."""
    partition: str | None = DEFAULT_PARTITION
    if given := op.present(operation, "partition"):
        partition = op.string(given)
    partition = _name("partition", "timers_bad_partition", partition)
    limits.check_names(queue, partition)
    yield "partition", partition
    yield "delayMs", _delay(operation, within)
    yield "txn", _txn(op.string(operation.get("txn")))
    yield "payload", _payload(operation, within)
    if "encrypted" in operation:
        encrypted = op.boolean(operation["encrypted"])
        if encrypted is None:
            raise _bad("timers_bad_encrypted", "encrypted must be a boolean")
        yield "encrypted", encrypted


def _delay(operation: Fields, within: Limits) -> msgspec.Raw:
    text = op.number(operation.get("delayMs"))
    if text is None:
        raise _bad("timers_delay_required", "delayMs must be a number of milliseconds")
    rough = float(text)
    if abs(rough) < MICROSECOND:
        delay = Decimal(0)
    elif abs(rough) < DELAY_MS_MAX:
        delay = Decimal(text).quantize(MICROSECOND)
    else:
        delay = DELAY_MS_MAX.copy_sign(Decimal(rough))
    if within.horizon_seconds is not None and delay > within.horizon_seconds * 1000:
        raise Declined(
            "timer_horizon_exceeded",
            "timers_horizon",
            f"a timer lies at most {within.horizon_seconds} s ahead",
            status=403,
        )
    return msgspec.Raw(f"{delay:f}".encode())


def _txn(text: str | None) -> str:
    if not text:
        raise _bad("timers_txn_required", "txn must be a string that is not empty")
    try:
        return limits.check_transaction_id("txn", text)
    except BadRequest as error:
        raise _bad("timers_bad_txn", str(error)) from None


def _payload(operation: Fields, within: Limits) -> str:
    text = op.string(operation.get("payload"))
    if text is None:
        raise _bad("timers_payload_required", "payload must be a string of base64")
    try:
        payload = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad("timers_payload_not_base64", "payload must be standard base64") from None
    if "payloadZstd" in operation:
        inflate = op.boolean(operation["payloadZstd"])
        if inflate is None:
            raise _bad("timers_bad_payload_zstd", "payloadZstd must be a boolean")
        if inflate:
            payload = _inflated(payload, within.payload_bytes)
    if len(payload) > within.payload_bytes:
        raise _too_large(
            "timers_payload_too_large", f"a payload has at most {within.payload_bytes} bytes"
        )
    try:
        document = payload.decode() or "null"
        _any_json.decode(document)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        raise _bad("timers_payload_not_json", "payload must decode to a JSON document") from None
    return document


def _inflated(payload: bytes, bytes_max: int) -> bytes:
    """Return what a zstd frame holds, or nothing when it is none; a little over the limit is seen.

    The size that a frame states is not believed, nor is it written out any further than that.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(payload) as reader:
            return reader.read(bytes_max + 1)
    except zstandard.ZstdError:
        return b""


def _name(field: str, reason: str, text: str | None) -> str:
    if not text or "\0" in text:
        raise _bad(reason, f"{field} must be a string that is not empty, without NUL")
    return text


def _key(text: str | None) -> str:
    key = _name("timerKey", "timers_key_required", text)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise _bad("timers_key_too_long", f"timerKey is over {KEY_BYTES_MAX} bytes")
    return key


def _bad(reason: str, message: str) -> Declined:
    return Declined("timers_bad_request", reason, message)


def _too_large(reason: str, message: str) -> Declined:
    return Declined("payload_too_large", reason, message, status=413)
