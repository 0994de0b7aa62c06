-- Where a feed's slot was confirmed last.
select r.confirmed_flush_lsn as lsn, r.wal_status, r.plugin
from pg_replication_slots r
where r.slot_name = $1 and r.database = current_database()
