-- Up to where this server's log is on its disk.
select pg_current_wal_flush_lsn() as lsn
