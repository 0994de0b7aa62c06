"""KV: validate a call's operations, carry them out as one step, read for the console, sweep."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from queen_pg.broker import operation as op
from queen_pg.broker import switch
from queen_pg.broker.operation import Fields
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Declined, Refused

EXPIRING = ("put", "putIfAbsent", "incr")
"""What writes a new expiry, and so must say which."""

CHANGING = (*EXPIRING, "delete", "check")
"""What takes a key for itself: once a call (step 2.3)."""

OPERATIONS = (*CHANGING, "get", "getMany", "getPrefix")

KEY_BYTES_MAX = 512
PAGE_DEFAULT = 100
PAGE_MAX = 1000
VERSION_MAX = 2**63 - 1
FOREVER_SECONDS = 9_200_000_000_000
"""A lifetime of so many seconds ends beyond what a timestamp can hold: forever."""

# Counters are added to exactly, digit by digit: what no counter needs is refused.
NUMBER_CHARACTERS_MAX = 400
_EXPONENT = re.compile(r"[eE][+-]?0*([0-9]+)\Z")
EXPONENT_MAX = 308

_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_keys = msgspec.json.Decoder(list[msgspec.Raw])


class Limits(msgspec.Struct, frozen=True):
    """What one call may hold."""

    operations: int
    keys: int
    value_bytes: int
    in_transaction: bool

    @classmethod
    def of_call(cls, settings: Settings) -> "Limits":
        """Return the limits of the KV routes."""
        return cls(
            operations=settings.kv_max_ops_per_call,
            keys=settings.kv_max_keys_per_call,
            value_bytes=settings.kv_max_value_bytes,
            in_transaction=False,
        )

    @classmethod
    def of_transaction(cls, settings: Settings) -> "Limits":
        """Return the limits of a transaction's rider (step 1.5)."""
        return cls(
            operations=64, keys=256, value_bytes=settings.kv_max_value_bytes, in_transaction=True
        )


class Lost(NamedTuple):
    """The required operation that lost, and its `kvReason`, `version` and `value` as JSON."""

    failed_index: int
    verdict: str


class Place(NamedTuple):
    """How far the sweep has come."""

    tenant: int
    namespace: str
    key: str


START = Place(0, "", "")


def check_size(operations: Sequence[msgspec.Raw], limits: Limits) -> None:
    """Refuse a call that is too large, before anything else is judged (step 2.2)."""
    _check_count(operations, limits)
    fields = [op.fields(document) or {} for document in operations]
    _check_keys(sum(_named_keys(operation) for operation in fields), limits)
    for operation in fields:
        if "value" in operation:
            _check_value(operation["value"], limits)


def is_write(operations: Sequence[msgspec.Raw]) -> bool:
    """Return whether a call spends a write's token: one write or check makes it a write call."""
    return any(
        op.scalar((op.fields(document) or {}).get("op")) in CHANGING for document in operations
    )


def is_growth(operations: Sequence[msgspec.Raw]) -> bool:
    """Return whether a call may make KV larger, and so can be over a quota."""
    return any(
        op.scalar((op.fields(document) or {}).get("op")) in EXPIRING for document in operations
    )


def validate(operations: Sequence[msgspec.Raw], limits: Limits) -> list[dict[str, Any]]:
    """Return the operations as the database takes them; raise Declined for the first bad one.

    The checks come in the order of step 2.3: each operation's in turn, then those of the call.
    """
    _check_count(operations, limits)
    validated = [_validated(document, limits) for document in operations]
    taken: set[tuple[str, str]] = set()
    for operation in validated:
        if operation["op"] in CHANGING:
            name = (operation["ns"], operation["key"])
            if name in taken:
                raise _bad("kv_duplicate_key_in_call", f"{name[1]!r} is written or checked twice")
            taken.add(name)
    _check_keys(
        sum(
            len(operation["keys"])
            if operation["op"] == "getMany"
            else operation.get("limit", PAGE_DEFAULT)
            if operation["op"] == "getPrefix"
            else 1
            for operation in validated
        ),
        limits,
    )
    return validated


async def run(
    db: Database, tenant: int, operations: Sequence[dict[str, Any]], deadline: float
) -> list[str] | Lost:
    """Carry out validated operations, all or nothing; return each one's result as JSON.

    A required operation that lost is the answer instead, and nothing is written.
    """
    arguments = {"tenant": tenant, "operations": msgspec.json.encode(operations).decode()}

    async def attempt() -> list[str] | Lost:
        if [operation["op"] for operation in operations] == ["get"]:
            # One row has one history: reading it needs no step.
            rows = await db.read("_kv", deadline=deadline, **arguments, careful=False)
        else:
            try:
                rows = await db.step("_kv", deadline=deadline, **arguments, careful=False)
            except Refused:
                rows = await db.step("_kv", deadline=deadline, **arguments, careful=True)
        if rows[0]["verdict"] == "disabled":
            raise switch.kv_disabled()
        if rows[0]["verdict"] == "refused":
            return Lost(rows[0]["operation_index"], rows[0]["result"])
        return [row["result"] for row in sorted(rows, key=lambda row: row["operation_index"])]

    return await db.retry("kv", deadline, attempt) if operations else []


async def namespaces(db: Database, tenant: int) -> list[tuple[str, int]]:
    """Return the tenant's namespaces in byte order, with their rows, dead ones included."""
    rows = await db.read("_kv_namespaces", tenant=tenant)
    return [(row["namespace"], row["key_count"]) for row in rows]


class Page(NamedTuple):
    """A page of the console's list; `rows` is a JSON array."""

    rows: str
    truncated: bool
    next_after: str | None
    bytes: int


async def page(db: Database, tenant: int, operation: dict[str, Any]) -> Page:
    """Return a page of a namespace's rows, for the console."""
    [row] = await db.read(
        "_kv_list", tenant=tenant, operation=msgspec.json.encode(operation).decode()
    )
    return Page(*row)


async def sweep(db: Database, place: Place, batch_max: int) -> tuple[int, Place]:
    """Remove the dead rows among the next keys; return how many, and where to go on."""
    [row] = await db.read(
        "_kv_sweep",
        after_tenant=place.tenant,
        after_namespace=place.namespace,
        after_key=place.key,
        batch_max=batch_max,
    )
    removed, *last = row
    return removed, START if last[0] is None else Place(*last)


def namespace_of(operation: Fields) -> str:
    """Return the `ns` of an operation, checked."""
    return check_namespace(op.scalar(operation.get("ns")) or "")


def check_namespace(text: str) -> str:
    """Return the text; raise Declined when it is no namespace."""
    if not _NAMESPACE.match(text):
        raise _bad("kv_bad_namespace", "ns must match ^[a-z0-9][a-z0-9._-]{0,63}$")
    return text


def check_key(field: str, text: str | None) -> str:
    """Return the text; raise Declined when it is no key."""
    if not text or "\0" in text:
        raise _bad("kv_bad_key", f"{field} must be a text of 1 to {KEY_BYTES_MAX} bytes, no NUL")
    if len(text.encode()) > KEY_BYTES_MAX:
        raise _too_large("kv_key_too_large", f"{field} is over {KEY_BYTES_MAX} bytes")
    return text


def page_fields(operation: Fields) -> dict[str, Any]:
    """Return the `after`, `limit` and `keysOnly` of a page, checked; the limit is clamped."""
    fields: dict[str, Any] = {"limit": PAGE_DEFAULT, "keysOnly": False}
    after = op.scalar(operation.get("after"))
    if after:
        if "\0" in after:
            raise _bad("kv_bad_key", "after must not contain NUL")
        fields["after"] = after
    if limit := op.present(operation, "limit"):
        size = op.integer(limit)
        if size is None:
            raise _bad("kv_bad_request", "limit must be an integer")
        fields["limit"] = max(1, min(size, PAGE_MAX))
    if keys_only := op.present(operation, "keysOnly"):
        if op.boolean(keys_only) is None:
            raise _bad("kv_bad_request", "keysOnly must be a boolean")
        fields["keysOnly"] = op.boolean(keys_only)
    return fields


def _validated(document: msgspec.Raw, limits: Limits) -> dict[str, Any]:
    operation = op.fields(document)
    if operation is None:
        raise _bad("kv_bad_request", "an operation must be an object")
    name = op.scalar(operation.get("op"))
    if name not in OPERATIONS:
        raise _bad("kv_unknown_op", f"op must be one of {', '.join(OPERATIONS)}")
    for field in op.TENANT_FIELDS:
        if field in operation:
            raise _bad("kv_tenant_not_an_input", f"{field} comes from the request's context")
    validated: dict[str, Any] = {"op": name}
    if name == "getMany":
        _many(operation, validated)
    elif name == "getPrefix":
        if limits.in_transaction:
            raise _bad("kv_get_prefix_not_allowed_in_transaction", "a transaction reads by key")
        if not op.scalar(operation.get("prefix")):
            raise _bad("kv_prefix_required", "prefix must not be empty")
        validated["ns"] = namespace_of(operation)
        validated["prefix"] = check_key("prefix", op.scalar(operation["prefix"]))
    else:
        validated["ns"] = namespace_of(operation)
        validated["key"] = check_key("key", op.scalar(operation.get("key")))
    validated.update(_rest(name, operation, limits))
    return validated


def _many(operation: Fields, validated: dict[str, Any]) -> None:
    try:
        keys = _keys.decode(operation.get("keys", b"[]"))
    except msgspec.DecodeError:
        raise _bad("kv_bad_request", "keys must be an array") from None
    if keys:
        validated["ns"] = namespace_of(operation)
    validated["keys"] = [check_key("each of keys", op.scalar(key)) for key in keys]


def _rest(name: str, operation: Fields, limits: Limits) -> Iterator[tuple[str, Any]]:
    """Yield what an operation holds besides its names, checked."""
    if name in EXPIRING:
        yield from _lifetime(operation)
    if name in ("put", "putIfAbsent"):
        if "value" not in operation:
            raise _bad("kv_bad_request", f"{name} needs a value, which may be null")
        _check_value(operation["value"], limits)
        yield "value", bytes(operation["value"]).decode()
    if name == "incr":
        yield from _sum(operation)
    elif name in CHANGING:
        yield from _expected(name, operation)
    if "required" in operation:
        required = op.boolean(operation["required"])
        if required is None:
            raise _bad("kv_bad_request", "required must be a boolean")
        yield "required", required
    if name == "getPrefix":
        yield from page_fields(operation).items()


def _lifetime(operation: Fields) -> Iterator[tuple[str, Any]]:
    seconds = None
    if "ttlSeconds" in operation:
        seconds = op.integer(operation["ttlSeconds"])
        if seconds is None or seconds <= 0:
            raise _bad("kv_bad_ttl", "ttlSeconds must be an integer above 0")
    forever = op.boolean(operation.get("forever")) is True
    if forever == (seconds is not None):
        raise _bad("kv_expiry_not_specified", "say either ttlSeconds or forever: true")
    if seconds is not None and seconds < FOREVER_SECONDS:
        yield "ttlSeconds", seconds


def _expected(name: str, operation: Fields) -> Iterator[tuple[str, Any]]:
    if "expect" not in operation:
        if name == "check":
            raise _bad("kv_bad_expect", "check needs an expect")
        return
    expect = op.integer(operation["expect"])
    if expect is None or expect < 0 or (name == "putIfAbsent" and expect != 0):
        raise _bad("kv_bad_expect", "expect must be a version, or 0 for a key that is not there")
    yield "expect", min(expect, VERSION_MAX)


def _sum(operation: Fields) -> Iterator[tuple[str, Any]]:
    if "expect" in operation:
        raise _bad("kv_bad_request", "incr takes no expect")
    if "delta" not in operation:
        raise _bad("kv_bad_request", "incr needs a delta")
    for field in ("delta", "min", "max"):
        if field in operation:
            text = op.number(operation[field])
            if text is None:
                raise _bad("kv_bad_request", f"{field} must be a number")
            exponent = _EXPONENT.search(text)
            if len(text) > NUMBER_CHARACTERS_MAX or (
                exponent and int(exponent.group(1)) > EXPONENT_MAX
            ):
                raise _bad("kv_bad_request", f"{field} is beyond what is counted exactly")
            yield field, operation[field]


def _named_keys(operation: Fields) -> int:
    """Return how many keys an operation names, as far as it can be told before it is checked."""
    match op.scalar(operation.get("op")):
        case "getMany":
            try:
                return len(_keys.decode(operation.get("keys", b"[]")))
            except msgspec.DecodeError:
                return 1
        case "getPrefix":
            size = op.integer(operation.get("limit"))
            return PAGE_DEFAULT if size is None else max(1, min(size, PAGE_MAX))
    return 1


def _check_count(operations: Sequence[msgspec.Raw], limits: Limits) -> None:
    if len(operations) > limits.operations:
        raise _bad("kv_too_many_ops", f"a call has at most {limits.operations} operations")


def _check_keys(count: int, limits: Limits) -> None:
    if count > limits.keys:
        raise _bad("kv_too_many_keys", f"a call names at most {limits.keys} keys")


def _check_value(value: msgspec.Raw, limits: Limits) -> None:
    limit = limits.value_bytes
    if len(bytes(value)) > limit and op.compact_bytes(value) > limit:
        raise _too_large("kv_value_too_large", f"a value has at most {limit} bytes of JSON")


def _bad(reason: str, message: str) -> Declined:
    return Declined("kv_bad_request", reason, message)


def _too_large(reason: str, message: str) -> Declined:
    return Declined("payload_too_large", reason, message, status=413)
