"""Partitions by name: their ids, which never change, so that a step need not look them up."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from queen_pg.database import Database

PartitionName = tuple[str, str]
"""A queue and the name of a partition in it."""

# Ids that one process remembers; each takes some 300 bytes.
IDS_MAX = 100_000


async def resolve(
    db: Database, tenant: int, names: Sequence[PartitionName], deadline: float
) -> dict[PartitionName, int]:
    """Return the ids of those partitions that exist."""
    if not names:
        return {}
    rows = await db.read(
        "_resolve_partitions",
        deadline=deadline,
        tenant=tenant,
        group_queue=[queue for queue, _ in names],
        group_partition=[partition for _, partition in names],
    )
    return {names[row["place"] - 1]: row["partition_id"] for row in rows}


class PartitionIds:
    """Remembers the ids of partitions, and creates partitions that are missing.

    A remembered partition may have been deleted; the step that uses its id finds out, and the id is
    to be forgotten.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ids: OrderedDict[tuple[int, PartitionName], int] = OrderedDict()

    def known(self, tenant: int, name: PartitionName) -> int | None:
        """Return a remembered id."""
        key = (tenant, name)
        found = self._ids.get(key)
        if found is not None:
            self._ids.move_to_end(key)
        return found

    async def resolve(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        """Return the ids of those partitions that exist, looking up only what is not known."""
        ids = {name: found for name in names if (found := self.known(tenant, name)) is not None}
        unknown = [name for name in names if name not in ids]
        if unknown:
            found_now = await resolve(self._db, tenant, unknown, deadline)
            self._remember(tenant, found_now)
            ids |= found_now
        return ids

    async def ensure(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        """Return the ids of partitions, after creating those that do not exist."""

        async def attempt() -> dict[PartitionName, int]:
            ids = await resolve(self._db, tenant, names, deadline)
            while missing := [name for name in names if name not in ids]:
                rows = await self._db.step(
                    "_create_partitions",
                    deadline=deadline,
                    tenant=tenant,
                    group_queue=[queue for queue, _ in missing],
                    group_partition=[partition for _, partition in missing],
                )
                ids |= {missing[row["place"] - 1]: row["partition_id"] for row in rows}
                if len(rows) < len(missing):
                    ids |= await resolve(self._db, tenant, missing, deadline)
            return ids

        found = await self._db.retry("create_partitions", deadline, attempt)
        self._remember(tenant, found)
        return found

    def _remember(self, tenant: int, found: Mapping[PartitionName, int]) -> None:
        for name, partition_id in found.items():
            self._ids[tenant, name] = partition_id
        while len(self._ids) > IDS_MAX:
            self._ids.popitem(last=False)

    def forget(self, tenant: int, names: Iterable[PartitionName]) -> None:
        """Drop ids that proved to be gone."""
        for name in names:
            self._ids.pop((tenant, name), None)
