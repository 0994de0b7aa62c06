"""The application of one process, put together: settings, database, waiting consumers, routes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar
from litestar.openapi import OpenAPIConfig

from queen_pg import __version__
from queen_pg.broker import epoch
from queen_pg.broker import retention as broker
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.rate import Rates
from queen_pg.broker.retention import Walk
from queen_pg.config import Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database
from queen_pg.leader import hosts
from queen_pg.listener import Listener
from queen_pg.log.standby import Mover
from queen_pg.routes import ROUTES, wire
from queen_pg.scheduler import Scheduler, Sweep
from queen_pg.wakeup import Waiters

# Both look at a bounded number of partitions, and what they look for is rare.
CLEAN_UP_SECONDS = 5.0
HINTS_SECONDS = 1.0
# A slot that stands by keeps as much of the log as is written in between.
STANDBY_SECONDS = 5.0
MEASURE_SECONDS = 10.0


class Application(Litestar):
    """The application; its hottest routes are reached past the framework's routing."""

    direct: wire.Direct

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a call."""
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
        database = Database(settings)
        mover = Mover(settings.pg_url or "")
        await database.start()
        try:
            app.state.database = database
            app.state.waiters = Waiters(database, settings)
            app.state.listener = Listener(settings, app.state.waiters)
            app.state.waiters.others = app.state.listener
            app.state.rates = Rates(settings)
            deliveries = Deliveries()
            app.state.conveyor = Conveyor(database, settings, deliveries)
            await app.state.conveyor.start()
            app.state.waiters.claimer = app.state.conveyor.claim
            app.state.waiters.deliveries = deliveries
            app.state.scheduler = Scheduler(
                database,
                app.state.waiters.pushed,
                attempts_max=settings.timers_max_attempts,
                sweeps=[*sweeps(database, settings), *log_sweeps(database, mover, settings)],
            )
            scheduling = asyncio.create_task(app.state.scheduler.run())
            app.state.listener.start()
            yield
            await drain(app)
            await scheduling
        finally:
            mover.close()
            await database.close()

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
    waiters: Waiters = app.state.waiters
    scheduler: Scheduler = app.state.scheduler
    listener: Listener = app.state.listener
    await waiters.close()
    await listener.stop()
    await scheduler.stop()


def sweeps(database: Database, settings: Settings) -> list[Sweep]:
    """Return the passes over partitions: retention, clean-up, and the mending of hints."""
    retention, all_partitions, hints = Walk(), Walk(), Walk()
    days = settings.partition_cleanup_days

    async def retain() -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        while await broker.retain(database, retention, days):
            # A long pass takes its time: four parts in five are left to everybody else.
            await asyncio.sleep(4 * (clock() - started))
            started = clock()

    async def clean_up() -> None:
        await broker.clean_up(database, all_partitions, days)

    async def mend() -> None:
        await broker.mend_hints(database, hints)

    return [
        Sweep("retention", settings.retention_interval_ms / 1000, retain),
        Sweep("clean-up", CLEAN_UP_SECONDS, clean_up),
        Sweep("hints", HINTS_SECONDS, mend),
    ]


def log_sweeps(database: Database, mover: Mover, settings: Settings) -> list[Sweep]:
    """Return what is done over and over for the replicated log."""

    async def measure() -> None:
        await epoch.measure(database)

    several = len(hosts(settings.pg_url or "")) > 1
    moving = [Sweep("standby slots", STANDBY_SECONDS, mover.run)] if several else []
    return [Sweep("log", MEASURE_SECONDS, measure), *moving]
