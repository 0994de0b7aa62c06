"""Acks: what a consumer says of the messages it was delivered."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from queen_pg.database import Database

QUEUE_MODE = "__QUEUE_MODE__"

AckStatus = Literal["completed", "failed", "retry", "dlq"]

# PostgreSQL's bigint; a partition id beyond it names nothing.
LARGEST_ID = 2**63 - 1


class AckItem(msgspec.Struct, frozen=True):
    """One ack: a message by its transaction id in a partition, and what became of it."""

    partition_id: int
    transaction_id: str
    status: AckStatus = "completed"
    error: str | None = None
    lease_id: str | None = None

    def document(self, consumer_group: str, call: int = 0) -> dict[str, Any]:
        """Return the ack as the SQL functions read it; acks of different calls are judged apart."""
        return {
            "partitionId": self.partition_id if self.partition_id <= LARGEST_ID else None,
            "consumerGroup": consumer_group,
            "leaseId": self.lease_id or None,
            "transactionId": self.transaction_id,
            "status": self.status,
            "error": self.error,
            "call": call,
        }


class AckResult(msgspec.Struct, frozen=True, rename="camel"):
    """What an ack is told; `error` is None when it succeeded (data-plane 6.2)."""

    success: bool
    error: str | None
    lease_released: bool
    dlq: bool
    noop: bool


class Acked(msgspec.Struct, frozen=True):
    """The results of a call, and the ids of the groups that can claim something again at once."""

    results: list[AckResult]
    woken: list[int]


def released(items: Sequence[AckItem], results: Sequence[AckResult]) -> set[str]:
    """Return the ids of the leases that these acks have released."""
    return {
        item.lease_id
        for item, result in zip(items, results, strict=True)
        if item.lease_id and result.lease_released
    }


async def ack(
    db: Database, tenant: int, consumer_group: str, items: Sequence[AckItem], deadline: float
) -> Acked:
    """Judge and apply acks; each (partition, lease) is decided on its own (data-plane 6.3)."""
    return await ack_calls(db, tenant, [(consumer_group, items)], deadline)


async def ack_calls(
    db: Database,
    tenant: int,
    calls: Sequence[tuple[str, Sequence[AckItem]]],
    deadline: float,
    *,
    patient: bool = True,
) -> Acked:
    """Do the same for several calls, each a consumer group and its acks, in one transaction.

    Unless `patient`, raise Held when somebody's transaction holds what they need.
    """
    documents = msgspec.json.encode(
        [
            item.document(consumer_group, call)
            for call, (consumer_group, items) in enumerate(calls)
            for item in items
        ]
    ).decode()

    async def attempt() -> Acked:
        [row] = await db.step("_ack", deadline=deadline, tenant=tenant, acks=documents)
        return Acked(msgspec.json.decode(row["results"], type=list[AckResult]), row["woken"])

    return await db.retry("ack", deadline, attempt, patient=patient)
