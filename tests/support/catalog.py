"""What a schema holds, as comparable text."""

import asyncpg

CATALOG = """
select 'relation', c.relname, c.relkind::text, coalesce(c.reloptions::text, ''),
       coalesce(obj_description(c.oid, 'pg_class'), '')
from pg_class c where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v', 'S')
union all
select 'column', c.relname, a.attnum::text, a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || ' ' || a.attnotnull || ' ' || a.attidentity::text || ' '
       || a.attcollation::regcollation::text,
       coalesce(pg_get_expr(d.adbin, d.adrelid), '')
from pg_attribute a join pg_class c on c.oid = a.attrelid
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v') and a.attnum > 0
union all
select 'constraint', c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid), ''
from pg_constraint c where c.connamespace = 'queen'::regnamespace
union all
select 'index', i.indrelid::regclass::text, i.indexrelid::regclass::text,
       pg_get_indexdef(i.indexrelid), ''
from pg_index i join pg_class c on c.oid = i.indexrelid
where c.relnamespace = 'queen'::regnamespace
union all
select 'function', p.proname, p.oid::regprocedure::text, pg_get_functiondef(p.oid),
       coalesce(obj_description(p.oid, 'pg_proc'), '') || coalesce(p.proacl::text, '')
from pg_proc p where p.pronamespace = 'queen'::regnamespace
order by 1, 2, 3
"""


async def catalog(url: str) -> list[tuple[str, ...]]:
    """Return one row per relation, column, constraint, index and function of the schema queen."""
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(CATALOG)]
    finally:
        await connection.close()
