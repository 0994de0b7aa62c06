-- What a follower's slot says at its primary.
select r.confirmed_flush_lsn as lsn, r.active, r.active_pid, r.wal_status
from pg_replication_slots r
where r.slot_name = $1
