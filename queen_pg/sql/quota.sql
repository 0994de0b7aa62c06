-- What tenants keep, for the quotas of a broker (step 2.12). Nobody counts inside a step: a count reads what every
-- other write of the tenant changes, and SERIALIZABLE would send all but one of them back. So it is asked every few
-- seconds, and a quota is as exact as that.

-- A dead key counts as gone, though its row may wait for the sweep. A value counts with what it takes as it is stored.
create or replace function queen._usage(kv boolean, timers boolean)
returns table (tenant integer, kv_rows bigint, kv_bytes bigint, timer_count bigint)
language sql stable
as $$
    select u.tenant_id, sum(u.kv_rows)::bigint, sum(u.kv_bytes)::bigint, sum(u.timer_count)::bigint
    from (
        select k.tenant_id, count(*) as kv_rows,
               sum(octet_length(k.namespace) + octet_length(k.key) + pg_column_size(k.value)) as kv_bytes, 0 as timer_count
        from queen.kv k
        where _usage.kv and queen._kv_live(k.expires_at, (select queen.now()))
        group by k.tenant_id
        union all
        select t.tenant_id, 0, 0, count(*)
        from queen.timers t
        where _usage.timers
        group by t.tenant_id
    ) u
    group by u.tenant_id;
$$;

comment on function queen._usage(boolean, boolean) is
    'What each tenant keeps: live keys, the bytes of their names and values, pending timers; only what is asked for is counted.';
