"""The code blocks of a page, and what runs them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from queen_pg.embedded import bundled_binaries

ROOT = Path(__file__).parents[2]
PSQL = shutil.which("psql") or str(bundled_binaries() / "psql")

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the code blocks of a page of docs/, each with its language, in order."""
    return _BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


def psql(url: str, script: str, *options: str) -> str:
    """Run a script as psql would run it from a file, up to the first error; return its output."""
    done = subprocess.run(
        [PSQL, "-X", "-q", "-v", "ON_ERROR_STOP=1", *options, "-d", url, "-f", "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PGCONNECT_TIMEOUT": "10", "PGTZ": "UTC"},
    )
    assert done.returncode == 0, f"{done.stderr}\nin\n{script}"
    return done.stdout


def run(page: str, url: str) -> None:
    """Run a page's blocks in their order: SQL by psql, Python in one interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.docs.follow", page],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DATABASE_URL": url},
    )
    assert done.returncode == 0, done.stderr
