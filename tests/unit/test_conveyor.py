"""What a lane takes next: in order, within bounds, and past those whose partition is busy."""

import asyncio
from collections.abc import Sequence

from queen_pg.conveyor import PASSED_MAX, _Belt, _Lane, _Load, _Part


def part(*partitions: int, tenant: int = 1, items: int = 1) -> _Part:
    return _Part(
        tenant=tenant,
        consumer_group="",
        items=[None] * items,
        partitions=list(partitions),
        bytes=0,
        deadline=0.0,
        since=0.0,
        answer=asyncio.get_running_loop().create_future(),
    )


async def nothing(parts: Sequence[_Part]) -> Sequence[None]:
    return [None] * len(parts)


async def test_parts_for_busy_partitions_stay_and_so_does_what_follows_for_theirs() -> None:
    belt = _Belt("push", nothing)
    one, two, three, four = part(1), part(1, 2), part(2), part(3)
    belt.waiting.extend([one, two, three, four])
    assert belt.next_batch(10, {1}) == [four]
    assert list(belt.waiting) == [one, two, three]
    assert belt.next_batch(10, set()) == [one, two, three]


async def test_a_batch_is_of_one_tenant_and_within_bounds() -> None:
    belt = _Belt("push", nothing)
    first, second, other = part(1, 2), part(3), part(4, tenant=2)
    belt.waiting.extend([first, second, other])
    assert belt.next_batch(2, set()) == [first]
    assert belt.next_batch(2, set()) == [second]
    assert belt.next_batch(2, set()) == [other]


async def test_the_search_for_others_ends() -> None:
    belt = _Belt("push", nothing)
    belt.waiting.extend([*(part(1) for _ in range(PASSED_MAX)), part(2)])
    assert belt.next_batch(10, {1}) == []
    assert len(belt.waiting) == PASSED_MAX + 1


async def test_two_kinds_run_side_by_side_but_never_on_one_partition() -> None:
    running: dict[int, str] = {}
    together = 0
    carried: list[str] = []

    def carrier(kind: str) -> _Belt:
        async def carry(parts: Sequence[_Part]) -> Sequence[None]:
            nonlocal together
            mine = [partition for each in parts for partition in each.partitions]
            assert not running.keys() & set(mine)
            running.update(dict.fromkeys(mine, kind))
            together = max(together, len(set(running.values())))
            await asyncio.sleep(0.002)
            for partition in mine:
                running.pop(partition, None)
            carried.extend([kind] * len(parts))
            return [None] * len(parts)

        return _Belt(kind, carry)

    load = _Load()
    lane = _Lane([carrier("push"), carrier("ack")], load)
    parts = []
    for number in range(40):
        for kind in ("push", "ack"):
            each = part(number % 3)
            load.take_in([each])
            lane.put(kind, each)
            parts.append(each)
        await asyncio.sleep(0.0005)
    await asyncio.wait_for(asyncio.gather(*(each.answer for each in parts)), 10)
    assert sorted(carried) == ["ack"] * 40 + ["push"] * 40
    assert together == 2
