"""Moving a tenant: everything that it has goes from one group to another, and nothing else.

Nobody works for the tenant meanwhile: its place is empty, and brokers answer 503 `retry`. Ids are
numbered anew where it arrives, so partition ids on the wire change, and leases taken before can
no longer be acked: their messages come again. Offsets, transaction ids, versions and times stay as
they are.

Until it is placed elsewhere a tenant has what it has where it was. So a move that was interrupted
may be repeated, turned back, or sent elsewhere: what an earlier one copied is copied again, and
once a tenant is placed, what other groups still have of it is removed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg

from queen_pg import leader, sql
from queen_pg.broker.placement import DEFAULT_TENANT, REMEMBERED_SECONDS
from queen_pg.config import HOME, Settings
from queen_pg.log import statement
from queen_pg.log.node import LogError, Say

CHUNKS_MAX = 16


async def places(settings: Settings) -> list[tuple[str, str]]:
    """Return the tenants that do not live at home, each with its group."""
    async with _open(settings.pg_url or "") as home:
        rows = await home.fetch(sql.read("reads/tenant_places"))
        return [(row["tenant"], row["log_group"] or "being moved") for row in rows]


async def move(settings: Settings, tenant: str, target: str, say: Say) -> None:
    """Move a tenant to another group; raise LogError when there is no such way."""
    urls = {HOME: settings.pg_url or "", **settings.group_urls}
    if target not in urls:
        raise LogError(f"there is no group {target}; the groups are {', '.join(urls)}")
    tenant = _name(tenant)
    async with contextlib.AsyncExitStack() as stack:
        home = await stack.enter_async_context(_open(urls[HOME]))
        rows = await home.fetch(sql.read("reads/tenant_place"), tenant)
        place = rows[0] if rows else None
        origin = HOME if place is None else place["log_group"] or place["moved_from"]
        if origin not in urls:
            raise LogError(
                f"{tenant} lives in {origin}, which is no group; name it in QUEEN_PG_GROUPS"
            )
        if origin != target:
            source = await stack.enter_async_context(_open(urls[origin]))
            arrival = await stack.enter_async_context(_open(urls[target]))
            await home.execute(statement.unplace_tenant(tenant, origin))
            say(f"waiting until every broker knows that {tenant} is on its way")
            await asyncio.sleep(2 * REMEMBERED_SECONDS)
            await _copy(source, arrival, tenant, say)
        if place is not None or origin != target:
            await home.execute(statement.place_tenant(tenant, target))
        say(f"{tenant} lives in {target}")
        for name in urls.keys() - {target}:
            async with _open(urls[name]) as group:
                await _forget(group, tenant)


def _name(text: str) -> str:
    """Return a tenant's name as brokers look it up."""
    try:
        name = str(UUID(text))
    except ValueError:
        raise LogError(f"{text} is no tenant: a tenant is a UUID") from None
    if name == DEFAULT_TENANT:
        raise LogError("the first tenant lives at home, and nowhere else")
    return name


@contextlib.asynccontextmanager
async def _open(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await leader.connect(await leader.leading_url(url))
    try:
        yield connection
    finally:
        connection.terminate()


async def _copy(
    source: asyncpg.Connection, target: asyncpg.Connection, tenant: str, say: Say
) -> None:
    old = await source.fetchval(sql.read("reads/tenant_known"), tenant)
    if old is None:
        return
    async with source.transaction(isolation="repeatable_read"), target.transaction():
        new = await target.fetchval(sql.read("reads/tenant_id"), tenant)
        # An earlier attempt's copy may lack what the tenant has done since.
        await _empty(target, new)
        shift = await target.fetchval(sql.read("reads/tenant_shift"))
        tables = list(statement.TENANT_TABLES)
        for row in await source.fetch(sql.read("reads/tenant_columns"), tables):
            table, columns = row["name"], row["columns"]
            query = statement.tenant_rows(table, columns, old, new, shift)
            await _pipe(source, query, target, table, columns)
            say(f"{tenant}: {table}")
        await target.execute(statement.AFTER_ARRIVAL)


async def _pipe(
    source: asyncpg.Connection,
    query: str,
    target: asyncpg.Connection,
    table: str,
    columns: list[str],
) -> None:
    """Pass rows from one server to another, a few chunks at a time."""
    chunks: asyncio.Queue[bytes] = asyncio.Queue(CHUNKS_MAX)

    async def drained() -> AsyncIterator[bytes]:
        while chunk := await chunks.get():
            yield chunk

    async def fill() -> None:
        await source.copy_from_query(query, output=chunks.put, format="binary")
        await chunks.put(b"")

    async with asyncio.TaskGroup() as group:
        group.create_task(fill())
        group.create_task(
            target.copy_to_table(
                table, schema_name="queen", columns=columns, source=drained(), format="binary"
            )
        )


async def _forget(group: asyncpg.Connection, tenant: str) -> None:
    """Remove what a group has of a tenant that lives elsewhere."""
    number = await group.fetchval(sql.read("reads/tenant_known"), tenant)
    if number is not None:
        async with group.transaction():
            await _empty(group, number)


async def _empty(group: asyncpg.Connection, number: int) -> None:
    for table in reversed(statement.TENANT_TABLES):
        await group.execute(statement.forget_rows(table, number))
