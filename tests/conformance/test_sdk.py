"""The official SDK's own tests pass, all of them, none skipped and none altered."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance import sdk
from tests.conformance.sdk import Outcome
from tests.support.broker import Broker
from tests.support.database import Databases

# Those that sleep most come first: they run side by side with the others.
FILES = [
    "test_subscription.py",
    "test_consume.py",
    "test_timers.py",
    "test_push.py",
    "test_locks.py",
    "test_ack_commit.py",
    "test_ack_window.py",
    "test_complete.py",
    "test_dlq.py",
    "test_docs.py",
    "test_kv.py",
    "test_pop.py",
    "test_queue.py",
    "test_transaction.py",
    "test_transaction_kv_timers.py",
    "test_transaction_lease_fencing.py",
]
AT_ONCE = 6


@pytest_asyncio.fixture(scope="module")
async def outcomes(
    request: pytest.FixtureRequest,
    databases: Databases,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[dict[str, asyncio.Task[Outcome]]]:
    """The runs of the selected files, each with a database and a broker of its own."""
    cache = request.config.cache
    assert cache is not None
    archive = await asyncio.to_thread(sdk.fetch, Path(cache.mkdir("sdk")))
    folder = tmp_path_factory.mktemp("sdk")
    tests = sdk.unpack(archive, folder)
    # The first clone makes the template for all others.
    await databases.drop(await databases.create())
    places = asyncio.Semaphore(AT_ONCE)

    async def run(name: str) -> Outcome:
        async with places, databases.clone() as url:
            broker = Broker(url)
            await asyncio.to_thread(broker.start)
            try:
                return await sdk.run(tests, name, broker.base_url, folder / f"{name}.xml")
            finally:
                await asyncio.to_thread(broker.stop)

    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    }
    runs = {name: asyncio.create_task(run(name)) for name in FILES if name in selected}
    yield runs
    for task in runs.values():
        task.cancel()
    await asyncio.gather(*runs.values(), return_exceptions=True)


@pytest.mark.parametrize("name", FILES)
async def test_the_sdks_own_tests_pass(
    outcomes: dict[str, asyncio.Task[Outcome]], name: str
) -> None:
    """Each file of the published tests, by itself."""
    outcome = await outcomes[name]
    assert outcome.passed > 0, outcome.output
    assert (outcome.failed, outcome.skipped) == (0, 0), outcome.output
