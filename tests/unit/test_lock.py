"""What locks accept: step 4.2."""

import json
from typing import Any

import msgspec
import pytest

from queen_pg.broker import lock
from queen_pg.errors import Declined

ACQUIRE = {"op": "acquire", "name": "l", "ttlSeconds": 20, "owner": "me"}
RENEW = {**ACQUIRE, "op": "renew", "token": 7}
RELEASE = {"op": "release", "name": "l", "token": 7}
GET = {"op": "get", "name": "l"}


def raws(*documents: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps(document).encode()) for document in documents]


def validate(*documents: Any) -> list[dict[str, Any]]:
    return lock.validate(raws(*documents))


def without(document: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != field}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (5, "locks_bad_request"),
        ({}, "locks_unknown_op"),
        ({**GET, "op": "Get"}, "locks_unknown_op"),
        ({**GET, "op": 5}, "locks_unknown_op"),
        *[
            ({**GET, field: 1}, "locks_tenant_not_an_input")
            for field in ("tenant", "tenantId", "_tenant")
        ],
        (without(GET, "name"), "locks_bad_name"),
        *[
            ({**GET, "name": name}, "locks_bad_name")
            for name in ("", "a#b", "a\0", "a\n", "a\x7f", "a\x85", "é" * 129, 5, None)
        ],
        (without(ACQUIRE, "ttlSeconds"), "locks_ttl_required"),
        ({**ACQUIRE, "ttlSeconds": None}, "locks_ttl_required"),
        ({**ACQUIRE, "forever": False}, "locks_ttl_required"),
        ({**RENEW, "forever": None}, "locks_ttl_required"),
        *[
            ({**ACQUIRE, "ttlSeconds": ttl}, "locks_bad_ttl")
            for ttl in (0, -1, 1.5, 60.0, "60", True)
        ],
        *[
            ({**ACQUIRE, "owner": owner}, "locks_bad_owner")
            for owner in ("", 5, "a\n", "é" * 129, ["me"])
        ],
        *[({**ACQUIRE, "limit": n}, "locks_bad_limit") for n in (0, 1025, 1.0, "1", True)],
        (without(RENEW, "token"), "locks_token_required"),
        ({**RELEASE, "token": None}, "locks_token_required"),
        *[({**RELEASE, "token": n}, "locks_bad_token") for n in (0, -1, 1.0, "7", 2**63)],
        *[({**RELEASE, "slot": n}, "locks_bad_slot") for n in (-1, 1024, 0.0, "0")],
    ],
)
def test_a_bad_operation_has_its_reason(document: Any, reason: str) -> None:
    """Step 4.2."""
    with pytest.raises(Declined) as raised:
        validate(document)
    assert raised.value.reason == reason
    assert (raised.value.status, raised.value.code) == (400, "locks_bad_request")


def test_the_limits_of_a_call() -> None:
    """Step 4.2: 64 operations, each name once, 4096 slots: the limit, 1000 for a get, else 1."""
    many = [{**GET, "name": f"l{n}"} for n in range(4)]
    wide = {**ACQUIRE, "name": "w", "limit": 95}
    validate(*many, wide, RENEW)
    for documents, reason in (
        ([*many, {**wide, "limit": 96}, RENEW], "locks_too_many_keys"),
        ([ACQUIRE, {**ACQUIRE, "name": "m"}, GET], "locks_duplicate_in_call"),
        ([{**RELEASE, "name": f"l{n}"} for n in range(65)], "locks_too_many_ops"),
    ):
        with pytest.raises(Declined) as raised:
            validate(*documents)
        assert raised.value.reason == reason


def test_defaults() -> None:
    """Step 4.2: a lock is a semaphore of one; the first slot; an owner may be absent."""
    assert validate({"op": "acquire", "name": "l", "ttlSeconds": 5, "limit": None}) == [
        {"op": "acquire", "name": "l", "ttlSeconds": 5, "owner": None, "limit": 1}
    ]
    assert validate({**RELEASE, "slot": None}) == [{**RELEASE, "slot": 0}]
    assert validate({**RENEW, "slot": 1023, "owner": None}) == [
        {**RENEW, "slot": 1023, "owner": None}
    ]


def test_only_looking_is_a_read() -> None:
    """Step 4.2, 2.12."""
    assert not lock.is_write(raws(GET, GET))
    assert all(lock.is_write(raws(GET, document)) for document in (ACQUIRE, RENEW, RELEASE))
