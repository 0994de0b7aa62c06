"""Timers: `POST /api/v1/timers` and the routes of one queue's timers (step 3)."""

import base64
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import delete, get
from litestar.response.base import ASGIResponse

from queen_pg.broker import switch, timer, timer_document
from queen_pg.errors import BadRequest, Declined
from queen_pg.routes import surface, wire

PREFIX_BYTES_MAX = 128
LIST_DEFAULT = 100
LIST_MAX = 1000

_LIMIT = re.compile(r"[+-]?[0-9]{1,9}\Z")


@surface.speaking("timers")
async def call(request: wire.AnyRequest) -> ASGIResponse:
    """Schedule and cancel timers in one commit; results come in the order of the operations."""
    operations = await surface.read_operations(request)
    tenant = wire.tenant(request)
    database = wire.database(request)
    scheduling = timer_document.is_schedule(operations)
    if scheduling:
        async with switch.first(database, "timers_schedule"):
            surface.quotas(request).check_timers(tenant)
            surface.rates(request).spend(tenant, "write")
            validated = _validated(request, operations)
    else:
        validated = _validated(request, operations)
    results = await timer.run(database, tenant, validated, wire.deadline())
    if (seconds := timer_document.seconds_ahead(validated)) is not None:
        surface.scheduler(request).wake(seconds)
    return surface.results(results, indexed=False)


@delete("/api/v1/timers/{names:path}", status_code=200)
@surface.speaking("timers")
async def cancel(request: wire.AnyRequest) -> ASGIResponse:
    """Cancel one timer; nothing that pauses scheduling refuses it."""
    names = wire.names(request, "/api/v1/timers/{queue}/{timerKey...}")
    operation = timer_document.cancel(
        names["queue"], names["timerKey"], wire.Query(request).text("txn")
    )
    [result] = await timer.run(
        wire.database(request), wire.tenant(request), [operation], wire.deadline()
    )
    return wire.answer(result.encode())


@get("/api/v1/timers/{names:path}")
@surface.speaking("timers")
async def read(request: wire.AnyRequest) -> ASGIResponse:
    """Look at one pending timer, list those of a queue, or count them."""
    names = wire.match(request, "/api/v1/timers/{queue}/{timerKey...}")
    if names is not None:
        return await _peek(request, names["queue"], names["timerKey"])
    queue = wire.names(request, "/api/v1/timers/{queue}")["queue"]
    mode = wire.Query(request).text("mode")
    if mode == "count":
        return await _count(request, queue)
    if mode is not None:
        raise _bad("timers_read_mode_unknown", "the only mode is count")
    return await _list(request, queue)


async def _peek(request: wire.AnyRequest, queue: str, timer_key: str) -> ASGIResponse:
    found = await timer.peek(wire.database(request), wire.tenant(request), queue, timer_key)
    if found is None:
        return wire.answer({"found": False, "queue": queue, "timerKey": timer_key})
    payload = base64.b64encode(found.payload.encode()).decode()
    return wire.answer(f'{{"found":true,{found.fields[1:-1]},"payload":"{payload}"}}'.encode())


async def _list(request: wire.AnyRequest, queue: str) -> ASGIResponse:
    query = wire.Query(request)
    given = query.text("limit") or ""
    limit = int(given) if _LIMIT.match(given) else LIST_DEFAULT
    limit = max(1, min(limit, LIST_MAX))
    rows = await timer.pending(
        wire.database(request),
        wire.tenant(request),
        queue,
        query.text("after") or "",
        limit + 1,
    )
    truncated = len(rows) > limit
    rows = rows[:limit]
    return wire.answer(
        {
            "rows": [msgspec.Raw(fields) for _, fields in rows],
            "truncated": truncated,
            "nextAfter": rows[-1][0] if truncated else None,
        }
    )


async def _count(request: wire.AnyRequest, queue: str) -> ASGIResponse:
    query = wire.Query(request)
    if query.text("after") is not None or query.text("limit") is not None:
        raise _bad("timers_count_page_parameters", "a count has no pages")
    try:
        prefix = query.text("prefix")
    except BadRequest as error:
        raise _bad("timers_count_prefix_invalid", error.message) from None
    if prefix is None:
        raise _bad("timers_count_prefix_required", "a count needs a prefix")
    if len(prefix.encode()) > PREFIX_BYTES_MAX:
        raise _bad("timers_count_prefix_too_long", f"prefix is over {PREFIX_BYTES_MAX} bytes")
    number = await timer.count(wire.database(request), wire.tenant(request), queue, prefix)
    return wire.answer({"queue": queue, "prefix": prefix, "count": number})


def _validated(request: wire.AnyRequest, operations: Sequence[msgspec.Raw]) -> list[dict[str, Any]]:
    return timer_document.validate(
        operations, timer_document.Limits.of_call(wire.settings(request))
    )


def _bad(reason: str, message: str) -> Declined:
    return Declined("timers_bad_request", reason, message)


ROUTES = [wire.bare("POST", "/api/v1/timers", call), cancel, read]
