"""Append: what a push has put at the end of a partition, as far as those who wait need to know."""

from collections.abc import Iterable, Sequence

import msgspec

from queen_pg.broker.push import PushItem, PushResult


class Append(msgspec.Struct, frozen=True):
    """Offsets that were appended to a partition, from the first to the last.

    Without a `partition_id` no more is known than that something was.
    """

    queue: str
    partition: str
    partition_id: int | None = None
    first_offset: int = 0
    last_offset: int = 0

    def join(self, other: "Append") -> "Append | None":
        """Return both as one, or None when they are not next to each other."""
        first, last = sorted((self, other), key=_first)
        if first.last_offset + 1 != last.first_offset:
            return None
        return msgspec.structs.replace(first, last_offset=last.last_offset)


def appends(items: Sequence[PushItem], results: Iterable[PushResult]) -> list[Append]:
    """Return what a call has appended, partition by partition; its offsets there have no gaps."""
    found: dict[tuple[str, str], tuple[PushResult, PushResult]] = {}
    for item, result in zip(items, results, strict=True):
        if result.status == "queued":
            name = (item.queue, item.partition)
            before = found.get(name)
            found[name] = (before[0] if before else result, result)
    return [
        Append(*name, first.partition_id, first.offset or 0, last.offset or 0)
        for name, (first, last) in found.items()
    ]


def _first(append: Append) -> int:
    return append.first_offset
