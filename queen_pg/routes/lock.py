"""Locks and semaphores: `POST /api/v1/locks` (step 4)."""

from litestar.response.base import ASGIResponse

from queen_pg.broker import lock, switch
from queen_pg.routes import surface, wire


@surface.speaking("locks")
async def call(request: wire.AnyRequest) -> ASGIResponse:
    """Carry out lock operations, independent of each other; results come in their order."""
    operations = await surface.read_operations(request)
    tenant = wire.tenant(request)
    database = wire.database(request)
    async with switch.first(database, "kv"):
        if lock.is_growth(operations):
            surface.quotas(request).check_kv(tenant)
        surface.rates(request).spend(tenant, "write" if lock.is_write(operations) else "read")
        validated = lock.validate(operations)
    return surface.results(
        await lock.run(database, tenant, validated, wire.deadline()), indexed=True
    )


ROUTES = [wire.bare("POST", "/api/v1/locks", call)]
