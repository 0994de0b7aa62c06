"""Which group a tenant lives in, and its id there (placement.sql)."""

from queen_pg.config import HOME
from queen_pg.database import Database

DEFAULT_TENANT = "00000000-0000-0000-0000-000000000001"
REMEMBERED_SECONDS = 5.0
"""How long a broker goes by what it knows of a tenant's place; moving one waits for longer."""


async def group_of(db: Database, tenant: str) -> str | None:
    """Ask the home group where a tenant lives; None while it is being moved."""
    rows = await db.read("_placement", tenant=tenant)
    if not rows:
        return HOME
    name: str | None = rows[0]["log_group"]
    return name


async def tenant_id(db: Database, tenant: str) -> int:
    """Return a tenant's id in its group, entering it there when it is new."""
    [[found]] = await db.read("_tenant_id", name=tenant)
    return int(found)
