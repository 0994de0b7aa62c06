"""queen._fail and queen._assert_serializable."""

import json

import asyncpg
import pytest


async def fail(conn: asyncpg.Connection, *arguments: object) -> asyncpg.PostgresError:
    places = ", ".join(f"${place}" for place in range(1, len(arguments) + 1))
    with pytest.raises(asyncpg.PostgresError) as caught:
        await conn.execute(f"select queen._fail({places})", *arguments)
    return caught.value


async def test_fail_raises_the_code_the_sentence_the_detail_and_the_hint(
    conn: asyncpg.Connection,
) -> None:
    error = await fail(conn, "QU000", "no 100 % good", json.dumps({"field": "queue"}), "try again")
    assert error.sqlstate == "QU000"
    assert error.message == "no 100 % good"
    assert json.loads(error.detail) == {"field": "queue"}
    assert error.hint == "try again"


async def test_fail_needs_no_detail_and_no_hint(conn: asyncpg.Connection) -> None:
    error = await fail(conn, "QU900", "gone")
    assert (error.sqlstate, error.detail, error.hint) == ("QU900", None, None)


@pytest.mark.parametrize(
    ("isolation", "refused"), [("read committed", True), ("serializable", False)]
)
async def test_assert_serializable_refuses_every_other_isolation(
    shared_database: str, isolation: str, refused: bool
) -> None:
    connection = await asyncpg.connect(
        shared_database, server_settings={"default_transaction_isolation": isolation}
    )
    try:
        if refused:
            with pytest.raises(asyncpg.PostgresError) as caught:
                await connection.execute("select queen._assert_serializable()")
            assert caught.value.sqlstate == "25001"
        else:
            await connection.execute("select queen._assert_serializable()")
    finally:
        await connection.close()
