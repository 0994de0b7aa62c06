-- How far a subscription's initial copy is.
select count(*) as tables,
       count(*) filter (where r.srsubstate in ('s', 'r')) as copied,
       (select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
        from pg_class c where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r') as bytes,
       coalesce((select sum(e.sync_error_count)::bigint from pg_stat_subscription_stats e where e.subid = $1), 0) as errors
from pg_subscription_rel r
where r.srsubid = $1
