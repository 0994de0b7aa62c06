-- Up to where in its primary's log a follower has applied and flushed everything; 0/0 before the first step.
select coalesce(pg_replication_origin_progress('pg_' || $1::oid, true), '0/0'::pg_lsn) as lsn
