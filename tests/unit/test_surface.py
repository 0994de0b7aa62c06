"""How KV, timers and locks refuse: step 0.1, 2.11, 3.1, 4.2."""

import json

import pytest
from litestar.response.base import ASGIResponse

from queen_pg.errors import (
    BadBody,
    BadRequest,
    Declined,
    Internal,
    NameTooLong,
    QueenError,
    StorageFull,
    Unavailable,
)
from queen_pg.routes import surface, wire
from queen_pg.routes.surface import Surface


async def refused(name: Surface, error: QueenError) -> ASGIResponse:
    """The answer of a handler on a surface that raises an error."""

    @surface.speaking(name)
    async def handler(request: wire.AnyRequest) -> ASGIResponse:
        raise error

    request: wire.AnyRequest = wire.AnyRequest({"type": "http"})
    with pytest.raises(QueenError) as raised:
        await handler(request)
    return wire.failure(raised.value, "/")


@pytest.mark.parametrize(
    ("name", "error", "status", "code", "reason"),
    [
        ("kv", BadBody("x"), 400, "kv_bad_request", "kv_bad_body"),
        ("timers", BadBody("x"), 400, "timers_bad_request", "timers_bad_body"),
        ("locks", BadBody("x"), 400, "locks_bad_request", "locks_bad_body"),
        ("kv", BadRequest("x"), 400, "kv_bad_request", "kv_bad_request"),
        ("timers", NameTooLong("x"), 413, "payload_too_large", "name_too_long"),
        ("kv", Unavailable("timeout", "x"), 503, "kv_unavailable", "kv_timeout"),
        ("kv", Unavailable("retry", "x"), 503, "kv_unavailable", "kv_retry"),
        ("kv", Unavailable("no_leader", "x"), 503, "kv_unavailable", "kv_no_leader"),
        ("timers", Unavailable("retry", "x"), 503, "timers_unavailable", "timers_retry"),
        ("locks", Unavailable("retry", "x"), 503, "kv_unavailable", "kv_retry"),
        ("kv", StorageFull("x"), 507, "storage_full", "storage_full"),
        ("kv", Internal("x"), 500, "kv_error", "internal"),
        ("timers", Internal("x"), 500, "timers_error", "internal"),
        ("locks", Internal("x"), 500, "kv_error", "internal"),
        ("kv", Declined("a", "b", "x", status=403), 403, "a", "b"),
    ],
)
async def test_every_error_has_a_coarse_code_and_a_reason(
    name: Surface, error: QueenError, status: int, code: str, reason: str
) -> None:
    """Step 0.1: `error` is the code itself, never prose; a lock's database is KV's."""
    response = await refused(name, error)
    assert response.status_code == status
    assert json.loads(response.body) == {"error": code, "reason": reason, "detail": "x"}
    waits = status in (429, 503)
    assert response.headers.get("retry-after") == ("1" if waits else None)
