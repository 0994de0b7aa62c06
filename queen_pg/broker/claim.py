"""Claim: lease spans of offsets, proposed outside the step, in one step for several pops."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from queen_pg.database import Database
from queen_pg.errors import Conflict


class Span(msgspec.Struct, frozen=True):
    """Offsets of a partition to be leased to a pop, and the cursor as the proposal saw it.

    `next_offset` is the partition's, `committed_offset` where the group is or would begin. A
    `queue_id` says that nobody has looked: the step judges the queue's delays, and knows its lease.
    """

    partition_id: int
    group_id: int
    cursor_exists: bool
    committed_offset: int
    start_offset: int
    end_offset: int
    next_offset: int
    lease_id: UUID
    lease_seconds: int | None
    commit_on_delivery: bool
    conflated: bool
    queue_id: int | None = None


KEY_TAKEN = "23505"

Claimer = Callable[[Sequence[Span], float], Awaitable[Sequence[int | None]]]
"""Claims spans until a deadline, as `claim` does."""


async def claim(db: Database, spans: Sequence[Span], deadline: float) -> list[int | None]:
    """Claim spans; return for each the number of its delivery attempt, or None when it is lost.

    Lost is what has changed since its proposal. Raises Held, and claims nothing, when somebody's
    transaction holds something that is to be written.
    """
    order: dict[tuple[int, int], int] = {}
    for place, span in enumerate(spans):
        order.setdefault((span.partition_id, span.group_id), place)
    places = [order[key] for key in sorted(order)]
    chosen = [spans[place] for place in places]
    arguments = {name: [getattr(span, name) for span in chosen] for name in Span.__struct_fields__}

    partitions = [span.partition_id for span in chosen]

    async def attempt() -> list[Any]:
        try:
            async with db.turn(partitions):
                return await db.step("_claim", deadline=deadline, **arguments)
        except Conflict as conflict:
            if conflict.sqlstate == KEY_TAKEN:
                # Somebody else's is the first cursor there: all of this is to be proposed again.
                return []
            raise

    attempts: list[int | None] = [None] * len(spans)
    rows = await db.retry(
        "claim",
        deadline,
        attempt,
        on=(Conflict,),
        patient=False,
        partitions=partitions,
    )
    for row in rows:
        attempts[places[row["place"] - 1]] = row["delivery_attempt"]
    return attempts
