-- The logical slots of this database: who reads them, and how much of the log each keeps.
select r.slot_name::text as name, r.plugin::text as plugin, r.active, r.wal_status,
       r.confirmed_flush_lsn as lsn,
       greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn), 0)::bigint as kept_bytes,
       n.name as node,
       e.role = 'follower' as standing_by,
       pg_size_bytes(current_setting('max_slot_wal_keep_size')) as kept_bytes_max
from queen.epoch e
join pg_replication_slots r on r.slot_type = 'logical' and r.database = current_database()
left join queen.nodes n on r.slot_name = 'queen_' || n.name
order by 1
