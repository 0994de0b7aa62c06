"""What timers accept: step 3.1, and 1.6 for a transaction's rider."""

import base64
import json
from typing import Any

import msgspec
import pytest
import zstandard

from queen_pg.broker import timer_document
from queen_pg.broker.timer_document import Limits
from queen_pg.config import Settings
from queen_pg.errors import Declined, NameTooLong

CALL = Limits.of_call(Settings())
RIDER = Limits()
DAY_MS = 24 * 3600 * 1000


def encoded(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


SCHEDULE = {
    "op": "schedule",
    "queue": "q",
    "timerKey": "k",
    "delayMs": 1500,
    "txn": "t",
    "payload": encoded(b'{"a":1}'),
}
CANCEL = {"op": "cancel", "queue": "q", "timerKey": "k"}


def raws(*documents: Any) -> list[msgspec.Raw]:
    return [
        msgspec.Raw(
            document.encode() if isinstance(document, str) else json.dumps(document).encode()
        )
        for document in documents
    ]


def without(document: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in fields}


def validate(*documents: Any, limits: Limits = CALL, sub: str | None = None) -> list[Any]:
    """Validate, and read the result as the database would."""
    decoded: list[Any] = msgspec.json.decode(
        msgspec.json.encode(timer_document.validate(raws(*documents), limits, sub))
    )
    return decoded


REFUSED = [
    (1, "timers_bad_op"),
    ([], "timers_bad_op"),
    ({**SCHEDULE, "_x": 1}, "timers_server_owned_field"),
    ({**CANCEL, "_x": 1}, "timers_server_owned_field"),
    ({**SCHEDULE, "producerSub": "a"}, "timers_server_owned_field"),
    ({**SCHEDULE, "producer_sub": "a"}, "timers_server_owned_field"),
    *[
        ({**SCHEDULE, field: 1}, "timers_field_not_allowed")
        for field in (
            *("messageId", "message_id", "tenant", "tenantId", "tenant_id", "deliverAt"),
            *("deliver_at", "delaySeconds", "delay_seconds", "attempts", "claimToken"),
            *("claim_token", "claimedUntil", "claimed_until"),
        )
    ],
    ({}, "timers_unknown_op"),
    ({**SCHEDULE, "op": "Schedule"}, "timers_unknown_op"),
    *[({**SCHEDULE, "queue": queue}, "timers_queue_required") for queue in ("", None, 5, "a\0")],
    (without(CANCEL, "queue"), "timers_queue_required"),
    *[({**SCHEDULE, "timerKey": key}, "timers_key_required") for key in ("", None, 5, "a\0")],
    (without(CANCEL, "timerKey"), "timers_key_required"),
    ({**SCHEDULE, "timerKey": "k" * 2049}, "timers_key_too_long"),
    *[({**SCHEDULE, "partition": name}, "timers_bad_partition") for name in ("", 5, "a\0")],
    *[({**SCHEDULE, "delayMs": delay}, "timers_delay_required") for delay in (None, "5", True)],
    (without(SCHEDULE, "delayMs"), "timers_delay_required"),
    *[({**SCHEDULE, "txn": txn}, "timers_txn_required") for txn in (None, "", 5)],
    (without(SCHEDULE, "txn"), "timers_txn_required"),
    *[({**SCHEDULE, "txn": txn}, "timers_bad_txn") for txn in ("a\0", "t" * 65_536)],
    ({**CANCEL, "txn": 5}, "timers_bad_txn"),
    *[({**SCHEDULE, "payload": payload}, "timers_payload_required") for payload in (None, 5, {})],
    (without(SCHEDULE, "payload"), "timers_payload_required"),
    *[
        ({**SCHEDULE, "payload": payload}, "timers_payload_not_base64")
        for payload in ("MQ", "M_==", "MQ==\n", "é")
    ],
    *[
        ({**SCHEDULE, "payload": encoded(payload)}, "timers_payload_not_json")
        for payload in (b"{", b"\xff", b"1 2", b"nul", b"[" * 100_000)
    ],
    ({**SCHEDULE, "payload": encoded(b"1" * 1_048_577)}, "timers_payload_too_large"),
    ({**SCHEDULE, "payloadZstd": 1}, "timers_bad_payload_zstd"),
    ({**SCHEDULE, "encrypted": "no"}, "timers_bad_encrypted"),
    ({**SCHEDULE, "delayMs": 90 * DAY_MS + 1}, "timers_horizon"),
    ({**SCHEDULE, "delayMs": 1e300}, "timers_horizon"),
]

COARSE = {
    "timers_payload_too_large": (413, "payload_too_large"),
    "timers_horizon": (403, "timer_horizon_exceeded"),
}


@pytest.mark.parametrize(("document", "reason"), REFUSED)
def test_a_bad_operation_has_its_reason(document: Any, reason: str) -> None:
    """Step 3.1."""
    with pytest.raises(Declined) as raised:
        validate(document)
    assert raised.value.reason == reason
    coarse = COARSE.get(reason, (400, "timers_bad_request"))
    assert (raised.value.status, raised.value.code) == coarse


def test_a_timer_is_named_once_a_call() -> None:
    """Step 3.1: a cancel plus a schedule counts; another queue's timer is another."""
    with pytest.raises(Declined) as raised:
        validate(SCHEDULE, CANCEL)
    assert (raised.value.code, raised.value.reason) == (
        "timers_bad_request",
        "timers_duplicate_key",
    )
    validate(SCHEDULE, {**CANCEL, "queue": "other"}, {**CANCEL, "timerKey": "other"})


def test_the_number_of_operations_is_limited_on_the_route_only() -> None:
    """Step 3.1, 1.6."""
    many = [{**CANCEL, "timerKey": f"k{n}"} for n in range(257)]
    assert len(validate(*many, limits=RIDER)) == 257
    with pytest.raises(Declined) as raised:
        validate(*many)
    assert raised.value.reason == "timers_too_many_ops"


def test_a_transaction_knows_no_horizon_and_larger_payloads() -> None:
    """Step 1.6: neither the horizon nor the ceiling of 1 MiB applies."""
    far = {**SCHEDULE, "delayMs": 1e300, "payload": encoded(b"1" * 1_048_577)}
    [operation] = validate(far, limits=RIDER)
    assert operation["delayMs"] == 10**18
    with pytest.raises(Declined) as raised:
        validate({**SCHEDULE, "payload": encoded(b"1" * (16 * 1024 * 1024 + 1))}, limits=RIDER)
    assert raised.value.reason == "timers_payload_too_large"


def test_provenance_comes_first() -> None:
    """Step 1.11-2: before the shape of any operation."""
    with pytest.raises(Declined) as raised:
        validate({"op": "nope"}, 5, {**SCHEDULE, "_owner": "x"})
    assert raised.value.reason == "timers_server_owned_field"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("1500", 1500),
        ("1.0004", 1),
        ("0.0015", 0.002),
        ("-0.0", 0),
        ("-10000", -10000),
        ("1e3", 1000),
        ("1e-999999999999999999999", 0),
        ("-1e400", -(10**18)),
        ("90e5", 9_000_000),
    ],
)
def test_delays_are_kept_to_the_microsecond(given: str, taken: float) -> None:
    """Step 3.1: any JSON number, at or below 0 too."""
    document = json.dumps(SCHEDULE).replace("1500", given)
    assert validate(document)[0]["delayMs"] == taken


def test_the_horizon_itself_is_allowed() -> None:
    validate({**SCHEDULE, "delayMs": 90 * DAY_MS})


def test_names_that_no_queue_can_have_are_refused_before_they_wait() -> None:
    """Step 3.4-9: a fire must not fail for a name."""
    with pytest.raises(NameTooLong):
        validate({**SCHEDULE, "queue": "q" * 412})
    with pytest.raises(NameTooLong):
        validate({**SCHEDULE, "partition": "p" * 411})
    validate({**SCHEDULE, "queue": "q" * 200, "partition": "p" * 211})
    validate({**CANCEL, "queue": "q" * 412})


@pytest.mark.parametrize(
    ("payload", "inflate", "document"),
    [
        (b'{"b" : 1.0}', False, '{"b" : 1.0}'),
        (b"", False, "null"),
        (zstandard.compress(b'{"z":1}'), True, '{"z":1}'),
        (b"not a frame", True, "null"),
        (zstandard.compress(b""), True, "null"),
        (b"1", False, "1"),
    ],
)
def test_a_payload_is_the_json_document_it_decodes_to(
    payload: bytes, inflate: bool, document: str
) -> None:
    """Step 3.1 payload, payloadZstd; Q8: empty bytes deliver null."""
    operation = {**SCHEDULE, "payload": encoded(payload), "payloadZstd": inflate}
    assert validate(operation)[0]["payload"] == document


def test_a_payload_that_inflates_too_far_is_refused() -> None:
    """A frame that states no size, or any, is inflated to the limit and no further."""
    bomb = zstandard.compress(b"1" * 100_000_000)
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(b"1" * 2_000_000)
    for payload in (bomb, stream):
        with pytest.raises(Declined) as raised:
            validate({**SCHEDULE, "payload": encoded(payload), "payloadZstd": True})
        assert raised.value.reason == "timers_payload_too_large"


def test_the_payloads_of_a_call_are_limited_together() -> None:
    """Step 3.1 timers_call_too_large."""
    frame = encoded(zstandard.compress(b"1" * 1_048_576))
    many = [
        {**SCHEDULE, "timerKey": f"k{n}", "payload": frame, "payloadZstd": True} for n in range(65)
    ]
    with pytest.raises(Declined) as raised:
        validate(*many)
    assert (raised.value.status, raised.value.reason) == (413, "timers_call_too_large")


def test_what_reaches_the_database() -> None:
    """Step 3.1, 3.4-3: the default partition; the subject is the request's, not the caller's."""
    assert validate(SCHEDULE, sub="alice") == [
        {
            "op": "schedule",
            "queue": "q",
            "timerKey": "k",
            "partition": "Default",
            "delayMs": 1500,
            "txn": "t",
            "payload": '{"a":1}',
            "producerSub": "alice",
        }
    ]
    assert validate(CANCEL) == [{**CANCEL, "txn": None}]
    assert validate({**CANCEL, "txn": "t", "payload": 5}) == [{**CANCEL, "txn": "t"}]
    assert validate({**SCHEDULE, "partition": None})[0]["partition"] == "Default"


def test_a_call_that_only_cancels_schedules_nothing() -> None:
    """Section 5: cancels are never refused."""
    assert not timer_document.is_schedule(raws(CANCEL, CANCEL))
    assert timer_document.is_schedule(raws(CANCEL, {**SCHEDULE, "op": "reschedule"}))
