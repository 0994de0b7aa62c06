"""KV over HTTP: step 2."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.wire import Wire


@pytest.fixture
def ns(queue: str) -> str:
    """A namespace that only this test uses."""
    return queue[-48:].strip("-")


def put(ns: str, key: str, value: Any = 1, **more: Any) -> dict[str, Any]:
    return {"op": "put", "ns": ns, "key": key, "value": value, "ttlSeconds": 60, **more}


async def kv(wire: Wire, *operations: Any) -> list[dict[str, Any]]:
    answer = await wire.post("/api/v1/kv", {"operations": operations}, 200)
    assert list(answer) == ["results"]
    results: list[dict[str, Any]] = answer["results"]
    assert [result["index"] for result in results] == list(range(len(operations)))
    return results


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    """Return the status and the two codes of an error, which has prose besides."""
    body = response.json()
    assert set(body) == {"error", "reason", "detail"}
    assert isinstance(body["detail"], str)
    return response.status_code, body["error"], body["reason"]


async def test_a_call_answers_each_operation_at_its_place(wire: Wire, ns: str) -> None:
    """Step 2.2, 2.5: an object or a bare array; every element starts with index and op."""
    results = await kv(
        wire,
        put(ns, "c-1", {"items": 2}),
        {"op": "incr", "ns": ns, "key": "hits", "delta": 1, "max": 5, "ttlSeconds": 60},
        {"op": "get", "ns": ns, "key": "c-2"},
    )
    assert [list(result)[:2] for result in results] == [["index", "op"]] * 3
    assert (results[0]["value"], results[1]["value"], results[2]["found"]) == (
        {"items": 2},
        1,
        False,
    )
    bare = await wire.post("/api/v1/kv", [{"op": "get", "ns": ns, "key": "c-1"}], 200)
    assert bare["results"][0]["value"] == {"items": 2}


async def test_an_empty_call_is_answered_empty(wire: Wire) -> None:
    """Step 2.2."""
    for body in ([], {"operations": []}):
        assert await wire.post("/api/v1/kv", body, 200) == {"results": []}


async def test_a_lost_required_operation_is_the_answer(wire: Wire, ns: str) -> None:
    """Step 2.2: HTTP 200, no results, the index in the array; nothing was written."""
    [written] = await kv(wire, put(ns, "gate", {"by": "x"}))
    answer = await wire.post(
        "/api/v1/kv",
        [put(ns, "a"), {**put(ns, "gate"), "op": "putIfAbsent", "required": True}],
        200,
    )
    assert answer == {
        "ok": False,
        "reason": "kv_precondition",
        "failedIndex": 1,
        "kvReason": "exists",
        "version": written["version"],
        "value": {"by": "x"},
    }
    [found] = await kv(wire, {"op": "get", "ns": ns, "key": "a"})
    assert found["found"] is False


@pytest.mark.parametrize("count", [20])
async def test_one_of_many_put_if_absents_wins(wire: Wire, ns: str, count: int) -> None:
    """Step 2.6-4: the others report the winner's value and version."""
    calls = [
        kv(wire, {**put(ns, "claim", {"by": number}), "op": "putIfAbsent"})
        for number in range(count)
    ]
    results = [result for [result] in await asyncio.gather(*calls)]
    [winner] = [result for result in results if result["applied"]]
    losers = [result for result in results if not result["applied"]]
    assert {result["reason"] for result in losers} == {"exists"}
    assert all(
        (result["value"], result["version"]) == (winner["value"], winner["version"])
        for result in losers
    )


async def test_no_count_is_lost(wire: Wire, ns: str) -> None:
    """Step 2.6-3: sums of concurrent calls add up, and versions rise with them."""
    operation = {"op": "incr", "ns": ns, "key": "n", "delta": 1, "ttlSeconds": 60}
    results = [
        result for [result] in await asyncio.gather(*[kv(wire, operation) for _ in range(30)])
    ]
    by_version = sorted(results, key=lambda result: result["version"])
    assert [result["value"] for result in by_version] == list(range(1, 31))


async def test_an_expired_key_reads_as_absent(wire: Wire, ns: str) -> None:
    """Step 2.8: before any sweep, and the sweep takes its row away."""
    await kv(wire, put(ns, "k", ttlSeconds=1))
    count = "select count(*) from queen.kv where namespace = $1"
    async with asyncio.timeout(20):
        while (await kv(wire, {"op": "get", "ns": ns, "key": "k"}))[0]["found"]:
            await asyncio.sleep(0.05)
        while await wire.sql.fetchval(count, ns):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", (400, "kv_bad_request", "kv_bad_body")),
        (b"{", (400, "kv_bad_request", "kv_bad_body")),
        (b"5", (400, "kv_bad_request", "kv_bad_body")),
        (b"{}", (400, "kv_bad_request", "kv_bad_body")),
        (b'{"operations":{}}', (400, "kv_bad_request", "kv_bad_body")),
        (b'[{"op":"get","ns":"\xff","key":"k"}]', (400, "kv_bad_request", "kv_bad_body")),
        (b'[{"op":"get","ns":"n","key":"\\ud800"}]', (400, "kv_bad_request", "kv_bad_body")),
        (b'[{"op":"get","ns":"n","key":"\\u0000"}]', (400, "kv_bad_request", "kv_bad_key")),
        (b'[{"op":"get","ns":"BAD","key":"k"}]', (400, "kv_bad_request", "kv_bad_namespace")),
        (b"[5]", (400, "kv_bad_request", "kv_bad_request")),
        (b"[" + b",".join([b"5"] * 257) + b"]", (400, "kv_bad_request", "kv_too_many_ops")),
        (
            b'[{"op":"put","ns":"n","key":"k","ttlSeconds":5,"value":"' + b"x" * 65_536 + b'"}]',
            (413, "payload_too_large", "kv_value_too_large"),
        ),
        (
            b'[{"op":"get","ns":"n","key":"' + b"k" * 513 + b'"}]',
            (413, "payload_too_large", "kv_key_too_large"),
        ),
    ],
)
async def test_a_refusal_has_two_codes(wire: Wire, content: bytes, expected: Any) -> None:
    """Step 0.1, 2.3, 2.11."""
    response = await wire.http.post("/api/v1/kv", content=content)
    assert refusal(response) == expected


async def test_a_lone_surrogate_is_named(wire: Wire) -> None:
    """What UTF-8 cannot hold is refused, and the field it is in is told."""
    response = await wire.http.post(
        "/api/v1/kv", content=b'[{"op":"put","ns":"n","key":"k","value":"\\ud800","ttlSeconds":5}]'
    )
    assert "value" in response.json()["detail"]


async def test_the_path_routes(wire: Wire, ns: str) -> None:
    """Step 2.9: the single element, an ETag for what is found; catch-all keys."""
    path = f"/api/v1/kv/{ns}/a/b"
    missing = await wire.http.get(path)
    assert (missing.status_code, missing.json()) == (
        200,
        {"index": 0, "op": "get", "found": False, "key": "a/b"},
    )
    assert "etag" not in missing.headers
    written = await wire.http.put(
        path, json={"value": [1], "ttlSeconds": 60, "expect": 0, "tenant": "ignored"}
    )
    version = written.json()["version"]
    assert written.json() == {
        "index": 0,
        "op": "put",
        "applied": True,
        "key": "a/b",
        "value": [1],
        "version": version,
    }
    found = await wire.http.get(path)
    assert (found.json()["value"], found.headers["etag"]) == ([1], f'"{version}"')
    lost = await wire.http.request("DELETE", path, json={"expect": version + 1})
    assert (lost.status_code, lost.json()["reason"]) == (200, "version")
    required = await wire.http.request(
        "DELETE", path, json={"expect": version + 1, "required": True}
    )
    assert (required.json()["reason"], required.json()["kvReason"]) == (
        "kv_precondition",
        "version",
    )
    for body, applied in ((b"null", True), (b"", False)):
        removed = await wire.http.request("DELETE", path, content=body)
        assert removed.json()["applied"] is applied


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("a%2Fb", "a/b"),
        ("a//b", "a//b"),
        ("a/", "a/"),
        ("%C3%A9", "é"),
        ("a%20b+c", "a b+c"),
        ("a%252Fb", "a%2Fb"),
    ],
)
async def test_a_key_in_the_path_is_decoded_after_it_is_split(
    wire: Wire, ns: str, path: str, key: str
) -> None:
    """Step 2.9: slashes are the key's, as they are."""
    response = await wire.http.get(f"/api/v1/kv/{ns}/{path}")
    assert response.json()["key"] == key


async def test_what_the_path_routes_refuse(wire: Wire, ns: str) -> None:
    """Step 2.9: query strings, names in the body, and keys that are none."""
    path = f"/api/v1/kv/{ns}/k"
    body = {"value": 1, "ttlSeconds": 5}
    for response, reason in (
        (await wire.http.get(path, params={"x": 1}), "kv_no_query_string"),
        (await wire.http.put(path, json={**body, "key": "k"}), "kv_field_in_path"),
        (await wire.http.put(path, json={**body, "op": "put"}), "kv_field_in_path"),
        (await wire.http.put(path, json={**body, "ns": "n"}), "kv_field_in_path"),
        (await wire.http.request("DELETE", path, json={"namespace": "n"}), "kv_field_in_path"),
        (await wire.http.put(path, json=[1]), "kv_bad_body"),
        (await wire.http.put(path, content=b""), "kv_bad_body"),
        (await wire.http.put(path, json={"value": 1}), "kv_expiry_not_specified"),
        (await wire.http.get(f"/api/v1/kv/{ns}/"), "kv_bad_key"),
        (await wire.http.get("/api/v1/kv/BAD/k"), "kv_bad_namespace"),
    ):
        assert refusal(response) == (400, "kv_bad_request", reason)


async def test_the_consoles_reads(wire: Wire, ns: str) -> None:
    """Step 2.10."""
    await kv(wire, put(ns, "a", {"v": 1}), put(ns, "b"), put(ns, "c%"), put(ns, "c1"))
    spaces = await wire.get("/api/v1/resources/kv/namespaces", 200)
    assert {"namespace": ns, "keys": 4} in spaces["namespaces"]
    names = [space["namespace"] for space in spaces["namespaces"]]
    assert names == sorted(names)
    listing = "/api/v1/resources/kv/list"
    page = await wire.post(listing, {"namespace": ns, "limit": 2}, 200)
    assert [row["key"] for row in page["rows"]] == ["a", "b"]
    assert (page["truncated"], page["nextAfter"], page["bytes"]) == (True, "b", 8)
    assert page["rows"][0]["value"] == {"v": 1}
    assert page["rows"][0]["updatedAt"].endswith("Z")
    page = await wire.post(
        listing,
        {"namespace": ns, "prefix": "c%", "keysOnly": True, "includeExpired": True, "after": "b"},
        200,
    )
    [row] = page["rows"]
    assert (row["key"], row["expired"], "value" in row) == ("c%", False, False)
    for body, reason in (
        ({}, "kv_bad_namespace"),
        ({"namespace": ns, "limit": "x"}, "kv_bad_request"),
        ({"namespace": ns, "includeExpired": 1}, "kv_bad_request"),
        ([], "kv_bad_body"),
    ):
        response = await wire.http.post(listing, json=body)
        assert refusal(response) == (400, "kv_bad_request", reason)
    for response in (
        await wire.http.post(listing, params={"x": 1}, json={"namespace": ns}),
        await wire.http.get("/api/v1/resources/kv/namespaces", params={"x": 1}),
    ):
        assert refusal(response) == (400, "kv_bad_request", "kv_no_query_string")


async def test_a_call_is_one_point_in_history(wire: Wire, ns: str) -> None:
    """Step 2.6-3: readers of two keys never see one half of a write of both."""
    await kv(wire, put(ns, "a", 0), put(ns, "b", 0))
    done = False

    async def write() -> None:
        nonlocal done
        for number in range(1, 40):
            await kv(wire, put(ns, "b", number), put(ns, "a", number))
        done = True

    async def read() -> list[tuple[Any, Any]]:
        seen = []
        while not done:
            first, second = await kv(
                wire, {"op": "get", "ns": ns, "key": "a"}, {"op": "get", "ns": ns, "key": "b"}
            )
            seen.append((first["value"], second["value"]))
            await asyncio.sleep(0.02)
        return seen

    _, first, second = await asyncio.gather(write(), read(), read())
    assert first
    assert all(a == b for a, b in first + second)


async def test_values_keep_their_text(wire: Wire, ns: str) -> None:
    """Q14: to the letter, through both ways of reading."""
    text = '{"b" : 1.0,"a":"\\u0000\\u00e9","b":1e400}'
    body = f'[{{"op":"put","ns":"{ns}","key":"k","forever":true,"value":{text}}}]'
    await wire.http.post("/api/v1/kv", content=body.encode())
    answer = await wire.http.get(f"/api/v1/kv/{ns}/k")
    assert text in answer.text
    answer = await wire.http.post(
        "/api/v1/kv", content=json.dumps([{"op": "getPrefix", "ns": ns, "prefix": "k"}])
    )
    assert text in answer.text
