"""Tenants: the header names one (admin 13), a table says in which group it lives."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest
import pytest_asyncio

from queen_pg.broker.placement import DEFAULT_TENANT, REMEMBERED_SECONDS
from queen_pg.config import Settings
from queen_pg.log import statement, tenant
from queen_pg.log.node import LogError
from tests.support.broker import Broker
from tests.support.database import Databases

ONE = "11111111-1111-1111-1111-111111111111"
TWO = "22222222-2222-2222-2222-222222222222"
RESERVED = "00000000-0000-0000-0000-00000000fffe"


class Tenants:
    """A broker with two groups, and a connection to each group's database."""

    def __init__(
        self, http: httpx.AsyncClient, home: asyncpg.Connection, far: asyncpg.Connection
    ) -> None:
        self.http = http
        self.urls: dict[str, str] = {}
        self.home = home
        self.far = far

    async def push(self, tenant: str | None, payload: Any, status: int = 201) -> Any:
        """Push to the queue `q` for a tenant."""
        headers = {} if tenant is None else {"x-queen-tenant": tenant}
        body = {"items": [{"queue": "q", "payload": payload}]}
        response = await self.http.post("/api/v1/push", json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def pop(self, tenant: str | None) -> list[Any]:
        """Pop everything of the queue `q` for a tenant."""
        headers = {} if tenant is None else {"x-queen-tenant": tenant}
        response = await self.http.get(
            "/api/v1/pop/queue/q?batch=100&autoAck=true", headers=headers
        )
        return [m["data"] for m in response.json()["messages"]] if response.content else []


@pytest_asyncio.fixture(scope="module")
async def tenants(databases: Databases) -> AsyncIterator[Tenants]:
    """One broker, whose home group has a second group beside it."""
    async with databases.clone() as home, databases.clone() as far:
        with Broker(home, QUEEN_PG_GROUPS=f"far={far}", QUEEN_TENANCY_HEADER="on") as broker:
            async with httpx.AsyncClient(base_url=broker.base_url, timeout=30) as http:
                at_home, away = await asyncpg.connect(home), await asyncpg.connect(far)
                await at_home.execute(
                    "insert into queen.placements (tenant, log_group) values ($1, 'far')", TWO
                )
                made = Tenants(http, at_home, away)
                made.urls = {"home": home, "far": far}
                try:
                    yield made
                finally:
                    await at_home.close()
                    await away.close()


async def test_tenants_do_not_see_one_another(tenants: Tenants) -> None:
    await tenants.push(None, "default")
    await tenants.push(ONE, "one")
    await tenants.push(TWO, "two")
    assert await tenants.pop(TWO) == ["two"]
    assert await tenants.pop(ONE) == ["one"]
    assert await tenants.pop(None) == ["default"]


async def test_a_tenant_lives_in_its_group_and_in_no_other(tenants: Tenants) -> None:
    await tenants.push(TWO, 1)
    known = "select count(*) from queen.tenants where name = $1"
    assert await tenants.home.fetchval(known, TWO) == 0
    assert await tenants.far.fetchval(known, TWO) == 1
    await tenants.push(ONE, 1)
    assert await tenants.home.fetchval(known, ONE) == 1
    assert await tenants.far.fetchval(known, ONE) == 0


async def test_the_first_tenant_is_meant_where_none_is_named(tenants: Tenants) -> None:
    await tenants.pop(None)
    await tenants.push("", 1)
    await tenants.push("00000000-0000-0000-0000-000000000001", 2)
    assert await tenants.pop(None) == [1, 2]


async def test_a_tenant_is_a_uuid_in_either_case(tenants: Tenants) -> None:
    tenant = "ABCDEF00-0000-0000-0000-00000000000A"
    await tenants.push(tenant, 1)
    assert await tenants.pop(tenant.lower()) == [1]
    refused = await tenants.push("acme", 1, 400)
    assert refused["error"] == "invalid x-queen-tenant header (must be a UUID)"


async def test_reserved_tenants_are_refused(tenants: Tenants) -> None:
    assert (await tenants.push(RESERVED, 1, 403))["code"] == "reserved_tenant"


async def test_a_tenant_on_the_move_is_asked_to_wait(tenants: Tenants) -> None:
    moving = "33333333-3333-3333-3333-333333333333"
    await tenants.home.execute("insert into queen.placements (tenant) values ($1)", moving)
    refused = await tenants.push(moving, 1, 503)
    assert refused["code"] == "retry"
    lost = "44444444-4444-4444-4444-444444444444"
    await tenants.home.execute(
        "insert into queen.placements (tenant, log_group) values ($1, 'nowhere')", lost
    )
    assert "nowhere" in (await tenants.push(lost, 1, 503))["error"]


async def test_a_tenant_moves_with_everything_it_has(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = "55555555-5555-5555-5555-555555555555"
    headers = {"x-queen-tenant": mover}
    await tenants.push(TWO, "so that ids are taken there")
    for number in range(3):
        await tenants.push(mover, number)
    params = {"consumerGroup": "g", "subscriptionMode": "all", "batch": "1"}
    path = "/api/v1/pop/queue/q"
    popped = (await tenants.http.get(path, params=params, headers=headers)).json()
    [message] = popped["messages"]
    ack = {
        "transactionId": message["transactionId"], "partitionId": message["partitionId"],
        "leaseId": message["leaseId"], "consumerGroup": "g", "status": "completed",
    }  # fmt: skip
    (await tenants.http.post("/api/v1/ack", json=ack, headers=headers)).raise_for_status()
    step = {
        "operations": [],
        "kv": [{"op": "put", "ns": "n", "key": "k", "value": 7, "forever": True}],
        "timers": [{"op": "schedule", "queue": "later", "timerKey": "t", "txn": "t",
                    "delayMs": 3600000, "payload": "e30="}],
    }  # fmt: skip
    response = await tenants.http.post("/api/v1/transaction", json=step, headers=headers)
    assert response.json()["success"], response.text

    # The broker of this test has no other whose memory must run out first.
    monkeypatch.setattr("queen_pg.log.tenant.REMEMBERED_SECONDS", REMEMBERED_SECONDS / 2)
    settings = Settings(pg_url=tenants.urls["home"], pg_groups=f"far={tenants.urls['far']}")
    said: list[str] = []
    await tenant.move(settings, mover, "far", said.append)
    await tenant.move(settings, mover, "far", said.append)
    assert said[-1] == f"{mover} lives in far"
    assert (mover, "far") in await tenant.places(settings)

    for table in ("queues", "kv", "timers"):
        left = await tenants.home.fetchval(
            f"select count(*) from queen.{table} x join queen.tenants t on t.id = x.tenant_id"
            " where t.name = $1",
            mover,
        )
        assert left == 0, table
    again = (await tenants.http.get(path, params={**params, "batch": "9"}, headers=headers)).json()
    assert [(m["data"], m["offset"]) for m in again["messages"]] == [(1, 1), (2, 2)]
    value = (await tenants.http.get("/api/v1/kv/n/k", headers=headers)).json()
    assert value["value"] == 7
    [pushed] = await tenants.push(mover, 3)
    assert pushed["offset"] == 3
    timers = "select deliver_at > now() from queen.timers where queue = 'later'"
    assert await tenants.far.fetchval(timers)
    with pytest.raises(LogError, match="no group"):
        await tenant.move(settings, mover, "nowhere", said.append)


class Interrupted(Exception):
    """What an operator's Ctrl-C is to a command."""


def interrupt(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Have the next move end at a place: amid the copy, after it, or when the tenant is placed."""
    step = {"amid": (tenant, "_pipe"), "after": (statement, "place_tenant"),
            "placed": (tenant, "_forget")}[where]  # fmt: skip
    real = getattr(*step)
    left = 4 if where == "amid" else 1

    def ending(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupted
        return real(*arguments)

    monkeypatch.setattr(*step, ending)


async def work(connection: asyncpg.Connection, name: str, *numbers: int) -> None:
    """Leave messages, a key and a timer in one group, as its owner may for any tenant."""
    await connection.execute("select queen._tenant_id($1)", name)
    await connection.execute(f"set queen.tenant = '{name}'")
    for number in numbers:
        await connection.execute(
            f"select queen.push('q', '{number}'), queen.kv_put('n', 'k', '{number}'),"
            f" queen.timer_schedule('q', '{number}', '1', delay => '1 hour')"
        )
    await connection.execute("reset queen.tenant")


async def held(connection: asyncpg.Connection, name: str) -> list[list[str]]:
    """Return the messages, values and timers that a group has of a tenant."""
    return [
        [row[0] for row in await connection.fetch(f"{query} order by 1", name)]
        for query in (
            "select m.payload::text from queen.messages m join queen.partitions p"
            " on p.id = m.partition_id join queen.queues q on q.id = p.queue_id"
            " join queen.tenants t on t.id = q.tenant_id where t.name = $1",
            "select k.value::text from queen.kv k join queen.tenants t on t.id = k.tenant_id"
            " where t.name = $1",
            "select x.timer_key from queen.timers x join queen.tenants t on t.id = x.tenant_id"
            " where t.name = $1",
        )
    ]


NOTHING: list[list[str]] = [[], [], []]
ONE_STEP = [["1"], ["1"], ["1"]]
TWO_STEPS = [["1", "2"], ["2"], ["1", "2"]]


@pytest.mark.parametrize("where", ["amid", "after", "placed"])
@pytest.mark.parametrize("then", ["repeat", "back", "elsewhere"])
async def test_a_move_may_be_interrupted_anywhere(
    tenants: Tenants, databases: Databases, monkeypatch: pytest.MonkeyPatch, where: str, then: str
) -> None:
    """What the tenant does after it was turned back or sent elsewhere is there after the next."""
    mover = str(uuid4())
    monkeypatch.setattr("queen_pg.log.tenant.REMEMBERED_SECONDS", 0)
    said: list[str] = []
    async with databases.clone() as third:
        settings = Settings(
            pg_url=tenants.urls["home"], pg_groups=f"far={tenants.urls['far']} third={third}"
        )
        await work(tenants.home, mover, 1)
        with monkeypatch.context() as patch:
            interrupt(patch, where)
            with pytest.raises(Interrupted):
                await tenant.move(settings, mover, "far", said.append)
        assert await held(tenants.home, mover) == ONE_STEP
        if then == "repeat":
            await tenant.move(settings, mover.upper(), "far", said.append)
            assert await held(tenants.far, mover) == ONE_STEP
            assert await held(tenants.home, mover) == NOTHING
            return
        group = "home" if then == "back" else "third"
        await tenant.move(settings, mover, group, said.append)
        assert await held(tenants.far, mover) == NOTHING
        beside = await asyncpg.connect(third)
        try:
            await work(tenants.home if then == "back" else beside, mover, 2)
            await tenant.move(settings, mover, "far", said.append)
            assert await held(tenants.far, mover) == TWO_STEPS
            assert await held(tenants.home, mover) == NOTHING
            assert await held(beside, mover) == NOTHING
        finally:
            await beside.close()


async def test_what_cannot_move_is_refused(tenants: Tenants) -> None:
    settings = Settings(pg_url=tenants.urls["home"], pg_groups=f"far={tenants.urls['far']}")
    for name, word in (("acme", "UUID"), (DEFAULT_TENANT, "first tenant")):
        with pytest.raises(LogError, match=word):
            await tenant.move(settings, name, "far", print)
        with pytest.raises(asyncpg.CheckViolationError):
            await tenants.home.execute("insert into queen.placements (tenant) values ($1)", name)


async def test_without_tenancy_the_header_is_not_read(broker: Broker) -> None:
    body = {"items": [{"queue": "q", "payload": 1}]}
    headers = {"x-queen-tenant": "acme"}
    url = f"{broker.base_url}/api/v1/push"
    assert httpx.post(url, json=body, headers=headers).status_code == 201
