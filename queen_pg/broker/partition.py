"""Partitions by name: their ids, which never change, so that a step need not look them up."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from queen_pg.database import Database
from queen_pg.errors import QueenError, Unavailable

PartitionName = tuple[str, str]
"""A queue and the name of a partition in it."""

# Ids that one process remembers; each takes some 300 bytes.
IDS_MAX = 100_000
# Names that one question is about; those beyond it go into the next one.
NAMES_MAX = 1000

Ask = Callable[[int, Sequence[PartitionName], float], Awaitable[dict[PartitionName, int]]]
"""Asks for ids in a tenant until a deadline; returns those that there are."""


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


async def ensure(
    db: Database, tenant: int, names: Sequence[PartitionName], deadline: float
) -> dict[PartitionName, int]:
    """Return the ids of partitions, after creating those that do not exist."""

    async def attempt() -> dict[PartitionName, int]:
        ids = await resolve(db, tenant, names, deadline)
        while missing := [name for name in names if name not in ids]:
            rows = await db.step(
                "_create_partitions",
                deadline=deadline,
                tenant=tenant,
                group_queue=[queue for queue, _ in missing],
                group_partition=[partition for _, partition in missing],
            )
            ids |= {missing[row["place"] - 1]: row["partition_id"] for row in rows}
            if len(rows) < len(missing):
                ids |= await resolve(db, tenant, missing, deadline)
        return ids

    return await db.retry("create_partitions", deadline, attempt)


class PartitionIds:
    """Remembers the ids of partitions, and creates partitions that are missing.

    A remembered partition may have been deleted; the step that uses its id finds out, and the id is
    to be forgotten.
    """

    def __init__(self, db: Database) -> None:
        self._memory = _Memory()
        self._resolve = _Shared(lambda *asked: resolve(db, *asked))
        self._ensure = _Shared(lambda *asked: ensure(db, *asked))

    async def resolve(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        """Return the ids of those partitions that exist, looking up only what is not known."""
        return await self._find(self._resolve, tenant, names, deadline)

    async def ensure(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        """Return the ids of partitions, after creating those that do not exist."""
        return await self._find(self._ensure, tenant, names, deadline)

    def forget(self, tenant: int, names: Iterable[PartitionName]) -> None:
        """Drop ids that proved to be gone."""
        self._memory.forget(tenant, names)

    async def _find(
        self, shared: "_Shared", tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        ids = self._memory.known(tenant, names)
        if len(ids) < len(names):
            unknown = [name for name in names if name not in ids]
            found = await shared.ask(tenant, unknown, deadline)
            self._memory.note(tenant, found)
            ids |= found
        return ids


class _Memory:
    """The ids that were used last, in two generations: the older one makes room for the younger."""

    def __init__(self) -> None:
        self._young: dict[tuple[int, PartitionName], int] = {}
        self._old: dict[tuple[int, PartitionName], int] = {}

    def known(self, tenant: int, names: Iterable[PartitionName]) -> dict[PartitionName, int]:
        """Return the ids that are remembered."""
        ids: dict[PartitionName, int] = {}
        young, old = self._young, self._old
        for name in names:
            found = young.get((tenant, name))
            if found is None:
                found = old.get((tenant, name))
                if found is None:
                    continue
                self.note(tenant, {name: found})
            ids[name] = found
        return ids

    def note(self, tenant: int, found: Mapping[PartitionName, int]) -> None:
        """Remember ids."""
        for name, partition_id in found.items():
            self._young[tenant, name] = partition_id
        if len(self._young) > IDS_MAX // 2:
            self._young, self._old = {}, self._young

    def forget(self, tenant: int, names: Iterable[PartitionName]) -> None:
        """Forget ids."""
        for name in names:
            self._young.pop((tenant, name), None)
            self._old.pop((tenant, name), None)


class _Question:
    """What some callers want to know together."""

    def __init__(self, deadline: float) -> None:
        self.names: dict[PartitionName, None] = {}
        self.deadline = deadline
        self.callers = 0
        self.answer: asyncio.Task[dict[PartitionName, int]]


class _Shared:
    """Asks one question at a time for each tenant; whoever comes meanwhile shares the next one."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._last: dict[int, _Question] = {}
        self._open: dict[int, _Question] = {}

    async def ask(
        self, tenant: int, names: Sequence[PartitionName], deadline: float
    ) -> dict[PartitionName, int]:
        """Return the ids of those names that have one."""
        question = self._open.get(tenant)
        if question is None or len(question.names) >= NAMES_MAX:
            question = self._begin(tenant, deadline)
        question.names.update(dict.fromkeys(names))
        question.deadline = max(question.deadline, deadline)
        question.callers += 1
        try:
            async with asyncio.timeout_at(deadline):
                ids = await asyncio.shield(question.answer)
        except TimeoutError:
            raise Unavailable("timeout", "timeout: the database did not answer in time") from None
        except Unavailable:
            raise
        except QueenError:
            if question.callers == 1:
                raise
            # It may be another's name that is refused.
            return await self._ask(tenant, names, deadline)
        finally:
            # An error's traceback holds this frame: it must not hold the error in turn.
            del question
        return {name: ids[name] for name in names if name in ids}

    def _begin(self, tenant: int, deadline: float) -> _Question:
        question = _Question(deadline)
        before = self._last.get(tenant)
        question.answer = asyncio.create_task(self._carry(tenant, question, before))
        # Its callers may all have gone when it fails.
        question.answer.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._last[tenant] = self._open[tenant] = question
        return question

    async def _carry(
        self, tenant: int, question: _Question, before: _Question | None
    ) -> dict[PartitionName, int]:
        try:
            if before is not None:
                await asyncio.wait([before.answer])
            if self._open.get(tenant) is question:
                del self._open[tenant]
            return await self._ask(tenant, list(question.names), question.deadline)
        finally:
            if self._last.get(tenant) is question:
                del self._last[tenant]
            del question
