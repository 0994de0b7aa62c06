"""The door to PostgreSQL: calls by name, one isolation for steps, errors by SQLSTATE, retries."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from queen_pg.config import Settings
from queen_pg.database import Database, array
from queen_pg.errors import (
    BadRequest,
    Conflict,
    DuplicateMessage,
    Internal,
    NameTooLong,
    NotFound,
    PayloadTooLarge,
    QueenError,
    Refused,
    Signal,
    Stale,
    StorageFull,
    Unavailable,
)

FUNCTIONS = """
create function queen.echo(number integer, document json default '{}', id uuid default null)
returns table (number integer, document json, id uuid, isolation text, jit text, zone text)
language sql as $$
    select echo.number, echo.document, echo.id, current_setting('transaction_isolation'),
           current_setting('jit'), current_setting('timezone')
$$;
create function queen.arrays(numbers bigint[], ids uuid[], truths boolean[])
returns table (numbers bigint[], ids uuid[], truths boolean[])
language sql as $$ select arrays.numbers, arrays.ids, arrays.truths $$;
create function queen.raise(code text, detail jsonb default null) returns void
language plpgsql as $$ begin perform queen._fail(code, 'said so', detail); end; $$;
create function queen.lose(place text, nap float8 default 0) returns bigint
language plpgsql as $$
declare v_sum bigint;
begin
    select sum(c.value) into v_sum from queen.counters c;
    perform pg_sleep(nap);
    update queen.counters c set value = v_sum + 1 where c.name = lose.place;
    return v_sum;
end; $$;
create function queen.nap(seconds float8) returns void
language sql as $$ select pg_sleep(seconds) $$;
create function queen.hang_up() returns void
language sql as $$ select pg_terminate_backend(pg_backend_pid()) $$;
create table queen.counters (name text primary key, value bigint not null);
insert into queen.counters values ('a', 0), ('b', 0);
drop index queen.messages_transaction_id_key;
create table queen.keys (id int constraint messages_transaction_id_key unique, other int unique);
create function queen.take(id int, other int) returns void
language sql as $$ insert into queen.keys values (take.id, take.other) $$;
"""


def soon(seconds: float = 5) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest_asyncio.fixture(params=[False, True], ids=["direct", "pooler"])
async def door(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Database]:
    connection = await asyncpg.connect(database)
    await connection.execute(FUNCTIONS)
    await connection.close()
    opened = Database(Settings(pg_url=database, pg_pooler=request.param))
    await opened.start()
    yield opened
    await opened.close()


async def test_an_array_may_go_in_its_text_form(door: Database) -> None:
    numbers, ids, truths = [1, None, -(2**62)], [uuid.uuid4(), None], [True, False, None]
    [row] = await door.read(
        "arrays",
        **{
            "numbers::bigint[]": array(numbers),
            "ids::uuid[]": array(ids),
            "truths::boolean[]": array(truths),
        },
    )
    assert (row["numbers"], row["ids"], row["truths"]) == (numbers, ids, truths)
    [row] = await door.read("arrays", **{"numbers::bigint[]": array([])}, ids=None, truths=None)
    assert (row["numbers"], row["ids"]) == ([], None)


@pytest.mark.parametrize(
    "name", ["number::text[]", "number::bigint[]; drop table x", "num ber::bigint[]"]
)
async def test_no_argument_smuggles_sql(door: Database, name: str) -> None:
    with pytest.raises(ValueError, match="name of an argument"):
        await door.read("echo", **{name: "{}"})


async def test_a_step_is_serializable_and_a_read_is_not(door: Database) -> None:
    place = uuid.uuid4()
    (row,) = await door.step(
        "echo", deadline=soon(), id=place, number=7, document='{"b": 1,  "a": 1.0}'
    )
    assert (row["number"], row["document"], row["id"]) == (7, '{"b": 1,  "a": 1.0}', place)
    assert (row["isolation"], row["zone"]) == ("serializable", "UTC")
    (row,) = await door.read("echo", number=8)
    assert (row["number"], row["isolation"]) == (8, "read committed")


async def test_a_name_that_is_none_never_reaches_the_database(door: Database) -> None:
    with pytest.raises(ValueError, match="not a name"):
        await door.read("echo(1); select")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("QU000", BadRequest),
        ("QU001", PayloadTooLarge),
        ("QU100", NotFound),
        ("QU900", Stale),
        ("QU901", Refused),
        ("40001", Conflict),
        ("40P01", Conflict),
        ("23503", Stale),
        ("53100", StorageFull),
        ("54001", BadRequest),
        ("42501", Internal),
        ("XX000", Internal),
    ],
)
async def test_an_error_is_what_its_sqlstate_says(
    door: Database, code: str, error: type[QueenError | Signal]
) -> None:
    with pytest.raises(error) as caught:
        await door.step("raise", deadline=soon(), code=code, detail='{"field": "queue"}')
    assert type(caught.value) is error
    if code.startswith("QU"):
        assert caught.value.detail == {"field": "queue"}
    if error is Internal:
        assert "said so" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "wire"),
    [("57P01", "retry"), ("53300", "retry"), ("08006", "outcome_unknown"), ("57014", "timeout"),
     ("25006", "no_leader"), ("40003", "outcome_unknown")],
)  # fmt: skip
async def test_what_may_be_sent_again_is_unavailable(door: Database, code: str, wire: str) -> None:
    with pytest.raises(Unavailable) as caught:
        await door.step("raise", deadline=soon(), code=code)
    assert (caught.value.code, caught.value.status) == (wire, 503)
    assert caught.value.retry_after == 1


async def test_names_over_budget_have_a_code_of_their_own(door: Database) -> None:
    with pytest.raises(NameTooLong) as caught:
        await door.step("raise", deadline=soon(), code="QU001", detail='{"code": "name_too_long"}')
    assert (caught.value.code, caught.value.status) == ("name_too_long", 413)


async def test_a_taken_key_is_told_by_its_index(door: Database) -> None:
    await door.step("take", deadline=soon(), id=1, other=1)
    with pytest.raises(DuplicateMessage):
        await door.step("take", deadline=soon(), id=1, other=2)
    with pytest.raises(Conflict) as caught:
        await door.step("take", deadline=soon(), id=2, other=1)
    assert type(caught.value) is Conflict


async def test_lost_races_are_run_again_and_counted(door: Database) -> None:
    def lost() -> float:
        found = REGISTRY.get_sample_value(
            "queen_step_retries_total", {"function": "lose", "sqlstate": "40001"}
        )
        return found or 0

    before = lost()
    deadline = soon(30)

    async def one(place: str) -> list[asyncpg.Record]:
        return await door.retry(
            "lose", deadline, lambda: door.step("lose", deadline=deadline, place=place, nap=0.05)
        )

    # Each reads both counters and writes one: where they overlap, one of them must fail first.
    while lost() == before:
        await asyncio.gather(one("a"), one("b"))


async def test_a_step_that_never_wins_is_given_up_at_its_deadline(door: Database) -> None:
    clock = asyncio.get_running_loop().time
    started, runs = clock(), 0

    async def lose() -> None:
        nonlocal runs
        runs += 1
        raise Conflict("lost", sqlstate="40001")

    with pytest.raises(Unavailable) as caught:
        await door.retry("never", started + 0.3, lose)
    assert caught.value.code == "retry"
    assert 3 < runs < 100
    assert clock() - started < 0.35


async def test_refusals_are_not_retried(door: Database) -> None:
    async def refuse() -> None:
        raise Refused("carefully, please", sqlstate="QU901")

    with pytest.raises(Refused):
        await door.retry("refused", soon(), refuse)


async def test_a_deadline_ends_a_call_and_frees_its_connection(database: str) -> None:
    door = Database(Settings(pg_url=database, pg_pool_size=1))
    await door.start()
    connection = await asyncpg.connect(database)
    await connection.execute(FUNCTIONS)
    with pytest.raises(Unavailable) as caught:
        await door.step("nap", deadline=soon(0.1), seconds=30.0)
    assert caught.value.code == "timeout"
    (row,) = await door.step("echo", deadline=soon(), number=1)
    assert row["number"] == 1
    sleeping = await connection.fetchval(
        "select count(*) from pg_stat_activity where query like '%queen.nap%' and state = 'active'"
        " and pid <> pg_backend_pid()"
    )
    assert sleeping == 0
    await connection.close()
    await door.close()


async def test_a_call_that_waits_for_a_connection_ends_at_its_deadline(database: str) -> None:
    door = Database(Settings(pg_url=database, pg_pool_size=1))
    await door.start()
    connection = await asyncpg.connect(database)
    await connection.execute(FUNCTIONS)
    await connection.close()
    first = asyncio.create_task(door.step("nap", deadline=soon(), seconds=0.5))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as caught:
        await door.step("echo", deadline=soon(0.1), number=1)
    assert caught.value.code == "timeout"
    await first
    await door.close()


async def test_a_lost_connection_leaves_a_step_unknown_and_a_read_to_be_repeated(
    door: Database,
) -> None:
    # The server speaks a last word here; the fault tests cut the connection itself.
    with pytest.raises(Unavailable) as caught:
        await door.read("hang_up")
    assert caught.value.code == "retry"
    with pytest.raises(Unavailable) as caught:
        await door.step("hang_up", deadline=soon())
    assert caught.value.code in ("retry", "outcome_unknown")
    assert (await door.step("echo", deadline=soon(), number=2))[0]["number"] == 2


async def test_no_server_is_unavailable_at_once() -> None:
    door = Database(Settings(pg_url="postgresql://queen@127.0.0.1:1/queen"))
    with pytest.raises(Unavailable) as caught:
        await door.start()
    assert caught.value.code == "retry"
    with pytest.raises(Unavailable):
        await door.read("echo", number=1)
