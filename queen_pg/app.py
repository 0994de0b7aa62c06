"""The application of one process, put together: settings, groups, routes."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar
from litestar.openapi import OpenAPIConfig

from queen_pg import __version__
from queen_pg.config import Settings
from queen_pg.errors import QueenError
from queen_pg.group import Groups
from queen_pg.routes import ROUTES, wire


class Application(Litestar):
    """The application; its hottest routes are reached past the framework's routing."""

    direct: wire.Direct
    groups: Groups | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call; under tenancy, for the tenant that it names."""
        if self.groups is not None and wire.is_call(scope):
            try:
                scope[wire.PLACE] = await self.groups.place(wire.named_tenant(scope))
            except QueenError as error:
                await wire.failure(error, scope["path"])(scope, receive, send)
                return
        route = self.direct.find(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await super().__call__(scope, receive, send)
        else:
            scope["litestar_app"] = self
            await route(scope, receive, send)


def create_app(settings: Settings) -> Litestar:
    """Return the application; its lifespan opens and closes what it needs."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        groups = Groups(settings)
        try:
            await groups.start()
            app.state.groups = groups
            app.state.home = groups.home
            if settings.tenancy_header and isinstance(app, Application):
                app.groups = groups
            yield
            await drain(app)
        finally:
            await groups.close()

    app = Application(
        ROUTES,
        lifespan=[lifespan],
        exception_handlers=wire.EXCEPTION_HANDLERS,
        openapi_config=OpenAPIConfig(title="queen-pg", version=__version__),
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
    )
    app.direct = wire.Direct(ROUTES)
    app.state.settings = settings
    return app


async def drain(app: Litestar) -> None:
    """Answer parked pops empty, take no new ones, and end the background work; may be repeated."""
    groups: Groups = app.state.groups
    await groups.drain()
