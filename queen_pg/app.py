"""The application of one process, put together: settings, database, waiting consumers, routes."""

import contextlib
from collections.abc import AsyncIterator

from litestar import Litestar
from litestar.openapi import OpenAPIConfig

from queen_pg import __version__
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.routes import ROUTES
from queen_pg.routes.wire import EXCEPTION_HANDLERS
from queen_pg.wakeup import Waiters


def create_app(settings: Settings) -> Litestar:
    """Return the application; its lifespan opens and closes what it needs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        database = Database(settings)
        await database.start()
        try:
            app.state.database = database
            app.state.waiters = Waiters(database, settings)
            yield
            await drain(app)
        finally:
            await database.close()

    app = Litestar(
        ROUTES,
        lifespan=[lifespan],
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=OpenAPIConfig(title="queen-pg", version=__version__),
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
    )
    app.state.settings = settings
    return app


async def drain(app: Litestar) -> None:
    """Answer parked pops empty, take no new ones, and end the background work; may be repeated."""
    waiters: Waiters = app.state.waiters
    await waiters.close()
