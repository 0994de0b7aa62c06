"""Rules for Python files: no SQL text, one reader of the environment, docstrings at the doors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "queen_pg"
FILES = sorted(PACKAGE.rglob("*.py"))

# The door itself, the applications' door, the migrations' door, the first words to a server without
# a schema, the statements of replication, and what it tells people to grant.
MAY_HOLD_SQL = {
    "database.py",
    "client.py",
    "migrate.py",
    "embedded.py",
    "log/statement.py",
    "log/replica.py",
}

SQL = re.compile(
    r"\s*(select\s|insert\s+into\s|update\s+\S+\s+set\s|delete\s+from\s|with\s+\w+\s+as\s*\(|"
    r"(create|alter|drop)\s+(or\s+replace\s+)?(table|index|function|role|database|schema)\s|"
    r"(listen|notify)\s+\w+\s*$|begin\s*;|commit\s*;)",
    re.IGNORECASE,
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def each(file: Path) -> str:
    return str(file.relative_to(ROOT))


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes that are docstrings, of attributes too."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize("file", FILES, ids=each)
def test_no_sql_text_in_python(file: Path) -> None:
    if str(file.relative_to(PACKAGE)) in MAY_HOLD_SQL:
        return
    tree = ast.parse(file.read_text())
    spared = docstrings(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in spared
        ):
            assert not SQL.match(node.value), f"{file}:{node.lineno}"


@pytest.mark.parametrize("file", FILES, ids=each)
def test_only_the_settings_read_the_environment(file: Path) -> None:
    if file == PACKAGE / "config.py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            pytest.fail(f"{file}:{node.lineno} reads the environment")


@pytest.mark.parametrize("file", FILES, ids=each)
def test_modules_and_what_is_public_in_them_are_explained(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), f"{file} has no docstring"
    for node in public(tree):
        assert ast.get_docstring(node), f"{file}:{node.lineno} {node.name} has no docstring"


def public(
    tree: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            yield node
        elif isinstance(node, ast.ClassDef) and node.name[0] != "_":
            yield node
            yield from public(node)


def test_nothing_is_left_for_later() -> None:
    for folder in (PACKAGE, ROOT / "migrations"):
        for file in folder.rglob("*.*"):
            if file.suffix in (".py", ".sql"):
                assert not UNFINISHED.search(file.read_text()), file
