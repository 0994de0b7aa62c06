"""Locks and semaphores in the database: permits, tokens, holders (step 4)."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.support.database import set_clock

START = datetime(2030, 1, 1, 12, tzinfo=UTC)
Operation = dict[str, Any]


@pytest_asyncio.fixture(autouse=True)
async def clock(conn: asyncpg.Connection) -> None:
    await set_clock(conn, START)


async def later(conn: asyncpg.Connection, seconds: float) -> None:
    await set_clock(conn, START + timedelta(seconds=seconds))


async def locks(conn: asyncpg.Connection, *operations: Operation) -> list[dict[str, Any]]:
    rows = await conn.fetch(
        "select * from queen._locks(1, $1) order by operation_index", json.dumps(operations)
    )
    assert [row["verdict"] for row in rows] == ["done"] * len(operations)
    return [json.loads(row["result"]) for row in rows]


async def lock(conn: asyncpg.Connection, operation: Operation) -> dict[str, Any]:
    [result] = await locks(conn, operation)
    return result


def acquire(owner: str | None = "me", name: str = "l", ttl: int = 20, **more: Any) -> Operation:
    return {"op": "acquire", "name": name, "owner": owner, "ttlSeconds": ttl, **more}


def renew(token: int, owner: str | None = "me", ttl: int = 20, **more: Any) -> Operation:
    return {
        "op": "renew",
        "name": "l",
        "token": token,
        "owner": owner,
        "ttlSeconds": ttl,
        **more,
    }


def release(token: int, slot: int = 0) -> Operation:
    return {"op": "release", "name": "l", "token": token, "slot": slot}


def get(name: str = "l") -> Operation:
    return {"op": "get", "name": name}


def guard(token: int, slot: int = 0) -> Operation:
    return {
        "op": "check",
        "ns": "queen-locks",
        "key": f"l#{slot}",
        "expect": token,
        "required": True,
    }


async def guarded(conn: asyncpg.Connection, operation: Operation) -> bool:
    """Whether a step with this guard would commit."""
    return (
        await conn.fetchval("select queen._kv_judge(1, $1, queen.now())", json.dumps([operation]))
        is None
    )


async def put(conn: asyncpg.Connection, key: str, value: str, ttl: int | None = 60) -> int:
    """Write a row by hand."""
    operation = {
        "op": "put",
        "ns": "queen-locks",
        "key": key,
        "value": value,
        "ttlSeconds": ttl,
    }
    rows = await conn.fetch("select * from queen._kv(1, $1, false)", json.dumps([operation]))
    version: int = json.loads(rows[0]["result"])["version"]
    return version


async def test_a_lock_is_a_kv_row(conn: asyncpg.Connection) -> None:
    """Step 4.1, 4.3: the grant, and the row whose version is the token."""
    granted = await lock(conn, acquire())
    token = granted["token"]
    assert granted == {
        "op": "acquire",
        "name": "l",
        "acquired": True,
        "slot": 0,
        "token": token,
        "owner": "me",
        "guard": guard(token),
    }
    row = await conn.fetchrow("select * from queen.kv")
    assert (row["namespace"], row["key"], row["version"]) == ("queen-locks", "l#0", token)
    assert json.loads(row["value"]) == {"owner": "me"}
    assert row["expires_at"] == START + timedelta(seconds=20)


async def test_a_held_lock_names_its_holder(conn: asyncpg.Connection) -> None:
    """Step 4.4-2: somebody else's permit is in the way."""
    await lock(conn, acquire("me"))
    refused = await lock(conn, acquire("you"))
    assert refused == {
        "op": "acquire",
        "name": "l",
        "acquired": False,
        "reason": "held",
        "holders": [{"slot": 0, "owner": "me"}],
    }


async def test_an_owner_that_asks_again_has_its_permit(conn: asyncpg.Connection) -> None:
    """Step 4.4-2: already, the same token, and a lifetime that is not extended."""
    first = await lock(conn, acquire(ttl=20))
    await later(conn, 10)
    again = await lock(conn, acquire(ttl=20))
    assert again == {**first, "already": True}
    assert await conn.fetchval("select expires_at from queen.kv") == START + timedelta(seconds=20)


async def test_nobody_is_not_an_owner(conn: asyncpg.Connection) -> None:
    """Step 4.4-2: without an owner a call is nobody's permit."""
    first = await lock(conn, acquire(None))
    assert (first["acquired"], first["owner"]) == (True, None)
    second = await lock(conn, acquire(None))
    assert (second["acquired"], second["holders"]) == (False, [{"slot": 0, "owner": None}])


async def test_an_expired_lock_goes_to_the_next_with_a_higher_token(
    conn: asyncpg.Connection,
) -> None:
    """Step 4.4-9: and the guard of the one before fails."""
    old = await lock(conn, acquire("me", ttl=1))
    assert await guarded(conn, old["guard"])
    await later(conn, 1)
    assert not await guarded(conn, old["guard"])
    new = await lock(conn, acquire("you"))
    assert new["acquired"]
    assert new["token"] > old["token"]
    assert not await guarded(conn, old["guard"])
    assert await guarded(conn, new["guard"])


async def test_renew_gives_a_new_token_and_remembers_since_when(
    conn: asyncpg.Connection,
) -> None:
    """Step 4.4-5: new expiry and token, `since` kept from the first renew on; the guard moves."""
    first = await lock(conn, acquire())
    await later(conn, 5)
    second = await lock(conn, renew(first["token"]))
    assert second == {
        "op": "renew",
        "name": "l",
        "renewed": True,
        "slot": 0,
        "token": second["token"],
        "guard": guard(second["token"]),
    }
    assert second["token"] > first["token"]
    assert not await guarded(conn, first["guard"])
    assert await guarded(conn, second["guard"])
    await later(conn, 10)
    await lock(conn, renew(second["token"]))
    value = json.loads(await conn.fetchval("select value from queen.kv"))
    assert value == {"owner": "me", "since": "2030-01-01T12:00:00+00:00"}
    assert await conn.fetchval("select expires_at from queen.kv") == START + timedelta(seconds=30)


async def test_a_stale_token_renews_for_its_own_owner(conn: asyncpg.Connection) -> None:
    """Step 4.4-5: the answer to a renew was lost; a stranger with the old token gets nothing."""
    first = await lock(conn, acquire())
    second = await lock(conn, renew(first["token"]))
    again = await lock(conn, renew(first["token"]))
    assert again["token"] > second["token"]
    for owner in ("you", None):
        lost = await lock(conn, renew(first["token"], owner))
        assert lost == {
            "op": "renew",
            "name": "l",
            "renewed": False,
            "reason": "lost",
            "slot": 0,
            "holders": [{"slot": 0, "owner": "me"}],
        }


async def test_a_renew_by_token_needs_no_owner(conn: asyncpg.Connection) -> None:
    """Step 4.4-5: the token alone is proof."""
    first = await lock(conn, acquire("me"))
    assert (await lock(conn, renew(first["token"], "you")))["renewed"]


async def test_nothing_to_renew(conn: asyncpg.Connection) -> None:
    """Step 4.4-5: not live means lost, without holders."""
    granted = await lock(conn, acquire(ttl=1))
    await later(conn, 1)
    lost = await lock(conn, renew(granted["token"]))
    assert (lost["renewed"], lost["holders"]) == (False, [])


async def test_release(conn: asyncpg.Connection) -> None:
    """Step 4.4-6: by token only; lost names what is in the way, or nobody."""
    granted = await lock(conn, acquire())
    lost = await lock(conn, release(granted["token"] + 1))
    assert lost == {
        "op": "release",
        "name": "l",
        "released": False,
        "reason": "lost",
        "slot": 0,
        "holders": [{"slot": 0, "owner": "me"}],
    }
    released = await lock(conn, release(granted["token"]))
    assert released == {"op": "release", "name": "l", "released": True, "slot": 0}
    assert not await guarded(conn, granted["guard"])
    gone = await lock(conn, release(granted["token"]))
    assert (gone["reason"], gone["holders"]) == ("lost", [])
    again = await lock(conn, acquire("you"))
    assert again["token"] > granted["token"]


async def test_a_semaphore_has_as_many_permits_as_asked_for(conn: asyncpg.Connection) -> None:
    """Step 4.4-3: each in a free slot of its own; then held, with all holders."""
    granted = [await lock(conn, acquire(f"w{n}", limit=5)) for n in range(5)]
    assert sorted(permit["slot"] for permit in granted) == [0, 1, 2, 3, 4]
    refused = await lock(conn, acquire("w5", limit=5))
    assert refused["reason"] == "held"
    assert [holder["slot"] for holder in refused["holders"]] == [0, 1, 2, 3, 4]
    again = await lock(conn, acquire("w3", limit=5))
    assert again == {**granted[3], "already": True}
    freed = granted[2]
    assert (await lock(conn, release(freed["token"], freed["slot"])))["released"]
    assert (await lock(conn, acquire("w5", limit=5)))["slot"] == freed["slot"]


async def test_free_slots_are_chosen_by_chance(conn: asyncpg.Connection) -> None:
    """Step 4.4-3: so that those who come at once rarely meet."""
    slots = [(await lock(conn, acquire("w", name=f"s{n}", limit=1024)))["slot"] for n in range(10)]
    assert len(set(slots)) > 1


async def test_every_caller_brings_its_own_limit(conn: asyncpg.Connection) -> None:
    """Step 4.4-4: a small limit sees the low slots only."""
    for number in range(3):
        await lock(conn, acquire(f"w{number}", limit=3))
    assert (await lock(conn, acquire("w3", limit=2)))["reason"] == "held"
    assert (await lock(conn, acquire("w3", limit=4)))["slot"] == 3
    assert (await lock(conn, acquire("w3", limit=2)))["reason"] == "held"


async def test_get_shows_the_live_holders_by_slot(conn: asyncpg.Connection) -> None:
    """Step 4.4-7: only keys that are a slot's, and since when each is held."""
    granted = await lock(conn, acquire("me"))
    for key in ("l#01", "l#1024", "l#x", "l#-1", "l#1 ", "l#", "ll#2"):
        await put(conn, key, '{"owner":"stranger"}')
    tenth = await put(conn, "l#10", '{"owner":"other"}', None)
    await put(conn, "l#2", '{"owner":"dead"}', 1)
    await later(conn, 5)
    renewed = await lock(conn, renew(granted["token"]))
    assert await lock(conn, get()) == {
        "op": "get",
        "name": "l",
        "held": True,
        "holders": [
            {
                "slot": 0,
                "owner": "me",
                "token": renewed["token"],
                "since": "2030-01-01T12:00:00+00:00",
                "expiresAt": "2030-01-01T12:00:25+00:00",
                "renewedAt": "2030-01-01T12:00:05+00:00",
            },
            {
                "slot": 10,
                "owner": "other",
                "token": tenth,
                "since": "2030-01-01T12:00:00+00:00",
                "expiresAt": None,
                "renewedAt": "2030-01-01T12:00:00+00:00",
            },
        ],
    }
    assert await lock(conn, get("x")) == {"op": "get", "name": "x", "held": False, "holders": []}


@pytest.mark.parametrize(
    ("value", "owner"),
    [
        ("5", None),
        ("null", None),
        ('{"owner":5}', None),
        ("{}", None),
        ('{"owner":"\\u0000"}', None),
        ('{"owner":"x","note":"\\ud83d\\ude00"}', None),
        ('{"owner":"a\\\\u0000"}', "a\\u0000"),
        (' {"owner" : "x"} ', "x"),
    ],
)
async def test_a_row_written_by_hand_occupies_its_slot(
    conn: asyncpg.Connection, value: str, owner: str | None
) -> None:
    """Step 4.4-8: whatever its value, and it can be renewed by its token."""
    token = await put(conn, "l#0", value)
    refused = await lock(conn, acquire("me"))
    assert refused["holders"] == [{"slot": 0, "owner": owner}]
    renewed = await lock(conn, renew(token))
    assert renewed["renewed"]
    kept = json.loads(await conn.fetchval("select value from queen.kv"))
    if isinstance(kept, dict):
        assert kept.pop("since") == "2030-01-01T12:00:00+00:00"
    assert kept == json.loads(value)


async def test_an_owner_may_be_any_text(conn: asyncpg.Connection) -> None:
    """Step 4.2: what looks like an escape is none."""
    for owner in ("\\u0000", 'a"b\\', "é😀", "{}"):
        first = await lock(conn, acquire(owner, name=owner.replace("#", "")))
        again = await lock(conn, acquire(owner, name=owner.replace("#", "")))
        assert (again["already"], again["token"]) == (True, first["token"])


async def test_operations_of_a_call_are_independent(conn: asyncpg.Connection) -> None:
    """Step 4.4-1: a lost one stops nothing; results come in the order of the call."""
    await lock(conn, acquire("other", name="b"))
    results = await locks(
        conn, acquire(name="c"), acquire(name="b"), release(7), acquire(name="a"), get("b")
    )
    assert [result.get("acquired") for result in results] == [True, False, None, True, None]
    assert results[4]["held"]


async def test_a_paused_kv_pauses_locks(conn: asyncpg.Connection) -> None:
    """Step 5 kv: all of them, reads too."""
    await conn.execute("select queen._throw_switches(false, null, null)")
    [row] = await conn.fetch("select * from queen._locks(1, $1)", json.dumps([get()]))
    assert row["verdict"] == "disabled"
