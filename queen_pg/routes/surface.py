"""The manners of KV, timers and locks: how operations are read, and how these surfaces refuse.

Their errors are `{error, reason, detail}`, where the error is a coarse code, never prose: clients
branch on it (step 0.1). `speaking` gives every error of a handler that form.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Literal

import msgspec
from litestar.response.base import ASGIResponse

from queen_pg.broker.quota import Quotas
from queen_pg.broker.rate import Rates
from queen_pg.errors import (
    BadBody,
    BadRequest,
    Declined,
    Internal,
    PayloadTooLarge,
    QueenError,
    StorageFull,
    Unavailable,
)
from queen_pg.routes import wire
from queen_pg.scheduler import Scheduler

Surface = Literal["kv", "timers", "locks"]


class _Operations(msgspec.Struct):
    operations: list[msgspec.Raw]


_operations = msgspec.json.Decoder(_Operations | list[msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rates(request: wire.AnyRequest) -> Rates:
    """Return the buckets from which calls are paid."""
    return wire.place(request).group.rates


def quotas(request: wire.AnyRequest) -> Quotas:
    """Return what tenants may keep."""
    return wire.place(request).group.quotas


def scheduler(request: wire.AnyRequest) -> Scheduler:
    """Return who fires timers, and is told of new ones."""
    return wire.place(request).group.scheduler


async def read_operations(request: wire.AnyRequest) -> Sequence[msgspec.Raw]:
    """Return the operations of a call, sent as an object or as a bare array."""
    parsed = wire.parse(_operations, await wire.read_body(request))
    return parsed.operations if isinstance(parsed, _Operations) else parsed


async def read_object(
    request: wire.AnyRequest, *, optional: bool = False
) -> dict[str, msgspec.Raw]:
    """Return the fields of the body; an optional one may be empty or null."""
    body = await wire.read_body(request)
    if optional and body.strip() in (b"", b"null"):
        return {}
    return wire.parse(_object, body)


def refuse_query(request: wire.AnyRequest, surface: Surface) -> None:
    """Refuse a query string, where none means anything."""
    if request.scope["query_string"]:
        raise Declined(
            f"{surface}_bad_request", f"{surface}_no_query_string", "there is no query here"
        )


def results(elements: Sequence[str], *, indexed: bool) -> ASGIResponse:
    """Answer with one result per operation, each one's text as it came."""
    parts = (
        (f'{{"index":{index},{element[1:]}' for index, element in enumerate(elements))
        if indexed
        else elements
    )
    return wire.answer(f'{{"results":[{",".join(parts)}]}}'.encode())


def speaking(surface: Surface) -> Callable[[wire.Handler], wire.Handler]:
    """Make a handler refuse as its surface does."""

    def decorate(handler: wire.Handler) -> wire.Handler:
        @wraps(handler)
        async def wrapped(request: wire.AnyRequest) -> ASGIResponse:
            try:
                return await handler(request)
            except QueenError as error:
                raise _declined(surface, error) from error

        return wrapped

    return decorate


def _declined(surface: Surface, error: QueenError) -> QueenError:
    # A lock is KV: where the database is at fault, KV speaks for it.
    at_fault = "kv" if surface == "locks" else surface
    match error:
        case BadBody():
            return Declined(f"{surface}_bad_request", f"{surface}_bad_body", error.message)
        case BadRequest():
            return Declined(f"{surface}_bad_request", f"{surface}_bad_request", error.message)
        case PayloadTooLarge():
            return Declined("payload_too_large", error.code, error.message, status=error.status)
        case Unavailable():
            code = f"{at_fault}_unavailable"
            reason = f"{at_fault}_{error.code}"
        case StorageFull():
            code = reason = error.code
        case Internal():
            code, reason = f"{at_fault}_error", error.code
        case _:
            return error
    return Declined(code, reason, error.message, status=error.status, retry_after=error.retry_after)
