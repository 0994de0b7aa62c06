"""What one broker process is inside, without HTTP: several of them may share a database."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from queen_pg.broker import lease, queue
from queen_pg.broker.ack import QUEUE_MODE, Acked, AckItem, AckStatus
from queen_pg.broker.append import appends
from queen_pg.broker.delivery import Deliveries
from queen_pg.broker.lease import Extension
from queen_pg.broker.pop import Claim, PopAnswer, PopRequest
from queen_pg.broker.push import PushItem, PushResult
from queen_pg.broker.transaction import Transaction, Verdict
from queen_pg.config import Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database
from queen_pg.wakeup import Waiters

TENANT = 1
DEADLINE_SECONDS = 30.0


class Process:
    """Calls to one process, each with the deadline that the wire gives by default."""

    def __init__(self, url: str, *, database: Database | None = None, pool_size: int = 8) -> None:
        settings = Settings(pg_url=url, pg_pool_size=pool_size)
        self.db = Database(settings) if database is None else database
        deliveries = Deliveries()
        self.conveyor = Conveyor(self.db, settings, deliveries)
        self.waiters = Waiters(self.db, settings)
        self.waiters.claimer = self.conveyor.claim
        self.waiters.deliveries = deliveries
        self._payloads = itertools.count()

    async def __aenter__(self) -> "Process":
        await self.db.start()
        await self.conveyor.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.waiters.close()
        await self.db.close()

    def deadline(self) -> float:
        """Return the instant at which a call that starts now gives up."""
        return asyncio.get_running_loop().time() + DEADLINE_SECONDS

    def item(self, queue: str, partition: str, transaction_id: str | None = None) -> PushItem:
        """Return a message whose payload no other message of this process has."""
        payload = str(next(self._payloads)).encode()
        return PushItem(queue, partition, payload, transaction_id)

    async def push(self, items: Sequence[PushItem]) -> list[PushResult]:
        """Push, and wake who waits here, as the route does."""
        results = await self.conveyor.push(TENANT, items, self.deadline())
        self.waiters.pushed_to(TENANT, appends(items, results))
        return results

    async def push_one(
        self, queue: str, partition: str = "Default", transaction_id: str | None = None
    ) -> PushResult:
        """Push one message."""
        [result] = await self.push([self.item(queue, partition, transaction_id)])
        return result

    async def pop(
        self, queue: str | None, *, gone: Callable[[], bool] = lambda: False, **parameters: Any
    ) -> PopAnswer:
        """Pop; a named group reads from the start unless it says otherwise."""
        parameters.setdefault("subscription_mode", "all")
        return await self.waiters.pop(TENANT, PopRequest(queue=queue, **parameters), gone)

    async def settled(self) -> None:
        """Return once no pop is being served: those that are left wait."""
        await asyncio.sleep(0)
        while self.waiters._looking is not None or any(
            line.task is not None for line in self.waiters._lines
        ):
            await asyncio.sleep(0.001)

    async def ack(
        self,
        answer: PopAnswer,
        status: AckStatus = "completed",
        *,
        claims: Sequence[Claim] | None = None,
    ) -> Acked:
        """Give every message of an answer, or of some of its claims, one status."""
        return await self.ack_items(
            answer.consumer_group,
            [
                AckItem(
                    claim.partition_id,
                    message.transaction_id,
                    status,
                    lease_id=None if answer.lease_id is None else str(answer.lease_id),
                )
                for claim in (answer.claims if claims is None else claims)
                for message in claim.messages
            ],
        )

    async def ack_items(self, consumer_group: str | None, items: Sequence[AckItem]) -> Acked:
        """Ack, and wake who waits here, as the route does."""
        acked = await self.conveyor.ack(
            TENANT, consumer_group or QUEUE_MODE, items, self.deadline()
        )
        self.waiters.freed(acked.woken)
        return acked

    async def extend(self, lease_id: str, seconds: int) -> Extension:
        """Extend a lease."""
        return await lease.extend(self.db, TENANT, lease_id, seconds, self.deadline())

    async def commit(self, one: Transaction) -> Verdict:
        """Carry out a transaction, and wake who waits here, as the route does."""
        verdict = await self.conveyor.commit(TENANT, one, self.deadline())
        if verdict.success:
            self.waiters.pushed_to(TENANT, appends(one.items, verdict.pushes))
            self.waiters.freed(verdict.woken)
        return verdict

    async def configure(self, name: str, **options: Any) -> None:
        """Create a queue, or change some of its options."""
        await queue.configure(self.db, TENANT, name, options, self.deadline(), replace=False)

    async def delete(self, name: str) -> bool:
        """Delete a queue, as the route does."""
        existed = await queue.delete(self.db, TENANT, name, self.deadline())
        self.waiters.deleted(TENANT, name)
        return existed


def messages(answer: PopAnswer) -> list[str]:
    """Return the payloads of an answer."""
    return [message.payload for claim in answer.claims for message in claim.messages]


def offsets(answer: PopAnswer) -> list[int]:
    """Return the offsets of an answer."""
    return [message.offset for claim in answer.claims for message in claim.messages]
