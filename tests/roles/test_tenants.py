"""Tenants are apart: a role works for those that it is granted, whatever its session asks for."""

import asyncpg
import pytest

from tests.roles.conftest import Governed

OTHER = "11111111-1111-1111-1111-111111111111"
DEFAULT = "00000000-0000-0000-0000-000000000001"


async def as_owner(governed: Governed, *statements: str) -> None:
    connection = await asyncpg.connect(governed.owner_url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def refused(connection: asyncpg.Connection, tenant: str, sqlstate: str = "42501") -> None:
    await connection.execute(f"set queen.tenant = '{tenant}'")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await connection.execute("select queen.push('orders', '1')")
    assert caught.value.sqlstate == sqlstate


async def test_without_a_grant_a_role_works_for_the_default_tenant_alone(
    governed: Governed, logins: dict[str, str]
) -> None:
    await as_owner(governed, f"insert into queen.tenants (name) values ('{OTHER}')")
    async with governed.login(logins["application"]) as connection:
        assert await connection.fetchval("select queen.current_tenant()") == 1
        await connection.execute(f"set queen.tenant = '{DEFAULT}'")
        assert await connection.fetchval("select queen.current_tenant()") == 1
        await refused(connection, OTHER)
        # Whether a tenant exists is not to be found out.
        await refused(connection, "no such tenant")


async def test_a_granted_role_works_for_its_tenant_and_sees_nothing_of_others(
    governed: Governed, logins: dict[str, str]
) -> None:
    role = logins["application"]
    await as_owner(
        governed,
        f"insert into queen.tenants (name) values ('{OTHER}')",
        "insert into queen.tenant_roles"
        f" select '{role}', id from queen.tenants where name = '{OTHER}'",
        "select queen.push('orders', '\"mine\"', 'p', 't')",
        "select queen.kv_put('n', 'k', '\"mine\"')",
        "select queen.timer_schedule('orders', 'k', '1', delay => '1 hour')",
        "select queen.lock_acquire('l', '1 minute')",
    )
    owner = await asyncpg.connect(governed.owner_url)
    leased = await owner.fetchrow(
        "select * from queen.pop('orders', 'g', subscription_mode => 'all')"
    )
    async with governed.login(role) as connection:
        assert await connection.fetchval("select queen.current_tenant()") == 2
        pop = "select * from queen.pop('orders', 'g', subscription_mode => 'all')"
        assert await connection.fetch(pop) == []
        assert await connection.fetch("select * from queen.kv_get('n', 'k')") == []
        assert await connection.fetch("select * from queen.kv_list('n')") == []
        assert await connection.fetch("select * from queen.lock_holders('l')") == []
        assert not await connection.fetchval("select queen.timer_cancel('orders', 'k')")
        for call, arguments in (
            ("ack($1, $2, $3, 'g')", (leased["partition_id"], "t", leased["lease_id"])),
            ("nack($1, $2, $3, 'g')", (leased["partition_id"], "t", leased["lease_id"])),
        ):
            row = await connection.fetchrow(f"select * from queen.{call}", *arguments)
            assert not row["success"]
        renewed = await connection.fetchrow(
            "select * from queen.extend_lease($1)", leased["lease_id"]
        )
        assert renewed["renewed"] == 0
        # The pop above has made a queue of the same name: each tenant has its own.
        assert await connection.fetchval("select queen.delete_queue('orders')")
        await refused(connection, DEFAULT)
        # Neither a change of role nor a function of its own makes it another session.
        await connection.execute("reset queen.tenant; set role queen_application")
        assert await connection.fetchval("select queen.current_tenant()") == 2
    still = await owner.fetchrow(
        "select * from queen.ack($1, 't', $2, 'g')", leased["partition_id"], leased["lease_id"]
    )
    assert still["success"]
    await owner.close()


async def test_a_role_of_several_tenants_must_say_which(
    governed: Governed, logins: dict[str, str]
) -> None:
    await as_owner(
        governed,
        f"insert into queen.tenants (name) values ('{OTHER}')",
        "insert into queen.tenant_roles select 'queen_application', id from queen.tenants",
    )
    async with governed.login(logins["application"]) as connection:
        await refused(connection, "", "QU000")
        for tenant, number in ((DEFAULT, 1), (OTHER, 2)):
            await connection.execute(f"set queen.tenant = '{tenant}'")
            assert await connection.fetchval("select queen.current_tenant()") == number


async def test_the_owner_and_the_broker_choose_freely(
    governed: Governed, logins: dict[str, str]
) -> None:
    await as_owner(governed, f"insert into queen.tenants (name) values ('{OTHER}')")
    for url in (governed.owner_url, governed.url(logins["broker"])):
        connection = await asyncpg.connect(url)
        assert await connection.fetchval("select queen.current_tenant()") == 1
        await connection.execute(f"set queen.tenant = '{OTHER}'")
        assert await connection.fetchval("select queen.current_tenant()") == 2
        await refused(connection, "no such tenant")
        await connection.close()


async def test_a_reader_chooses_what_the_views_show_and_nothing_more(
    governed: Governed, logins: dict[str, str]
) -> None:
    await as_owner(
        governed,
        f"insert into queen.tenants (name) values ('{OTHER}')",
        "select queen.push('orders', '1')",
        f"set queen.tenant = '{OTHER}'",
        "select queen.push('parcels', '1')",
    )
    async with governed.login(logins["reader"]) as connection:
        assert [row[0] for row in await connection.fetch("select queue from queen.message")] == [
            "orders"
        ]
        await connection.execute(f"set queen.tenant = '{OTHER}'")
        assert [row[0] for row in await connection.fetch("select queue from queen.message")] == [
            "parcels"
        ]
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetchval("select queen.current_tenant()")
