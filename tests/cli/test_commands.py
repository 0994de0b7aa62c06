"""The small commands: migrate, doctor, config, url and psql."""

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import msgspec
import pytest

from queen_pg import doctor, migrate
from queen_pg.config import Settings
from tests.support.database import Databases


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("QUEEN_")}
    return subprocess.run(
        [sys.executable, "-m", "queen_pg", *arguments],
        env={**kept, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )


async def examine(url: str, **settings: object) -> dict[str, doctor.Finding]:
    chosen = msgspec.convert({"QUEEN_PG_URL": url, **settings}, Settings)
    return {finding.subject: finding for finding in await doctor.examine(chosen)}


async def test_migrate_says_what_it_did(databases: Databases) -> None:
    async with databases.clone(migrated=False) as url:
        first = run("migrate", QUEEN_PG_URL=url)
        assert (first.returncode, first.stdout) == (0, "migrated from revision none to 0002\n")
        assert run("migrate", QUEEN_PG_URL=url).stdout == "up to date at revision 0002\n"


def test_migrate_sql_needs_no_database() -> None:
    done = run("migrate", "--sql", QUEEN_PG_URL="postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == migrate.script().rstrip("\n")


def test_config_shows_every_setting_and_no_secret() -> None:
    done = run("config", QUEEN_PG_URL="postgresql://u:secret@h/db?sslmode=require")
    assert done.returncode == 0
    assert "QUEEN_PG_URL=postgresql://u:***@h/db?sslmode=require\n" in done.stdout
    assert "PORT=6632\n" in done.stdout
    assert "secret" not in done.stdout


def test_config_refuses_by_name() -> None:
    done = run("config", PORT="none")
    assert done.returncode == 1
    assert done.stderr == "Error: Expected `int`, got `str` - at `PORT`\n"


def test_url_and_psql_need_a_running_server(tmp_path: Path) -> None:
    for command in ("url", "psql"):
        done = run(command, QUEEN_DATA_DIR=str(tmp_path))
        assert done.returncode == 1
        assert "is not running" in done.stderr


def test_url_prints_the_database_that_is_set() -> None:
    assert run("url", QUEEN_PG_URL="postgresql://u:pw@h/db").stdout == "postgresql://u:pw@h/db\n"


def test_psql_opens_the_database_and_takes_psqls_own_arguments(database: str) -> None:
    done = run("psql", "-X", "-A", "-t", "-c", "select count(*) from queen.tenants",
               QUEEN_PG_URL=database)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n")


async def test_doctor_finds_a_migrated_database_good(database: str) -> None:
    found = await examine(database)
    # The test's own server saves nothing to disk in earnest, and that is bad indeed.
    wanted = {name for name in found if name not in ("fsync", "full_page_writes", "role")}
    assert {name: found[name].grade for name in wanted} == dict.fromkeys(wanted, "good")
    assert found["schema"].value == "revision 0002"


async def test_doctor_tells_an_empty_database_to_be_migrated(databases: Databases) -> None:
    async with databases.clone(migrated=False) as url:
        found = await examine(url)
        assert (found["schema"].grade, found["schema"].value) == ("poor", "not installed")
        assert found["may migrate"].grade == "good"
        assert "may use the schema" not in found


async def test_doctor_wants_room_for_the_pools(database: str) -> None:
    found = await examine(database, QUEEN_PG_POOL_SIZE=1000)
    assert found["connections"].grade == "poor"
    assert "QUEEN_PG_POOL_SIZE" in found["connections"].advice


async def test_doctor_sees_a_later_release(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("update queen.alembic_version set version_num = '9999'")
    await connection.close()
    assert (await examine(database))["schema"].grade == "bad"


@pytest.mark.parametrize(
    ("column", "value", "subject", "grade"),
    [
        ("server_version", 140_009, "server version", "bad"),
        ("in_recovery", True, "takes writes", "bad"),
        ("server_encoding", "LATIN1", "server_encoding", "bad"),
        ("wal_level", "replica", "wal_level", "poor"),
        ("max_pred_locks_per_transaction", 64, "max_pred_locks_per_transaction", "poor"),
        ("max_pred_locks_per_relation", -2, "max_pred_locks_per_relation", "poor"),
        ("max_pred_locks_per_page", 2, "max_pred_locks_per_page", "poor"),
        ("fsync", "off", "fsync", "bad"),
        ("synchronous_commit", "off", "synchronous_commit", "bad"),
        ("synchronous_commit", "local", "synchronous_commit", "good"),
        ("superuser", True, "role", "poor"),
        ("owns_schema", False, "may migrate", "bad"),
        ("may_use_schema", False, "may use the schema", "bad"),
    ],
)
def test_doctor_grades_each_line_and_says_what_to_do(
    column: str, value: object, subject: str, grade: str
) -> None:
    row = {
        "server_version": 180_001,
        "in_recovery": False,
        "server_encoding": "UTF8",
        "wal_level": "logical",
        "max_pred_locks_per_transaction": 2048,
        "max_pred_locks_per_relation": 100_000,
        "max_pred_locks_per_page": 200,
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "connections": 97,
        "role": "queen",
        "superuser": False,
        "may_create": True,
        "installed": True,
        "owns_schema": True,
        "may_use_schema": True,
        "clock": 0.0,
    }
    good = doctor.judge(row, 0.0, Settings())
    assert {finding.grade for finding in good} == {"good"}
    found = {each.subject: each for each in doctor.judge({**row, column: value}, 0.0, Settings())}
    assert found[subject].grade == grade
    assert (found[subject].advice == "") == (grade == "good")


def test_doctor_measures_the_clock() -> None:
    assert doctor.clock(0.4).grade == "good"
    assert (doctor.clock(-3.0).grade, doctor.clock(-3.0).value) == ("poor", "-3.000 s")


def test_doctor_ends_with_1_when_something_is_bad(database: str) -> None:
    done = run("doctor", QUEEN_PG_URL=database)
    bad = [line for line in done.stdout.splitlines() if line.startswith("bad")]
    assert done.returncode == (1 if bad else 0)
    assert done.stdout.count("\n") >= 15


def test_doctor_says_that_a_database_is_away() -> None:
    done = run("doctor", QUEEN_PG_URL="postgresql://nobody@127.0.0.1:1/none")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
