"""What all routes share: data-plane 1 and the limits of 12."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from tests.support.broker import Broker
from tests.support.server import Server
from tests.support.wire import Wire, data

BODY_BYTES_MAX = 64 * 1024 * 1024

POSTS = ["/api/v1/push", "/api/v1/ack", "/api/v1/ack/batch", "/api/v1/configure"]


async def refused(wire: Wire, path: str, content: bytes, status: int = 400) -> dict[str, Any]:
    """Post a body that must be refused, and nothing written."""
    before = await wire.fingerprint()
    response = await wire.http.post(path, content=content)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert await wire.fingerprint() == before
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"17",
        b"\xff\xfe",
        b'{"items": [}',
        b'{"items": [], "queue": "\xff"}',
        b'{"a": 1} trailing',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=range(12),
)
async def test_a_body_that_is_not_the_shape(wire: Wire, path: str, content: bytes) -> None:
    """data-plane 1-5: 400 `bad_body` with `error` and `code`."""
    answer = await refused(wire, path, content)
    assert answer.keys() == {"error", "code"}
    assert answer["code"] == "bad_body"


async def test_the_content_type_does_not_matter(wire: Wire, queue: str) -> None:
    """data-plane 3: dispatch on path and magic."""
    for content_type in ("text/plain", "application/x-queen-push", "application/json"):
        response = await wire.http.post(
            "/api/v1/push",
            content=json.dumps({"items": [{"queue": queue, "payload": 1}]}),
            headers={"content-type": content_type},
        )
        assert response.status_code == 201


async def test_unknown_keys_and_parameters_are_ignored(wire: Wire, queue: str) -> None:
    """data-plane 1-3."""
    item = {"queue": queue, "payload": 1, "colour": "red", "data": 2}
    await wire.post("/api/v1/push", {"items": [item], "more": {"a": 1}}, 201)
    assert data(await wire.pop(queue, colour="red", batch=5)) == [1]


async def test_nobody_is_asked_who_he_is(wire: Wire, queue: str) -> None:
    """data-plane 1-7: by default; what a client says of itself is ignored."""
    for headers in ({}, {"authorization": "Bearer whatever"}):
        response = await wire.http.post(
            "/api/v1/push", json={"items": [{"queue": queue, "payload": 1}]}, headers=headers
        )
        assert response.status_code == 201
    assert [message["producerSub"] for message in await wire.take(queue)] == [None, None]


BOOLEANS = ["wait", "commitOnDelivery", "autoAck", "conflation", "autopilot", "frames"]
INTEGERS = ["batch", "partitions", "timeout", "leaseSeconds"]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", ["", "1", "True", "yes", "true ", "null"])
async def test_a_boolean_is_exactly_true_or_false(wire: Wire, name: str, value: str) -> None:
    """data-plane 1-4: on every pop route, even where it has no effect."""
    for path in ("/queue/q", "/queue/q/partition/p", ""):
        answer = await wire.get(f"/api/v1/pop{path}", 400, namespace="n", **{name: value})
        assert answer["code"] == "bad_request"
        assert name in answer["error"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["", "1.5", "1e3", "0x10", " 1", "+1", "ten", "٣", "9" * 40])
async def test_an_integer_is_a_plain_decimal(wire: Wire, name: str, value: str) -> None:
    """data-plane 1-4."""
    answer = await wire.get("/api/v1/pop/queue/q", 400, **{name: value})
    assert (answer["code"], name in answer["error"]) == ("bad_request", True)


@pytest.mark.parametrize("name", INTEGERS)
async def test_a_huge_integer_is_no_fault(wire: Wire, queue: str, name: str) -> None:
    """data-plane 1-5, 12: clamped, never a 500."""
    for value in ("9" * 18, "-" + "9" * 18, "0"):
        response = await wire.http.get(f"/api/v1/pop/queue/{queue}", params={name: value})
        assert response.status_code == 204


async def test_the_last_of_a_repeated_parameter_counts(wire: Wire, queue: str) -> None:
    """admin 2-8: and `+` is a space."""
    await wire.push(queue, 1, 2, 3)
    response = await wire.http.get(
        f"/api/v1/pop/queue/{queue}?batch=3&batch=1&consumerGroup=a+b&subscriptionMode=all"
    )
    assert data(response.json()) == [1]
    assert response.json()["consumerGroup"] == "a b"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/api/v1/nope", "/api/v2/push", "/api/v1/pop/nothing", "/api/"])
async def test_an_unknown_path_is_no_such_route(wire: Wire, method: str, path: str) -> None:
    """data-plane 1-5."""
    response = await wire.http.request(method, path)
    if (method, path) != ("GET", "/api/v1/pop/nothing") and path.startswith("/api/v1/pop"):
        assert response.status_code == 405
        return
    assert response.status_code == 404
    answer = response.json()
    assert (answer["code"], answer["path"]) == ("no_such_route", path)
    assert answer["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/push"),
        ("DELETE", "/api/v1/ack"),
        ("POST", "/api/v1/pop/queue/q"),
        ("GET", "/api/v1/configure"),
        ("POST", "/api/v1/dlq/x"),
        ("PUT", "/health"),
    ],
)
async def test_a_wrong_method_is_json_too(wire: Wire, method: str, path: str) -> None:
    """data-plane 1-1: an error body on every refusal."""
    response = await wire.http.request(method, path)
    assert response.status_code in (404, 405)
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() >= {"error", "code"}


# Names, ids and texts.


def item(queue: str = "q", **fields: Any) -> bytes:
    return json.dumps({"items": [{"queue": queue, "payload": 1, **fields}]}).encode()


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/api/v1/push", item("a\0b"), "items[0].queue"),
        ("/api/v1/push", item(partition="\0"), "items[0].partition"),
        ("/api/v1/push", item(transactionId="\0"), "items[0].transactionId"),
        ("/api/v1/configure", b'{"queue": "\\u0000"}', "queue"),
        ("/api/v1/configure", b'{"queue": "q", "namespace": "\\u0000"}', "namespace"),
        (
            "/api/v1/ack",
            b'{"transactionId": "\\u0000", "partitionId": "1"}',
            "transactionId",
        ),
        (
            "/api/v1/ack",
            b'{"transactionId": "t", "partitionId": "1", "consumerGroup": "\\u0000"}',
            "consumerGroup",
        ),
        (
            "/api/v1/ack",
            b'{"acknowledgments": [{"transactionId": "", "partitionId": "1", "error": "\\u0000"}]}',
            "acknowledgments[0].error",
        ),
    ],
)
async def test_nul_is_refused_by_the_name_of_its_field(
    wire: Wire, path: str, content: bytes, field: str
) -> None:
    """data-plane 13: PostgreSQL cannot keep it."""
    answer = await refused(wire, path, content)
    assert (answer["code"], field in answer["error"]) == ("bad_request", True)


@pytest.mark.parametrize("surrogate", ["\\ud800", "\\udc00", "\\ud800x", "\\ud800\\u0041"])
@pytest.mark.parametrize(
    ("template", "field"),
    [
        ('{"items": [{"queue": "@", "payload": 1}]}', "items[0].queue"),
        ('{"items": [{"queue": "q", "payload": {"a": ["@"]}}]}', "items[0].payload.a[0]"),
    ],
)
async def test_a_lone_surrogate_is_refused_by_the_name_of_its_field(
    wire: Wire, surrogate: str, template: str, field: str
) -> None:
    """data-plane 13: it is no character."""
    content = template.replace("@", surrogate).encode()
    answer = await refused(wire, "/api/v1/push", content)
    assert (answer["code"], field in answer["error"]) == ("bad_body", True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/queue/%00", "queue"),
        ("/queue/%ff", "queue"),
        ("/queue/q/partition/%00", "partition"),
        ("/queue/q?consumerGroup=%00", "consumerGroup"),
        ("/queue/q?consumerGroup=%ff", "consumerGroup"),
        ("/queue/q?consumerGroup=%ed%a0%80", "consumerGroup"),
    ],
)
async def test_names_in_a_url_are_text(wire: Wire, path: str, name: str) -> None:
    """data-plane 13."""
    answer = await wire.get(f"/api/v1/pop{path}", 400)
    assert (answer["code"], name in answer["error"]) == ("bad_request", True)


async def test_any_other_character_may_be_in_a_name(wire: Wire, queue: str) -> None:
    """data-plane 12: name characters: no rule."""
    name = f"{queue}\x01\x7f\t\n \"'\\/?#%&+;=@:,äöü\u2028\U0001f600"
    await wire.push(name, 1, partition=name, ids=[name])
    [message] = await wire.take(name, name, consumerGroup=name)
    assert (message["partition"], message["transactionId"]) == (name, name)
    [result] = await wire.ack(message, group=name)
    assert result["success"] is True


@pytest.mark.parametrize(
    ("queue_bytes", "partition_bytes", "fits"),
    [(411, 0, False), (404, 7, True), (405, 7, False), (1, 410, True), (1, 411, False)],
)
async def test_the_budget_of_the_names(
    wire: Wire, queue_bytes: int, partition_bytes: int, fits: bool
) -> None:
    """data-plane 12: tenant + queue + the longer of partition and group <= 447 bytes."""
    body = {"queue": "q" * queue_bytes, "partition": "p" * partition_bytes, "payload": 1}
    answer = await wire.post("/api/v1/push", {"items": [body]}, 201 if fits else 413)
    if not fits:
        assert answer["code"] == "name_too_long"
    path = f"/api/v1/pop/queue/{'q' * queue_bytes}"
    response = await wire.http.get(path, params={"consumerGroup": "g" * max(partition_bytes, 7)})
    assert response.status_code == (204 if fits else 413)


async def test_a_transaction_id_has_65535_bytes_at_most(wire: Wire, queue: str) -> None:
    """data-plane 12, 0.2."""
    for transaction_id in ("x" * 65_535, "ä" * 32_767):
        [pushed] = await wire.push(queue, 1, ids=[transaction_id])
        assert pushed["transaction_id"] == transaction_id
        assert (await wire.push(queue, 1, ids=[transaction_id]))[0]["status"] == "duplicate"
    messages = await wire.take(queue)
    assert [result["success"] for result in await wire.ack(messages)] == [True, True]
    for transaction_id in ("x" * 65_536, "ä" * 32_768):
        content = item(queue, transactionId=transaction_id)
        answer = await refused(wire, "/api/v1/push", content)
        assert answer["code"] == "bad_request"
        assert "items[0].transactionId" in answer["error"]


async def test_a_body_over_64_mib_is_refused_unread(wire: Wire) -> None:
    """data-plane 1-5, 12: plain text, before any parsing."""
    before = await wire.fingerprint()
    response = await wire.http.post("/api/v1/push", content=b"x" * (BODY_BYTES_MAX + 1))
    assert response.status_code == 413
    assert response.headers["content-type"].startswith("text/plain")
    response = await wire.http.post("/api/v1/push", content=b"x" * BODY_BYTES_MAX)
    assert response.status_code == 400
    assert await wire.fingerprint() == before


async def test_many_items_are_no_limit(wire: Wire, queue: str) -> None:
    """data-plane 12: items per push, and batch."""
    answer = await wire.push(queue, *range(10_000))
    assert [each["offset"] for each in answer] == list(range(10_000))
    assert data(await wire.pop(queue, batch=20_000)) == list(range(10_000))


async def test_health_and_status(wire: Wire) -> None:
    """admin 8.1, 8.2."""
    health = await wire.get("/health", 200)
    assert (health["status"], health["database"], health["engine"]) == (
        "healthy",
        "connected",
        "postgres",
    )
    assert health["version"]
    assert await wire.get("/status", 200) == {"status": "ok", "engine": "postgres"}


# A database that is away.


async def test_without_its_database_a_broker_says_so(database: str, server: Server) -> None:
    """data-plane 1-5, step 1.10, 2.11: 503, Retry-After, a word after which consumers go on."""
    with Broker(database) as broker:
        async with httpx.AsyncClient(base_url=broker.base_url, timeout=60) as http:
            admin = await asyncpg.connect(server.admin_url)
            try:
                await _lose(admin, database)
                await _is_unavailable(http)
            finally:
                name = _name(database)
                await admin.execute(f"alter database {name}_away rename to {name}")
                await admin.execute(f"alter database {name} allow_connections true")
                await admin.close()
            await _recovers(http)


def _name(url: str) -> str:
    return urlsplit(url).path[1:]


async def _lose(admin: asyncpg.Connection, database: str) -> None:
    name = _name(database)
    await admin.execute(f"alter database {name} allow_connections false")
    await admin.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1", name
    )
    await admin.execute(f"alter database {name} rename to {name}_away")


async def _is_unavailable(http: httpx.AsyncClient) -> None:
    health = await http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "unhealthy"
    assert (await http.get("/status")).status_code == 200
    push = await http.post("/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]})
    pop = await http.get("/api/v1/pop/queue/q")
    for response in (push, pop):
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["code"] in ("retry", "no_leader", "timeout", "outcome_unknown")
    assert "connection" in pop.json()["error"]
    body = {"operations": [{"type": "push", "items": [{"queue": "q", "payload": 1}]}]}
    step = await http.post("/api/v1/transaction", json=body)
    assert (step.status_code, step.json().keys()) == (503, {"error", "code"})
    for surface, path in (("kv", "kv/n/k"), ("timers", "timers/q/k")):
        read = await http.get(f"/api/v1/{path}")
        assert (read.status_code, read.json()["error"]) == (503, f"{surface}_unavailable")
        assert read.json()["reason"] in (f"{surface}_retry", f"{surface}_no_leader")
        assert int(read.headers["retry-after"]) >= 1


async def _recovers(http: httpx.AsyncClient) -> None:
    for _ in range(50):
        response = await http.post("/api/v1/push", json={"items": [{"queue": "q", "payload": 1}]})
        if response.status_code == 201:
            return
        await asyncio.sleep(0.1)
    pytest.fail("the broker did not find its database again")
