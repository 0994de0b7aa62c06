"""An administrator's connections to the nodes of the log, and what the nodes are.

Every command here begins with a look at all nodes (`Cluster.reach`), does what is missing, and may
be repeated: an interrupted one left some of it done. What changes anything goes through `Node.run`
or `Node.batch`, which show it in a dry run instead.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import asyncpg
import msgspec

from queen_pg import leader, sql
from queen_pg.config import Settings, without_password
from queen_pg.leader import Sight
from queen_pg.log import statement

REACH_SECONDS = 5.0
POLL_SECONDS = 0.05
IN_USE_ATTEMPTS = 100
SERVER_VERSION_MIN = 150_000
# One administrator at a time: each takes this lock on every node that it reaches.
LOCK = int.from_bytes(b"queenlog")

SOURCE = re.compile(r"postgres(ql)?://[^']*")
INSUFFICIENT_PRIVILEGE = "42501"

T = TypeVar("T")
Say = Callable[[str], None]


class LogError(Exception):
    """What was asked for cannot be done as things are; the message says what to do."""


class Member(msgspec.Struct, frozen=True):
    """A node as the log's own table has it."""

    name: str
    host: str
    port: int
    synchronous: bool
    joined: bool


class Facts(msgspec.Struct, frozen=True):
    """What a node is and what our role may do there (reads/log_node.sql)."""

    system_identifier: int
    database: str
    server_version: int
    wal_level: str
    standby_names: str
    role: str
    installed: bool
    tables: list[str]
    published: list[str]
    publishes: bool
    kept: list[str]
    subscription: str | None
    enabled: bool | None
    subscription_id: int | None
    slots: list[str]
    superuser: bool
    may_replicate: bool
    may_subscribe: bool
    may_publish: bool
    may_see_progress: bool
    may_set_quorum: bool
    owns_database: bool


class Node:
    """A connection to one server. `url` has the administrator's role, `owner_url` the schema's."""

    def __init__(
        self, url: str, owner_url: str, connection: asyncpg.Connection, say: Say, *, dry: bool
    ) -> None:
        self.url = url
        self.owner_url = owner_url
        self.host, self.port = leader.address(url)
        self.dry = dry
        self.sight: Sight
        self.facts: Facts
        self._connection = connection
        self._turn = asyncio.Lock()
        self._say = say

    @property
    def name(self) -> str:
        """The node's name in the log, or its address as long as it has none."""
        return self.sight.name or f"{self.host}:{self.port}"

    @property
    def epoch(self) -> int:
        """The epoch that the node knows."""
        return self.sight.epoch

    def is_same_as(self, other: "Node") -> bool:
        """Whether two connections lead to one database of one server."""
        return (
            self.facts.system_identifier == other.facts.system_identifier
            and self.facts.database == other.facts.database
            and self.sight.recovering == other.sight.recovering
        )

    async def look(self) -> None:
        """Learn anew what the node is."""
        self.sight = await leader.look(self._connection, self.url)
        row = await self._connection.fetchrow(sql.read("reads/log_node"))
        self.facts = Facts(**row)

    async def fetch(self, read: str, *arguments: Any) -> list[asyncpg.Record]:
        """Ask something: `read` names a file in sql/reads."""

        async def ask() -> list[asyncpg.Record]:
            async with self._turn:
                rows: list[asyncpg.Record] = await self._connection.fetch(
                    sql.read(f"reads/{read}"), *arguments
                )
            return rows

        return await _patiently(ask)

    async def fetchrow(self, read: str, *arguments: Any) -> asyncpg.Record | None:
        """Ask for one row, None where there is none."""
        return next(iter(await self.fetch(read, *arguments)), None)

    async def run(self, text: str, *, right: str = "") -> None:
        """Carry a statement out by itself; `right` says what the role needs for it."""
        self._show(text)
        if not self.dry:
            async with self._turn:
                await self._execute(text, right)

    async def attempt(self, text: str, seconds: float) -> None:
        """Try a statement for so long; raise what the driver raises."""
        async with self._turn:
            await self._connection.execute(f"set statement_timeout = {round(seconds * 1000)}")
            try:
                await _patiently(lambda: self._connection.execute(text))
            finally:
                await self._connection.execute("reset statement_timeout")

    async def batch(self, texts: Sequence[str], *, right: str = "") -> None:
        """Carry statements out, all or none."""
        self._show("begin")
        for text in texts:
            self._show(text)
        self._show("commit")
        if self.dry:
            return
        async with self._turn, self._connection.transaction():
            for text in texts:
                await self._execute(text, right)

    async def position(self) -> int:
        """Return the place in its log up to which everything is on the node's disk."""
        [row] = await self.fetch("log_position")
        position: int = row["lsn"]
        return position

    async def progress(self) -> int:
        """Return the place in its primary's log up to which a follower has everything on disk."""
        [row] = await self.fetch("log_progress", self.facts.subscription_id)
        progress: int = row["lsn"]
        return progress

    async def lock(self) -> None:
        """Keep other administrators out until the connection ends; raise LogError if one is in."""
        if not await self._connection.fetchval(sql.read("reads/log_lock"), LOCK):
            raise LogError(f"somebody else is changing the log on {self.name}; try again later")

    def close(self) -> None:
        """End the connection."""
        self._connection.terminate()

    def show(self, text: str) -> None:
        """Show what a dry run would do here."""
        if self.dry:
            shown = SOURCE.sub(lambda found: without_password(found[0]), text)
            self._say(f"{self.name}=> {shown}")

    def _show(self, text: str) -> None:
        self.show(f"{text};")

    async def _execute(self, text: str, right: str) -> None:
        try:
            await _patiently(lambda: self._connection.execute(text))
        except asyncpg.PostgresError as error:
            if error.sqlstate == INSUFFICIENT_PRIVILEGE and right:
                needed = right.format(role=self.facts.role, database=self.facts.database)
                raise LogError(
                    f"on {self.name}, the role {self.facts.role} needs a right: {needed}"
                ) from error
            raise LogError(f"on {self.name}: {error.message}") from error


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Do something with a slot; when somebody is at it (a broker moves it), try again shortly."""
    for _ in range(IN_USE_ATTEMPTS):
        try:
            return await work()
        except asyncpg.ObjectInUseError:
            await asyncio.sleep(POLL_SECONDS)
    return await work()


class Cluster:
    """The nodes that could be reached, and those that should have been."""

    def __init__(self, settings: Settings, say: Say, *, dry: bool) -> None:
        self.say = say
        self.dry = dry
        self.nodes: list[Node] = []
        self.members: dict[str, Member] = {}
        self.quorum = 0
        self._owner_url = settings.pg_url or ""
        self._url = settings.pg_admin_url or self._owner_url

    async def __aenter__(self) -> "Cluster":
        try:
            await self._reach_all()
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    @property
    def primary(self) -> Node | None:
        """The node that leads, if it was reached: the primary of the latest epoch of all."""
        latest = max((node.epoch for node in self.nodes), default=0)
        leading = [node for node in self.nodes if node.sight.leads and node.epoch == latest]
        named = [node for node in leading if node.sight.name]
        return next(iter(named or leading), None)

    @property
    def followers(self) -> list[Node]:
        """The followers that were reached, by name."""
        found = [node for node in self.nodes if node.sight.role == "follower"]
        return sorted(found, key=lambda node: node.name)

    @property
    def unreached(self) -> list[Member]:
        """The nodes of the log that were not reached."""
        reached = {node.sight.name for node in self.nodes}
        return [member for member in self.members.values() if member.name not in reached]

    def require_primary(self) -> Node:
        """Return the primary; raise LogError when it was not reached."""
        if self.primary is None:
            raise LogError(
                "the primary cannot be reached; name every node in QUEEN_PG_URL, or promote a"
                " follower (queen-pg replica promote)"
            )
        return self.primary

    def node(self, name: str) -> Node | None:
        """Return a node that was reached, by its name."""
        return next((node for node in self.nodes if node.sight.name == name), None)

    def source(self, primary: Node) -> str:
        """Return the URL by which followers reach a primary."""
        member = self.members.get(primary.name)
        host, port = (member.host, member.port) if member else (primary.host, primary.port)
        return leader.with_address(primary.url, host, port)

    async def reach(self, host: str, port: int) -> Node:
        """Return the node at an address, connecting if need be; raise what the driver does."""
        for node in self.nodes:
            if (node.host, node.port) == (host, port):
                return node
        url = leader.with_address(self._url, host, port)
        async with asyncio.timeout(REACH_SECONDS):
            connection = await leader.connect(url)
            await connection.execute("set synchronous_commit = local")
        owner_url = leader.with_address(self._owner_url, host, port)
        node = Node(url, owner_url, connection, self.say, dry=self.dry)
        try:
            async with asyncio.timeout(REACH_SECONDS):
                await node.look()
        except BaseException:
            node.close()
            raise
        # One server may have two addresses.
        for other in self.nodes:
            if node.is_same_as(other):
                node.close()
                return other
        self.nodes.append(node)
        return node

    async def lock(self) -> None:
        """Keep other administrators out of every node that was reached."""
        if not self.dry:
            for node in sorted(self.nodes, key=lambda node: node.name):
                await node.lock()

    async def refresh(self) -> None:
        """Learn anew what the nodes are, and who belongs to the log."""
        await asyncio.gather(*(node.look() for node in self.nodes))
        await self._read_members()

    async def _reach_all(self) -> None:
        addresses = [leader.address(url) for url in leader.hosts(self._url)]
        await self._try(addresses)
        if not self.nodes:
            raise LogError("none of the hosts in QUEEN_PG_URL can be reached")
        await self._read_members()
        late = [(member.host, member.port) for member in self.unreached]
        await self._try(address for address in late if address not in addresses)

    async def _try(self, addresses: Iterable[tuple[str, int]]) -> None:
        async def attempt(host: str, port: int) -> None:
            try:
                await self.reach(host, port)
            except asyncpg.InvalidAuthorizationSpecificationError as error:
                raise LogError(f"{host}:{port}: {error}") from error
            except leader.UNREACHABLE as error:
                self.say(f"{host}:{port} cannot be reached: {str(error) or type(error).__name__}")

        await asyncio.gather(*(attempt(host, port) for host, port in addresses))

    async def _read_members(self) -> None:
        """Take the list of nodes from the one that knows the latest epoch."""
        known = [node for node in self.nodes if node.facts.installed and node.epoch]
        if not known:
            return
        latest = max(known, key=lambda node: (node.epoch, node.sight.leads, node.name))
        rows = await latest.fetch("log_members")
        self.quorum = rows[0]["quorum"] if rows else 0
        self.members = {
            row["name"]: Member(
                row["name"], row["host"], row["port"], row["synchronous"], row["joined"]
            )
            for row in rows
            if row["name"] is not None
        }

    def _close(self) -> None:
        for node in self.nodes:
            node.close()


async def confirmed(primary: Node, follower: str, lsn: int, seconds: float) -> bool:
    """Wait until a follower has confirmed a place in its primary's log; return whether it did."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while True:
        row = await primary.fetchrow("log_confirmed", statement.slot(follower))
        if row is not None and row["lsn"] is not None and row["lsn"] >= lsn:
            return True
        if clock() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
