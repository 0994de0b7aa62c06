"""What brokers tell each other, and what SQL users tell them: NOTIFY on the channel `queen`.

One connection of this process listens, and speaks for it: after commits, at most once in 20 ms,
because commits that notify run one at a time on the whole server. A process that knows of no other
says nothing. Whatever is not heard is found by the poll, so nothing here is ever waited for, and
behind a transaction pooler, which cannot listen, nobody does.

A message is an array (sql/notify.sql): ["pushed", tenant, queue], ["freed", group] or ["here"].
"""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Protocol

import asyncpg
import msgspec

from queen_pg import sql
from queen_pg.config import Settings
from queen_pg.leader import NotLeading, connect, leading_url, look
from queen_pg.telemetry import logger

CHANNEL = "queen"
COALESCE_SECONDS = 0.02
# How often a process says that it is there, and finds out whether its connection still is.
HERE_SECONDS = 10.0
NEIGHBOUR_SECONDS = 3 * HERE_SECONDS
CALL_SECONDS = 5.0
RECONNECT_SECONDS = 1.0
# More at once says no more than the next poll does.
MESSAGES_MAX = 1000

HERE = '["here"]'

LOST = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

_log = logger("listener")
_message = msgspec.json.Decoder(list[int | str])


class Ears(Protocol):
    """Who is to hear what others say."""

    def pushed(self, tenant: int, queues: Iterable[str], *, heard: bool = False) -> None:
        """Something was pushed to these queues."""

    def freed(self, group_ids: Iterable[int], *, heard: bool = False) -> None:
        """These groups can claim something again."""


class Listener:
    """Listens for this process, and tells the others what it committed."""

    def __init__(self, settings: Settings, ears: Ears) -> None:
        if settings.pg_url is None:
            raise ValueError("a listener needs a URL")
        self._url = settings.pg_url
        self._possible = not settings.pg_pooler
        self._ears = ears
        self._neighbours: dict[int, float] = {}
        self._unsaid: set[str] = set()
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect in the background, and again whenever the connection is lost."""
        if self._possible:
            self._task = asyncio.create_task(self._keep(), name="listener")

    async def stop(self) -> None:
        """End; what was not said yet is not said."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def tell_pushed(self, tenant: int, queues: Iterable[str]) -> None:
        """Say that something was pushed, if there is anybody to hear it."""
        if self._neighbours:
            for queue in queues:
                self._say(msgspec.json.encode(["pushed", tenant, queue]).decode())

    def tell_freed(self, group_ids: Iterable[int]) -> None:
        """Say that groups can claim something again, if there is anybody to hear it."""
        if self._neighbours:
            for group_id in group_ids:
                self._say(f'["freed",{group_id}]')

    def _say(self, message: str) -> None:
        if len(self._unsaid) < MESSAGES_MAX:
            self._unsaid.add(message)
            self._due.set()

    async def _keep(self) -> None:
        troubled = False
        while True:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    url = await leading_url(self._url)
                    connection = await connect(url)
                if troubled:
                    _log.info("listener.recovered")
                    troubled = False
                try:
                    await self._talk(connection, url)
                finally:
                    self._neighbours.clear()
                    connection.terminate()
            except LOST as error:
                if not troubled:
                    _log.warning("listener.lost", error=str(error) or type(error).__name__)
                    troubled = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _talk(self, connection: asyncpg.Connection, url: str) -> None:
        """Listen and speak over one connection until it fails or leads to another server."""
        connection.add_termination_listener(lambda _: self._due.set())
        async with asyncio.timeout(CALL_SECONDS):
            # What is said here is a hint: it need not be on disk before the next one.
            await connection.execute("set synchronous_commit = off")
            await connection.add_listener(CHANNEL, self._hear)
        clock = asyncio.get_running_loop().time
        here = 0.0
        while True:
            async with asyncio.timeout(CALL_SECONDS):
                if clock() >= here:
                    self._forget(clock())
                    if not (await look(connection, url)).leads:
                        raise NotLeading("another server leads")
                    self._unsaid.add(HERE)
                    here = clock() + HERE_SECONDS
                if self._unsaid:
                    messages, self._unsaid = list(self._unsaid), set()
                    await connection.fetch(sql.read("reads/tell"), CHANNEL, messages)
            await asyncio.sleep(COALESCE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(here - clock(), 0)):
                    await self._due.wait()
            self._due.clear()
            if connection.is_closed():
                raise ConnectionResetError("the connection was lost")

    def _hear(self, connection: asyncpg.Connection, pid: int, _: str, payload: object) -> None:
        if pid == connection.get_server_pid():
            return
        try:
            message = _message.decode(str(payload))
        except msgspec.DecodeError:
            # Anybody may notify, and may not know how.
            return
        match message:
            case ["pushed", int(tenant), str(queue)]:
                self._ears.pushed(tenant, (queue,), heard=True)
            case ["freed", int(group_id)]:
                self._ears.freed((group_id,), heard=True)
            case ["here"]:
                if pid not in self._neighbours:
                    self._say(HERE)
                self._neighbours[pid] = asyncio.get_running_loop().time()

    def _forget(self, now: float) -> None:
        """Forget the neighbours that have been silent for long."""
        self._neighbours = {
            pid: heard for pid, heard in self._neighbours.items() if now - heard < NEIGHBOUR_SECONDS
        }
