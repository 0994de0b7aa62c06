"""The README's commands, pasted one by one into a shell as a newcomer would."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import Broker
from tests.support.server import temporary_folder

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def embedded_broker() -> Iterator[Broker]:
    """A broker with its bundled server, as `make run` starts it."""
    with (
        temporary_folder() as place,
        Broker(None, QUEEN_DATA_DIR=str(place / "data")) as broker,
    ):
        yield broker


def commands() -> list[str]:
    """Return the first section's shell blocks, without those that start make."""
    section = README.read_text().split("\n## ")[1]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if not block.startswith("make ")]


def test_the_first_minute_works_as_written(embedded_broker: Broker) -> None:
    push_and_pop, step, by_sql = commands()
    again = step[step.index("curl ") :]
    script = "\nprintf '\\n----\\n'\n".join([push_and_pop, step, by_sql, again])
    for written, here in (
        ("localhost:6632", f"127.0.0.1:{embedded_broker.port}"),
        (".venv/bin/queen-pg", f"{sys.executable} -m queen_pg"),
    ):
        assert written in script
        script = script.replace(written, here)
    done = subprocess.run(
        ["sh", "-eu", "-c", script],
        env=embedded_broker.environment,
        cwd=README.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, committed, pushed, refused = done.stdout.split("\n----\n")
    assert '"status":"queued"' in first
    assert '"data":{"paid": true}' in first
    assert '"success":true' in committed
    assert "queued" in pushed
    assert '"success":false' in refused
    assert '"reason":"rejected_ack"' in refused
