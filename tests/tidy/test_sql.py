"""Rules for SQL files: the manifest is the folder, functions are explained, nothing is dynamic."""

import re
from pathlib import Path

import asyncpg
import pytest

from queen_pg import sql

FOLDER = Path(sql.__file__).parent
MIGRATIONS = Path(__file__).parents[2] / "migrations" / "versions"


def test_the_manifest_names_every_file_once() -> None:
    assert len(set(sql.MANIFEST)) == len(sql.MANIFEST)
    # The roles are not the schema owner's to make: an administrator runs that script.
    assert {path.stem for path in FOLDER.glob("*.sql")} - {"roles"} == set(sql.MANIFEST)


@pytest.mark.parametrize("stem", sql.MANIFEST)
def test_a_file_begins_with_prose_and_raises_only_through_the_guard(stem: str) -> None:
    text = sql.read(stem)
    assert re.match(r"-- \w", text), "say what the concept is, who calls, and what may race"
    if stem != "guard":
        assert not re.search(r"^\s*raise\s+exception", text, re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("stem", sql.MANIFEST)
def test_sql_is_static(stem: str) -> None:
    code = re.sub(r"--.*|'[^']*'", "", sql.read(stem))
    assert not re.search(r"^\s*execute\s", code, re.MULTILINE | re.IGNORECASE)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("reads/*.sql")), ids=lambda path: path.stem)
def test_a_read_is_one_select(path: Path) -> None:
    code = re.sub(r"--.*", "", path.read_text()).strip()
    assert re.match(r"(select|with)\b", code)
    assert ";" not in code


async def test_every_function_has_a_comment(conn: asyncpg.Connection) -> None:
    silent = await conn.fetch(
        "select p.oid::regprocedure::text from pg_catalog.pg_proc p"
        " where p.pronamespace = 'queen'::regnamespace"
        " and obj_description(p.oid, 'pg_proc') is null"
    )
    assert [row[0] for row in silent] == []


async def test_no_function_has_two_signatures(conn: asyncpg.Connection) -> None:
    twice = await conn.fetch(
        "select p.proname from pg_catalog.pg_proc p where p.pronamespace = 'queen'::regnamespace"
        " group by p.proname having count(*) > 1"
    )
    assert [row[0] for row in twice] == []


async def test_every_table_has_a_primary_key(conn: asyncpg.Connection) -> None:
    bare = await conn.fetch(
        "select c.relname from pg_catalog.pg_class c"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r' and not exists ("
        "   select from pg_catalog.pg_constraint k where k.conrelid = c.oid and k.contype = 'p')"
    )
    assert [row[0] for row in bare] == []


def test_revisions_are_numbered_without_gaps_and_run_their_script() -> None:
    names = sorted(path.stem for path in MIGRATIONS.glob("*.py"))
    assert names == sorted(path.stem for path in MIGRATIONS.glob("*.sql"))
    for number, name in enumerate(names, 1):
        assert re.fullmatch(rf"{number:04}_[a-z_]+", name)
        text = (MIGRATIONS / f"{name}.py").read_text()
        before = f'"{number - 1:04}"' if number > 1 else "None"
        assert f'revision = "{number:04}"\ndown_revision = {before}\n' in text
