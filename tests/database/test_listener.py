"""What brokers tell each other, and what SQL users tell them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

import asyncpg
import pytest
import pytest_asyncio

from queen_pg import listener as module
from queen_pg import wakeup
from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import PushItem, push
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.listener import HERE, Listener
from queen_pg.wakeup import Waiters

LISTENING = (
    "select pid from pg_stat_activity where datname = current_database()"
    " and query like '%pg_notify%' and pid <> pg_backend_pid()"
)


class Heard:
    """Ears that remember what they heard."""

    def __init__(self) -> None:
        self.queues: list[tuple[int, str]] = []
        self.groups: list[int] = []

    def pushed(self, tenant: int, queues: Iterable[str], *, heard: bool = False) -> None:
        assert heard
        self.queues.extend((tenant, queue) for queue in queues)

    def freed(self, group_ids: Iterable[int], *, heard: bool = False) -> None:
        assert heard
        self.groups.extend(group_ids)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def neighbours(database: str) -> AsyncIterator[list[tuple[Listener, Heard]]]:
    """Two listeners that know of each other."""
    opened = []
    for _ in range(2):
        ears = Heard()
        opened.append((Listener(Settings(pg_url=database), ears), ears))
    for listener, _ in opened:
        listener.start()
    await until(lambda: all(listener._neighbours for listener, _ in opened))
    yield opened
    for listener, _ in opened:
        await listener.stop()


async def test_one_broker_tells_another_and_not_itself(
    neighbours: list[tuple[Listener, Heard]],
) -> None:
    (speaker, itself), (_, other) = neighbours
    for _ in range(50):
        speaker.tell_pushed(1, ["orders", 'a/b"ü'])
        speaker.tell_freed([7])
    await until(lambda: other.groups and len(other.queues) == 2)
    # Fifty commits within a moment are one message.
    assert sorted(other.queues) == [(1, 'a/b"ü'), (1, "orders")]
    assert other.groups == [7]
    assert itself.queues == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_listener_that_is_about_to_speak_can_be_stopped(database: str, turns: int) -> None:
    """Whatever step it is at between being told and speaking, it ends."""
    listener = Listener(Settings(pg_url=database), Heard())
    listener.start()
    await asyncio.sleep(0.2)
    listener._say(HERE)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await listener.stop()


async def test_a_broker_that_is_alone_says_nothing(database: str) -> None:
    listener = Listener(Settings(pg_url=database), Heard())
    listener.start()
    spy = await asyncpg.connect(database)
    said: list[object] = []
    await spy.add_listener("queen", lambda *message: said.append(message[3]))
    listener.tell_pushed(1, ["orders"])
    await spy.execute("select pg_notify('queen', 'the end')")
    await until(lambda: "the end" in said)
    assert not [message for message in said if "orders" in str(message)]
    await listener.stop()
    await spy.close()


async def test_a_listener_that_is_cut_off_comes_back(
    neighbours: list[tuple[Listener, Heard]], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.01)
    (speaker, _), (_, other) = neighbours
    connection = await asyncpg.connect(database)
    ended = {pid for (pid,) in await connection.fetch(LISTENING)}
    assert len(ended) == 2
    await connection.execute("select pg_terminate_backend(p, 5000) from unnest($1::int[]) p", ended)
    await until(lambda: speaker._neighbours.keys() - ended)
    speaker.tell_pushed(1, ["orders"])
    await until(lambda: other.queues)
    await connection.close()


async def test_noise_on_the_channel_is_ignored(
    neighbours: list[tuple[Listener, Heard]], database: str
) -> None:
    connection = await asyncpg.connect(database)
    for noise in ("", "hello", "{}", "[]", '["pushed"]', '["pushed","1","q"]', '["freed","x"]'):
        await connection.execute("select pg_notify('queen', $1)", noise)
    await connection.execute("select queen._tell_pushed(1, '{last}', true)")
    _, ears = neighbours[1]
    await until(lambda: (1, "last") in ears.queues)
    assert ears.queues == [(1, "last")]
    assert ears.groups == []
    await connection.close()


async def test_behind_a_transaction_pooler_nobody_listens(database: str) -> None:
    listener = Listener(Settings(pg_url=database, pg_pooler=True), Heard())
    listener.start()
    listener.tell_pushed(1, ["orders"])
    await listener.stop()


@pytest_asyncio.fixture
async def parked(
    db: Database, database: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator["asyncio.Task[int]"]:
    """A pop that waits, in a process whose poll does not come."""
    monkeypatch.setattr(wakeup, "POLL_SECONDS", 3600.0)
    settings = Settings(pg_url=database)
    waiters = Waiters(db, settings)
    listener = Listener(settings, waiters)
    waiters.others = listener
    listener.start()
    request = PopRequest(queue="orders", consumer_group="g", wait=True, timeout_ms=60_000)

    async def wait() -> int:
        return len((await waiters.pop(1, request)).claims)

    task = asyncio.create_task(wait())
    await until(lambda: list(waiters._lines) and not any(line.task for line in waiters._lines))
    # The listener has said that it is there once it listens.
    spy = await asyncpg.connect(database)
    async with asyncio.timeout(20):
        while not await spy.fetch(LISTENING):
            await asyncio.sleep(0.005)
    await spy.close()
    yield task
    await listener.stop()
    await waiters.close()


@pytest.mark.parametrize("how", ["argument", "setting"])
async def test_a_parked_pop_hears_of_a_push_by_sql_at_once(
    parked: "asyncio.Task[int]", database: str, how: str
) -> None:
    connection = await asyncpg.connect(database)
    if how == "setting":
        await connection.execute("set queen.notify = on")
        await connection.execute("select queen.push('orders', '1')")
    else:
        await connection.execute("select queen.push('orders', '1', notify => true)")
    assert await asyncio.wait_for(parked, 20) == 1
    await connection.close()


async def test_a_parked_pop_hears_of_a_push_through_another_broker(
    parked: "asyncio.Task[int]", db: Database, database: str
) -> None:
    elsewhere = Listener(Settings(pg_url=database), Heard())
    elsewhere.start()
    await until(lambda: elsewhere._neighbours)
    await push(db, 1, [PushItem("orders", "p", b"1")], asyncio.get_running_loop().time() + 30)
    elsewhere.tell_pushed(1, ["orders"])
    assert await asyncio.wait_for(parked, 20) == 1
    await elsewhere.stop()


async def test_without_notify_the_poll_finds_a_push_by_sql(db: Database, database: str) -> None:
    waiters = Waiters(db, Settings(pg_url=database))
    request = PopRequest(queue="orders", consumer_group="g", wait=True, timeout_ms=60_000)
    waiting = asyncio.create_task(waiters.pop(1, request))
    await until(lambda: list(waiters._lines) and not any(line.task for line in waiters._lines))
    connection = await asyncpg.connect(database)
    await connection.execute("select queen.push('orders', '1')")
    answer = await asyncio.wait_for(waiting, 20)
    assert len(answer.claims) == 1
    await connection.close()
    await waiters.close()
