"""Waiting pops: the lines in which they stand, and how these are found by what wakes them.

Pops of one source, a group on a queue or on one partition of it, stand in one line. A line is there
for as long as somebody stands in it or it is being served.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from queen_pg.broker.pop import Demand, Group, PopAnswer, Source


class Waiter(msgspec.Struct, eq=False):
    """One pop in line."""

    demand: Demand
    answer: asyncio.Future[PopAnswer]
    gone: Callable[[], bool]
    wait: bool
    autopilot: bool
    served: bool = False
    entered: bool = False


class Line:
    """The pops of one source, and the task that serves them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.waiters: list[Waiter] = []
        self.group: Group | None = None
        self.group_id: int | None = None
        self.conflation: bool | None = None
        self.seeding = False
        self.task: asyncio.Task[None] | None = None
        self.due = False


class Lines:
    """All lines, to be found by what wakes them."""

    def __init__(self) -> None:
        self._all: dict[Source, Line] = {}
        # By queue, and there by partition; None for those that read all of it.
        self._of_queue: defaultdict[tuple[int, str], defaultdict[str | None, set[Line]]]
        self._of_queue = defaultdict(lambda: defaultdict(set))
        self._of_group: defaultdict[int, set[Line]] = defaultdict(set)

    def __iter__(self) -> Iterator[Line]:
        return iter(list(self._all.values()))

    def open(self, source: Source) -> Line:
        """Return the line of a source."""
        line = self._all.get(source)
        if line is None:
            line = self._all[source] = Line(source)
            self._of_queue[source.tenant, source.queue][source.partition].add(line)
        return line

    def close(self, line: Line) -> None:
        """Forget a line in which nobody stands; a wake that comes late may close it once more."""
        self.move(line, None)
        if self._all.get(line.source) is line:
            del self._all[line.source]
            queue, partition = (line.source.tenant, line.source.queue), line.source.partition
            lines = self._of_queue[queue]
            lines[partition].discard(line)
            if not lines[partition]:
                del lines[partition]
            if not lines:
                del self._of_queue[queue]

    def move(self, line: Line, group_id: int | None) -> None:
        """Note the id of the group that a line's pops are for."""
        if group_id == line.group_id:
            return
        if line.group_id is not None:
            self._of_group[line.group_id].discard(line)
            if not self._of_group[line.group_id]:
                del self._of_group[line.group_id]
        if group_id is not None:
            self._of_group[group_id].add(line)
        line.group_id = group_id

    def of_queue(self, tenant: int, queue: str) -> list[Line]:
        """Return the lines that read all of a queue."""
        return list(self._by_partition(tenant, queue).get(None, ()))

    def of_partition(self, tenant: int, queue: str, partition: str) -> list[Line]:
        """Return the lines at one partition."""
        return list(self._by_partition(tenant, queue).get(partition, ()))

    def of_partitions(self, tenant: int, queue: str) -> list[Line]:
        """Return the lines at the single partitions of a queue."""
        return [
            line
            for partition, lines in self._by_partition(tenant, queue).items()
            if partition is not None
            for line in lines
        ]

    def _by_partition(self, tenant: int, queue: str) -> Mapping[str | None, set[Line]]:
        return self._of_queue.get((tenant, queue)) or {}

    def of_group(self, group_id: int) -> list[Line]:
        """Return the lines of a group."""
        return list(self._of_group.get(group_id, ()))
