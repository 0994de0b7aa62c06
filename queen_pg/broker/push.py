"""Push: append messages to their partitions."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec

from queen_pg.broker.partition import PartitionName, resolve
from queen_pg.database import Database, Repeat, array
from queen_pg.errors import DuplicateMessage

T = TypeVar("T")

# What one push may append to one partition, in bytes of ids and payloads (data-plane 12).
APPEND_MAX_BYTES = 96 * 1024 * 1024
# What an id holds for the first message of an append: the UUID's variant, and place 1.
FIRST_PLACE = 0x800001
_BYTES_PER_CHARACTER = 4


class PushItem(msgspec.Struct, frozen=True):
    """One message to push; `payload` is its JSON document, kept as it is."""

    queue: str
    partition: str
    payload: bytes
    transaction_id: str | None = None
    message_id: UUID | None = None
    trace_id: UUID | None = None
    producer_sub: str | None = None


class PushResult(msgspec.Struct, frozen=True):
    """What became of a message; of a duplicate, the id and offset of the original.

    The partition's id is there when the append was given it.
    """

    status: Literal["queued", "duplicate", "error"]
    message_id: str | None
    transaction_id: str
    offset: int | None
    partition_id: int | None = None


class Batch:
    """The messages of a call as the arrays that queen._push takes, group by group.

    A group is the call's share for one partition. Groups go in the order in which the step locks
    their partitions: by id, then those to be created by name. Several calls may share a batch;
    `calls` then says which one each message is of, and their appends keep stamps of their own.
    """

    def __init__(self, items: Sequence[PushItem], calls: Sequence[int] | None = None) -> None:
        self._items = items
        self._calls = calls
        self._groups: dict[PartitionName, list[int]] = {}
        for place, item in enumerate(items):
            self._groups.setdefault((item.queue, item.partition), []).append(place)

    def too_large(self) -> set[int]:
        """Return the places of the messages whose append would be over its limit."""
        if sum(map(_size_at_most, self._items)) <= APPEND_MAX_BYTES:
            return set()
        return {
            place
            for places in self._groups.values()
            if sum(_size(self._items[place]) for place in places) > APPEND_MAX_BYTES
            for place in places
        }

    @property
    def names(self) -> list[PartitionName]:
        """The partitions that the call pushes to."""
        return list(self._groups)

    def groups(self) -> Iterable[tuple[PartitionName, list[int]]]:
        """Return each partition with the places of its messages in the call."""
        return self._groups.items()

    def lay_out(self, ids: Mapping[PartitionName, int]) -> "Arrays":
        """Lay the arrays out, given the ids of the partitions that exist."""
        groups = self._groups
        known = ids.keys() >= groups.keys()
        if known:
            order = sorted(groups, key=ids.__getitem__)
        else:
            order = sorted(groups, key=lambda name: (name not in ids, ids.get(name, 0), name))
        sizes = [len(groups[group]) for group in order]
        places = [place for group in order for place in groups[group]]
        items = [self._items[place] for place in places]
        partition_ids = [ids.get(name) for name in order]
        return Arrays(
            places=places,
            sizes=sizes,
            partition_ids=partition_ids,
            arguments={
                # Names are for those to be created.
                "group_queue": None if known else [queue for queue, _ in order],
                "group_partition": None if known else [partition for _, partition in order],
                "group_partition_id::bigint[]": array(partition_ids),
                "item_group::integer[]": array(
                    [number for number, size in enumerate(sizes, 1) for _ in range(size)]
                ),
                "item_message_id": _column([item.message_id for item in items]),
                "item_transaction_id": [item.transaction_id for item in items],
                "item_trace_id": _column([item.trace_id for item in items]),
                "item_producer_sub": _column([item.producer_sub for item in items]),
                "item_payload": [str(item.payload, "utf-8") for item in items],
                **self._appends(order),
            },
        )

    def _appends(self, order: Iterable[PartitionName]) -> dict[str, str]:
        """Number the appends of each group, for a batch in which some group holds several."""
        if self._calls is None or len(self._groups) == len(self._items):
            return {}
        numbers = []
        for group in order:
            number = 0
            before = None
            for place in self._groups[group]:
                call = self._calls[place]
                number += before is not None and call != before
                before = call
                numbers.append(number)
        return {"item_append::integer[]": array(numbers)} if any(numbers) else {}


class Arrays(msgspec.Struct, frozen=True):
    """A batch laid out: SQL arguments, and the place in the call of each message.

    Of each group it has the size, and the id of the partition, if there is one.
    """

    places: list[int]
    sizes: list[int]
    partition_ids: list[int | None]
    arguments: dict[str, Any]

    async def store(
        self, db: Database, tenant: int, deadline: float, *, careful: bool
    ) -> list[PushResult]:
        """Run the step. Optimistic unless careful: a duplicate then raises DuplicateMessage."""
        if careful:
            return self.results(
                await db.step(
                    "_push", deadline=deadline, tenant=tenant, **self.arguments, careful=True
                )
            )
        [row] = await db.step(
            "_append", deadline=deadline, tenant=tenant, **self.arguments, **self.extents()
        )
        return self.appended(row)

    def extents(self) -> dict[str, str]:
        """Return where each group begins, and its size: what queen._append takes besides."""
        first = itertools.accumulate(self.sizes, initial=1)
        return {
            "group_first::integer[]": array(itertools.islice(first, len(self.sizes))),
            "group_size::integer[]": array(self.sizes),
        }

    def results(self, rows: Iterable[Mapping[str, Any]]) -> list[PushResult]:
        """Return the results that queen._push answered, in the order of the call."""
        results: list[Any] = [None] * len(self.places)
        given = self.arguments["item_transaction_id"]
        for row in rows:
            item = row["item"] - 1
            message_id = str(row["message_id"])
            transaction_id = message_id if given[item] is None else given[item]
            results[self.places[item]] = PushResult(
                row["status"], message_id, transaction_id, row["message_offset"]
            )
        return results

    def appended(self, row: Mapping[str, Any]) -> list[PushResult]:
        """Return the results of queen._append: ids as queen._appended_id makes them."""
        results: list[Any] = [None] * len(self.places)
        message_ids = self.arguments["item_message_id"]
        transaction_ids = self.arguments["item_transaction_id"]
        tail = row["tail"]
        item = 0
        for size, partition_id, first, head in zip(
            self.sizes,
            self.partition_ids,
            row["first_offset"],
            row["head"],
            strict=True,
        ):
            start = f"{head[:8]}-{head[8:12]}-{head[12:]}-"
            for offset in range(first, first + size):
                if message_ids is None or message_ids[item] is None:
                    digits = f"{FIRST_PLACE + item:x}"
                    message_id = f"{start}{digits[:4]}-{digits[4:]}{tail}"
                else:
                    message_id = str(message_ids[item])
                given = transaction_ids[item]
                results[self.places[item]] = PushResult(
                    "queued",
                    message_id,
                    message_id if given is None else given,
                    offset,
                    partition_id,
                )
                item += 1
        return results


def repeat(
    db: Database,
    tenant: int,
    items: Sequence[PushItem],
    deadline: float,
    tells: Callable[[Any], bool] | None = None,
) -> Repeat:
    """Return how a push that got no answer is repeated: each message is found by its id.

    With `tells`, the messages are of one transaction, and one that can be found is enough.
    """
    queues = {item.queue for item in items}
    enough = all if tells is None else any

    async def safe() -> bool:
        rows = await db.read("_forgetting", deadline=deadline, tenant=tenant, queue=sorted(queues))
        forgetting = {row["forgetting_queue"] for row in rows}
        return enough(
            item.transaction_id is not None and item.queue not in forgetting for item in items
        )

    return Repeat(safe) if tells is None else Repeat(safe, tells)


async def push(
    db: Database, tenant: int, items: Sequence[PushItem], deadline: float
) -> list[PushResult]:
    """Append every message that is not a duplicate; return a result for each, in order.

    Messages for one partition become visible together, with consecutive offsets (data-plane 2.2-4).
    The first run is optimistic; a duplicate makes it fail, and the careful run tells which.
    """
    refused = Batch(items).too_large()
    accepted = [item for place, item in enumerate(items) if place not in refused]
    stored = iter(await _push_all(db, tenant, accepted, deadline) if accepted else [])
    return [
        PushResult("error", None, item.transaction_id or "", None)
        if place in refused
        else next(stored)
        for place, item in enumerate(items)
    ]


async def _push_all(
    db: Database, tenant: int, items: Sequence[PushItem], deadline: float
) -> list[PushResult]:
    batch = Batch(items)
    careful = False

    async def attempt() -> list[PushResult]:
        nonlocal careful
        while True:
            arrays = batch.lay_out(await resolve(db, tenant, batch.names, deadline))
            try:
                return await arrays.store(db, tenant, deadline, careful=careful)
            except DuplicateMessage:
                if careful:
                    raise
                careful = True

    return await db.retry("push", deadline, attempt, repeat=repeat(db, tenant, items, deadline))


def _column(values: list[T | None]) -> list[T | None] | None:
    """Return a column as it is sent: rarely given ones have nothing to send, mostly."""
    return None if all(value is None for value in values) else values


def _size(item: PushItem) -> int:
    return len(item.payload) + len((item.transaction_id or "").encode())


def _size_at_most(item: PushItem) -> int:
    return len(item.payload) + _BYTES_PER_CHARACTER * len(item.transaction_id or "")
