-- What a server is in the log. The timeline tells a promoted physical standby from the primary it replaced: both
-- have the same row.
select
    e.number as epoch,
    e.fenced_by,
    e.role,
    e.node as name,
    pg_is_in_recovery() as recovering,
    case when pg_is_in_recovery() then 0
         else ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer end as timeline
from queen.epoch e
