"""Repeated transaction ids: one message is stored, whoever pushes it, and however often."""

import asyncpg

from tests.support.process import Process


async def test_a_push_of_nothing_but_duplicates_leaves_the_partition_as_it_is(
    one: Process, session: asyncpg.Connection
) -> None:
    """data-plane 10.1-3: not even its quiet time begins again (10.3)."""
    state = "select p.* from queen.partitions p where p.name = 'p'"
    await one.push_one("mail", "p", "t")
    before = await session.fetchrow(state)
    # Of so many others some go in one transaction with it.
    others = [one.item("mail", f"other {number}") for number in range(20)]
    results = await one.push([one.item("mail", "p", "t"), *others, one.item("mail", "p", "t")])
    assert [result.status for result in results] == ["duplicate", *["queued"] * 20, "duplicate"]
    assert await session.fetchrow(state) == before
