-- The transactions that run in this database beside our own; a transaction that wrote before it was fenced is one.
select l.virtualtransaction as transaction, l.pid
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'virtualxid' and l.pid <> pg_backend_pid() and a.datname = current_database()
  and coalesce(a.backend_type, 'client backend') = 'client backend'
