"""Push over HTTP: data-plane 2, 3 and 10.1."""

import asyncio
import json
import uuid
from datetime import datetime
from typing import Any

import httpx
import pytest
import zstandard
from queen import Queen
from queen.http.push_binary import PushBatch, encode_push_binary, encode_push_frames

from tests.support.wire import Wire, data

CONTENT_TYPE = {"content-type": "application/x-queen-push"}


async def push_body(wire: Wire, body: bytes, status: int = 201) -> Any:
    response = await wire.http.post("/api/v1/push", content=body, headers=CONTENT_TYPE)
    assert response.status_code == status, response.text
    return response.json()


async def test_the_answer_has_one_object_per_item_in_order(wire: Wire, queue: str) -> None:
    """data-plane 2.1: the fields, their casing, and no others."""
    answer = await wire.post(
        "/api/v1/push",
        {
            "items": [
                {"queue": queue, "partition": "user-7", "transactionId": "a", "payload": 1},
                {"queue": queue, "payload": None},
                {"queue": queue, "partition": "user-7", "transactionId": "b", "payload": 2},
            ]
        },
        201,
    )
    ids = [item.pop("message_id") for item in answer]
    assert all(uuid.UUID(each).version == 7 and each == each.lower() for each in ids)
    assert answer == [
        {"index": 0, "transaction_id": "a", "queueName": queue, "status": "queued", "offset": 0},
        {"index": 1, "transaction_id": ids[1], "queueName": queue, "status": "queued", "offset": 0},
        {"index": 2, "transaction_id": "b", "queueName": queue, "status": "queued", "offset": 1},
    ]


async def test_no_items_is_an_empty_success(wire: Wire) -> None:
    """data-plane 2: `[]` answers 201 `[]`."""
    assert await wire.post("/api/v1/push", {"items": []}, 201) == []


async def test_an_empty_or_null_partition_is_the_default_one(wire: Wire, queue: str) -> None:
    """data-plane 2: the partition's default."""
    for partition in ("", None, "Default"):
        await wire.push(queue, partition, partition=partition)
    [message] = {message["partition"] for message in await wire.take(queue)}
    assert message == "Default"


PAYLOADS = [
    "null",
    "{}",
    '{"b": 1, "a": 2, "b": 3}',
    "1.50",
    "1E+2",
    "123456789012345678901234567890",
    '"\\u0000 \\ud83d\\ude00 \\/"',
    '"äöü 😀"',
    "[1,\n 2]",
    "-0",
    "1e999999",
]


@pytest.mark.parametrize("text", PAYLOADS)
async def test_a_payload_comes_back_as_it_was_sent(wire: Wire, queue: str, text: str) -> None:
    """data-plane 2: stored as the exact bytes sent."""
    body = f'{{"items":[{{"queue":"{queue}","payload":{text}}}]}}'.encode()
    assert (await wire.http.post("/api/v1/push", content=body)).status_code == 201
    answer = await wire.http.get(f"/api/v1/pop/queue/{queue}")
    assert f'"data":{text},"producerSub"'.encode() in answer.content


async def test_an_empty_transaction_id_is_a_key_in_json(wire: Wire, queue: str) -> None:
    """data-plane 2, question 12: `""` is taken literally."""
    first = await wire.push(queue, 1, ids=[""])
    again = await wire.push(queue, 2, ids=[""])
    assert (first[0]["transaction_id"], again[0]["status"]) == ("", "duplicate")


async def test_a_trace_id_is_kept_and_delivered(wire: Wire, queue: str) -> None:
    """data-plane 2, question 4; what is no UUID is ignored."""
    trace_id = str(uuid.uuid4())
    items = [
        {"queue": queue, "payload": place, "traceId": trace}
        for place, trace in enumerate((trace_id, "no uuid", None))
    ]
    await wire.post("/api/v1/push", {"items": items}, 201)
    assert [message["traceId"] for message in await wire.take(queue)] == [trace_id, None, None]


async def test_nothing_is_written_when_one_item_is_bad(wire: Wire, queue: str) -> None:
    """data-plane 2.2-1: the whole body is validated first."""
    before = await wire.fingerprint()
    good = {"queue": queue, "payload": 1}
    for bad, status in (
        ({"queue": queue}, 400),
        ({"queue": queue, "payload": 1, "partition": 7}, 400),
        ({"payload": 1}, 400),
        ({"queue": queue, "payload": 1, "partition": "p" * 500}, 413),
        ({"queue": queue, "payload": 1, "transactionId": "t" * 65_536}, 400),
    ):
        await wire.post("/api/v1/push", {"items": [good, bad]}, status)
    assert await wire.fingerprint() == before


async def test_a_missing_key_is_the_minted_message_id(wire: Wire, queue: str) -> None:
    """data-plane 2.2-2: one UUIDv7 per item, which is its key; ids rise with the offsets."""
    answer = await wire.push(queue, *range(50))
    assert all(item["transaction_id"] == item["message_id"] for item in answer)
    ids = [item["message_id"] for item in answer]
    assert ids == sorted(set(ids))


async def test_a_repeat_within_the_request_is_the_first_ones_duplicate(
    wire: Wire, queue: str
) -> None:
    """data-plane 2.2-3: also when the window is 0."""
    await wire.configure(queue, dedupWindowSeconds=0)
    answer = await wire.push(queue, 1, 2, 3, ids=["a", "b", "a"])
    assert [item["status"] for item in answer] == ["queued", "queued", "duplicate"]
    assert [item["offset"] for item in answer] == [0, 1, 0]
    assert answer[2]["message_id"] == answer[0]["message_id"]
    assert data(await wire.take(queue)) == [1, 2]


async def test_a_repeat_of_a_stored_message_is_its_duplicate_too(wire: Wire, queue: str) -> None:
    """data-plane 2.2-3: the leader's final id and offset."""
    [original] = await wire.push(queue, 1, ids=["a"])
    answer = await wire.push(queue, 2, 3, ids=["a", "a"])
    assert [item["status"] for item in answer] == ["duplicate", "duplicate"]
    assert {item["message_id"] for item in answer} == {original["message_id"]}


async def test_an_append_has_consecutive_offsets_in_the_order_of_its_items(
    wire: Wire, queue: str
) -> None:
    """data-plane 2.2-4, 12-1: grouped by partition, offsets in item order, no gaps."""
    items = [{"queue": queue, "partition": str(n % 3), "payload": n} for n in range(30)]
    answer = await wire.post("/api/v1/push", {"items": items}, 201)
    assert [item["offset"] for item in answer] == [n // 3 for n in range(30)]
    for partition in range(3):
        messages = await wire.take(queue, str(partition))
        assert data(messages) == list(range(partition, 30, 3))


async def test_concurrent_appends_do_not_interleave(wire: Wire, queue: str) -> None:
    """data-plane 2.2-4, 2.2-5: each append is atomic, under the partition's lock."""
    await asyncio.gather(*(wire.push(queue, *[[push, n] for n in range(10)]) for push in range(12)))
    messages = await wire.take(queue)
    assert [message["offset"] for message in messages] == list(range(120))
    for at in range(0, 120, 10):
        batch = data(messages[at : at + 10])
        assert batch == [[batch[0][0], n] for n in range(10)]


async def test_a_push_creates_queue_and_partition_once(wire: Wire, queue: str) -> None:
    """data-plane 2.2-5: first-push races."""
    await asyncio.gather(*(wire.push(queue, n, partition="p") for n in range(10)))
    messages = await wire.take(queue)
    assert sorted(data(messages)) == list(range(10))
    assert len({message["partitionId"] for message in messages}) == 1


async def test_only_duplicates_write_nothing(wire: Wire, queue: str) -> None:
    """data-plane 2.2-6."""
    await wire.push(queue, 1, 2, ids=["a", "b"])
    before = await wire.fingerprint()
    answer = await wire.push(queue, 3, 4, ids=["b", "a"])
    assert [item["status"] for item in answer] == ["duplicate", "duplicate"]
    assert await wire.fingerprint() == before


async def test_stamps_rise_strictly_along_a_partition(wire: Wire, queue: str) -> None:
    """data-plane 2.2-7: one stamp per append, strictly above the one before."""
    pushed = [await wire.push(queue, 1, 2) for _ in range(20)]
    rows = await wire.sql.fetch(
        "select m.created_at, m.message_offset from queen.messages m where m.id = any($1::uuid[])"
        " order by m.message_offset",
        [item["message_id"] for answer in pushed for item in answer],
    )
    stamps: list[datetime] = [row["created_at"] for row in rows]
    assert stamps[::2] == stamps[1::2]
    assert all(earlier < later for earlier, later in zip(stamps[::2], stamps[2::2], strict=False))


async def test_a_pop_right_after_the_answer_sees_the_message(wire: Wire, queue: str) -> None:
    """data-plane 2.2-8, 12-4."""
    for n in range(10):
        await wire.push(queue, n)
        answer = await wire.pop(queue, autoAck=True)
        assert data(answer) == [n]


async def test_a_push_wakes_a_waiting_pop(wire: Wire, queue: str) -> None:
    """data-plane 2.2-9."""
    await wire.configure(queue)
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000))
    await asyncio.sleep(0.3)
    pushed_at = loop.time()
    await wire.push(queue, 1)
    assert data(await waiting) == [1]
    assert loop.time() - pushed_at < 0.4


async def test_an_append_that_is_too_large_is_an_error_of_its_items(wire: Wire, queue: str) -> None:
    """data-plane 2.2-10: 96 MiB for one partition, other partitions are served."""
    payload = b'"' + b"a" * (14 * 1024 * 1024) + b'"'
    body = encode_push_binary(
        [
            PushBatch(queue, "large", [payload] * 7, [str(n) for n in range(7)]),
            PushBatch(queue, "small", [b"1"], ["s"]),
        ],
        compress=True,
    )
    answer = await push_body(wire, body)
    assert [item["status"] for item in answer] == ["error"] * 7 + ["queued"]
    assert all("offset" not in item for item in answer[:7])
    assert data(await wire.take(queue)) == [1]


async def test_the_producer_is_not_taken_from_the_body(wire: Wire, queue: str) -> None:
    """data-plane 2.2-11."""
    items = [{"queue": queue, "payload": 1, "producerSub": "me"}]
    await wire.post("/api/v1/push", {"items": items}, 201)
    [message] = await wire.take(queue)
    assert message["producerSub"] is None


@pytest.mark.parametrize(
    ("suffix", "namespace", "task"),
    [("", "{}", ""), (".welcome", "{}", "welcome"), (".welcome.eu", "{}", "welcome")],
)
async def test_an_implicit_queue_takes_its_labels_from_its_name(
    wire: Wire, queue: str, suffix: str, namespace: str, task: str
) -> None:
    """data-plane 2.3: labels, and a lease of 60 s."""
    await wire.push(queue + suffix, 1)
    configured = await wire.configure(queue + suffix)
    assert configured["namespace"] == namespace.format(queue)
    assert configured["task"] == task
    assert configured["options"]["leaseTime"] == 60
    assert configured["options"]["retentionSinkHoldMaxSeconds"] == 604_800


# Dedup.


async def test_dedup_is_per_partition(wire: Wire, queue: str) -> None:
    """data-plane 10.1-1."""
    for partition in ("a", "b"):
        [item] = await wire.push(queue, 1, partition=partition, ids=["t"])
        assert item["status"] == "queued"
    [item] = await wire.push(queue, 1, partition="a", ids=["t"])
    assert item["status"] == "duplicate"


async def test_a_hit_needs_a_message_inside_the_window(wire: Wire, queue: str) -> None:
    """data-plane 10.1-2: outside it, the id is new again; of several the lowest in the window."""
    await wire.configure(queue, dedupWindowSeconds=100)
    await wire.push(queue, 1, ids=["t"])
    await wire.age(queue, 200)
    [second] = await wire.push(queue, 2, ids=["t"])
    assert (second["status"], second["offset"]) == ("queued", 1)
    [third] = await wire.push(queue, 3, ids=["t"])
    assert (third["status"], third["offset"]) == ("duplicate", 1)
    await wire.configure(queue, dedupWindowSeconds=1000)
    [fourth] = await wire.push(queue, 4, ids=["t"])
    assert (fourth["status"], fourth["offset"]) == ("duplicate", 0)


async def test_a_window_of_zero_disables_the_stored_check(wire: Wire, queue: str) -> None:
    """data-plane 10.1-1."""
    await wire.configure(queue, dedupWindowSeconds=0)
    answers = [await wire.push(queue, n, ids=["t"]) for n in range(3)]
    assert [answer[0]["status"] for answer in answers] == ["queued"] * 3
    assert data(await wire.take(queue)) == [0, 1, 2]


async def test_a_duplicate_names_its_original(wire: Wire, queue: str) -> None:
    """data-plane 10.1-3: also long after the original was consumed."""
    await wire.push(queue, 0)
    [original] = await wire.push(queue, 1, ids=["t"])
    await wire.ack(await wire.take(queue))
    [duplicate] = await wire.push(queue, 2, ids=["t"])
    assert duplicate == {**original, "status": "duplicate"}


async def test_concurrent_pushes_of_one_id_store_it_once(wire: Wire, queue: str) -> None:
    """data-plane 10.1-4."""
    for n in range(5):
        answers = await asyncio.gather(*(wire.push(queue, n, ids=[f"t{n}"]) for _ in range(8)))
        statuses = sorted(answer[0]["status"] for answer in answers)
        assert statuses == ["duplicate"] * 7 + ["queued"]
        assert len({answer[0]["message_id"] for answer in answers}) == 1


async def test_the_window_outlives_the_message(wire: Wire, queue: str) -> None:
    """data-plane 10.1-5: neither consumption nor retention matters, the original stays known."""
    await wire.configure(queue, retentionEnabled=True, retentionSeconds=1)
    [original] = await wire.push(queue, 1, ids=["t"])
    await wire.pop(queue, autoAck=True)
    await wire.age(queue, 100)
    await wire.removed(queue)
    assert await wire.take(queue, consumerGroup="g") == []
    [duplicate] = await wire.push(queue, 1, ids=["t"])
    assert duplicate == {**original, "status": "duplicate"}


async def test_a_hit_inside_a_transaction_rolls_it_back(wire: Wire, queue: str) -> None:
    """data-plane 10.1-6."""
    await wire.push(queue, 1, ids=["t"])
    items = [
        {"queue": queue, "payload": 2, "transactionId": "new"},
        {"queue": queue, "payload": 3, "transactionId": "t"},
    ]
    verdict = await wire.transaction({"type": "push", "items": items})
    assert (verdict["success"], verdict["reason"]) == (False, "duplicate")
    assert data(await wire.take(queue)) == [1]


# The binary bodies.


@pytest.mark.parametrize("options", [{}, {"compress": True}], ids=["plain", "zstd"])
async def test_a_binary_push_is_answered_like_a_json_one(
    wire: Wire, queue: str, options: dict[str, bool]
) -> None:
    """data-plane 3.1, 3.3: an empty transaction id means a minted one here."""
    batches = [
        PushBatch(queue, "k1", [b'{"n":1}', b"null"], ["t-1", ""]),
        PushBatch(queue, "", [b"[1]"], ["t-1"]),
    ]
    answer = await push_body(wire, encode_push_binary(batches, **options))
    assert [item["status"] for item in answer] == ["queued"] * 3
    assert answer[0]["transaction_id"] == "t-1"
    assert answer[1]["transaction_id"] == answer[1]["message_id"]
    assert data(await wire.take(queue, "k1")) == [{"n": 1}, None]
    assert data(await wire.take(queue, "Default")) == [[1]]


async def test_a_framed_push_keeps_the_ids_of_the_client(wire: Wire, queue: str) -> None:
    """data-plane 3.2: the message id is stored and returned as sent; dedup goes by the key."""
    body = encode_push_frames([PushBatch(queue, "p", [b"1", b"2"], ["t", ""])])
    first = await push_body(wire, body)
    assert [item["status"] for item in first] == ["queued", "queued"]
    assert first[1]["transaction_id"] == first[1]["message_id"]
    assert [each["id"] for each in await wire.take(queue)] == [each["message_id"] for each in first]
    assert await push_body(wire, body) == [{**item, "status": "duplicate"} for item in first]


async def test_a_push_may_ask_for_counts_only(wire: Wire, queue: str) -> None:
    """data-plane 3.3: flag 2."""
    batches = [PushBatch(queue, "p", [b"1", b"2", b"3"], ["a", "b", "a"])]
    answer = await push_body(wire, encode_push_binary(batches, counts=True))
    assert answer == {"count": 3, "queued": 2, "duplicate": 1, "error": 0}


async def test_a_malformed_binary_push_writes_nothing(wire: Wire, queue: str) -> None:
    """data-plane 3.3: 400 `bad_body`, whatever is wrong with the bytes."""
    before = await wire.fingerprint()
    body = encode_push_frames([PushBatch(queue, "p", [b"1", b"2"], ["a", "b"])])
    plain = encode_push_binary([PushBatch(queue, "p", [b"1", b"2"], ["a", "b"])])
    for bad in (
        *(body[:length] for length in range(0, len(body), 5)),
        body + b"\0",
        b"QPB1\x10" + body[5:],
        b"QPB2" + body[4:],
        plain[:-1] + b"x",
        plain[:5] + zstandard.compress(plain[5:]),
        b"",
    ):
        answer = await push_body(wire, bad, 400)
        assert answer["code"] == "bad_body", bad
    assert await wire.fingerprint() == before


@pytest.mark.parametrize("compression", [False, True])
async def test_the_sdk_pushes_binary_and_pops_framed(
    wire: Wire, queue: str, compression: bool
) -> None:
    """data-plane 3, 5: the SDK's own options, end to end."""
    async with Queen(
        str(wire.http.base_url), binary_push=True, push_compression=compression, framed_pop=True
    ) as client:
        items = [{"data": {"n": n, "text": "äöü 😀"}, "transactionId": f"t{n}"} for n in range(20)]
        answer = await client.queue(queue).partition("p").push(items)
        assert [item["status"] for item in answer] == ["queued"] * 20
        messages = await client.queue(queue).batch(50).wait(False).pop()
        assert [message["data"] for message in messages] == [item["data"] for item in items]
        assert [message["transactionId"] for message in messages] == [f"t{n}" for n in range(20)]
        acked = await client.ack(messages[-1])
        assert acked["success"] is True


async def test_a_large_message_and_one_too_large(wire: Wire, queue: str) -> None:
    """data-plane 12: a single message may have 16 MiB."""
    largest = "a" * (16 * 1024 * 1024 - 2)
    [item] = await wire.push(queue, largest)
    assert item["status"] == "queued"
    assert data(await wire.take(queue)) == [largest]
    body = {"items": [{"queue": queue, "payload": largest + "a"}]}
    refused = await wire.post("/api/v1/push", body, 413)
    assert refused["code"] == "payload_too_large"
    assert "items[0].payload" in refused["error"]


async def test_deep_nesting_is_refused(wire: Wire, queue: str) -> None:
    """data-plane 1-5: bad input is a 400, never a 500."""
    for depth in (5_000, 1_000_000):
        nested = "[" * depth + "]" * depth
        body = f'{{"items":[{{"queue":"{queue}","payload":{nested}}}]}}'
        response = await wire.http.post("/api/v1/push", content=body)
        assert response.status_code == 400
        assert response.json()["code"] == "bad_body"
    deep = json.loads("[" * 100 + "]" * 100)
    await wire.push(queue, deep)
    assert data(await wire.take(queue)) == [deep]


async def test_a_push_is_safe_to_send_again(wire: Wire, queue: str) -> None:
    """data-plane 1-5: the SDK re-sends the same bytes after a lost answer."""
    body = {"items": [{"queue": queue, "payload": n, "transactionId": str(n)} for n in range(3)]}
    first: httpx.Response = await wire.http.post("/api/v1/push", json=body)
    again = await wire.http.post("/api/v1/push", json=body)
    assert [each["offset"] for each in again.json()] == [each["offset"] for each in first.json()]
    assert data(await wire.take(queue)) == [0, 1, 2]
