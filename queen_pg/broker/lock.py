"""Locks and semaphores: permits that are KV rows, and whose tokens only rise (step 4)."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from queen_pg.broker import operation as op
from queen_pg.broker import switch
from queen_pg.broker.operation import Fields
from queen_pg.database import Database
from queen_pg.errors import Declined

OPERATIONS = ("acquire", "renew", "release", "get")
OPERATIONS_MAX = 64
SLOTS_MAX = 4096
"""How many slots the operations of one call may look at."""

GET_SLOTS = 1000
LIMIT_MAX = 1024
TEXT_BYTES_MAX = 256
TOKEN_MAX = 2**63 - 1


def is_write(operations: Sequence[msgspec.Raw]) -> bool:
    """Return whether a call spends a write's token: all do but those that only look."""
    return any(op.string((op.fields(document) or {}).get("op")) != "get" for document in operations)


def is_growth(operations: Sequence[msgspec.Raw]) -> bool:
    """Return whether a call may add permits, and so can be over KV's quota; a renewal does not."""
    return any(
        op.string((op.fields(document) or {}).get("op")) == "acquire" for document in operations
    )


def validate(operations: Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    """Return the operations as the database takes them; raise Declined for the first bad one."""
    if len(operations) > OPERATIONS_MAX:
        raise _bad("locks_too_many_ops", f"a call has at most {OPERATIONS_MAX} operations")
    validated = [_validated(document) for document in operations]
    names = [operation["name"] for operation in validated]
    if len(set(names)) < len(names):
        raise _bad("locks_duplicate_in_call", "a call names each lock once")
    if sum(_slots(operation) for operation in validated) > SLOTS_MAX:
        raise _bad("locks_too_many_keys", f"a call looks at no more than {SLOTS_MAX} slots")
    return validated


async def run(
    db: Database, tenant: int, operations: Sequence[dict[str, Any]], deadline: float
) -> list[str]:
    """Carry out validated operations, independent of each other; return their results as JSON."""
    arguments = {"tenant": tenant, "operations": msgspec.json.encode(operations).decode()}
    looking = all(operation["op"] == "get" for operation in operations)

    async def attempt() -> list[str]:
        call = db.read if looking else db.step
        rows = await call("_locks", deadline=deadline, **arguments)
        if rows[0]["verdict"] == "disabled":
            raise switch.kv_disabled()
        return [row["result"] for row in sorted(rows, key=lambda row: row["operation_index"])]

    return await db.retry("locks", deadline, attempt) if operations else []


def _slots(operation: dict[str, Any]) -> int:
    limit: int = operation.get("limit", 1)
    return GET_SLOTS if operation["op"] == "get" else limit


def _validated(document: msgspec.Raw) -> dict[str, Any]:
    operation = op.fields(document)
    if operation is None:
        raise _bad("locks_bad_request", "an operation must be an object")
    name = op.string(operation.get("op"))
    if name not in OPERATIONS:
        raise _bad("locks_unknown_op", f"op must be one of {', '.join(OPERATIONS)}")
    for field in op.TENANT_FIELDS:
        if field in operation:
            raise _bad("locks_tenant_not_an_input", f"{field} comes from the request's context")
    lock = op.string(operation.get("name"))
    if lock is None or not _is_text(lock) or "#" in lock:
        raise _bad(
            "locks_bad_name",
            f"name must be 1 to {TEXT_BYTES_MAX} bytes without control characters and #",
        )
    return {"op": name, "name": lock, **dict(_rest(name, operation))}


def _rest(name: str, operation: Fields) -> Iterator[tuple[str, Any]]:
    """Yield what an operation holds besides its name, checked."""
    if name in ("acquire", "renew"):
        yield "ttlSeconds", _lifetime(operation)
        yield "owner", _owner(operation)
    if name == "acquire":
        yield "limit", _bounded(operation, "limit", 1, 1, LIMIT_MAX)
    if name in ("renew", "release"):
        if not op.present(operation, "token"):
            raise _bad("locks_token_required", f"{name} needs the token of its permit")
        yield "token", _bounded(operation, "token", 0, 1, TOKEN_MAX)
        yield "slot", _bounded(operation, "slot", 0, 0, LIMIT_MAX - 1)


def _lifetime(operation: Fields) -> int:
    if "forever" in operation or not op.present(operation, "ttlSeconds"):
        raise _bad("locks_ttl_required", "a permit needs ttlSeconds: none is forever")
    seconds = op.integer(operation["ttlSeconds"], exact=True)
    if seconds is None or seconds <= 0:
        raise _bad("locks_bad_ttl", "ttlSeconds must be an integer above 0")
    return seconds


def _owner(operation: Fields) -> str | None:
    given = op.present(operation, "owner")
    owner = op.string(given)
    if given and (owner is None or not _is_text(owner)):
        raise _bad(
            "locks_bad_owner", f"owner must be 1 to {TEXT_BYTES_MAX} bytes, no control characters"
        )
    return owner


def _bounded(operation: Fields, field: str, default: int, least: int, most: int) -> int:
    given = op.present(operation, field)
    if not given:
        return default
    number = op.integer(given, exact=True)
    if number is None or not least <= number <= most:
        raise _bad(f"locks_bad_{field}", f"{field} must be an integer from {least} to {most}")
    return number


def _is_text(text: str) -> bool:
    return 1 <= len(text.encode()) <= TEXT_BYTES_MAX and not any(
        code < 0x20 or 0x7F <= code <= 0x9F for code in map(ord, text)
    )


def _bad(reason: str, message: str) -> Declined:
    return Declined("locks_bad_request", reason, message)
