-- Whether a role may move slots, and see up to where.
select r.rolsuper or (r.rolreplication
                      and has_function_privilege(r.oid, 'pg_replication_origin_progress(text, boolean)', 'execute')) as movable
from pg_roles r
where r.rolname = $1
