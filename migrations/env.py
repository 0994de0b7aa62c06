"""How alembic runs here: the schema, the revisions, then the functions, in one transaction.

`queen_pg.migrate` is the door: it hands over a connection that holds the migration lock. Without
one (`queen-pg migrate --sql`) the same script is printed. Scripts go to the driver as they stand,
because alembic's own `op.execute` refuses several statements at once and reads `:word` as a
parameter.
"""

from pathlib import Path

from alembic import context

from queen_pg import sql

SCHEMA = """
do $$
begin
    if to_regnamespace('queen') is null then
        create schema queen;
    end if;
end;
$$;
"""

LOCK = "select pg_advisory_xact_lock({lock});"

FUNCTION_SET = """
create or replace function queen._function_set() returns text
language sql immutable parallel safe as $$ select '{digest}' $$;

comment on function queen._function_set() is
    'The fingerprint of the installed set of functions, by which a broker knows its own.';
"""

# A function older than this transaction is a leftover of another release. It has to go: an old
# signature beside a new one makes a call by name ambiguous.
LEFTOVERS = """
do $$
declare
    v_routine regprocedure;
begin
    for v_routine in
        select p.oid
        from pg_catalog.pg_proc p
        join pg_catalog.pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'queen' and age(p.xmin) > 0
        order by p.oid
    loop
        execute format('drop routine %s', v_routine);
    end loop;
end;
$$;
"""


def run(text: str) -> None:
    """Run a script inside the migration's transaction, or print it."""
    migration = context.get_context()
    if migration.as_sql:
        migration.impl.static_output(text.strip() + "\n")
        return
    connection = migration.connection
    if connection is None or connection.connection.dbapi_connection is None:
        raise RuntimeError("a migration needs an open connection")
    connection.connection.dbapi_connection.run_async(lambda driver: driver.execute(text))


def run_beside(revision: str) -> None:
    """Run the script beside a revision's Python file, given that file's `__file__`."""
    run(Path(revision).with_suffix(".sql").read_text(encoding="utf-8"))


def install_functions() -> None:
    """Install the set of functions anew, drop what it no longer holds, and set the rights."""
    *functions, rights = sql.MANIFEST
    for stem in functions:
        run(sql.read(stem))
    run(FUNCTION_SET.format(digest=sql.digest()))
    # Rights come last: they touch every function, after which none looks left over.
    run(LEFTOVERS)
    run(sql.read(rights))


context.config.attributes["run_beside"] = run_beside
context.configure(
    connection=context.config.attributes.get("connection"),
    dialect_name="postgresql",
    version_table_schema="queen",
    transactional_ddl=True,
)
with context.begin_transaction():
    if context.is_offline_mode():
        run(LOCK.format(lock=context.config.attributes["lock"]))
    run(SCHEMA)
    context.run_migrations()
    install_functions()
