"""What a lane takes next: in order, within bounds, and past those whose partition is busy."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence

import pytest

from queen_pg.errors import Unavailable
from queen_pg.lanes import PASSED_MAX, Belt, Lanes, Part, Traffic


def part(*partitions: int, tenant: int = 1, items: int = 1) -> Part:
    return Part(
        tenant=tenant,
        consumer_group="",
        items=[None] * items,
        partitions=list(partitions),
        bytes=0,
        deadline=0.0,
        since=0.0,
        answer=asyncio.get_running_loop().create_future(),
    )


def busy(*partitions: int) -> Traffic:
    traffic = Traffic()
    traffic.busy.update(partitions)
    return traffic


async def nothing(parts: Sequence[Part]) -> Sequence[None]:
    return [None] * len(parts)


async def test_parts_for_busy_partitions_stay_and_so_does_what_follows_for_theirs() -> None:
    belt = Belt("push", nothing)
    one, two, three, four = part(1), part(1, 2), part(2), part(3)
    belt.waiting.extend([one, two, three, four])
    assert belt.next_batch(10, busy(1)) == [four]
    assert list(belt.waiting) == [one, two, three]
    assert belt.next_batch(10, Traffic()) == [one, two, three]


async def test_a_batch_is_of_one_tenant_and_within_bounds() -> None:
    belt = Belt("push", nothing)
    first, second, other = part(1, 2), part(3), part(4, tenant=2)
    belt.waiting.extend([first, second, other])
    assert belt.next_batch(2, Traffic()) == [first]
    assert belt.next_batch(2, Traffic()) == [second]
    assert belt.next_batch(2, Traffic()) == [other]


async def test_the_search_for_others_ends() -> None:
    belt = Belt("push", nothing)
    belt.waiting.extend([*(part(1) for _ in range(PASSED_MAX)), part(2)])
    assert belt.next_batch(10, busy(1)) == []
    assert len(belt.waiting) == PASSED_MAX + 1


async def test_two_kinds_run_side_by_side_but_never_on_one_partition() -> None:
    running: dict[int, str] = {}
    together = 0
    carried: list[str] = []

    def carrier(kind: str) -> Belt:
        async def carry(parts: Sequence[Part]) -> Sequence[None]:
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

        return Belt(kind, carry)

    lanes = Lanes(1, lambda: [carrier("push"), carrier("ack")])
    parts = []
    for number in range(40):
        for kind in ("push", "ack"):
            each = part(number % 3)
            lanes.load.take_in([each])
            lanes.put(0, kind, each)
            parts.append(each)
        await asyncio.sleep(0.0005)
    await asyncio.wait_for(asyncio.gather(*(each.answer for each in parts)), 10)
    assert sorted(carried) == ["ack"] * 40 + ["push"] * 40
    assert together == 2


class Works:
    """Lanes whose parts and steps note what they do, each for as long as it is told."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = Lanes(lanes, lambda: [Belt("push", self._carry), Belt("ack", self._carry)])
        self.present: Counter[int] = Counter()
        self.done: list[str] = []
        self._names: dict[int, str] = {}
        self._gates: dict[str, asyncio.Event] = {}

    async def put(
        self, name: str, *partitions: int, kind: str = "push", wide: bool = False
    ) -> asyncio.Future[None]:
        each = part(*partitions)
        each.since = asyncio.get_running_loop().time()
        self._names[id(each)] = name
        self.lanes.load.take_in([each])
        self.lanes.put(self.lanes.lane_of(partitions[0], wide=wide), kind, each)
        await settle()
        return each.answer

    async def cross(self, name: str, *partitions: int, seconds: float = 60) -> asyncio.Task[None]:
        task = asyncio.create_task(self._cross(name, partitions, seconds))
        await settle()
        return task

    async def _cross(self, name: str, partitions: Sequence[int], seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        async with self.lanes.cross(partitions, deadline):
            await self._work([name], partitions)

    async def _carry(self, parts: Sequence[Part]) -> Sequence[None]:
        names = [self._names[id(each)] for each in parts]
        await self._work(names, {partition for each in parts for partition in each.partitions})
        return [None] * len(parts)

    async def _work(self, names: Sequence[str], partitions: Collection[int]) -> None:
        self.present.update(partitions)
        assert max(self.present.values(), default=0) <= 1, "two are at one partition"
        try:
            for name in names:
                await self._gate(name).wait()
        finally:
            self.present.subtract(partitions)
        self.done.extend(names)

    def _gate(self, name: str) -> asyncio.Event:
        return self._gates.setdefault(name, asyncio.Event())

    async def finish(self, name: str) -> None:
        """Let what has this name end, now or once it begins."""
        self._gate(name).set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_waits_until_nobody_is_at_its_partitions_and_others_go_on() -> None:
    works = Works()
    await works.put("push", 1)
    step = await works.cross("step", 1, 2)
    for name in ("step", "other step", "other push"):
        await works.finish(name)
    await works.cross("other step", 3)
    await works.put("other push", 4, kind="ack")
    assert works.done == ["other step", "other push"]
    await works.finish("push")
    await step
    assert works.done == ["other step", "other push", "push", "step"]


async def test_who_comes_for_a_partition_of_a_waiting_step_stays_behind_it() -> None:
    works = Works()
    await works.put("first", 1)
    step = await works.cross("step", 1, 2, 3)
    for name in ("later part", "later step", "step"):
        await works.finish(name)
    later = [await works.put("later part", 2, kind="ack"), await works.cross("later step", 3)]
    assert works.done == []
    await works.finish("first")
    await asyncio.gather(step, *later)
    assert works.done[:2] == ["first", "step"]


async def test_a_step_does_not_overtake_a_part_that_was_passed_over() -> None:
    works = Works()
    await works.cross("first", 1)
    await works.put("part", 1)
    for name in ("part", "step"):
        await works.finish(name)
    step = await works.cross("step", 1)
    await works.finish("first")
    await step
    assert works.done == ["first", "part", "step"]


async def test_the_halves_of_a_wide_call_go_side_by_side() -> None:
    works = Works()
    even, odd = (2, 4), (3, 5)
    halves = [
        await works.put("even", *even, wide=True),
        await works.put("odd", *odd, wide=True),
    ]
    assert {partition for partition, count in works.present.items() if count} == {*even, *odd}
    await works.finish("odd")
    await works.finish("even")
    await asyncio.gather(*halves)


async def test_a_step_does_not_overtake_half_of_a_wide_call_that_was_passed_over() -> None:
    works = Works()
    await works.cross("first", 3)
    await works.put("half", 3, 5, wide=True)
    for name in ("half", "step"):
        await works.finish(name)
    step = await works.cross("step", 3)
    await works.finish("first")
    await step
    assert works.done == ["first", "half", "step"]


async def test_half_of_a_wide_call_goes_on_when_the_other_lane_lets_go_of_its_partition() -> None:
    works = Works()
    await works.put("narrow", 3)
    half = await works.put("half", 3, 5, wide=True)
    await works.finish("half")
    assert works.done == []
    await works.finish("narrow")
    await half
    assert works.done == ["narrow", "half"]


async def test_a_step_whose_time_is_over_says_so_and_lets_the_others_pass() -> None:
    works = Works()
    await works.put("first", 1)
    step = await works.cross("step", 1, 2, seconds=0.01)
    await works.finish("later")
    later = await works.put("later", 2, kind="ack")
    with pytest.raises(Unavailable, match="timeout"):
        await step
    await later
    await works.finish("first")
    await works.finish("last")
    await (await works.put("last", 1))
    assert works.done == ["later", "first", "last"]


@pytest.mark.parametrize("when", ["waiting", "let go ahead", "at work"])
async def test_a_step_that_is_cancelled_leaves_nothing_behind(when: str) -> None:
    works = Works()
    first = await works.cross("first", 1)
    step = await works.cross("step", 1, 2)
    await works.finish("last")
    last = await works.put("last", 2)
    if when == "let go ahead":
        # It has its way, and has not heard of it yet.
        first.cancel()
        await asyncio.sleep(0)
        assert 2 in works.lanes._traffic.busy
        assert not works.present[2]
    elif when == "at work":
        await works.finish("first")
        assert works.present[2]
    step.cancel()
    await last
    await works.finish("first")
    await works.finish("end")
    await (await works.cross("end", 1, 2))
    assert "step" not in works.done
    assert works.done[-1] == "end"


async def test_nobody_waits_for_ever() -> None:
    works = Works(lanes=3)
    order = random.Random(1)
    waiting: list[Awaitable[None]] = []
    names = [str(number) for number in range(300)]
    for name in names:
        if order.random() < 0.5:
            waiting.append(await works.cross(name, *order.sample(range(9), order.randint(1, 4))))
        else:
            kind = order.choice(("push", "ack"))
            wide = order.random() < 0.5
            waiting.append(await works.put(name, order.randrange(9), kind=kind, wide=wide))
        if order.random() < 0.3:
            await works.finish(order.choice(names))
    for name in names:
        await works.finish(name)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert works.lanes.load.items == 0
    assert works.lanes._traffic.busy == set()
    assert works.lanes._traffic.waiting == {}
