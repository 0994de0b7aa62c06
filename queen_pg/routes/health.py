"""`/health` and `/status`: whether the broker can do its work, and whether it is there at all."""

from typing import Any

from litestar import get
from litestar.response.base import ASGIResponse

from queen_pg import __version__
from queen_pg.broker import epoch
from queen_pg.errors import QueenError
from queen_pg.routes import wire

ENGINE = "postgres"
ROUND_TRIP_SECONDS = 5.0


@get("/health")
async def health(request: wire.AnyRequest) -> ASGIResponse:
    """Ask the database what it is in the log; 503 when it does not answer or takes no writes."""
    try:
        state = await epoch.state(wire.database(request), wire.deadline(ROUND_TRIP_SECONDS))
    except QueenError:
        return _health("unhealthy", "disconnected", 503, {})
    log = {
        "epoch": state.epoch,
        "role": state.role,
        "node": state.node,
        "replication": state.mode,
        "quorum": state.quorum,
        "followers": [
            {
                "name": follower.name,
                "connected": follower.connected,
                "synchronous": follower.synchronous,
                "lagBytes": follower.lag_bytes,
                "lagSeconds": follower.lag_seconds,
            }
            for follower in state.followers
        ],
    }
    if state.role == "primary":
        return _health("healthy", "connected", 200, log)
    return _health("unhealthy", "connected", 503, log)


def _health(status: str, database: str, code: int, log: dict[str, Any]) -> ASGIResponse:
    body = {"status": status, "database": database, "engine": ENGINE, "version": __version__}
    return wire.answer({**body, **log}, code)


@get("/status")
async def status() -> ASGIResponse:
    """Say that the process is alive, without a look at the database."""
    return wire.answer({"status": "ok", "engine": ENGINE})


ROUTES = [health, status]
