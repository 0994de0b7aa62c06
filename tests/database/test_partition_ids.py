"""What a process remembers of partitions, and how its callers look them up together."""

import asyncio
from collections.abc import Sequence

import pytest

from queen_pg.broker import partition
from queen_pg.broker.partition import PartitionIds, PartitionName
from queen_pg.database import Database
from queen_pg.errors import BadRequest, Unavailable

TENANT = 1


def soon() -> float:
    """Return a deadline that is not reached."""
    return asyncio.get_running_loop().time() + 30


class Asked:
    """Stands before a question to the database, and notes what it is about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.names: list[list[PartitionName]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        real = getattr(partition, name)

        async def ask(
            db: Database, tenant: int, names: Sequence[PartitionName], deadline: float
        ) -> dict[PartitionName, int]:
            self.names.append(list(names))
            await self.gate.wait()
            if ("refused", "p") in names:
                raise BadRequest("refused")
            found: dict[PartitionName, int] = await real(db, tenant, names, deadline)
            return found

        monkeypatch.setattr(partition, name, ask)


async def test_callers_at_one_time_share_a_question(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, "ensure")
    ids = PartitionIds(db)
    asked.gate.clear()
    first = asyncio.create_task(ids.ensure(TENANT, [("q", "first")], soon()))
    await asyncio.sleep(0.01)
    others = [
        asyncio.create_task(ids.ensure(TENANT, [("q", f"p-{number}"), ("q", "all")], soon()))
        for number in range(20)
    ]
    await asyncio.sleep(0.01)
    asked.gate.set()
    found = await asyncio.gather(first, *others)

    assert [len(names) for names in asked.names] == [1, 21]
    assert len({each["q", "all"] for each in found[1:]}) == 1
    assert len({id_ for each in found for id_ in each.values()}) == 22
    assert all(len(each) == 2 for each in found[1:]), "each is told what it asked for"
    await ids.ensure(TENANT, [("q", "all"), ("q", "p-7")], soon())
    assert len(asked.names) == 2, "what is known is not asked for"


async def test_one_callers_refusal_is_not_anothers(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    Asked(monkeypatch, "ensure")
    ids = PartitionIds(db)
    good, bad = await asyncio.gather(
        ids.ensure(TENANT, [("q", "p")], soon()),
        ids.ensure(TENANT, [("refused", "p")], soon()),
        return_exceptions=True,
    )
    assert isinstance(good, dict)
    assert isinstance(bad, BadRequest)


async def test_a_caller_waits_until_its_own_deadline_and_spoils_nothing(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, "ensure")
    ids = PartitionIds(db)
    asked.gate.clear()
    patient = asyncio.create_task(ids.ensure(TENANT, [("q", "p")], soon()))
    with pytest.raises(Unavailable, match="timeout"):
        await ids.ensure(TENANT, [("q", "p")], asyncio.get_running_loop().time() + 0.05)
    asked.gate.set()
    assert set(await patient) == {("q", "p")}


async def test_what_does_not_exist_is_asked_for_again(db: Database) -> None:
    ids = PartitionIds(db)
    assert await ids.resolve(TENANT, [("q", "p")], soon()) == {}
    made = await ids.ensure(TENANT, [("q", "p")], soon())
    assert await ids.resolve(TENANT, [("q", "p")], soon()) == made


async def test_what_was_used_last_is_remembered(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "IDS_MAX", 20)
    asked = Asked(monkeypatch, "resolve")
    ids = PartitionIds(db)
    for number in range(50):
        await ids.ensure(TENANT, [("q", f"p-{number}")], soon())
        await ids.resolve(TENANT, [("q", "p-0")], soon())
    assert asked.names.count([("q", "p-0")]) <= 1, "what is in use stays"
    asked.names.clear()
    await ids.resolve(TENANT, [("q", "p-1")], soon())
    assert asked.names == [[("q", "p-1")]], "what is not makes room"
