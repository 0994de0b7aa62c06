-- A follower's slot at its primary: how far it lags, and how much of the log is kept for it.
select r.wal_status,
       greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), r.confirmed_flush_lsn), 0)::bigint as lag_bytes,
       greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn), 0)::bigint as kept_bytes
from pg_replication_slots r
where r.slot_name = $1
