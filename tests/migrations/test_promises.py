"""What users build on stays: signatures, columns, and their own objects over ours."""

from pathlib import Path

import asyncpg

from queen_pg import migrate
from tests.support.database import Databases

PROMISED = Path(__file__).with_name("promised.txt")

SURFACE = """
select format('%s(%s) -> %s%s', p.proname, pg_get_function_arguments(p.oid),
              pg_get_function_result(p.oid), case p.provolatile when 's' then ' stable' else '' end)
from pg_proc p where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_'
union all
select format('view %s(%s)', c.relname,
              string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', '
                         order by a.attnum))
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where c.relnamespace = 'queen'::regnamespace and c.relkind = 'v'
group by c.relname
"""


async def test_the_public_surface_is_what_was_promised(conn: asyncpg.Connection) -> None:
    """A line may only be added, or grow at its end by an argument with a default or by a column.

    To add one, write it into promised.txt and into docs/sql.md. Whatever else makes this fail
    breaks somebody's program.
    """
    surface = [row[0] for row in await conn.fetch(SURFACE)]
    assert sorted(surface) == sorted(PROMISED.read_text().splitlines())


USERS = """
create schema shop;
create table shop.orders (id integer primary key);
create view shop.stuck as
    select l.*, m.payload from queen.lag l
    join queen.message m on m.queue = l.queue and m.partition = l.partition
    where l.oldest_at < now() + interval '1 hour';
create view shop.answers as select (queen.push('orders', '1')).*;
create function shop.place(id integer) returns bigint language sql as $$
    insert into shop.orders values ($1);
    select message_offset from queen.push('orders', to_json($1), partition => 'order-' || $1);
$$;
create function shop.placed() returns trigger language plpgsql as $$
begin
    perform queen.push('events', to_json(new));
    return null;
end;
$$;
create trigger placed after insert on shop.orders for each row execute function shop.placed();
create materialized view shop.queues as select * from queen.queue_state;
"""


async def test_a_user_s_objects_over_ours_survive_a_migration(databases: Databases) -> None:
    async with databases.clone() as url:
        connection = await asyncpg.connect(url)
        await connection.execute(USERS)
        await connection.execute("select shop.place(1)")
        before = sorted(row[0] for row in await connection.fetch(SURFACE))
        # As if another release had been installed: every function and view is made anew.
        await connection.execute(
            "create or replace function queen._function_set() returns text"
            " language sql as $$ select 'another release' $$"
        )
        await connection.close()
        assert not (await migrate.state(url)).current
        await migrate.upgrade(url)

        connection = await asyncpg.connect(url)
        assert sorted(row[0] for row in await connection.fetch(SURFACE)) == before
        await connection.execute("select shop.place(2)")
        await connection.execute("select queen.pop('orders', 'g', subscription_mode => 'all')")
        await connection.execute("refresh materialized view shop.queues")
        assert await connection.fetchval("select count(*) from shop.stuck") == 2
        assert await connection.fetchval("select status from shop.answers") == "queued"
        events = "select messages from shop.queues where queue = 'events'"
        assert await connection.fetchval(events) == 2
        await connection.close()
