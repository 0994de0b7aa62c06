"""The binary bodies, against the official SDK's own encoder and decoder."""

import contextlib
import json
import struct
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from queen.http.pop_frames import decode_pop_frames
from queen.http.push_binary import (
    PushBatch,
    encode_push_binary,
    encode_push_frames,
    encode_transaction_frames,
)

from queen_pg import frames

# Text that UTF-8 carries; names over 65,535 bytes never leave the SDK.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    max_leaves=8,
).map(lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


@st.composite
def batches(draw: st.DrawFn, *, transaction_ids: bool = True) -> list[PushBatch]:
    made = []
    for _ in range(draw(st.integers(0, 3))):
        payloads = draw(st.lists(documents, min_size=1, max_size=4))
        ids = [draw(texts) for _ in payloads] if transaction_ids else None
        made.append(PushBatch(draw(texts), draw(texts), payloads, ids))
    return made


def sent(made: list[PushBatch]) -> list[tuple[str, str, str, bytes]]:
    """What the batches hold, message by message."""
    return [
        (batch.queue, batch.partition, transaction_id, payload)
        for batch in made
        for transaction_id, payload in zip(
            batch.transaction_ids or [""] * len(batch.payloads), batch.payloads, strict=True
        )
    ]


def received(items: list[frames.Item]) -> list[tuple[str, str, str, bytes]]:
    """What a decoded body holds, message by message."""
    return [(item.queue, item.partition, item.transaction_id, item.payload) for item in items]


@given(batches(), st.booleans(), st.booleans())
def test_a_push_of_the_sdk_is_read_as_it_was_meant(
    made: list[PushBatch], compress: bool, counts: bool
) -> None:
    """data-plane 3.1: flags 1, 2 and 4."""
    push = frames.decode_push(encode_push_binary(made, compress=compress, counts=counts))
    assert push.counts is counts
    assert received(push.items) == sent(made)
    assert all(item.message_id is None for item in push.items)


@given(batches(transaction_ids=False))
def test_a_push_without_transaction_ids_leaves_them_to_the_broker(made: list[PushBatch]) -> None:
    """data-plane 3.1: without flag 4 every item gets a minted id."""
    push = frames.decode_push(encode_push_binary(made))
    assert received(push.items) == sent(made)


@given(batches(), st.booleans())
def test_a_framed_push_of_the_sdk_brings_its_message_ids(
    made: list[PushBatch], counts: bool
) -> None:
    """data-plane 3.2: the client mints the message id, and writes it where no key was given."""
    push = frames.decode_push(encode_push_frames(made, counts=counts))
    assert push.counts is counts
    assert received(push.items) == [
        (queue, partition, transaction_id or str(item.message_id), payload)
        for (queue, partition, transaction_id, payload), item in zip(
            sent(made), push.items, strict=True
        )
    ]
    assert all(item.message_id and item.message_id.version == 7 for item in push.items)


@given(documents, batches(), st.booleans())
def test_a_transaction_of_the_sdk_is_a_head_and_framed_pushes(
    head: bytes, made: list[PushBatch], counts: bool
) -> None:
    """data-plane 3.4, step 1.13."""
    transaction = frames.decode_transaction(encode_transaction_frames(head, made, counts=counts))
    assert transaction.counts is counts
    assert transaction.head == head
    assert [item.payload for item in transaction.items] == [each[3] for each in sent(made)]


def test_the_worked_example_of_the_page() -> None:
    """data-plane 3.1: the 77 bytes and their three items."""
    body = bytes.fromhex(
        "5150423104 02000000"
        "0400 6a6f6273 0200 6b31 02000000"
        "0300 742d31 07000000 7b226e223a317d"
        "0000 04000000 6e756c6c"
        "0400 6a6f6273 0700 44656661756c74 01000000"
        "0000 03000000 5b315d"
    )
    assert received(frames.decode_push(body).items) == [
        ("jobs", "k1", "t-1", b'{"n":1}'),
        ("jobs", "k1", "", b"null"),
        ("jobs", "Default", "", b"[1]"),
    ]


EXAMPLES = {
    "plain": encode_push_binary([PushBatch("q", "p", [b"1", b'"a"'], ["t", ""])]),
    "zstd": encode_push_binary([PushBatch("q", "p", [b"1", b'"a"'], ["t", ""])], compress=True),
    "framed": encode_push_frames([PushBatch("q", "p", [b"1", b'"a"'], ["t", ""])]),
}


@pytest.mark.parametrize("body", EXAMPLES.values(), ids=EXAMPLES)
def test_every_truncation_is_malformed(body: bytes) -> None:
    """data-plane 3.3: truncated bytes."""
    for length in range(len(body)):
        with pytest.raises(frames.Malformed):
            frames.decode_push(body[:length])


@pytest.mark.parametrize("body", EXAMPLES.values(), ids=EXAMPLES)
def test_trailing_bytes_are_malformed(body: bytes) -> None:
    """data-plane 3.3: trailing bytes."""
    with pytest.raises(frames.Malformed):
        frames.decode_push(body + b"\0")


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_corrupted_bytes_never_raise_anything_else(name: str, data: st.DataObject) -> None:
    """data-plane 3.3: whatever the bytes, the body is read or it is malformed."""
    body = bytearray(EXAMPLES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(frames.Malformed, frames.Oversize):
        frames.decode_push(bytes(body))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tail: bytes) -> None:
    """data-plane 3.3, 3.4."""
    for decode, magic in (
        (frames.decode_push, frames.PUSH_MAGIC),
        (frames.decode_transaction, frames.TRANSACTION_MAGIC),
    ):
        with contextlib.suppress(frames.Malformed, frames.Oversize):
            decode(magic + tail)


def framed(*bodies: bytes, count: int | None = None, z: bytes | None = None) -> bytes:
    """A framed push of one group with the frames' bodies as given."""
    inflated = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    z = zstandard.compress(inflated) if z is None else z
    head = b"QPB1\x08\x01\0\0\0\x01\0q\x01\0p"
    return head + struct.pack("<II", len(bodies) if count is None else count, len(z)) + z


FRAME = b"\0" + bytes(16) + b"\x01\0t" + b"1"


def test_the_hand_made_frame_is_well_formed() -> None:
    [item] = frames.decode_push(framed(FRAME)).items
    assert item == frames.Item("q", "p", UUID(int=0), "t", b"1")


MALFORMED = {
    "wrong magic": b"QPB2" + EXAMPLES["plain"][4:],
    "unknown flag": b"QPB1\x14" + EXAMPLES["plain"][5:],
    "flags that do not go together": b"QPB1\x0c" + framed(FRAME)[5:],
    "an empty group": b"QPB1\x04\x01\0\0\0\x01\0q\x01\0p\0\0\0\0",
    "a name that is not UTF-8": b"QPB1\0\x01\0\0\0\x01\0\xff\x01\0p\x01\0\0\0\x01\0\0\x001",
    "a payload that is not JSON": b"QPB1\0\x01\0\0\0\x01\0q\x01\0p\x01\0\0\0\x01\0\0\0x",
    "an empty payload": b"QPB1\0\x01\0\0\0\x01\0q\x01\0p\x01\0\0\0\0\0\0\0",
    "two documents": b"QPB1\0\x01\0\0\0\x01\0q\x01\0p\x01\0\0\0\x03\0\0\x001 2",
    "a payload that is not UTF-8": b'QPB1\0\x01\0\0\0\x01\0q\x01\0p\x01\0\0\0\x03\0\0\0"\xff"',
    "a frame's flags": framed(b"\x01" + FRAME[1:]),
    "too few frames": framed(FRAME, count=2),
    "too many frames": framed(FRAME, FRAME, count=1),
    "a frame cut short": framed(FRAME[:10]),
    "not zstd": framed(FRAME, z=b"no zstd at all"),
    "two zstd frames": framed(FRAME, z=zstandard.compress(b"") + zstandard.compress(b"")),
    "no stated size": framed(
        FRAME, z=zstandard.ZstdCompressor(write_content_size=False).compress(FRAME)
    ),
    "another size than stated": b"QPB1\x05" + struct.pack("<I", 7) + EXAMPLES["zstd"][9:],
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed(body: bytes) -> None:
    """data-plane 3.2, 3.3: each rule of the layout."""
    with pytest.raises(frames.Malformed):
        frames.decode_push(body)


def test_a_bomb_is_refused_by_its_stated_size() -> None:
    """data-plane 3.2: the inflated size is bounded before anything is inflated."""
    bomb = zstandard.compress(bytes(frames.INFLATED_BYTES_MAX + 1))
    assert len(bomb) < 100_000
    with pytest.raises(frames.Oversize):
        frames.decode_push(framed(z=bomb, count=1))


def test_frames_are_bounded_together() -> None:
    """data-plane 3.2: many frames that each stay under the bound are one bomb all the same."""
    payload = b'"' + b"a" * (frames.INFLATED_BYTES_MAX // 2) + b'"'
    body = framed(FRAME[:-1] + payload)
    assert len(frames.decode_push(body).items) == 1
    with pytest.raises(frames.Oversize):
        frames.decode_push(body[:5] + b"\x02\0\0\0" + body[9:] * 2)


def delivery(offset: int, created_at_us: int, **fields: Any) -> frames.Delivery:
    return frames.Delivery(
        offset=offset,
        created_at_us=created_at_us,
        message_id=fields.get("message_id", UUID(int=offset)),
        trace_id=fields.get("trace_id"),
        transaction_id=fields.get("transaction_id", f"t-{offset}"),
        producer_sub=fields.get("producer_sub"),
        payload=fields.get("payload", b"null"),
    )


@st.composite
def claims(draw: st.DrawFn) -> frames.Claim:
    offset = draw(st.integers(0, 2**40))
    created_at_us = draw(st.integers(0, 2**52))
    messages = []
    for _ in range(draw(st.integers(1, 5))):
        messages.append(
            delivery(
                offset,
                created_at_us,
                message_id=draw(st.uuids()),
                trace_id=draw(st.none() | st.uuids()),
                transaction_id=draw(texts),
                producer_sub=draw(st.none() | texts),
                payload=draw(documents),
            )
        )
        # Offsets may have a gap, and an append may go on or end here.
        offset += draw(st.integers(1, 2))
        created_at_us += draw(st.integers(0, 1))
    partition_id = draw(st.integers(1, 2**63 - 1))
    return frames.Claim(partition_id, draw(texts), draw(st.integers(1, 100)), messages)


@given(texts, texts, texts, st.lists(claims(), max_size=3))
def test_the_sdk_reads_a_framed_pop_as_it_was_meant(
    queue: str, lease_id: str, consumer_group: str, made: list[frames.Claim]
) -> None:
    """data-plane 5."""
    own = b'{"autopilot":{"partitions":2,"batch":100}}'
    answer = decode_pop_frames(frames.encode_pop(own, queue, lease_id, consumer_group, made))
    assert answer["success"] is True
    assert answer["queue"] == queue
    assert answer["leaseId"] == lease_id
    assert answer["consumerGroup"] == consumer_group
    assert answer["partitionsClaimed"] == len(made)
    assert answer["autopilot"] == {"partitions": 2, "batch": 100}
    assert answer["partition"] == (made[0].partition if made else "")
    assert answer["messages"] == [
        {
            "id": str(message.message_id),
            "transactionId": message.transaction_id,
            "traceId": message.trace_id and str(message.trace_id),
            "data": json.loads(message.payload),
            "producerSub": message.producer_sub,
            "createdAt": milliseconds(message.created_at_us),
            "partitionId": str(claim.partition_id),
            "partition": claim.partition,
            "leaseId": lease_id,
            "consumerGroup": consumer_group,
            "deliveryAttempt": claim.delivery_attempt,
            "offset": message.offset,
        }
        for claim in made
        for message in claim.messages
    ]


def milliseconds(created_at_us: int) -> str:
    moment = datetime.fromtimestamp(created_at_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{created_at_us % 1_000_000 // 1000:03d}Z"


def test_an_append_is_one_record() -> None:
    """data-plane 5: messages of one append share a record; the next append has its own."""
    messages = [delivery(4, 10), delivery(5, 10), delivery(6, 11)]
    answer = frames.encode_pop(b"", "q", "", "g", [frames.Claim(1, "p", 1, messages)])
    # magic, version, own, queue, lease, group, claims, id, name; then start, end, attempt, records
    at = 4 + 1 + 4 + 3 + 2 + 3 + 4 + 8 + 3
    assert struct.unpack_from("<QQII", answer, at) == (4, 6, 1, 2)
