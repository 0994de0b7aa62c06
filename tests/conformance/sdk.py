"""The official SDK's published tests: fetched by pip, unpacked, and run as they are.

They are never part of this repository. What they ask of their surroundings, a fixture named
`client` and the broker's address in the environment, is in `client.py`, a plugin for their pytest.
"""

import asyncio
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

REQUIREMENT = (
    "queen-mq==2.6.0 --hash=sha256:c6657ad706ef5d9a826d9fb7e576cd8d27e70489f21a0b9230e29a78beccce88"
)
ARCHIVE = "queen_mq-2.6.0.tar.gz"
ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """How the tests of one file went; `output` is for whoever has to find out why."""

    passed: int
    failed: int
    skipped: int
    output: str


def fetch(cache: Path) -> Path:
    """Return the source distribution, from the cache or by pip; AssertionError without either."""
    archive = cache / ARCHIVE
    if not archive.exists():
        requirements = cache / "requirements.txt"
        requirements.write_text(REQUIREMENT)
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-binary", ":all:"),
            *("--require-hashes", "--requirement", str(requirements), "--dest", str(cache)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"the SDK's tests could not be fetched:\n{done.stderr}"
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the distribution's tests, and only those; return their folder."""
    with tarfile.open(archive) as opened:
        prefix = archive.name.removesuffix(".tar.gz") + "/tests/"
        members = [member for member in opened if member.name.startswith(prefix)]
        opened.extractall(folder, members, filter="data")
    return folder / prefix


async def run(tests: Path, name: str, url: str, report: Path) -> Outcome:
    """Run one file of the SDK's tests against a broker."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", name, "--tb=short", "--quiet", "-ra"),
        *("-c", os.devnull, "--rootdir", str(tests), "-p", "no:cacheprovider"),
        *("-p", "tests.conformance.client", "-o", "asyncio_mode=auto"),
        *("-o", "asyncio_default_fixture_loop_scope=function"),
        *("--junitxml", str(report)),
        cwd=tests,
        env={**os.environ, "PYTHONPATH": str(ROOT), "QUEEN_SERVER_URL": url},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    text = output.decode(errors="replace")
    if not report.exists():
        return Outcome(0, 0, 0, text)
    [suite] = ElementTree.parse(report).iter("testsuite")
    total, errors, failures, skipped = (
        int(suite.get(key, "0")) for key in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    return Outcome(total - failed - skipped, failed, skipped, text)
