"""What this process has delivered: so an ack need not look its messages up again.

It is a hint about facts that never change: which offset a delivered message has, and which group it
was delivered to. Whether the lease still stands is for the step to judge.
"""

from collections import OrderedDict
from collections.abc import Mapping
from uuid import UUID

import msgspec

# Messages that one process remembers; each takes some 200 bytes.
MESSAGES_MAX = 200_000


class Delivery(msgspec.Struct, frozen=True):
    """What one pop was given of one partition: the offset of each transaction id."""

    tenant: int
    consumer_group: str
    group_id: int
    lease_id: UUID
    offsets: Mapping[str, int]


class Deliveries:
    """The latest deliveries, by lease and partition."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], Delivery] = OrderedDict()
        # The latest lease on each cursor, by group and partition.
        self._leases: dict[tuple[int, int], str] = {}
        self._messages = 0

    def note(self, partition_id: int, delivery: Delivery) -> None:
        """Remember a delivery, and forget the oldest where there are too many."""
        key = (str(delivery.lease_id), partition_id)
        self.forget(*key)
        self._known[key] = delivery
        self._leases[delivery.group_id, partition_id] = key[0]
        self._messages += len(delivery.offsets)
        while self._messages > MESSAGES_MAX:
            self.forget(*next(iter(self._known)))

    def find(self, lease_id: str, partition_id: int) -> Delivery | None:
        """Return what was delivered under a lease from a partition."""
        return self._known.get((lease_id, partition_id))

    def out(self, group_id: int, partition_id: int) -> bool:
        """Whether the latest delivery of a partition to a group is not known to be settled."""
        return (group_id, partition_id) in self._leases

    def forget(self, lease_id: str, partition_id: int) -> None:
        """Drop a delivery that is settled."""
        gone = self._known.pop((lease_id, partition_id), None)
        if gone is not None:
            self._messages -= len(gone.offsets)
            if self._leases.get((gone.group_id, partition_id)) == lease_id:
                del self._leases[gone.group_id, partition_id]
