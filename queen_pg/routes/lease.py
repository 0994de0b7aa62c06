"""`POST /api/v1/lease/{leaseId}/extend`: more time for what a pop took (data-plane 7)."""

from typing import Any

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse

from queen_pg import limits
from queen_pg.broker import lease
from queen_pg.routes import wire

DEFAULT_SECONDS = 60


@post("/api/v1/lease/{names:path}")
async def extend(request: wire.AnyRequest) -> ASGIResponse:
    """Extend every live lease of an id; the body may be empty or name the seconds."""
    lease_id = wire.names(request, "/api/v1/lease/{leaseId}/extend")["leaseId"]
    seconds = _seconds(await wire.read_body(request))
    extension = await lease.extend(
        wire.database(request), wire.tenant(request), lease_id, seconds, wire.deadline()
    )
    expiry = extension.expires_at and wire.iso_milliseconds(extension.expires_at)
    return wire.answer(
        {
            "leaseId": lease_id,
            "success": extension.renewed > 0,
            "renewed": extension.renewed,
            # Clients have read each of these names at some time.
            "newExpiresAt": expiry,
            "expiresAt": expiry,
            "lease_expires_at": expiry,
        }
    )


def _seconds(body: bytes) -> int:
    """Return the seconds asked for; whatever is not an integer there means the default."""
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return DEFAULT_SECONDS
    seconds = document.get("seconds") if isinstance(document, dict) else None
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return DEFAULT_SECONDS
    return max(1, min(seconds, limits.INTEGER_MAX))


ROUTES = [extend]
