"""Waiting pops: the lines in which they stand, and how these are found by what wakes them.

Pops of one source, a group on a queue or on one partition of it, stand in one line. A line is there
for as long as somebody stands in it or it is being served.

A line remembers what it is told of pushes, to hand that over without a look, and when nothing was
left for its group. Both are beliefs: the claim judges the one, the poll renews the other.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from queen_pg.broker.append import Append
from queen_pg.broker.pop import Claim, Demand, Group, PopAnswer, Source

# How many partitions with something to hand over a line remembers; more is a look's business.
APPENDS_MAX = 64


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
        # Whether somebody has said that something is there, and it was not looked for since.
        self.look = False
        # When the walk over everything began that has left nothing behind.
        self.walked_at = -math.inf
        # How many looks have begun.
        self.looks = 0
        self._appends: dict[int, Append] = {}

    def told(self, append: Append) -> None:
        """Note what was pushed: to hand it over or, where that is not certain, to look."""
        # The first message of a partition meets no cursor, and where one would begin is to be seen.
        if (
            self.group is None
            or self.group["conflation"]
            or self.group["delaying"]
            or append.partition_id is None
            or append.first_offset == 0
        ):
            self.look = True
            return
        before = self._appends.pop(append.partition_id, None)
        together = append if before is None else before.join(append)
        if together is None or len(self._appends) >= APPENDS_MAX:
            self.look = True
        else:
            self._appends[append.partition_id] = together

    def take(self) -> list[Append]:
        """Return what is there to hand over, in the order in which it came."""
        appends = list(self._appends.values())
        self._appends.clear()
        return appends

    def leased(self, claims: list[Claim]) -> None:
        """Forget what cannot be handed over any more: what precedes it has been leased."""
        for claim in claims:
            self._appends.pop(claim.partition_id, None)

    def doubt(self) -> None:
        """Believe nothing any more about what is there."""
        self.look = True
        self.walked_at = -math.inf


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
