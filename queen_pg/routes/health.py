"""`/health` and `/status`: whether the broker can do its work, and whether it is there at all."""

from litestar import get
from litestar.response.base import ASGIResponse

from queen_pg import __version__
from queen_pg.errors import QueenError
from queen_pg.routes import wire

ENGINE = "postgres"
ROUND_TRIP_SECONDS = 5.0


@get("/health")
async def health(request: wire.AnyRequest) -> ASGIResponse:
    """Ask the database for its time; 503 when it does not answer."""
    try:
        await wire.database(request).read("now", deadline=wire.deadline(ROUND_TRIP_SECONDS))
    except QueenError:
        return _health("unhealthy", "disconnected", 503)
    return _health("healthy", "connected", 200)


def _health(status: str, database: str, code: int) -> ASGIResponse:
    body = {"status": status, "database": database, "engine": ENGINE, "version": __version__}
    return wire.answer(body, code)


@get("/status")
async def status() -> ASGIResponse:
    """Say that the process is alive, without a look at the database."""
    return wire.answer({"status": "ok", "engine": ENGINE})


ROUTES = [health, status]
