-- What an administrator must know of a node: who it is, what it replicates, and what its role may do.
select
    c.system_identifier,
    current_database()::text as database,
    current_setting('server_version_num')::integer as server_version,
    current_setting('wal_level') as wal_level,
    current_setting('synchronous_standby_names') as standby_names,
    current_user::text as role,
    to_regclass('queen.nodes') is not null as installed,
    array(select c.relname::text from pg_class c
          where c.relnamespace = to_regnamespace('queen') and c.relkind = 'r'
            and c.relname not in ('epoch', 'alembic_version') order by 1) as tables,
    array(select t.tablename::text from pg_publication_tables t
          where t.pubname = 'queen_log' and t.schemaname = 'queen' order by 1) as published,
    exists (select from pg_publication p where p.pubname = 'queen_log') as publishes,
    array(select s.nspname::text from pg_namespace s where s.nspname like 'queen\_before\_%' order by 1) as kept,
    b.subname::text as subscription,
    b.subenabled as enabled,
    b.oid as subscription_id,
    array(select r.slot_name::text from pg_replication_slots r
          where r.slot_type = 'logical' and r.database = current_database() order by 1) as slots,
    u.rolsuper as superuser,
    u.rolsuper or u.rolreplication as may_replicate,
    u.rolsuper or (has_database_privilege(current_database(), 'CREATE')
                   and (current_setting('server_version_num')::integer >= 160000
                        and exists (select from pg_roles g where g.rolname = 'pg_create_subscription'
                                    and pg_has_role(g.oid, 'usage')))) as may_subscribe,
    has_database_privilege(current_database(), 'CREATE')
        and (n.oid is null or pg_has_role(n.nspowner, 'usage')) as may_publish,
    has_function_privilege('pg_replication_origin_progress(text, boolean)', 'execute') as may_see_progress,
    has_parameter_privilege('synchronous_standby_names', 'alter system')
        and has_function_privilege('pg_reload_conf()', 'execute') as may_set_quorum,
    pg_has_role(d.datdba, 'usage') as owns_database
from pg_control_system() c
cross join pg_database d
join pg_roles u on u.rolname = current_user
left join pg_namespace n on n.nspname = 'queen'
left join pg_subscription b on b.subdbid = d.oid and b.subname like 'queen\_%'
where d.datname = current_database()
