-- A turn is over: the session gives up the locks of reads/turn.sql.
select pg_advisory_unlock_all()
