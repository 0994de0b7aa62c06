"""The examples do what they say, as they are, with the official SDK."""

import asyncio
import os
import sys
from pathlib import Path

from tests.support.broker import Broker

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_MAX = 60


async def run(example: Path, url: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(example),
        env=os.environ | {"QUEEN_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
    return process.returncode, output.decode()


async def test_every_example_passes(broker: Broker) -> None:
    examples = sorted(EXAMPLES.glob("*.py"))
    assert len(examples) == 3
    results = await asyncio.gather(*(run(example, broker.base_url) for example in examples))
    for example, (code, output) in zip(examples, results, strict=True):
        assert code == 0, f"{example.name}:\n{output}"
        assert output.splitlines()[-1] == "PASS"


async def test_an_example_without_a_broker_fails() -> None:
    code, output = await run(EXAMPLES / "order_state_machine.py", "http://127.0.0.1:1")
    assert code != 0
    assert "PASS" not in output
