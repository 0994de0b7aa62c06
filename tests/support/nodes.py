"""Three servers for one log: started, killed, paused, cut off, and brought back.

Followers and administrators know a node by its link, a port of its own that passes bytes on to the
server and can be made to lose them; brokers know the servers themselves.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from queen_pg.config import Settings
from queen_pg.embedded import DATABASE, EmbeddedServer
from queen_pg.log.node import Cluster
from tests.support.broker import free_port
from tests.support.link import Link
from tests.support.server import fast_folder

PASSWORD = "three-nodes"
NAMES = ("a", "b", "c")
END_SECONDS = 10.0

# What the owner of the schema needs to replicate; PostgreSQL 15 wants a superuser all the same.
RIGHTS = (
    "alter role queen replication password '{password}'",
    "alter role postgres password '{password}'",
    "grant alter system on parameter synchronous_standby_names to queen",
    "grant execute on function pg_reload_conf() to queen",
    "grant execute on function pg_replication_origin_progress(text, boolean) to queen",
)
RIGHTS_16 = ("grant pg_create_subscription to queen",)
# A follower that lost its primary asks again every so often: every 5 s would make each test slow.
SETTINGS = ("alter system set wal_retrieve_retry_interval = '200ms'", "select pg_reload_conf()")


class Server:
    """One node's server process."""

    def __init__(
        self, name: str, folder: Path, bin_folder: Path | None, *, durable: bool = False
    ) -> None:
        self.name = name
        self.embedded = EmbeddedServer(
            folder, bin_folder=bin_folder, port=free_port(), durable=durable
        )
        self.embedded.start()
        self.link = Link(self.port)

    @property
    def port(self) -> int:
        """The loopback port."""
        assert self.embedded.endpoint is not None
        return self.embedded.endpoint.port

    @property
    def address(self) -> tuple[str, int]:
        """Where administrators and followers find it: its link."""
        return "127.0.0.1", self.link.port

    @property
    def url(self) -> str:
        """The URL for the owner of the schema."""
        return f"postgresql://queen:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def admin_url(self) -> str:
        """The URL for the superuser, in the same database."""
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"

    async def allow(self) -> None:
        """Grant what replication needs, and hurry the server up."""
        local = urlsplit(self.embedded.superuser_url)._replace(path=f"/{DATABASE}")
        connection = await asyncpg.connect(
            f"postgresql://postgres@/{DATABASE}?{local.query}",
            server_settings={"default_transaction_read_only": "off"},
        )
        try:
            later = connection.get_server_version().major >= 16
            for text in (*RIGHTS, *(RIGHTS_16 if later else ()), *SETTINGS):
                await connection.execute(text.format(password=PASSWORD))
        finally:
            await connection.close()

    async def allow_copies(self) -> None:
        """Let pg_basebackup and physical standbys in."""
        [access] = self.embedded.folder.glob("postgres-*/pg_hba.conf")
        with access.open("a") as file:
            file.write("host replication all 127.0.0.1/32 scram-sha-256\n")
        connection = await asyncpg.connect(self.admin_url)
        try:
            await connection.execute("select pg_reload_conf()")
        finally:
            await connection.close()

    def kill(self) -> None:
        """End every process of the server at once (SIGKILL)."""
        family = self._family()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while any(map(_runs, family)) or self.embedded.alive():
            assert time.monotonic() < deadline, f"processes of {self.name} did not end"
            time.sleep(0.005)

    def pause(self) -> None:
        """Stop every process of the server where it is (SIGSTOP)."""
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes go on (SIGCONT)."""
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def start(self) -> None:
        """Start a server that was killed, with the data that it had; others are left alone."""
        self.resume()
        if not self.embedded.alive():
            self.embedded.revive()

    def stop(self) -> None:
        """Stop for good."""
        self.resume()
        self.embedded.stop()
        self.link.close()

    def _family(self) -> list[int]:
        """The server's process and its children, each of which leads a session of its own."""
        [pid_file] = self.embedded.folder.glob("postgres-*/postmaster.pid")
        postmaster = int(pid_file.read_text().split()[0])
        return [postmaster, *(pid for pid, parent in _processes() if parent == postmaster)]


class Nodes:
    """Three servers, named a, b and c; `a` is the primary of a new log."""

    def __init__(self, folder: Path, bin_folder: Path | None, *, durable: bool = False) -> None:
        def make(name: str) -> Server:
            return Server(name, _subfolder(folder, name), bin_folder, durable=durable)

        # Side by side: most of a start is waiting for the disk.
        with ThreadPoolExecutor() as pool:
            self._servers = {server.name: server for server in pool.map(make, NAMES)}
        self.said: list[str] = []

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    @property
    def url(self) -> str:
        """The URL that names every node."""
        return self._several("queen")

    @property
    def settings(self) -> Settings:
        """What an administrator's commands read."""
        return Settings(pg_url=self.url, pg_admin_url=self._several("postgres"))

    def _several(self, role: str) -> str:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self)
        return f"postgresql://{role}:{PASSWORD}@{hosts}/{DATABASE}"

    @contextlib.asynccontextmanager
    async def cluster(self, *, dry: bool = False) -> AsyncIterator[Cluster]:
        """Reach the nodes as an administrator's command does."""
        async with Cluster(self.settings, self.said.append, dry=dry) as cluster:
            yield cluster

    async def allow(self) -> None:
        """Grant what replication needs everywhere."""
        for server in self:
            await server.allow()

    def stop(self) -> None:
        """Stop every server."""
        for server in self:
            server.stop()


@contextlib.contextmanager
def three(bin_folder: Path | None = None, *, durable: bool = False) -> Iterator[Nodes]:
    """Yield three fresh servers, which save nothing to disk in earnest unless they are durable."""
    with _folder(None if durable else fast_folder()) as folder:
        nodes = Nodes(folder, bin_folder, durable=durable)
        try:
            yield nodes
        finally:
            nodes.stop()


@contextlib.contextmanager
def one(bin_folder: Path | None = None) -> Iterator[Server]:
    """Yield a fresh server by itself."""
    with _folder(fast_folder()) as folder:
        server = Server("one", folder, bin_folder)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def _folder(place: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="queen-pg-nodes-", dir=place))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _subfolder(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o755)
    return path


def _processes() -> Iterator[tuple[int, int]]:
    """Yield (pid, parent's pid) of every process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            yield int(text.split()[0]), int(text.rpartition(")")[2].split()[1])


def _runs(pid: int) -> bool:
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
