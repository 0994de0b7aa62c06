"""Conditions on keys that are not there: what keeps them true until the commit is no row's lock.

It is isolation; where a SQL user has less of it, a placeholder row. Each checker is proved without
either: the functions run at READ COMMITTED and are told that they do not.
"""

import asyncio
from typing import Any

import asyncpg
import msgspec
import pytest

from queen_pg.broker import kv
from queen_pg.broker.push import PushItem
from queen_pg.broker.transaction import Transaction, Verdict, commit
from queen_pg.database import Database
from tests.anomaly.conftest import Opener
from tests.support.isolation import soon, weaken

NAMESPACE = "rota"
PLANTS = pytest.mark.parametrize(
    ("lowered", "weakened"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["as it is", "weakened", "lowered", "lowered and weakened"],
)


def absent(key: str) -> dict[str, Any]:
    return {"op": "check", "ns": NAMESPACE, "key": key, "expect": 0, "required": True}


def put(key: str) -> dict[str, Any]:
    return {"op": "put", "ns": NAMESPACE, "key": key, "value": "true"}


async def step(db: Database, *operations: dict[str, Any]) -> Verdict:
    """Commit the operations and a message that tells of it."""
    item = PushItem("log", operations[-1]["key"], msgspec.json.encode(operations[-1]["key"]))
    return await commit(db, 1, Transaction(items=[item], kv=operations), soon())


async def rely_on_isolation(sql: asyncpg.Connection) -> None:
    await weaken(
        sql, "_kv_hold", "current_setting('transaction_isolation') = 'serializable'", "true"
    )


@PLANTS
async def test_write_skew_over_two_keys(
    open_door: Opener, meeting: asyncpg.Connection, *, lowered: bool, weakened: bool
) -> None:
    # Each of two doctors goes off duty provided that the other has not.
    if weakened:
        await rely_on_isolation(meeting)
    async with open_door(lowered=lowered) as db:
        await step(db, put("monday"))
        verdicts = await asyncio.gather(
            step(db, absent("alice-off"), put("bob-off"), put("~meeting-1")),
            step(db, absent("bob-off"), put("alice-off"), put("~meeting-2")),
        )
        off = await meeting.fetchval("select count(*) from queen.kv where key like '%-off'")
        told = await meeting.fetchval("select count(*) from queen.messages")
    won = [verdict for verdict in verdicts if verdict.success]
    if lowered and weakened:
        assert len(won) == 2, "the checker sees no skew"
        return
    [lost] = [verdict for verdict in verdicts if not verdict.success]
    assert (lost.reason, lost.failure and lost.failure.kv_reason) == ("kv_precondition", "exists")
    assert told == 2
    if not lowered:
        assert off == 1
        # The loser was sent back, and judged again from the start.
        assert db.lost.total() > 0


@PLANTS
async def test_a_reader_sees_no_state_between_two_steps(
    open_door: Opener, meeting: asyncpg.Connection, *, lowered: bool, weakened: bool
) -> None:
    # A fee is due unless money came in. Whoever sees the money and no fee must be right for good.
    if weakened:
        await rely_on_isolation(meeting)
    async with open_door(lowered=lowered) as db:
        await step(db, put("monday"))
        fee = asyncio.create_task(step(db, absent("paid"), put("fee"), put("~meeting-1")))
        async with asyncio.timeout(10):
            while not await meeting.fetchval("select is_called from queen.arrivals"):
                await asyncio.sleep(0.001)
        assert (await step(db, put("paid"))).success
        seen = await kv.run(
            db,
            1,
            [{"op": "get", "ns": NAMESPACE, "key": key} for key in ("paid", "fee")],
            soon(),
        )
        await meeting.execute("select nextval('queen.arrivals')")
        verdict = await fee
    paid, fined = (msgspec.json.decode(result)["found"] for result in seen)
    assert paid
    if lowered and weakened:
        assert (verdict.success, fined) == (True, False), "the checker sees no anomaly"
    else:
        assert verdict.success == fined
        assert lowered or not fined
