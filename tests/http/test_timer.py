"""Timers over HTTP: step 3."""

import asyncio
import base64
import json
import time
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.wire import Wire, data

NEVER_MS = 600_000


def schedule(
    queue: str, key: str, payload: Any = 1, delay_ms: float = NEVER_MS, **more: Any
) -> Any:
    return {
        "op": "schedule",
        "queue": queue,
        "timerKey": key,
        "delayMs": delay_ms,
        "txn": f"txn-{key}",
        "payload": base64.b64encode(json.dumps(payload).encode()).decode(),
        **more,
    }


async def timers(wire: Wire, *operations: Any) -> list[dict[str, Any]]:
    answer = await wire.post("/api/v1/timers", {"operations": operations}, 200)
    results: list[dict[str, Any]] = answer["results"]
    assert len(results) == len(operations)
    return results


def path(queue: str, key: str | None = None) -> str:
    """The path as the SDK writes it: the queue escaped whole, a key's slashes left alone."""
    tail = "" if key is None else f"/{quote(key, safe='/')}"
    return f"/api/v1/timers/{quote(queue, safe='')}{tail}"


async def delivered(wire: Wire, queue: str, count: int = 1) -> list[Any]:
    messages: list[Any] = []
    async with asyncio.timeout(20):
        while len(messages) < count:
            taken = await wire.take(queue, wait=True, timeout=1000)
            if taken:
                await wire.ack(taken)
            messages += taken
    return messages


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert set(body) == {"error", "reason", "detail"}
    return response.status_code, body["error"], body["reason"]


async def test_a_timer_becomes_a_message(wire: Wire, queue: str) -> None:
    """Step 3.4-2, 3.4-3: not before its time; with the promised id, the txn and the payload."""
    started = time.monotonic()
    [scheduled] = await timers(wire, schedule(queue, "k", {"v": 1}, 300, partition="p"))
    [message] = await delivered(wire, queue)
    assert time.monotonic() - started >= 0.3
    assert (message["id"], message["transactionId"]) == (scheduled["messageId"], "txn-k")
    assert (message["data"], message["traceId"], message["producerSub"]) == ({"v": 1}, None, None)
    assert message["partition"] == "p"
    peek = await wire.get(path(queue, "k"), 200)
    assert peek == {"found": False, "queue": queue, "timerKey": "k"}


async def test_a_waiting_pop_is_woken(wire: Wire, queue: str) -> None:
    """Step 3.4-3: the pop's own poll is slower than this."""
    pop = asyncio.create_task(wire.take(queue, wait=True, timeout=20_000))
    await asyncio.sleep(0.1)
    await timers(wire, schedule(queue, "k", "due", -5))
    assert data(await pop) == ["due"]


async def test_what_is_due_already_fires_in_order(wire: Wire, queue: str) -> None:
    """Step 3.4-5, 3.4-6: at once, by due time."""
    await timers(wire, *[schedule(queue, f"k{n}", n, -n) for n in (1, 5, 3, 4, 2)])
    assert data(await delivered(wire, queue, 5)) == [5, 4, 3, 2, 1]


async def test_a_backlog_fires_whole_in_order_and_once(wire: Wire, queue: str) -> None:
    """Step 3.4-5: in batches, until nothing is due."""
    for start in range(0, 600, 200):
        await timers(
            wire, *[schedule(queue, f"k{n}", n, n - 10_000) for n in range(start, start + 200)]
        )
    messages = await delivered(wire, queue, 600)
    assert data(messages) == list(range(600))
    page = await wire.get(path(queue), 200)
    assert page == {"rows": [], "truncated": False, "nextAfter": None}


async def test_results_are_those_of_the_operations(wire: Wire, queue: str) -> None:
    """Step 3.1, 3.3: by position, without an index; an empty call is answered empty."""
    [scheduled] = await timers(wire, schedule(queue, "a"))
    assert set(scheduled) == {
        *("ok", "status", "queue", "timerKey", "txn", "messageId", "deliverAt")
    }
    results = await timers(
        wire,
        {**schedule(queue, "a", 2), "op": "reschedule"},
        {"op": "cancel", "queue": queue, "timerKey": "b", "txn": "mine"},
        schedule(queue, "c"),
    )
    assert [result["status"] for result in results] == ["rescheduled", "absent", "scheduled"]
    assert results[1]["txn"] == "mine"
    for body in ([], {"operations": []}):
        assert await wire.post("/api/v1/timers", body, 200) == {"results": []}


async def test_a_call_is_validated_before_anything_is_scheduled(wire: Wire, queue: str) -> None:
    """Step 3.1: one bad operation, and none is carried out."""
    response = await wire.http.post(
        "/api/v1/timers", json=[schedule(queue, "a"), {**schedule(queue, "b"), "txn": ""}]
    )
    assert refusal(response) == (400, "timers_bad_request", "timers_txn_required")
    assert (await wire.get(path(queue), 200))["rows"] == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", (400, "timers_bad_request", "timers_bad_body")),
        (b'{"operations":1}', (400, "timers_bad_request", "timers_bad_body")),
        (b"[1]", (400, "timers_bad_request", "timers_bad_op")),
        (
            json.dumps([schedule("q", "k"), schedule("q", "k")]).encode(),
            (400, "timers_bad_request", "timers_duplicate_key"),
        ),
        (
            json.dumps([schedule("q", "k", delay_ms=1e12)]).encode(),
            (403, "timer_horizon_exceeded", "timers_horizon"),
        ),
        (
            json.dumps([schedule("q", "k", "x" * 1_048_577)]).encode(),
            (413, "payload_too_large", "timers_payload_too_large"),
        ),
        (
            json.dumps([schedule("q" * 500, "k")]).encode(),
            (413, "payload_too_large", "name_too_long"),
        ),
    ],
)
async def test_a_refusal_has_two_codes(wire: Wire, body: bytes, expected: Any) -> None:
    """Step 0.1, 3.1."""
    assert refusal(await wire.http.post("/api/v1/timers", content=body)) == expected


async def test_peek_shows_the_payload(wire: Wire, queue: str) -> None:
    """Step 3.2: the fields of a pending timer, its payload in base64."""
    payload = base64.b64encode(b'{"v" : 1}').decode()
    [scheduled] = await timers(wire, {**schedule(queue, "k"), "payload": payload})
    peek = await wire.get(path(queue, "k"), 200)
    assert peek["found"] is True
    assert base64.b64decode(peek["payload"]) == b'{"v" : 1}'
    for field in ("queue", "timerKey", "txn", "messageId", "deliverAt"):
        assert peek[field] == scheduled[field]
    assert (peek["attempts"], peek["lastError"], peek["claimed"]) == (0, None, False)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a/b", "x/y"),
        ("a", "x//y/"),
        ("a b", "é ä"),
        ("a%2Fb", "100%"),
        ("..", "k?x=1#y"),
        ("a", "x%2Fy"),
    ],
)
async def test_names_in_the_path_may_be_anything(
    wire: Wire, queue: str, name: str, key: str
) -> None:
    """Step 3.2, routing trap: the raw path is split before it is decoded."""
    name = f"{queue}{name}"
    await timers(wire, schedule(name, key))
    assert (await wire.get(path(name, key), 200))["found"] is True
    assert [row["timerKey"] for row in (await wire.get(path(name), 200))["rows"]] == [key]
    cancelled = (await wire.http.delete(path(name, key), params={"txn": "x"})).json()
    assert (cancelled["status"], cancelled["txn"]) == ("cancelled", f"txn-{key}")


async def test_cancel_has_a_route_of_its_own(wire: Wire, queue: str) -> None:
    """Step 3.2, 3.3: the bare element; the txn is only echoed."""
    response = await wire.http.delete(path(queue, "k"), params={"txn": "a b"})
    assert (response.status_code, response.json()) == (
        200,
        {"ok": False, "status": "absent", "queue": queue, "timerKey": "k", "txn": "a b"},
    )
    assert (await wire.http.delete(path(queue, "k"))).json()["txn"] is None


async def test_a_cancelled_timer_never_fires(wire: Wire, queue: str) -> None:
    """Step 3.4-7: either the cancel found it, and nothing comes; or it fired, and it is absent."""
    keys = [f"k{n}" for n in range(60)]
    await timers(wire, *[schedule(queue, key, key, 40 + 5 * n) for n, key in enumerate(keys)])

    async def cancel(key: str) -> bool:
        await asyncio.sleep(0.1 + 0.004 * keys.index(key))
        answer = (await wire.http.delete(path(queue, key))).json()
        return bool(answer["ok"])

    cancelled = await asyncio.gather(*[cancel(key) for key in keys])
    expected = {key for key, ok in zip(keys, cancelled, strict=True) if not ok}
    messages = await delivered(wire, queue, len(expected)) if expected else []
    await asyncio.sleep(0.3)
    messages += await wire.take(queue)
    assert set(data(messages)) == expected
    assert len(messages) == len(expected)


async def test_list_is_paged(wire: Wire, queue: str) -> None:
    """Step 3.2: clamped, never refused; exclusive after; no payloads."""
    await timers(wire, *[schedule(queue, f"k{n}") for n in range(5)])
    page = await wire.get(path(queue), 200, limit=2)
    assert [row["timerKey"] for row in page["rows"]] == ["k0", "k1"]
    assert (page["truncated"], page["nextAfter"]) == (True, "k1")
    assert all("payload" not in row for row in page["rows"])
    rest = await wire.get(path(queue), 200, after="k1", limit="nonsense")
    assert [row["timerKey"] for row in rest["rows"]] == ["k2", "k3", "k4"]
    assert (rest["truncated"], rest["nextAfter"]) == (False, None)
    for limit in (0, -5):
        assert len((await wire.get(path(queue), 200, limit=limit))["rows"]) == 1


async def test_count(wire: Wire, queue: str) -> None:
    """Step 3.2, Q7: exact, under a literal prefix."""
    await timers(wire, *[schedule(queue, key) for key in ("a%1", "a_1", "b")])
    count = await wire.get(path(queue), 200, mode="count", prefix="a")
    assert count == {"queue": queue, "prefix": "a", "count": 2}
    assert (await wire.get(path(queue), 200, mode="count", prefix="a%"))["count"] == 1
    for params, reason in (
        ({"mode": "count"}, "timers_count_prefix_required"),
        ({"mode": "count", "prefix": ""}, "timers_count_prefix_required"),
        ({"mode": "count", "prefix": "é" * 65}, "timers_count_prefix_too_long"),
        ({"mode": "count", "prefix": "a\0"}, "timers_count_prefix_invalid"),
        ({"mode": "count", "prefix": "a", "limit": "1"}, "timers_count_page_parameters"),
        ({"mode": "count", "prefix": "a", "after": "1"}, "timers_count_page_parameters"),
        ({"mode": "sum"}, "timers_read_mode_unknown"),
    ):
        response = await wire.http.get(path(queue), params=params)
        assert refusal(response) == (400, "timers_bad_request", reason)


async def test_encrypted_payloads_conflict_with_a_queue_that_encrypts(
    wire: Wire, queue: str
) -> None:
    """Step 3.1 encrypted."""
    await wire.configure(queue, encryptionEnabled=True)
    response = await wire.http.post("/api/v1/timers", json=[schedule(queue, "k", encrypted=True)])
    assert refusal(response) == (400, "timers_bad_request", "timers_encrypted_conflict")
    await timers(wire, schedule(queue, "k", encrypted=False))


async def test_a_timer_says_whether_its_sender_has_encrypted_it(wire: Wire, queue: str) -> None:
    """Step 3.1, 3.2 encrypted: kept with the timer, of a transaction too, until it is replaced."""
    await timers(wire, schedule(queue, "a", encrypted=True), schedule(queue, "b", encrypted=False))
    await wire.transaction(timers=[schedule(queue, "c", encrypted=True), schedule(queue, "d")])
    for key, encrypted in (("a", True), ("b", False), ("c", True), ("d", False)):
        assert (await wire.get(path(queue, key), 200))["encrypted"] is encrypted
    listed = (await wire.get(path(queue), 200))["rows"]
    assert [row["encrypted"] for row in listed] == [True, False, True, False]
    await timers(wire, schedule(queue, "a"))
    assert (await wire.get(path(queue, "a"), 200))["encrypted"] is False


async def test_a_transactions_encrypted_payload_conflicts_too(wire: Wire, queue: str) -> None:
    """Step 1.10: 200 `bad_request`, and nothing is written."""
    await wire.configure(queue, encryptionEnabled=True)
    push = {"type": "push", "items": [{"queue": queue, "payload": 1}]}
    verdict = await wire.transaction(push, timers=[schedule(queue, "k", encrypted=True)])
    assert (verdict["success"], verdict["reason"]) == (False, "bad_request")
    assert await wire.take(queue) == []


async def test_a_known_txn_is_delivered_once(wire: Wire, queue: str) -> None:
    """Step 3.4-4: the second timer is done without a message."""
    await timers(wire, schedule(queue, "a", 1, 0, txn="t"))
    await delivered(wire, queue)
    await timers(wire, schedule(queue, "b", 2, 0, txn="t"), schedule(queue, "c", 3, 1))
    assert data(await delivered(wire, queue)) == [3]
    assert (await wire.get(path(queue), 200))["rows"] == []


async def test_a_timer_that_cannot_fire_ends_as_a_dead_letter(wire: Wire, queue: str) -> None:
    """Step 3.4-9: its attempts are counted, others are not held up, and it can be found."""
    await wire.sql.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        " $$ begin if new.transaction_id = 'poison' then raise 'no room for poison'; end if;"
        " return new; end $$;"
        "create trigger refuse before insert on queen.messages"
        " for each row execute function public.refuse()"
    )
    try:
        await timers(
            wire,
            schedule(queue, "bad", 1, -10, txn="poison"),
            schedule(queue, "good", 2, -5),
        )
        assert data(await delivered(wire, queue)) == [2]
        peek = await wire.get(path(queue, "bad"), 200)
        assert peek["attempts"] == 1
        assert peek["lastError"]
        await wire.sql.execute(
            "update queen.timers set attempts = 4, fire_at = now() where queue = $1", queue
        )
        async with asyncio.timeout(20):
            while not (letters := await wire.dead_letters(queue)):
                await asyncio.sleep(0.05)
        [letter] = letters
        assert (letter["consumerGroup"], letter["offset"]) == ("__timer__", -1)
        assert (letter["transactionId"], letter["data"]) == ("poison", 1)
        assert (await wire.get(path(queue, "bad"), 200))["found"] is False
    finally:
        await wire.sql.execute(
            "drop trigger refuse on queen.messages; drop function public.refuse()"
        )


async def test_timers_of_plain_sql_are_found(wire: Wire, queue: str) -> None:
    """The scheduler looks by itself, however a timer came to be."""
    operations = json.dumps([{**schedule(queue, "k", delay_ms=0), "payload": '"sql"'}])
    await wire.sql.execute("select queen._timers(1, $1)", operations)
    assert data(await delivered(wire, queue)) == ["sql"]
