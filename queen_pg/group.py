"""A group: one replicated log, and what this process runs on it.

A tenant lives in exactly one group, so no step ever spans two. Where it lives stands in a table of
the home group (QUEEN_PG_URL); the other groups are those of QUEEN_PG_GROUPS. A tenant that no row
names lives at home.
"""

import asyncio
import contextlib

import msgspec

from queen_pg.broker import epoch, placement
from queen_pg.broker import retention as broker
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.quota import Quotas
from queen_pg.broker.rate import Rates
from queen_pg.broker.retention import Walk
from queen_pg.config import HOME, Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database
from queen_pg.errors import Unavailable
from queen_pg.leader import hosts
from queen_pg.listener import Listener
from queen_pg.log.standby import Mover
from queen_pg.scheduler import Scheduler, Sweep
from queen_pg.wakeup import Waiters

# Both look at a bounded number of partitions, and what they look for is rare.
CLEAN_UP_SECONDS = 5.0
HINTS_SECONDS = 1.0
# A slot that stands by keeps as much of the log as is written in between.
STANDBY_SECONDS = 5.0
MEASURE_SECONDS = 10.0
QUOTAS_SECONDS = 2.0

DEFAULT_TENANT_ID = 1
PLACEMENTS_MAX = 10_000


class Group:
    """The connections to one log, and the work that goes on there."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.database = Database(settings)
        self.waiters = Waiters(self.database, settings)
        self.listener = Listener(settings, self.waiters)
        self.rates = Rates(settings)
        self.quotas = Quotas(settings)
        deliveries = Deliveries()
        self.conveyor = Conveyor(self.database, settings, deliveries)
        self.waiters.others = self.listener
        self.waiters.claimer = self.conveyor.claim
        self.waiters.deliveries = deliveries
        self._mover = Mover(settings.pg_url or "")
        self.scheduler = Scheduler(
            self.database,
            self.waiters.pushed,
            attempts_max=settings.timers_max_attempts,
            sweeps=[
                *self._sweeps(settings),
                *self._quota_sweeps(),
                *self._log_sweeps(settings),
            ],
        )
        self._scheduling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and begin the background work; raise Unavailable when the log is away."""
        await self.database.start()
        await self.conveyor.start()
        self._scheduling = asyncio.create_task(self.scheduler.run())
        self.listener.start()

    async def drain(self) -> None:
        """Answer parked pops empty, take no new ones, and end the background work."""
        await self.waiters.close()
        await self.listener.stop()
        await self.scheduler.stop()

    async def close(self) -> None:
        """Drain, and close every connection."""
        if self._scheduling is not None:
            await self.drain()
            await self._scheduling
        self._mover.close()
        await self.database.close()

    def _sweeps(self, settings: Settings) -> list[Sweep]:
        """Return the passes over partitions: retention, clean-up, and the mending of hints."""
        retention, all_partitions, hints = Walk(), Walk(), Walk()
        days = settings.partition_cleanup_days

        async def retain() -> None:
            clock = asyncio.get_running_loop().time
            started = clock()
            while await broker.retain(self.database, retention, days):
                # A long pass takes its time: four parts in five are left to everybody else.
                await asyncio.sleep(4 * (clock() - started))
                started = clock()

        async def clean_up() -> None:
            await broker.clean_up(self.database, all_partitions, days)

        async def mend() -> None:
            await broker.mend_hints(self.database, hints)

        return [
            Sweep("retention", settings.retention_interval_ms / 1000, retain),
            Sweep("clean-up", CLEAN_UP_SECONDS, clean_up),
            Sweep("hints", HINTS_SECONDS, mend),
        ]

    def _quota_sweeps(self) -> list[Sweep]:
        """Return the measuring of what tenants keep, if there are quotas."""

        async def measure() -> None:
            seconds = await self.quotas.measure(self.database)
            # Counting a lot takes its time: four parts in five are left to everybody else.
            await asyncio.sleep(4 * seconds)

        return [Sweep("quotas", QUOTAS_SECONDS, measure)] if self.quotas.counts else []

    def _log_sweeps(self, settings: Settings) -> list[Sweep]:
        """Return what is done over and over for the replicated log."""

        async def measure() -> None:
            await epoch.measure(self.database, self.name)

        several = len(hosts(settings.pg_url or "")) > 1
        moving = [Sweep("standby slots", STANDBY_SECONDS, self._mover.run)] if several else []
        return [Sweep("log", MEASURE_SECONDS, measure), *moving]


class Place(msgspec.Struct, frozen=True):
    """Where a tenant lives, and its id there."""

    group: Group
    tenant: int


class Groups:
    """All groups that this process serves, and which tenant lives where."""

    def __init__(self, settings: Settings) -> None:
        self._groups = {
            name: Group(name, msgspec.structs.replace(settings, pg_url=url))
            for name, url in {HOME: settings.pg_url or "", **settings.group_urls}.items()
        }
        self.home = Place(self._groups[HOME], DEFAULT_TENANT_ID)
        self._places: dict[str, tuple[Place, float]] = {}

    async def start(self) -> None:
        """Start every group; raise Unavailable when one is away."""
        for group in self._groups.values():
            await group.start()

    async def drain(self) -> None:
        """Drain every group; may be repeated."""
        for group in self._groups.values():
            await group.drain()

    async def close(self) -> None:
        """Close every group."""
        async with contextlib.AsyncExitStack() as stack:
            for group in self._groups.values():
                stack.push_async_callback(group.close)

    def others(self) -> list[Group]:
        """Return the groups beside the home group."""
        return [group for name, group in self._groups.items() if name != HOME]

    async def place(self, tenant: str) -> Place:
        """Return where a tenant lives; raise Unavailable while it is being moved."""
        if tenant == placement.DEFAULT_TENANT:
            return self.home
        now = asyncio.get_running_loop().time()
        known = self._places.get(tenant)
        if known is not None and known[1] > now:
            return known[0]
        found = await self._look_up(tenant)
        if len(self._places) >= PLACEMENTS_MAX:
            self._places.clear()
        self._places[tenant] = found, now + placement.REMEMBERED_SECONDS
        return found

    async def _look_up(self, tenant: str) -> Place:
        name = await placement.group_of(self.home.group.database, tenant)
        if name is None:
            raise Unavailable("retry", "the tenant is being moved to another group; try again")
        group = self._groups.get(name)
        if group is None:
            raise Unavailable("retry", f"this broker does not know the tenant's group, {name}")
        return Place(group, await placement.tenant_id(group.database, tenant))
