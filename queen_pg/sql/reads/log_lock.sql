-- One administrator at a time, for as long as this session lasts.
select pg_try_advisory_lock($1)
