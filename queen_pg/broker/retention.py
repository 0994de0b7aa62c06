"""Retention and the other passes over all partitions, a bounded piece at a time."""

import asyncio
from typing import Any

import asyncpg
import msgspec

from queen_pg.database import Database

WALK_BATCH = 1000
FORGET_BATCH = 5000
CALL_SECONDS = 30.0


class Walk(msgspec.Struct):
    """Where a pass over all partitions has come to: a queue or group, and a partition's name."""

    at: int = 0
    name: str = ""


async def retain(db: Database, walk: Walk, cleanup_days: int) -> bool:
    """Do what is due in the next partitions of queues with a rule; False at the end of the walk.

    Messages are taken from the front of a partition by its queue's rules, and rows that nobody
    needs any more are deleted (data-plane 11).
    """
    queues = await db.read("_next_retaining", queue_id=walk.at)
    if not queues:
        walk.at, walk.name = 0, ""
        return False
    queue_id = queues[0]["queue_id"]
    if queue_id != walk.at:
        walk.at, walk.name = queue_id, ""
    due = await _carry_out(db, walk, queue_id, cleanup_days)
    if len(due) < WALK_BATCH:
        walk.at, walk.name = queue_id + 1, ""
    else:
        walk.name = due[-1]["name"]
    return True


async def clean_up(db: Database, walk: Walk, cleanup_days: int) -> None:
    """Do the same in the next partitions of all queues, and delete those that hold nothing.

    A rule may have been taken back before all of its work was done.
    """
    due = await _carry_out(db, walk, None, cleanup_days)
    at_end = len(due) < WALK_BATCH
    walk.at, walk.name = (0, "") if at_end else (due[-1]["queue_id"], due[-1]["name"])


async def _carry_out(
    db: Database, walk: Walk, last_queue_id: int | None, cleanup_days: int
) -> list[asyncpg.Record]:
    due = await db.read(
        "_retention_due",
        after_queue_id=walk.at,
        after_name=walk.name,
        last_queue_id=last_queue_id,
        batch_max=WALK_BATCH,
        cleanup_days=cleanup_days,
    )
    raised = [row for row in due if row["keep_from"] is not None]
    forgotten = [row for row in due if row["forget_below"] is not None]
    expired = [row["partition_id"] for row in due if row["expired"]]
    if raised:
        await _step(
            db,
            "_raise_log_start",
            partition_id=[row["partition_id"] for row in raised],
            keep_from=[row["keep_from"] for row in raised],
        )
    while forgotten:
        deleted = await _step(
            db,
            "_forget_messages",
            partition_id=[row["partition_id"] for row in forgotten],
            forget_below=[row["forget_below"] for row in forgotten],
            batch_max=FORGET_BATCH,
        )
        if deleted < FORGET_BATCH:
            break
    if expired:
        await _step(db, "_delete_partitions", partition_id=expired, cleanup_days=cleanup_days)
    return due


async def mend_hints(db: Database, walk: Walk) -> int:
    """Enter missing hints for a group's next partitions; return how many were looked at.

    A group that was registered beside a push under way may lack a hint, and its pops would not
    find those messages.
    """
    groups = await db.read("_group_from", group_id=walk.at)
    if not groups:
        walk.at, walk.name = 0, ""
        return 0
    [group] = groups
    if group["group_id"] != walk.at:
        walk.at, walk.name = group["group_id"], ""
    [seen] = await db.read(
        "_walk_ready",
        group_id=group["group_id"],
        queue_id=group["queue_id"],
        after_name=walk.name,
        batch_max=WALK_BATCH,
    )
    if seen["last_name"] is None:
        walk.at, walk.name = group["group_id"] + 1, ""
    else:
        walk.name = seen["last_name"]
    count: int = seen["seen"]
    return count


async def _step(db: Database, function: str, **arguments: Any) -> int:
    deadline = asyncio.get_running_loop().time() + CALL_SECONDS

    async def attempt() -> int:
        [[count]] = await db.step(function, deadline=deadline, **arguments)
        return int(count)

    return await db.retry(function.removeprefix("_"), deadline, attempt)
