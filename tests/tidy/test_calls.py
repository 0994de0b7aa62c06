"""Calls that are made rightly: of SQL functions that are there, and of nothing that swallows."""

import re
from pathlib import Path

from queen_pg import sql

PACKAGE = Path(sql.__file__).parents[1]
CALL = re.compile(r'\b(?:read|step|_step)\(\s*(?:\w+,\s*)?"(_?[a-z]\w*)"')
DEFINITION = re.compile(r"create or replace function queen\.(\w+)")


def test_every_function_that_python_calls_is_defined() -> None:
    called = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in CALL.findall(path.read_text(encoding="utf-8"))
    }
    defined = {name for stem in sql.MANIFEST for name in DEFINITION.findall(sql.read(stem))}
    assert len(called) > 20, "the pattern finds the calls"
    assert called <= defined, sorted(called - defined)


def test_nothing_waits_in_a_way_that_loses_a_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11 may swallow one, and then its task never ends."""
    waiting = [path for path in PACKAGE.rglob("*.py") if "wait_for(" in path.read_text("utf-8")]
    assert waiting == []
