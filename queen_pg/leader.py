"""Which of several hosts takes writes.

A server says what it is in the log (reads/node.sql). The leader is the primary of the highest
epoch, and of physical standbys the one on the highest timeline; what has led before never leads
again. A primary of an earlier epoch that comes back is fenced by whoever sees it beside the later
one, so that nobody else mistakes it for the leader.
"""

import asyncio
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg
import msgspec

from queen_pg import sql
from queen_pg.telemetry import logger

LOOK_SECONDS = 2.0
"""How long a host may take to say what it is."""

CONNECT_SECONDS = 10.0
DEFAULT_PORT = 5432

# A database without our schema yet is nobody's follower.
NOT_INSTALLED = ("3F000", "42P01", "42703")

UNREACHABLE = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)

_log = logger("leader")


class NotLeading(ConnectionError):
    """The server at hand is not the leader; another may be, or may come to be."""


class Sight(msgspec.Struct, frozen=True):
    """What a server says of itself; `url` names this one host.

    `fenced_by` is the epoch, perhaps only attempted, for which it was fenced.
    """

    url: str
    epoch: int = 0
    fenced_by: int | None = None
    role: str = "primary"
    name: str | None = None
    recovering: bool = False
    timeline: int = 0

    @property
    def leads(self) -> bool:
        """Whether it takes writes, as far as it knows itself."""
        return self.role == "primary" and not self.recovering

    def same(self, other: "Sight") -> bool:
        """Whether both are the same server in the same reign."""
        return (self.url, self.rank) == (other.url, other.rank)

    @property
    def rank(self) -> tuple[int, int]:
        """What decides between two servers that both think they lead."""
        return self.epoch, self.timeline


def hosts(url: str) -> list[str]:
    """Return one URL for each host that a URL names, in their order."""
    parts = urlsplit(url)
    credentials, at, listed = parts.netloc.rpartition("@")
    query = parse_qsl(parts.query, keep_blank_values=True)
    if listed:
        return [
            parts._replace(netloc=f"{credentials}{at}{host}").geturl() for host in listed.split(",")
        ]
    values = dict(query)
    if "host" not in values:
        return [url]
    names = values["host"].split(",")
    ports = values.get("port", "").split(",")
    rest = [(name, value) for name, value in query if name not in ("host", "port")]
    found = []
    for place, name in enumerate(names):
        port = ports[place] if len(ports) > 1 else ports[0]
        chosen = [("host", name), *([("port", port)] if port else []), *rest]
        # Not geturl: it drops the two slashes before an empty host.
        found.append(f"{parts.scheme}://{parts.netloc}{parts.path}?{_query(chosen)}")
    return found


def address(url: str) -> tuple[str, int]:
    """Return the host (or socket folder) and port of a URL that names one; "" for no host."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    listed = parts.netloc.rpartition("@")[2]
    host, port = _split_port(listed) if listed else (query.get("host", ""), query.get("port", ""))
    return host, int(port or query.get("port", "") or DEFAULT_PORT)


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port that `host`, `host:port` or `[address]:port` means."""
    host, port = _split_port(text)
    if not host or (port and not port.isdecimal()):
        raise ValueError(f"{text} is not a host, nor host:port")
    return host, int(port or DEFAULT_PORT)


def with_address(url: str, host: str, port: int) -> str:
    """Return a URL like this one for another host."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    rest = [
        (name, value)
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
        if name not in ("host", "port")
    ]
    query = _query([("host", host), ("port", str(port)), *rest])
    return f"{parts.scheme}://{credentials}{at}{parts.path}?{query}"


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else (text, "")


def _query(values: list[tuple[str, str]]) -> str:
    return urlencode(values, safe="/*,:", quote_via=quote)


async def look(connection: asyncpg.Connection, url: str) -> Sight:
    """Ask a server what it is."""
    try:
        row = await connection.fetchrow(sql.read("reads/node"))
    except asyncpg.PostgresError as error:
        if error.sqlstate in NOT_INSTALLED:
            return Sight(url)
        raise
    return Sight(url, **row)


async def sight(url: str, *, pooler: bool = False) -> Sight:
    """Connect to one host for a look at it."""
    async with asyncio.timeout(CONNECT_SECONDS):
        connection = await connect(url, pooler=pooler)
        try:
            return await look(connection, url)
        finally:
            connection.terminate()


class Watch:
    """A connection to each host, over which it is asked again and again what it is."""

    def __init__(self, url: str, *, pooler: bool = False) -> None:
        self.urls = hosts(url)
        self._pooler = pooler
        self._connections: dict[str, asyncpg.Connection] = {}
        self._highest = (0, 0)

    @property
    def several(self) -> bool:
        """Whether there is more than one host to choose from."""
        return len(self.urls) > 1

    def close(self) -> None:
        """Close every connection."""
        for url in self.urls:
            self._drop(url)

    async def leader(self) -> Sight | None:
        """Return the leader, or None when no host leads that may.

        Of hosts with equal claims, the one with a name in a log, or else the first: the others have
        not been made followers yet.
        """
        sights = await self.sights()
        leading = [sight for sight in sights if sight.leads]
        if not leading:
            return None
        best = max(leading, key=lambda sight: (sight.rank, sight.name is not None))
        # A follower may know of an epoch whose primary cannot be seen from here.
        self._highest = max(self._highest, best.rank, *((sight.epoch, 0) for sight in sights))
        for sight in leading:
            if 0 < sight.epoch < self._highest[0]:
                await self._fence(sight)
        return best if best.rank == self._highest else None

    async def sights(self) -> list[Sight]:
        """Return what each host says that answers at all."""
        seen = await asyncio.gather(*map(self._look, self.urls))
        return [sight for sight in seen if sight is not None]

    async def _look(self, url: str) -> Sight | None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                if url not in self._connections:
                    self._connections[url] = await connect(url, pooler=self._pooler)
                return await look(self._connections[url], url)
        except UNREACHABLE as error:
            _log.debug("leader.unseen", error=str(error) or type(error).__name__)
            self._drop(url)
            return None

    async def _fence(self, sight: Sight) -> None:
        connection = self._connections[sight.url]
        epoch = self._highest[0]
        try:
            async with asyncio.timeout(LOOK_SECONDS), connection.transaction():
                # Nobody follows a fenced primary: it would wait for a quorum for ever.
                await connection.execute("set local synchronous_commit = local")
                fenced = await connection.fetchval(sql.read("reads/fence"), epoch)
        except UNREACHABLE as error:
            _log.warning("leader.not_fenced", node=sight.name, epoch=sight.epoch, error=str(error))
            self._drop(sight.url)
        else:
            if fenced:
                _log.warning("leader.fenced", node=sight.name, epoch=sight.epoch, by_epoch=epoch)

    def _drop(self, url: str) -> None:
        connection = self._connections.pop(url, None)
        if connection is not None:
            connection.terminate()


async def connect(url: str, *, pooler: bool = False) -> asyncpg.Connection:
    """Open a connection to one host that may write even where the database is read-only."""
    # Whatever the URL wants of the host that is used: here each one is to say what it is.
    if pooler:
        # Such a pooler refuses most start parameters, and keeps no statement.
        return await asyncpg.connect(url, target_session_attrs="any", statement_cache_size=0)
    return await asyncpg.connect(
        url,
        target_session_attrs="any",
        server_settings={
            "application_name": "queen-pg",
            "timezone": "UTC",
            "default_transaction_read_only": "off",
        },
    )


async def require_leader(url: str, *, pooler: bool = False) -> None:
    """Raise NotLeading when the one host of a URL takes no writes, or none of several does."""
    found = await sight(await leading_url(url, pooler=pooler), pooler=pooler)
    if not found.leads:
        what = "a standby" if found.recovering else found.role
        raise NotLeading(f"the server is {what}, epoch {found.epoch} of the log: no writes")


async def leading_url(url: str, *, pooler: bool = False) -> str:
    """Return the URL of the host that takes writes; raise NotLeading when none of several does."""
    watch = Watch(url, pooler=pooler)
    if not watch.several:
        return url
    try:
        found = await watch.leader()
    finally:
        watch.close()
    if found is None:
        raise NotLeading("none of the hosts takes writes")
    return found.url
