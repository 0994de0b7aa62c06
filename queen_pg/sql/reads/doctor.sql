-- What `queen-pg doctor` judges: the server's settings, this role's rights, and the clock.
select
    current_setting('server_version_num')::integer as server_version,
    pg_is_in_recovery() as in_recovery,
    current_setting('server_encoding') as server_encoding,
    current_setting('max_pred_locks_per_transaction')::integer as max_pred_locks_per_transaction,
    current_setting('max_pred_locks_per_relation')::integer as max_pred_locks_per_relation,
    current_setting('max_pred_locks_per_page')::integer as max_pred_locks_per_page,
    current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer as connections,
    current_setting('wal_level') as wal_level,
    current_setting('fsync') as fsync,
    current_setting('full_page_writes') as full_page_writes,
    current_setting('synchronous_commit') as synchronous_commit,
    current_user::text as role,
    r.rolsuper as superuser,
    has_database_privilege(current_database(), 'CREATE') as may_create,
    n.nspname is not null as installed,
    coalesce(pg_has_role(n.nspowner, 'member'), false) as owns_schema,
    coalesce(has_schema_privilege(n.oid, 'USAGE'), false) as may_use_schema,
    extract(epoch from clock_timestamp())::float8 as clock
from pg_catalog.pg_roles r
left join pg_catalog.pg_namespace n on n.nspname = 'queen'
where r.rolname = current_user
