"""What KV accepts: step 2.1 to 2.3, and 1.5 for a transaction's rider."""

import json
from typing import Any

import msgspec
import pytest

from queen_pg.broker import kv
from queen_pg.broker.kv import Limits
from queen_pg.config import Settings
from queen_pg.errors import Declined

CALL = Limits.of_call(Settings())
RIDER = Limits.of_transaction(Settings())
PUT = {"op": "put", "ns": "n", "key": "k", "value": 1, "ttlSeconds": 60}
ONCE = {**PUT, "op": "putIfAbsent"}
INCR = {"op": "incr", "ns": "n", "key": "k", "delta": 1, "ttlSeconds": 60}
CHECK = {"op": "check", "ns": "n", "key": "k", "expect": 0}
DELETE = {"op": "delete", "ns": "n", "key": "k"}
GET = {"op": "get", "ns": "n", "key": "k"}
MANY = {"op": "getMany", "ns": "n", "keys": ["a", "b"]}
PREFIX = {"op": "getPrefix", "ns": "n", "prefix": "p"}


def raws(*documents: Any) -> list[msgspec.Raw]:
    return [
        msgspec.Raw(
            document.encode() if isinstance(document, str) else json.dumps(document).encode()
        )
        for document in documents
    ]


def without(document: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in fields}


def validate(*documents: Any, limits: Limits = CALL) -> list[dict[str, Any]]:
    """Validate, and read the result as the database would."""
    validated = kv.validate(raws(*documents), limits)
    decoded: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(validated))
    return decoded


REFUSED = [
    # The order of step 2.3.
    (1, "kv_bad_request"),
    ("null", "kv_bad_request"),
    ([], "kv_bad_request"),
    ({}, "kv_unknown_op"),
    ({**GET, "op": "Get"}, "kv_unknown_op"),
    ({**GET, "op": None}, "kv_unknown_op"),
    ({**GET, "op": ["get"]}, "kv_unknown_op"),
    *[
        ({**GET, field: "t"}, "kv_tenant_not_an_input")
        for field in ("tenant", "tenantId", "_tenant")
    ],
    (without(PREFIX, "prefix"), "kv_prefix_required"),
    ({**PREFIX, "prefix": ""}, "kv_prefix_required"),
    ({**PREFIX, "prefix": None}, "kv_prefix_required"),
    *[
        ({**GET, "ns": ns}, "kv_bad_namespace")
        for ns in ("", "A", "-a", ".a", "a b", "ä", "a" * 65, "a\n", None, ["a"])
    ],
    (without(GET, "ns"), "kv_bad_namespace"),
    (without(GET, "key"), "kv_bad_key"),
    *[({**GET, "key": key}, "kv_bad_key") for key in ("", "a\0b", None, {"a": 1})],
    ({**PREFIX, "prefix": "a\0"}, "kv_bad_key"),
    ({**MANY, "keys": ["a", ""]}, "kv_bad_key"),
    ({**MANY, "keys": ["a", None]}, "kv_bad_key"),
    ({**GET, "key": "ä" * 257}, "kv_key_too_large"),
    ({**MANY, "keys": ["a" * 513]}, "kv_key_too_large"),
    ({**MANY, "keys": "a"}, "kv_bad_request"),
    ({**MANY, "keys": None}, "kv_bad_request"),
    ({**MANY, "ns": "A"}, "kv_bad_namespace"),
    *[
        ({**PUT, "ttlSeconds": ttl}, "kv_bad_ttl")
        for ttl in (None, "5", 1.5, 0, -1, True, [60], 1e300)
    ],
    (without(PUT, "ttlSeconds"), "kv_expiry_not_specified"),
    ({**PUT, "forever": True}, "kv_expiry_not_specified"),
    ({**without(PUT, "ttlSeconds"), "forever": False}, "kv_expiry_not_specified"),
    (without(ONCE, "ttlSeconds"), "kv_expiry_not_specified"),
    (without(INCR, "ttlSeconds"), "kv_expiry_not_specified"),
    (without(PUT, "value"), "kv_bad_request"),
    ({**PUT, "value": "x" * 65_535}, "kv_value_too_large"),
    (without(CHECK, "expect"), "kv_bad_expect"),
    *[({**PUT, "expect": expect}, "kv_bad_expect") for expect in (None, -1, 1.5, "1", True)],
    ({**ONCE, "expect": 1}, "kv_bad_expect"),
    ({**DELETE, "expect": -1}, "kv_bad_expect"),
    ({**INCR, "expect": 0}, "kv_bad_request"),
    (without(INCR, "delta"), "kv_bad_request"),
    *[({**INCR, "delta": delta}, "kv_bad_request") for delta in ("1", None, True, [1])],
    *[({**INCR, bound: "1"}, "kv_bad_request") for bound in ("min", "max")],
    ({**INCR, "max": None}, "kv_bad_request"),
    ('{"op":"incr","ns":"n","key":"k","delta":1e309,"forever":true}', "kv_bad_request"),
    ('{"op":"incr","ns":"n","key":"k","delta":1e-0999999999999,"forever":true}', "kv_bad_request"),
    ({**PUT, "required": "yes"}, "kv_bad_request"),
    ({**PUT, "required": None}, "kv_bad_request"),
    ({**PREFIX, "limit": "5"}, "kv_bad_request"),
    ({**PREFIX, "limit": 1.5}, "kv_bad_request"),
    ({**PREFIX, "keysOnly": 1}, "kv_bad_request"),
    ({**PREFIX, "after": "a\0"}, "kv_bad_key"),
]


@pytest.mark.parametrize(("document", "reason"), REFUSED)
def test_a_bad_operation_has_its_reason(document: Any, reason: str) -> None:
    """Step 2.3."""
    with pytest.raises(Declined) as raised:
        validate(document)
    assert raised.value.reason == reason
    too_large = reason.endswith("too_large")
    assert raised.value.status == (413 if too_large else 400)
    assert raised.value.code == ("payload_too_large" if too_large else "kv_bad_request")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"op": "nope", "tenant": 1}, "kv_unknown_op"),
        ({**PUT, "tenant": 1, "ns": "A"}, "kv_tenant_not_an_input"),
        ({**PUT, "ns": "A", "key": ""}, "kv_bad_namespace"),
        ({**PUT, "key": "", "ttlSeconds": 0}, "kv_bad_key"),
        ({**without(PUT, "value"), "ttlSeconds": 0}, "kv_bad_ttl"),
        ({**without(PUT, "value", "ttlSeconds"), "expect": -1}, "kv_expiry_not_specified"),
        ({**PUT, "value": "x" * 65_536, "expect": -1}, "kv_value_too_large"),
        ({**PUT, "expect": -1, "required": 1}, "kv_bad_expect"),
    ],
)
def test_the_first_fault_in_the_order_of_checks_is_named(document: Any, reason: str) -> None:
    """Step 2.3: checks come in one order."""
    with pytest.raises(Declined) as raised:
        validate(document)
    assert raised.value.reason == reason


def test_operations_are_checked_before_the_call() -> None:
    """Step 2.3: each operation in array order, then one write per key, then the keys' budget."""
    many = {**MANY, "keys": ["a"] * 1024}
    for documents, reason in (
        ((PUT, PUT, {**GET, "ns": "A"}), "kv_bad_namespace"),
        ((PUT, many, DELETE), "kv_duplicate_key_in_call"),
        ((PUT, many), "kv_too_many_keys"),
    ):
        with pytest.raises(Declined) as raised:
            validate(*documents)
        assert raised.value.reason == reason


@pytest.mark.parametrize("second", [PUT, ONCE, INCR, CHECK, DELETE])
def test_a_key_is_written_or_checked_once_a_call(second: dict[str, Any]) -> None:
    """Step 2.1, 2.3: a write plus a check counts; reads do not, nor do other namespaces."""
    with pytest.raises(Declined) as raised:
        validate(CHECK, second)
    assert raised.value.reason == "kv_duplicate_key_in_call"
    validate(second, GET, GET, MANY, {**second, "ns": "m"}, {**second, "key": "other"})


def test_the_number_of_operations_is_limited() -> None:
    """Step 2.1, 1.5: 256 on the route, 64 in a transaction."""
    assert len(validate(*[GET] * 256)) == 256
    assert len(validate(*[GET] * 64, limits=RIDER)) == 64
    for count, limits in ((257, CALL), (65, RIDER)):
        with pytest.raises(Declined) as raised:
            validate(*["nonsense"] * count, limits=limits)
        assert raised.value.reason == "kv_too_many_ops"


def test_the_number_of_keys_is_limited() -> None:
    """Step 2.1, 2.3: a getMany counts its keys, a getPrefix its clamped limit."""
    validate({**MANY, "keys": ["a"] * 1023}, GET)
    validate({**PREFIX, "limit": 5000}, *[GET] * 24)
    validate(*[PREFIX] * 10)
    validate({**MANY, "keys": ["a"] * 256}, limits=RIDER)
    for documents, limits in (
        (({**MANY, "keys": ["a"] * 1024}, GET), CALL),
        (({**PREFIX, "limit": 5000}, *[GET] * 25), CALL),
        ([PREFIX] * 11, CALL),
        (({**MANY, "keys": ["a"] * 256}, GET), RIDER),
    ):
        with pytest.raises(Declined) as raised:
            validate(*documents, limits=limits)
        assert raised.value.reason == "kv_too_many_keys"


def test_a_transaction_reads_no_prefix() -> None:
    """Step 1.5."""
    with pytest.raises(Declined) as raised:
        validate({**PREFIX, "prefix": ""}, limits=RIDER)
    assert raised.value.reason == "kv_get_prefix_not_allowed_in_transaction"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('"' + "é" * 32_767 + '"', 65_536),
        ('"' + "\\u00e9" * 32_767 + '"', 65_536),
        ('[ 1 ,\n"a b\\"c" ]' + " " * 70_000, None),
        ('"' + "é" * 32_768 + '"', 65_538),
        ('"' + "\\n" * 32_767 + '"', 65_536),
        ('"' + "\\n" * 32_768 + '"', 65_538),
        ('{"a":1.' + "0" * 65_530 + "}", 65_538),
    ],
)
def test_a_value_is_measured_as_compact_json(text: str, size: int | None) -> None:
    """Step 2.1: compact separators, non-ASCII not escaped, bytes of UTF-8; numbers as sent."""
    document = f'{{"op":"put","ns":"n","key":"k","ttlSeconds":60,"value":{text}}}'
    if size is None or size <= 65_536:
        assert validate(document)[0]["value"] == text.strip()
    else:
        with pytest.raises(Declined) as raised:
            validate(document)
        assert raised.value.reason == "kv_value_too_large"


def test_scalars_are_read_as_their_text() -> None:
    """Step 2.3: op, ns, key, prefix and after; null is absent for after, limit and keysOnly."""
    assert validate({**GET, "ns": 5, "key": True}) == [{"op": "get", "ns": "5", "key": "true"}]
    [page] = validate({**PREFIX, "prefix": 1.5, "after": 7, "limit": None, "keysOnly": None})
    assert page == {
        "op": "getPrefix",
        "ns": "n",
        "prefix": "1.5",
        "after": "7",
        "limit": 100,
        "keysOnly": False,
    }
    assert "after" not in validate({**PREFIX, "after": ""})[0]


@pytest.mark.parametrize(
    ("given", "taken"), [(-5, 1), (0, 1), (7.0, 7), (1000, 1000), (10**40, 1000)]
)
def test_a_pages_size_is_clamped(given: float, taken: int) -> None:
    """Step 2.1: 1 to 1000, never refused."""
    assert validate({**PREFIX, "limit": given})[0]["limit"] == taken


def test_what_reaches_the_database() -> None:
    """Values as text, lifetimes only where they end, numbers digit by digit."""
    assert validate('{"op":"put","ns":"n","key":"k","value":{"b" :1.0},"forever":true}') == [
        {"op": "put", "ns": "n", "key": "k", "value": '{"b" :1.0}'}
    ]
    assert validate({**PUT, "ttlSeconds": 60.0})[0]["ttlSeconds"] == 60
    assert "ttlSeconds" not in validate({**PUT, "ttlSeconds": 10**40})[0]
    assert validate({**PUT, "expect": 10**40})[0]["expect"] == 2**63 - 1
    encoded = msgspec.json.encode(
        kv.validate(raws('{"op":"incr","ns":"n","key":"k","delta":0.10,"ttlSeconds":1}'), CALL)
    )
    assert b'"delta":0.10' in encoded
    assert validate({"op": "getMany"}) == [{"op": "getMany", "keys": []}]


def test_size_comes_before_everything() -> None:
    """Step 2.2: op count, key sum and value sizes are judged first, whatever else is wrong."""
    bad = {"op": "nope", "ns": "A"}
    for documents, reason in (
        ([bad] * 257, "kv_too_many_ops"),
        ([bad, {**MANY, "keys": ["a"] * 1024}], "kv_too_many_keys"),
        ([bad, {**PREFIX, "limit": 1000}, *[PREFIX] * 1], "kv_too_many_keys"),
        ([bad, {"value": "x" * 65_536}], "kv_value_too_large"),
    ):
        with pytest.raises(Declined) as raised:
            kv.check_size(raws(*documents), CALL)
        assert raised.value.reason == reason
    kv.check_size(raws(bad, 5, {**MANY, "keys": 5}, {**PREFIX, "limit": "x"}), CALL)


@pytest.mark.parametrize("document", [PUT, ONCE, INCR, CHECK, DELETE])
def test_one_write_or_check_makes_a_write_call(document: dict[str, Any]) -> None:
    """Step 2.12."""
    assert kv.is_write(raws(GET, document))
    assert not kv.is_write(raws(GET, MANY, PREFIX, 5))
