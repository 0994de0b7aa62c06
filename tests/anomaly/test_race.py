"""Many clients at one key: no update is lost, and a gate lets one pass.

The functions stand on the key's row, whatever the isolation. So each checker is proved with a
function that looks at the row before it has it, at READ COMMITTED; under SERIALIZABLE even that
one loses nothing.
"""

import asyncio
from typing import Any

import asyncpg
import msgspec
import pytest

from queen_pg.broker import kv
from queen_pg.broker.push import PushItem
from queen_pg.broker.transaction import Transaction, commit
from queen_pg.database import Database
from tests.anomaly.conftest import Opener
from tests.support.isolation import soon, weaken

KEY = {"ns": "race", "key": "one"}
# Between its look and its write, which widens what would be a narrow gap.
LINGER = """
create function queen.linger() returns trigger language plpgsql as
$$ begin perform pg_sleep(0.002); return new; end $$;
create trigger linger before insert on queen.kv for each row execute function queen.linger();
"""
LOOK = """(select s.{column} from queen.kv s where s.tenant_id = {function}.tenant
    and s.namespace = {function}.operation->>'ns' and s.key = {function}.operation->>'key')"""

# Isolation taken away or not, and the function broken or not; and whether that is expected to hold.
PLANTS = pytest.mark.parametrize(
    ("lowered", "weakened", "holds"),
    [(False, False, True), (True, False, True), (False, True, True), (True, True, False)],
    ids=["as it is", "lowered", "weakened", "lowered and weakened"],
)


async def look_first(sql: asyncpg.Connection, function: str, text: str, instead: str) -> None:
    """Break a function: it judges by what its statement saw before it had the row."""
    await weaken(sql, function, text, instead)
    await sql.execute(LINGER)


async def run(db: Database, **operation: Any) -> dict[str, Any]:
    [result] = await kv.run(db, 1, [{**KEY, **operation}], soon())
    answer: dict[str, Any] = msgspec.json.decode(result)
    return answer


@PLANTS
async def test_no_increment_is_lost(
    open_door: Opener, sql: asyncpg.Connection, *, lowered: bool, weakened: bool, holds: bool
) -> None:
    clients, times = 8, 25
    if weakened:
        look = LOOK.format(column="value", function="_kv_incr")
        await look_first(
            sql,
            "_kv_incr",
            "queen._kv_number(k.value)",
            f"queen._kv_number(coalesce({look}, '0'))",
        )
    async with open_door(lowered=lowered) as db:

        async def client(number: int) -> None:
            for _ in range(times):
                if number % 2:
                    await run(db, op="incr", delta=1)
                else:
                    step = Transaction(
                        items=[PushItem("log", f"client-{number}", b"1")],
                        kv=[{"op": "incr", **KEY, "delta": 1}],
                    )
                    assert (await commit(db, 1, step, soon())).success

        await asyncio.gather(*(client(number) for number in range(clients)))
        total = (await run(db, op="get"))["value"]
    assert (total == clients * times) is holds


@PLANTS
async def test_no_expected_version_is_overwritten(
    open_door: Opener, sql: asyncpg.Connection, *, lowered: bool, weakened: bool, holds: bool
) -> None:
    clients, times = 8, 12
    if weakened:
        look = LOOK.format(column="version", function="_kv_put")
        await look_first(sql, "_kv_put", "k.version = v_expect", f"{look} = v_expect")
    async with open_door(lowered=lowered) as db:
        await run(db, op="put", value="0")

        async def client() -> int:
            applied = 0
            for _ in range(times):
                seen = await run(db, op="get")
                answer = await run(
                    db, op="put", value=str(seen["value"] + 1), expect=seen["version"]
                )
                applied += answer["applied"]
            return applied

        applied = sum(await asyncio.gather(*(client() for _ in range(clients))))
        total = (await run(db, op="get"))["value"]
    assert applied >= 1
    assert (total == applied) is holds


@PLANTS
async def test_a_gate_lets_one_of_twenty_pass_and_shows_it_to_all_others(
    open_door: Opener, sql: asyncpg.Connection, *, lowered: bool, weakened: bool, holds: bool
) -> None:
    clients, gates = 20, 10
    if weakened:
        look = LOOK.format(column="version", function="_kv_put")
        await look_first(
            sql,
            "_kv_put",
            "when queen._kv_live(k.expires_at, _kv_put.moment) then k.version",
            f"when {look} is not null then k.version",
        )
    async with open_door(lowered=lowered, connections=clients) as db:

        async def client(gate: int, number: int) -> tuple[bool, int, Any]:
            passing = {"op": "putIfAbsent", "ns": "gates", "key": f"{gate}", "value": str(number)}
            if number % 2:
                [result] = await kv.run(db, 1, [passing], soon())
                answer = msgspec.json.decode(result)
                return answer["applied"], answer["version"], answer["value"]
            step = Transaction(
                items=[PushItem("log", f"gate-{gate}", str(number).encode())],
                kv=[passing | {"required": True}],
            )
            verdict = await commit(db, 1, step, soon())
            if verdict.success:
                return True, msgspec.json.decode(verdict.kv[0])["version"], number
            assert verdict.failure is not None
            assert (verdict.reason, verdict.failure.kv_reason) == ("kv_precondition", "exists")
            assert verdict.failure.value is not None
            return False, verdict.failure.version, msgspec.json.decode(verdict.failure.value)

        rounds = [
            await asyncio.gather(*(client(gate, number) for number in range(clients)))
            for gate in range(gates)
        ]
    won = [sum(passed for passed, _, _ in seen) for seen in rounds]
    told = await sql.fetchval("select count(*) from queen.messages")
    assert told <= sum(won)
    one_winner = all(count == 1 for count in won)
    assert one_winner is holds
    if holds:
        # The winner's version and value are what everybody saw.
        assert all(len({(version, value) for _, version, value in seen}) == 1 for seen in rounds)
        assert told == sum(value % 2 == 0 for seen in rounds for passed, _, value in seen if passed)
