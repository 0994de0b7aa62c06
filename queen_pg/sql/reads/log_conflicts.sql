-- How often applying failed, and how often a row was not as the primary had it.
select (s.apply_error_count + s.sync_error_count)::bigint as errors,
       (s.confl_insert_exists + s.confl_update_origin_differs + s.confl_update_exists + s.confl_update_missing
        + s.confl_delete_origin_differs + s.confl_delete_missing + s.confl_multiple_unique_conflicts)::bigint as conflicts
from pg_stat_subscription_stats s
where s.subid = $1
