"""The server and the brokers of a run: started for it and stopped after it, or found at a URL.

Every candidate has a database of its own on the same server. What the server counted between two
moments (commits, WAL, dead rows) comes from here, and so do the settings that were in force.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from queen_pg import migrate
from queen_pg.embedded import ROLE, EmbeddedServer, running

from .client import exchange, request

PREFIX = "queen_bench_"
START_SECONDS = 60.0

# What decides the figures, besides the machine.
SETTINGS = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "autovacuum",
    "max_connections",
    "max_pred_locks_per_transaction",
    "max_pred_locks_per_page",
    "max_pred_locks_per_relation",
)

COUNTERS = """
select d.xact_commit, d.xact_rollback, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint as wal,
       (select coalesce(sum(n_dead_tup), 0)::bigint from pg_stat_user_tables) as dead,
       (select coalesce(sum(n_tup_ins), 0)::bigint from pg_stat_user_tables) as inserted,
       pg_database_size(d.datname) as bytes
from pg_stat_database d where d.datname = current_database()
"""

FILLED = """
select format('%I.%I', n.nspname, c.relname) as name
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' and n.nspname not in ('pg_catalog', 'information_schema')
  and pg_relation_size(c.oid) > 0
"""
TABLES = """
select s.relname as name, pg_total_relation_size(s.relid) as bytes, s.n_live_tup as live,
       s.n_dead_tup as dead, s.n_tup_upd as updated, s.n_tup_hot_upd as hot,
       s.autovacuum_count as vacuums
from pg_stat_user_tables s
where s.n_tup_ins > 0
order by pg_total_relation_size(s.relid) desc
"""


class Stage:
    """One PostgreSQL server for all candidates of a run."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self._url = url
        self._folder = folder
        self._created: set[str] = set()

    def cpu_seconds(self) -> float | None:
        """Return the processor time that the server has used, if it is ours to look at."""
        if self._folder is None:
            return None
        [file] = self._folder.glob("postgres-*/postmaster.pid")
        postmaster = int(file.read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return _processor_seconds(postmaster, children=True) + sum(
            _processor_seconds(int(child)) for child in children
        )

    def url(self, name: str) -> str:
        """Return the URL of a candidate's database."""
        parts = urlsplit(self._url)
        return urlunsplit(parts._replace(path=f"/{PREFIX}{name}"))

    def create(self, name: str) -> str:
        """Create a candidate's database anew, empty, and return its URL."""

        self._created.add(name)

        async def recreate() -> None:
            db = await asyncpg.connect(self._url)
            await _drop(db, f"{PREFIX}{name}")
            await db.execute(f"create database {PREFIX}{name}")
            await db.close()

        asyncio.run(recreate())
        return self.url(name)

    def drop(self, name: str) -> None:
        """Drop a candidate's database."""

        async def drop() -> None:
            db = await asyncpg.connect(self._url)
            await _drop(db, f"{PREFIX}{name}")
            await db.close()

        asyncio.run(drop())

    def clear(self) -> None:
        """Drop every database that was created here."""
        for name in self._created:
            self.drop(name)

    def execute(self, text: str, database: str | None = None) -> None:
        """Run a statement."""
        self.query(text, database)

    def checkpoint(self) -> None:
        """Make a checkpoint; raise RuntimeError where our role may not."""
        try:
            self.execute("checkpoint")
        except asyncpg.InsufficientPrivilegeError as error:
            raise RuntimeError(f"{error}; grant pg_checkpoint") from error

    def query(self, text: str, database: str | None = None) -> list[dict[str, Any]]:
        """Run a query and return its rows."""

        async def fetch() -> list[dict[str, Any]]:
            db = await asyncpg.connect(self.url(database) if database else self._url)
            try:
                return [dict(row) for row in await db.fetch(text)]
            finally:
                await db.close()

        return asyncio.run(fetch())

    def settle(self, name: str) -> None:
        """Vacuum what has been filled, and look at what is in it, as autovacuum would in time.

        Never a table that is empty: a plan that was made for one is kept, and suits it only.
        """
        filled = self.query(FILLED, name)
        self.execute(f"vacuum analyze {', '.join(row['name'] for row in filled)}", name)

    def counters(self, name: str) -> dict[str, int]:
        """Return what the server has counted for a database so far."""
        [row] = self.query(COUNTERS, name)
        return row

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Return sizes and dead rows of a candidate's tables."""
        return self.query(TABLES, name)

    def settings(self) -> dict[str, str]:
        """Return the settings that decide the figures."""
        names = ", ".join(f"'{name}'" for name in SETTINGS)
        rows = self.query(f"select name, setting, unit from pg_settings where name in ({names})")
        found = {row["name"]: f"{row['setting']}{row['unit'] or ''}" for row in rows}
        return {name: found[name] for name in SETTINGS if name in found}

    def migrate(self, name: str) -> str:
        """Create a database with the broker's tables and functions, and return its URL."""
        url = self.create(name)
        asyncio.run(migrate.upgrade(url))
        return url


class Broker:
    """A broker process of the run, on one of the stage's databases."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.host, self.port = "127.0.0.1", _free_port()
        self.environment = environment
        self._log = tempfile.NamedTemporaryFile(prefix="queen-bench-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "queen_pg", "serve"],
            stdout=self._log,
            stderr=self._log,
            env=os.environ
            | {
                "QUEEN_PG_URL": url,
                "PORT": str(self.port),
                "QUEEN_LOG_LEVEL": "warning",
                # The loads are one tenant, who would be held to the rates of one.
                "QUEEN_KV_READ_RATE": "0",
                "QUEEN_KV_WRITE_RATE": "0",
            }
            | environment,
        )
        self._await()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self.host, self.port

    @property
    def cpu_seconds(self) -> float:
        """The processor time that the broker's process has used."""
        return _processor_seconds(self._process.pid)

    def metrics(self) -> dict[str, float]:
        """Return the broker's own counters, or nothing where it does not show them."""
        response = exchange(self.address, request("GET", "/metrics/prometheus"))
        if response.status != 200:
            return {}
        samples = {}
        for line in response.body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def configure(self, queue: str, **options: Any) -> None:
        """Create a queue with options."""
        body = json.dumps({"queue": queue, "options": options}).encode()
        response = exchange(self.address, request("POST", "/api/v1/configure", body))
        if response.status not in (200, 201):
            raise RuntimeError(f"configure: {response.status} {response.body!r}")

    def stop(self) -> None:
        """Stop it in its own way."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _await(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                if exchange(self.address, request("GET", "/health")).status == 200:
                    return
            time.sleep(0.05)
        log = Path(self._log.name).read_text()
        raise RuntimeError(f"the broker did not start:\n{log}")


@contextlib.contextmanager
def stage(url: str | None) -> Iterator[Stage]:
    """Yield the server at a URL, or one of our own with full durability while it is needed.

    The role in the URL must be allowed to create databases.
    """
    if url is not None:
        found = Stage(url)
        try:
            yield found
        finally:
            found.clear()
        return
    folder = Path(tempfile.mkdtemp(prefix="queen-bench-"))
    # PostgreSQL runs as another user where we are root.
    folder.chmod(0o755)
    try:
        with EmbeddedServer(folder / "data") as server:
            asyncio.run(_empower(server.superuser_url))
            endpoint = running(folder / "data")
            assert endpoint is not None
            yield Stage(endpoint.loopback_url(), folder / "data")
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=False)


async def _drop(db: asyncpg.Connection, name: str) -> None:
    """Drop a database with whoever is still connected to it.

    Not by force: that refuses where a vacuum is under way, which a plain drop ends and waits for.
    """
    await db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = $1 and usename = current_user",
        name,
    )
    await db.execute(f"drop database if exists {name}")


async def _empower(superuser_url: str) -> None:
    db = await asyncpg.connect(superuser_url)
    await db.execute(f"alter role {ROLE} createdb; grant pg_checkpoint to {ROLE}")
    await db.close()


def _processor_seconds(process: int, *, children: bool = False) -> float:
    """Return the processor time of a process, of its ended children too where that is asked."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # It has ended: before its file was opened, or since.
        return 0.0
    return sum(map(int, fields[11:15] if children else fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
