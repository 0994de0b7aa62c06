-- Turns of brokers at partitions: held until the session gives them up. In the order of the keys, so that nobody
-- who waits is waited for.
select count(pg_advisory_lock(hashtext('queen.turns'), u.key))
from unnest($1::integer[]) u (key)
