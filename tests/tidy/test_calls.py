"""Python and SQL use the same words: every function that Python calls is there."""

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
