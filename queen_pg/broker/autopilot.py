"""Autopilot: how much a group is given at a time, from how fast it has worked (data-plane 4.6-3).

Every process learns for itself, from the leases that it granted and saw settled; nothing depends on
it but the size of a batch.
"""

from collections import OrderedDict
from uuid import UUID

from queen_pg.broker.pop import Source

# A batch is what a group works off in this time, between these bounds.
BATCH_SECONDS = 0.2
BATCH_MIN = 100
BATCH_MAX = 1000
# What the newest lease counts in the measured pace.
WEIGHT = 0.25
# What is remembered, the newest of it.
LEASES_MAX = 10_000
GROUPS_MAX = 10_000


class Pace:
    """The pace of groups, in messages acked per second of lease."""

    def __init__(self) -> None:
        self._leases: OrderedDict[UUID, tuple[Source, int, float]] = OrderedDict()
        self._paces: OrderedDict[Source, float] = OrderedDict()

    def batch(self, source: Source) -> int:
        """Return the batch for a group; BATCH_MIN while its pace is not known."""
        return max(BATCH_MIN, min(round(self._paces.get(source, 0) * BATCH_SECONDS), BATCH_MAX))

    def delivered(self, source: Source, lease_id: UUID, messages: int, now: float) -> None:
        """Note what was delivered under a lease; `now` is in seconds."""
        self._leases[lease_id] = (source, messages, now)
        if len(self._leases) > LEASES_MAX:
            self._leases.popitem(last=False)

    def settled(self, lease_id: UUID, now: float) -> None:
        """Learn from a lease that an ack has released."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        source, messages, since = lease
        pace = messages / max(now - since, 0.001)
        known = self._paces.get(source)
        self._paces[source] = pace if known is None else known + WEIGHT * (pace - known)
        self._paces.move_to_end(source)
        if len(self._paces) > GROUPS_MAX:
            self._paces.popitem(last=False)
