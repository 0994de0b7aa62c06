"""The kill switches: `GET` and `POST /api/v1/system/kv-timers` (step 5)."""

import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse

from queen_pg.broker import switch
from queen_pg.broker.switch import Switches
from queen_pg.errors import BadRequest
from queen_pg.routes import surface, wire


class _Body(msgspec.Struct, rename="camel"):
    kv: bool | None = None
    timers_schedule: bool | None = None
    timers_fire: bool | None = None


_body = msgspec.json.Decoder(_Body)


@get("/api/v1/system/kv-timers")
async def read(request: wire.AnyRequest) -> ASGIResponse:
    """Say which of KV, the scheduling and the firing of timers are switched on."""
    return wire.answer(_rendered(await switch.read(wire.database(request))))


@post("/api/v1/system/kv-timers", status_code=200)
async def throw(request: wire.AnyRequest) -> ASGIResponse:
    """Switch KV, the scheduling or the firing of timers on or off, for all brokers at once."""
    body = wire.parse(_body, await wire.read_body(request))
    if body == _Body():
        raise BadRequest("name at least one of kv, timersSchedule and timersFire")
    switches = await switch.throw(
        wire.database(request),
        kv=body.kv,
        timers_schedule=body.timers_schedule,
        timers_fire=body.timers_fire,
    )
    surface.scheduler(request).wake()
    return wire.answer(
        {
            **_rendered(switches),
            # Kept for clients of brokers that copied the switches from node to node.
            "mirrored": True,
            "message": "the switches are in the database: every broker sees them at once",
        }
    )


def _rendered(switches: Switches) -> dict[str, bool]:
    return {
        "kvEnabled": switches.kv,
        "timersScheduleEnabled": switches.timers_schedule,
        "timersFireEnabled": switches.timers_fire,
    }


ROUTES = [read, throw]
