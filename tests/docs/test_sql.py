"""docs/sql.md against the catalog, and its examples against a database."""

import asyncio
import re

import asyncpg
import pytest

from queen_pg import sql
from tests.docs.markdown import ROOT, blocks, psql

PAGE = (ROOT / "docs" / "sql.md").read_text(encoding="utf-8")
LINE_MAX = 96

FUNCTIONS = """
select p.proname as name, pg_get_function_arguments(p.oid) as arguments,
       pg_get_function_result(p.oid) as result, obj_description(p.oid) as comment
from pg_proc p where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_' order by 1
"""
VIEWS = """
select c.relname as name, obj_description(c.oid) as comment
from pg_class c where c.relnamespace = 'queen'::regnamespace and c.relkind = 'v' order by 1
"""
COLUMNS = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type,
       col_description(a.attrelid, a.attnum) as comment
from pg_attribute a where a.attrelid = ('queen.' || $1::text)::regclass and a.attnum > 0
order by a.attnum
"""


def short(text: str) -> str:
    """Write types and defaults as people do."""
    text = text.replace("timestamp with time zone", "timestamptz")
    text = re.sub(r"('[^']*'|NULL)::\w+(\[\])?", r"\1", text)
    return text.replace("DEFAULT NULL", "default null").replace("DEFAULT", "default")


def listed(head: str, parts: list[str]) -> str:
    """Write a list in one line, or each part on its own where that is too long."""
    line = f"{head}({', '.join(parts)})"
    return line if len(line) <= LINE_MAX else f"{head}(\n    " + ",\n    ".join(parts) + "\n)"


def signature(row: asyncpg.Record) -> str:
    """Return the block that the page must show for a function."""
    arguments = short(row["arguments"])
    table = re.fullmatch(r"TABLE\((.*)\)", short(row["result"]))
    result = (
        listed("returns table ", table[1].split(", "))
        if table
        else f"returns {short(row['result'])}"
    )
    return (
        listed(f"queen.{row['name']}", arguments.split(", ") if arguments else []) + f"\n{result}"
    )


def entry(name: str) -> str:
    """Return a function's or view's part of the page."""
    found = re.search(rf"^### queen\.{name}\n\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no entry"
    return found[1]


async def test_the_page_has_an_entry_for_everything_public_and_for_nothing_else(
    conn: asyncpg.Connection,
) -> None:
    names = [row["name"] for row in [*await conn.fetch(FUNCTIONS), *await conn.fetch(VIEWS)]]
    entries = re.findall(r"^### queen\.(\w+)$", PAGE, re.MULTILINE)
    assert sorted(entries) == sorted(names)


async def test_each_function_is_described_as_it_is(conn: asyncpg.Connection) -> None:
    for row in await conn.fetch(FUNCTIONS):
        text = entry(row["name"])
        # The comment is the entry's first paragraph, so \\df+ and the page say the same.
        assert text.partition("\n\n")[0] == row["comment"].rstrip(".") + "."
        assert f"```text\n{signature(row)}\n```" in text


async def test_each_view_is_described_as_it_is(conn: asyncpg.Connection) -> None:
    for row in await conn.fetch(VIEWS):
        text = entry(row["name"])
        assert text.partition("\n\n")[0] == row["comment"]
        columns = [
            f"| `{column['name']}` | {short(column['type'])} | {column['comment']} |"
            for column in await conn.fetch(COLUMNS, row["name"])
        ]
        assert "\n".join(columns) in text


async def test_the_page_names_every_table(conn: asyncpg.Connection) -> None:
    rows = await conn.fetch(
        "select c.relname from pg_class c"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r' order by 1"
    )
    named = re.findall(r"`(\w+)`", PAGE.partition("## Tables")[2].partition("\n\n")[2])
    assert [row[0] for row in rows] == sorted(set(named) & {row[0] for row in rows})


async def test_the_page_names_every_code_that_a_public_function_raises() -> None:
    raised = {
        code
        for stem in sql.MANIFEST
        if stem.endswith("_api") or stem in ("argument", "tenant", "seek", "document", "epoch")
        for code in re.findall(r"'(QU\d{3})'", sql.read(stem))
    }
    internal = {"QU900", "QU901", "QU902"}
    assert raised - internal == set(re.findall(r"^\| `(QU\d{3})`", PAGE, re.MULTILINE))


async def test_the_examples_run_from_the_first_to_the_last(database: str) -> None:
    script = "\n".join(text for language, text in blocks("sql.md") if language == "sql")
    output = await asyncio.to_thread(psql, database, script, "-At")
    for answer in ("queued|", "duplicate", "f|exists|", "order-9137|"):
        assert answer in output


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+\.md)(?:#[\w-]+)?\)", PAGE))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
