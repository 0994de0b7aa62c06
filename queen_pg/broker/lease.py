"""Leases: extend them, and give back those that nobody received."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from queen_pg.database import Database


class Extension(msgspec.Struct, frozen=True):
    """How many leases were extended, and the earliest of their new expiries."""

    renewed: int
    expires_at: datetime | None


async def extend(
    db: Database, tenant: int, lease_id: str, seconds: int, deadline: float
) -> Extension:
    """Extend every live lease of an id by `seconds` from now; a lease never gets shorter.

    An id that is unknown, expired or another tenant's extends nothing (data-plane 7).
    """
    try:
        lease = UUID(lease_id)
    except ValueError:
        return Extension(0, None)

    async def attempt() -> Extension:
        found = await db.read("_find_lease", deadline=deadline, tenant=tenant, lease_id=lease)
        if not found:
            return Extension(0, None)
        [row] = await db.step(
            "_extend_lease",
            deadline=deadline,
            lease_id=lease,
            seconds=seconds,
            partition_id=[row["partition_id"] for row in found],
            group_id=[row["group_id"] for row in found],
        )
        return Extension(row["renewed"], row["expires_at"])

    return await db.retry("extend_lease", deadline, attempt)


async def give_back(
    db: Database,
    lease_id: UUID,
    partition_ids: Sequence[int],
    group_id: int,
    deadline: float,
) -> None:
    """Release a lease whose answer could not be handed over (data-plane 4.3-12)."""

    async def attempt() -> None:
        await db.step(
            "_return_lease",
            deadline=deadline,
            lease_id=lease_id,
            partition_id=list(partition_ids),
            group_id=[group_id] * len(partition_ids),
        )

    await db.retry("return_lease", deadline, attempt)
