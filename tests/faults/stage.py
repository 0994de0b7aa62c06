"""What a round plays on: a PostgreSQL server, a proxy before it, and two brokers."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from queen_pg.embedded import EmbeddedServer
from tests.support.broker import Broker, free_port
from tests.support.proxy import Proxy
from tests.support.server import MEMORY_FOLDER

BROKERS = 2
SMALL_DISK_BYTES = 400 * 1024**2
HEAL_SECONDS = 60.0
PGBOUNCER = "/usr/sbin/pgbouncer"


class Stage:
    """The processes of one round. Everything is durable, and everything may be broken."""

    def __init__(
        self, root: Path, server: EmbeddedServer, proxy: Proxy, brokers: list[Broker]
    ) -> None:
        self._ballast = root / "ballast"
        self.server = server
        self.proxy = proxy
        self.brokers = brokers
        self._paused: list[int] = []

    @property
    def urls(self) -> list[str]:
        """Where the brokers listen."""
        return [broker.base_url for broker in self.brokers]

    async def database(self) -> asyncpg.Connection:
        """Open a connection past the proxy."""
        return await asyncpg.connect(self.server.url)

    async def admin(self) -> asyncpg.Connection:
        """Open a connection that may do everything."""
        return await asyncpg.connect(self.server.superuser_url.replace("/postgres?", "/queen?"))

    async def kill_broker(self, number: int) -> None:
        """End a broker at once."""
        await asyncio.to_thread(self.brokers[number].kill)

    async def kill_server(self) -> None:
        """End the postmaster and all backends at once."""
        process = self.server._process
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)

    async def restart_server(self) -> None:
        """Stop the server in good order, dropping its connections, and start it again."""
        process = self.server._process
        if process is not None:
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(self.server.revive)

    def pause(self, *pids: int) -> None:
        """Stop processes where they are."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._paused.append(pid)

    def resume(self) -> None:
        """Let all paused processes go on."""
        for pid in self._paused:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._paused.clear()

    def server_pids(self) -> list[int]:
        """Return the postmaster and all its children."""
        process = self.server._process
        if process is None:
            return []
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [process.pid, *(int(pid) for pid in listed.stdout.split())]

    def broker_pid(self, number: int) -> int:
        """Return a broker's process."""
        process = self.brokers[number].process
        return 0 if process is None else process.pid

    def fill_disk(self) -> None:
        """Leave no room beside the server's data."""
        with contextlib.suppress(OSError), self._ballast.open("wb") as ballast:
            while True:
                ballast.write(bytes(1 << 16))
                ballast.flush()

    def free_disk(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)

    async def heal(self) -> None:
        """Mend whatever is broken, and wait until every broker answers again."""
        self.resume()
        self.free_disk()
        self.proxy.swallow(False)
        self.proxy.refuse(False)
        self.proxy.cut_at(None)
        if not self.server.alive():
            await asyncio.to_thread(self.server.revive)
        for broker in self.brokers:
            if broker.process is None or broker.process.poll() is not None:
                broker.launch()
        deadline = asyncio.get_running_loop().time() + HEAL_SECONDS
        for broker in self.brokers:
            while not await asyncio.to_thread(broker.healthy):
                if asyncio.get_running_loop().time() > deadline:
                    raise AssertionError(f"a broker did not recover:\n{broker.log()[-3000:]}")
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def stage(*, pooled: bool = False, small_disk: bool = False) -> AsyncIterator[Stage]:
    """Yield a stage on a fresh server.

    `pooled` puts PgBouncer before it, in transaction mode; `small_disk` gives it a file system of
    its own that can be filled, for which it takes root.
    """
    root = Path(tempfile.mkdtemp(prefix="queen-pg-faults-", dir=_fast_folder()))
    if small_disk:
        size = f"size={SMALL_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", root], check=True)
    root.chmod(0o755)
    try:
        server = EmbeddedServer(root / "data", port=free_port())
        await asyncio.to_thread(server.start)
        proxy = Proxy(server.endpoint.port)
        brokers: list[Broker] = []
        try:
            await proxy.start()
            port = proxy.port
            with _pooler(server, root, port) if pooled else contextlib.nullcontext(port) as entry:
                url = _at_port(server.endpoint.loopback_url(), entry)
                environment = {
                    "QUEEN_KV_READ_RATE": "0",
                    "QUEEN_KV_WRITE_RATE": "0",
                    "RETENTION_INTERVAL": "200",
                    **({"QUEEN_PG_POOLER": "on", "QUEEN_MIGRATE": "off"} if pooled else {}),
                }
                if pooled:
                    with Broker(server.url):
                        pass
                brokers += [Broker(url, **environment) for _ in range(BROKERS)]
                for broker in brokers:
                    await asyncio.to_thread(broker.start)
                yield Stage(root, server, proxy, brokers)
        finally:
            for broker in brokers:
                broker.discard()
            await proxy.close()
            await asyncio.to_thread(server.stop)
    finally:
        if small_disk:
            subprocess.run(["umount", "--lazy", root], check=False)
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _pooler(server: EmbeddedServer, root: Path, port: int) -> Iterator[int]:
    entry = free_port()
    password = server.endpoint.password
    (root / "users.txt").write_text(f'"queen" "{password}"\n')
    (root / "pgbouncer.ini").write_text(
        f"[databases]\nqueen = host=127.0.0.1 port={port} dbname=queen\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {entry}\nauth_type = plain\n"
        f"auth_file = {root}/users.txt\npool_mode = transaction\nmax_client_conn = 200\n"
        f"default_pool_size = 20\nunix_socket_dir =\nserver_login_retry = 1\n"
        f"ignore_startup_parameters = extra_float_digits\nlogfile = {root}/pgbouncer.log\n"
    )
    for name in ("users.txt", "pgbouncer.ini"):
        (root / name).chmod(0o644)
    command = [PGBOUNCER, str(root / "pgbouncer.ini")]
    if os.geteuid() == 0:
        root.chmod(0o777)
        command[1:1] = ["--user", "nobody"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield entry
    finally:
        process.kill()
        process.wait()


def _at_port(url: str, port: int) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{port}"))


def _fast_folder() -> Path | None:
    return MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
