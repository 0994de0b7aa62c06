"""The binary bodies of the wire: `QPB1` (push), `QTB1` (transaction) and `QPF1` (framed pop).

Pure functions between bytes and plain values; data-plane 3 and 5 draw the layouts. All integers
are little-endian and unsigned but for the time stamp of a record. A body that is not exactly its
layout, to the last byte, raises Malformed: what a stranger sends is never believed, and no length
of his is used to allocate.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

import msgspec
import zstandard

PUSH_MAGIC = b"QPB1"
TRANSACTION_MAGIC = b"QTB1"
POP_MAGIC = b"QPF1"
POP_CONTENT_TYPE = "application/x-queen-pop"

INFLATED_BYTES_MAX = 128 * 1024 * 1024
"""How large a body may become once inflated, all its zstd frames together."""

_ZSTD, _COUNTS, _TRANSACTION_IDS, _FRAMED = 1, 2, 4, 8
_TRACE, _PRODUCER = 1, 2
_POP_VERSION = 1
_RAW_CODEC = 0

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_CLAIM_HEAD = struct.Struct("<QQII")
_RECORD_HEAD = struct.Struct("<QqIBI")

_any_json = msgspec.json.Decoder(msgspec.Raw)


class Malformed(ValueError):
    """The bytes are not the layout they claim to be."""


class Oversize(ValueError):
    """The body inflates to more than INFLATED_BYTES_MAX."""


class Item(NamedTuple):
    """One pushed message. An empty transaction id, or no message id: the broker mints one."""

    queue: str
    partition: str
    message_id: UUID | None
    transaction_id: str
    payload: bytes


class Push(NamedTuple):
    """A decoded push; `counts` asks for an answer without one object per item."""

    counts: bool
    items: list[Item]


class Transaction(NamedTuple):
    """A decoded transaction: its JSON head, and the pushes that follow it."""

    counts: bool
    head: bytes
    items: list[Item]


class Delivery(NamedTuple):
    """One message of a framed pop."""

    offset: int
    created_at_us: int
    message_id: UUID
    trace_id: UUID | None
    transaction_id: str
    producer_sub: str | None
    payload: bytes


class Claim(NamedTuple):
    """One partition's share of a framed pop, its messages in the order of their offsets."""

    partition_id: int
    partition: str
    delivery_attempt: int
    messages: Sequence[Delivery]


def decode_push(body: bytes) -> Push:
    """Decode a `QPB1` body; raise Malformed or Oversize."""
    reader = _Reader(body)
    reader.magic(PUSH_MAGIC)
    flags = reader.u8()
    if flags & _FRAMED:
        if flags & ~(_FRAMED | _COUNTS):
            raise Malformed(f"the flags {flags} do not go together")
        return Push(bool(flags & _COUNTS), list(_framed_groups(reader)))
    if flags & ~(_ZSTD | _COUNTS | _TRANSACTION_IDS):
        raise Malformed(f"unknown flags {flags}")
    if flags & _ZSTD:
        size = reader.u32()
        reader = _Reader(_Inflater().inflate(reader.rest(), size))
    return Push(bool(flags & _COUNTS), list(_plain_groups(reader, bool(flags & _TRANSACTION_IDS))))


def decode_transaction(body: bytes) -> Transaction:
    """Decode a `QTB1` body, but for the JSON of its head; raise Malformed or Oversize."""
    reader = _Reader(body)
    reader.magic(TRANSACTION_MAGIC)
    flags = reader.u8()
    if flags & ~_COUNTS:
        raise Malformed(f"unknown flags {flags}")
    head = reader.take(reader.u32())
    return Transaction(bool(flags), head, list(_framed_groups(reader)))


def encode_pop(
    own: bytes, queue: str, lease_id: str, consumer_group: str, claims: Iterable[Claim]
) -> bytes:
    """Encode a `QPF1` answer; `own` is the JSON object of the keys that have no field here."""
    encoded = [_claim(claim) for claim in claims]
    return b"".join(
        [
            POP_MAGIC,
            bytes([_POP_VERSION]),
            _U32.pack(len(own)),
            own,
            _text16(queue),
            _text16(lease_id),
            _text16(consumer_group),
            _U32.pack(len(encoded)),
            *encoded,
        ]
    )


class _Reader:
    """Takes fields off a body; a read past the end raises."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise Malformed("the body is truncated")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def magic(self, expected: bytes) -> None:
        if self.take(4) != expected:
            raise Malformed("the body does not start as it must")

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int.from_bytes(self.take(2), "little")

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def text16(self, what: str) -> str:
        try:
            return self.take(self.u16()).decode()
        except UnicodeDecodeError:
            raise Malformed(f"{what} is not UTF-8") from None

    def end(self) -> None:
        if self._at != len(self._data):
            raise Malformed("the body goes on after its end")


class _Inflater:
    """Inflates the zstd frames of one body, and bounds what they may become together."""

    def __init__(self) -> None:
        self._left = INFLATED_BYTES_MAX

    def inflate(self, frame: bytes, size: int | None = None) -> bytes:
        """Inflate one frame that must state its content size, and state `size` if that is given."""
        try:
            stated = zstandard.frame_content_size(frame)
        except zstandard.ZstdError:
            raise Malformed("a block is not a zstd frame") from None
        if stated < 0 or size not in (None, stated):
            raise Malformed("a zstd frame does not state its content size")
        self._left -= stated
        if self._left < 0:
            raise Oversize(f"the body inflates to more than {INFLATED_BYTES_MAX} bytes")
        try:
            # The output buffer has the stated size: a frame that lies about it is an error.
            return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError:
            raise Malformed("a zstd frame is damaged") from None


def _plain_groups(reader: _Reader, with_transaction_ids: bool) -> Iterator[Item]:
    for _ in range(reader.u32()):
        queue = reader.text16("a queue's name")
        partition = reader.text16("a partition's name")
        for _ in range(_count(reader)):
            transaction_id = reader.text16("a transaction id") if with_transaction_ids else ""
            payload = _document(reader.take(reader.u32()))
            yield Item(queue, partition, None, transaction_id, payload)
    reader.end()


def _framed_groups(reader: _Reader) -> Iterator[Item]:
    inflater = _Inflater()
    for _ in range(reader.u32()):
        queue = reader.text16("a queue's name")
        partition = reader.text16("a partition's name")
        count = _count(reader)
        frames = _Reader(inflater.inflate(reader.take(reader.u32())))
        for _ in range(count):
            yield Item(queue, partition, *_frame(_Reader(frames.take(frames.u32()))))
        frames.end()
    reader.end()


def _count(reader: _Reader) -> int:
    """Take a group's number of items; none at all would make a group that costs only our time."""
    count = reader.u32()
    if count == 0:
        raise Malformed("a group is empty")
    return count


def _frame(reader: _Reader) -> tuple[UUID, str, bytes]:
    if reader.u8() != 0:
        raise Malformed("a frame's flags are not 0")
    message_id = UUID(bytes=reader.take(16))
    transaction_id = reader.text16("a transaction id")
    return message_id, transaction_id or str(message_id), _document(reader.rest())


def _document(payload: bytes) -> bytes:
    """Return a payload; raise Malformed unless it is one JSON document."""
    try:
        payload.decode()  # the JSON decoder skips strings without looking at their bytes
        _any_json.decode(payload)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        raise Malformed("a payload is not one JSON document") from None
    return payload


def _claim(claim: Claim) -> bytes:
    records = list(_records(claim.messages))
    return b"".join(
        [
            claim.partition_id.to_bytes(8, "little"),
            _text16(claim.partition),
            _CLAIM_HEAD.pack(
                claim.messages[0].offset,
                claim.messages[-1].offset,
                claim.delivery_attempt,
                len(records),
            ),
            *records,
        ]
    )


def _records(messages: Sequence[Delivery]) -> Iterator[bytes]:
    """Encode each run of messages that one append wrote as a record of its own."""
    start = 0
    for place, message in enumerate(messages):
        following = messages[place + 1] if place + 1 < len(messages) else None
        if following is not None and (following.created_at_us, following.offset) == (
            message.created_at_us,
            message.offset + 1,
        ):
            continue
        run = messages[start : place + 1]
        frames = b"".join(_delivery(each) for each in run)
        head = (run[0].offset, run[0].created_at_us, len(run), _RAW_CODEC, len(frames))
        yield _RECORD_HEAD.pack(*head) + frames
        start = place + 1


def _delivery(message: Delivery) -> bytes:
    flags = (_TRACE if message.trace_id is not None else 0) | (
        _PRODUCER if message.producer_sub is not None else 0
    )
    frame = b"".join(
        [
            bytes([flags]),
            message.message_id.bytes,
            message.trace_id.bytes if message.trace_id is not None else b"",
            _text16(message.transaction_id),
            _text16(message.producer_sub) if message.producer_sub is not None else b"",
            message.payload,
        ]
    )
    return _U32.pack(len(frame)) + frame


def _text16(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data
