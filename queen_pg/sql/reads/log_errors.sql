-- How often applying failed; before PostgreSQL 18 a conflict is one of these errors.
select (s.apply_error_count + s.sync_error_count)::bigint as errors, null::bigint as conflicts
from pg_stat_subscription_stats s
where s.subid = $1
