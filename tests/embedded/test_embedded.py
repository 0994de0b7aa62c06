"""The PostgreSQL that the broker brings along: who owns it, what survives, what is left alone."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from queen_pg import embedded
from queen_pg.embedded import EmbeddedError, EmbeddedServer, bundled_binaries, running
from tests.support.server import temporary_folder

ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not ROOT, reason="about what root may do")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder that the system user can reach; pytest's own temporary folders are closed."""
    with temporary_folder() as place:
        yield place / "data"


async def value(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def postmaster(folder: Path) -> int:
    (file,) = folder.glob("postgres-*/postmaster.pid")
    return int(file.read_text().splitlines()[0])


async def test_it_runs_with_the_settings_that_steps_want(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        shown = {
            name: await value(server.url, f"show {name}")
            for name in (
                "max_pred_locks_per_transaction",
                "max_pred_locks_per_page",
                "max_pred_locks_per_relation",
                "wal_level",
                "fsync",
                "full_page_writes",
                "synchronous_commit",
                "listen_addresses",
                "server_encoding",
            )
        }
        assert shown == {
            "max_pred_locks_per_transaction": "2048",
            "max_pred_locks_per_page": "200",
            "max_pred_locks_per_relation": "100000",
            "wal_level": "logical",
            "fsync": "on",
            "full_page_writes": "on",
            "synchronous_commit": "on",
            "listen_addresses": "127.0.0.1",
            "server_encoding": "UTF8",
        }


@pytest.mark.parametrize(("disk", "wal"), [(8, 1024), (40, 2048), (1000, 4096)])
def test_the_log_takes_a_share_of_the_disk_within_bounds(disk: int, wal: int) -> None:
    assert embedded._wal_mb(disk * 1024**3) == wal


async def test_the_log_may_grow_as_the_disk_allows(folder: Path) -> None:
    with EmbeddedServer(folder, durable=False) as server:
        expected = embedded._wal_mb(shutil.disk_usage(folder).total)
        shown = "select setting::bigint from pg_settings where name = 'max_wal_size'"
        assert await value(server.url, shown) == expected


async def test_the_broker_is_no_superuser_and_loopback_asks_for_the_password(
    folder: Path,
) -> None:
    with EmbeddedServer(folder, durable=False) as server:
        role = "select rolname || rolsuper from pg_roles where rolname = current_user"
        assert await value(server.url, role) == "queenfalse"
        endpoint = running(folder)
        assert endpoint is not None
        assert await value(endpoint.loopback_url(), role) == "queenfalse"
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(endpoint.loopback_url().replace(endpoint.password, "guess"))
        (cluster,) = folder.glob("postgres-*")
        assert cluster.stat().st_mode & 0o77 == 0
        assert (cluster / "password").stat().st_mode & 0o77 == 0
    assert running(folder) is None


async def test_a_second_start_says_whose_the_folder_is(folder: Path) -> None:
    with EmbeddedServer(folder, durable=False) as server:
        with pytest.raises(EmbeddedError, match=f"already in use by process {os.getpid()}"):
            EmbeddedServer(folder).start()
        assert await value(server.url, "select 1") == 1


async def test_what_was_written_is_there_after_a_clean_stop(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        await value(server.url, "create table kept as select 7 as number")
        pid = postmaster(folder)
    assert not list(folder.glob("postgres-*/postmaster.pid"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with EmbeddedServer(folder) as server:
        assert await value(server.url, "select number from kept") == 7


async def test_a_killed_server_recovers_at_the_next_start(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        await value(server.url, "create table kept as select 7 as number")
        os.kill(postmaster(folder), signal.SIGKILL)
    with EmbeddedServer(folder) as server:
        assert await value(server.url, "select number from kept") == 7


async def test_a_killed_server_is_revived_where_its_clients_look(folder: Path) -> None:
    with EmbeddedServer(folder) as server:
        await value(server.url, "create table kept as select 7 as number")
        url = server.url
        assert server.alive()
        os.kill(postmaster(folder), signal.SIGKILL)
        while server.alive():
            pass
        server.revive()
        assert await value(url, "select number from kept") == 7


async def test_the_server_of_a_killed_owner_is_stopped_and_its_data_kept(folder: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, time; from queen_pg.embedded import EmbeddedServer;"
            "server = EmbeddedServer(pathlib.Path(sys.argv[1])); server.start();"
            "print(server.url, flush=True); time.sleep(600)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    with owner.stdout:
        url = owner.stdout.readline().strip()
    await value(url, "create table kept as select 7 as number")
    owner.kill()
    owner.wait()
    left = postmaster(folder)
    (cluster,) = folder.glob("postgres-*")
    assert embedded._is_postmaster(left, cluster)
    with EmbeddedServer(folder) as server:
        assert postmaster(folder) != left
        assert not embedded._is_postmaster(left, cluster)
        assert await value(server.url, "select number from kept") == 7


async def test_a_strangers_process_number_is_no_obstacle(folder: Path) -> None:
    with EmbeddedServer(folder, durable=False):
        (file,) = folder.glob("postgres-*/postmaster.pid")
        lines = file.read_text().splitlines()
    stranger = subprocess.Popen(["sleep", "600"])
    file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
    try:
        assert running(folder) is None
        with EmbeddedServer(folder, durable=False) as server:
            assert await value(server.url, "select 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_data_of_another_version_is_left_alone(folder: Path) -> None:
    (folder / "postgres-9").mkdir(parents=True)
    (folder / "postgres-9" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedError, match="postgres-9"):
        EmbeddedServer(folder).start()
    assert sorted(path.name for path in folder.glob("postgres-*")) == ["postgres-9"]


def test_a_start_that_fails_shows_the_servers_own_words(folder: Path) -> None:
    with EmbeddedServer(folder, durable=False):
        pass
    (cluster,) = folder.glob("postgres-*")
    with (cluster / "postgresql.conf").open("a") as file:
        file.write("no_such_setting = 1\n")
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        EmbeddedServer(folder, durable=False).start()


async def test_a_path_too_long_for_a_socket_gets_a_short_closed_folder(folder: Path) -> None:
    long = folder / "x'y\" ,z" / ("a" * 90)
    with EmbeddedServer(long, durable=False) as server:
        assert await value(server.url, "select 1") == 1
        endpoint = running(long)
        assert endpoint is not None
        assert not endpoint.socket_folder.is_relative_to(folder)
        assert endpoint.socket_folder.stat().st_mode & 0o77 == 0
    shutil.rmtree(endpoint.socket_folder)


@only_root
def test_as_root_it_runs_as_a_system_user(folder: Path) -> None:
    with EmbeddedServer(folder, durable=False):
        owner = Path(f"/proc/{postmaster(folder)}").stat().st_uid
        assert pwd.getpwuid(owner).pw_name in embedded.SYSTEM_USERS


@only_root
def test_as_root_a_closed_folder_is_refused_and_stays_closed(folder: Path) -> None:
    closed = folder.parent / "home"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="QUEEN_DATA_DIR"):
        EmbeddedServer(closed / "data").start()
    assert closed.stat().st_mode & 0o777 == 0o700


@only_root
async def test_as_root_binaries_under_a_closed_home_are_copied_and_it_stays_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = folder.parent / "home"
    closed.mkdir(mode=0o700)
    package = bundled_binaries().parent.parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            shutil.copytree(part, closed / part.name, symlinks=True)
    binaries = closed / package.name / "pginstall" / "bin"
    monkeypatch.setattr(embedded, "bundled_binaries", lambda: binaries)
    monkeypatch.setattr(embedded, "SYSTEM_FOLDER", folder.parent / "system")
    for _ in range(2):
        with EmbeddedServer(folder, durable=False) as server:
            assert await value(server.url, "select 1") == 1
            program = Path(f"/proc/{postmaster(folder)}/exe").resolve()
            assert program.is_relative_to(folder.parent / "system")
    assert [path.name[:9] for path in (folder.parent / "system").iterdir()] == ["binaries-"]
    assert closed.stat().st_mode & 0o777 == 0o700


@only_root
def test_an_ordinary_user_needs_no_root(folder: Path) -> None:
    """The test's own process gives its rights away, in a child, and runs a server there."""
    account = embedded._system_account()
    binaries = embedded._reachable_binaries(bundled_binaries(), account)
    nobody = pwd.getpwnam("nobody")
    os.chown(folder.parent, nobody.pw_uid, nobody.pw_gid)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            with EmbeddedServer(folder, bin_folder=binaries, durable=False):
                owner = Path(f"/proc/{postmaster(folder)}").stat().st_uid
                code = 0 if owner == nobody.pw_uid else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
