"""The kill switches: what an operator has paused (step 5)."""

import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from queen_pg.database import Database
from queen_pg.errors import RETRY_AFTER_SECONDS, Declined


class Switches(msgspec.Struct, frozen=True):
    """Whether each surface is open."""

    kv: bool
    timers_schedule: bool
    timers_fire: bool


async def read(db: Database) -> Switches:
    """Return the switches as they stand."""
    [row] = await db.read("_switches")
    return Switches(**row)


async def throw(
    db: Database, *, kv: bool | None, timers_schedule: bool | None, timers_fire: bool | None
) -> Switches:
    """Throw the switches that are not None, for all brokers at once; return all as they stand."""
    await db.read(
        "_throw_switches", kv=kv, timers_schedule=timers_schedule, timers_fire=timers_fire
    )
    return await read(db)


def kv_disabled() -> Declined:
    """Return the refusal of a paused KV."""
    return _disabled("kv_disabled", "KV is switched off")


def timers_disabled() -> Declined:
    """Return the refusal of paused scheduling."""
    return _disabled("timers_disabled", "scheduling timers is switched off; cancels still work")


def _disabled(code: str, message: str) -> Declined:
    return Declined(code, code, message, status=503, retry_after=RETRY_AFTER_SECONDS)


@contextlib.asynccontextmanager
async def first(db: Database, surface: Literal["kv", "timers_schedule"]) -> AsyncIterator[None]:
    """Let a paused surface answer so, before any refusal that is raised inside (step 5).

    The step itself reads the switch; only a call that never gets there has to ask for it.
    """
    try:
        yield
    except Declined:
        switches = await read(db)
        if surface == "kv" and not switches.kv:
            raise kv_disabled() from None
        if surface == "timers_schedule" and not switches.timers_schedule:
            raise timers_disabled() from None
        raise
