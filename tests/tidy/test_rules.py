"""Every rule of the wire that a page numbers, and every section without numbers, has a test.

A test names its rules in its docstring or a comment: `step 3.4-6` is rule 6 of section 3.4 of the
page on the step.
"""

import io
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# How many rules each section has; 0 for one that is told without numbers.
SECTIONS = {
    "step": {
        **dict.fromkeys(("0.1", "0.2", "0.3"), 0),
        **{f"1.{number}": 0 for number in range(1, 14)} | {"1.11": 16},
        **{f"2.{number}": 0 for number in range(1, 13)} | {"2.6": 4},
        **{"3.1": 0, "3.2": 0, "3.3": 0, "3.4": 10},
        **{"4.1": 0, "4.2": 0, "4.3": 0, "4.4": 11},
        **{"5": 0, "6": 7},
    },
    "data-plane": {
        **{"0.1": 0, "0.2": 0, "1": 7},
        **{"2.1": 0, "2.2": 11, "2.3": 0},
        **{"3.1": 0, "3.2": 0, "3.3": 0, "3.4": 0},
        **{"4.1": 0, "4.2": 0, "4.3": 12, "4.4": 0, "4.5": 0, "4.6": 5, "4.7": 6, "4.8": 7},
        **{"5": 0, "6.1": 0, "6.2": 0, "6.3": 0, "6.4": 13, "6.5": 0, "7": 4, "8": 6},
        **{"9.1": 6, "9.2": 0, "9.3": 0, "9.4": 0, "9.5": 0, "9.6": 0},
        **{"10.1": 6, "10.2": 0, "10.3": 0, "11": 0, "12": 4, "13": 0},
    },
}
_NAME = re.compile(r"(?i)\b(step|data-plane|admin)\b|\b(\d+(?:\.\d+)?(?:-\d+)?)\b")


def named() -> set[tuple[str, str]]:
    """Return the rules and sections that docstrings and comments of tests name, by page."""
    found = set()
    for file in TESTS.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                page = ""
                for name, rule in _NAME.findall(token.string):
                    page = name.lower() or page
                    found.add((page, rule))
    return found


@pytest.mark.parametrize("page", SECTIONS)
def test_every_rule_has_a_test_that_names_it(page: str) -> None:
    rules = {
        (page, f"{section}-{number}" if size else section)
        for section, size in SECTIONS[page].items()
        for number in range(1, max(size, 1) + 1)
    }
    assert sorted(rule for _, rule in rules - named()) == []
