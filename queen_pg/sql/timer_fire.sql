-- Firing: due timers become messages. `_timers_due` looks at READ COMMITTED, `_timers_fire` is the step that
-- claims what was found and judges it again.
--
-- The step takes the partitions before the timers, as every step does, and does not wait for a timer that
-- somebody is changing, so it cannot deadlock with a transaction that pushes to a partition and cancels a timer
-- of it. One step at a time fires a tenant's timers: those of one partition enter it in the order in which they
-- fell due (step 3.4-5), however many brokers look.

-- The oldest timers that are due, at most batch_max and 4 MiB of them, each with its partition's id if there is
-- one; else, in a row of its own, how long it is until the next one. Nothing while firing is switched off.
--
-- A pass goes on behind the last timer that it found, and without the partitions that were held: whatever is due in
-- one of those comes in its order when the next pass begins.
create or replace function queen._timers_due(
    batch_max integer,
    after_fire_at timestamptz default null,
    after_tenant integer default null,
    after_queue text default null,
    after_timer_key text default null,
    held_tenant integer[] default '{}',
    held_queue text[] default '{}',
    held_partition text[] default '{}'
) returns table (
    tenant integer, queue text, timer_key text, partition text, partition_id bigint, fire_at timestamptz,
    wait_seconds double precision
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
begin
    if not queen._switched_on('timers_fire') then
        return;
    end if;
    return query
    select d.tenant_id, d.queue, d.timer_key, d.partition, p.id, d.fire_at, null::double precision
    from (
        select t.*, sum(pg_column_size(t.payload)) over (order by t.fire_at, t.tenant_id, t.queue, t.timer_key) as bytes,
               row_number() over (order by t.fire_at, t.tenant_id, t.queue, t.timer_key) as place
        from (
            select t.tenant_id, t.queue, t.timer_key, t.partition, t.payload, t.fire_at
            from queen.timers t
            where t.fire_at <= v_now
              and (t.fire_at, t.tenant_id, t.queue, t.timer_key)
                  > (coalesce(_timers_due.after_fire_at, '-infinity'), coalesce(_timers_due.after_tenant, 0),
                     coalesce(_timers_due.after_queue, ''), coalesce(_timers_due.after_timer_key, ''))
              and (t.tenant_id, t.queue, t.partition)
                  not in (select h.tenant, h.queue, h.partition
                          from unnest(_timers_due.held_tenant, _timers_due.held_queue, _timers_due.held_partition)
                               h (tenant, queue, partition))
            order by t.fire_at, t.tenant_id, t.queue, t.timer_key
            limit _timers_due.batch_max
        ) t
    ) d
    left join queen.queues q on q.tenant_id = d.tenant_id and q.name = any(array[d.queue])
    left join queen.partitions p on p.queue_id = any(array[q.id]) and p.name = d.partition
    where d.place = 1 or d.bytes <= 4 * 1024 * 1024
    order by d.place;

    if not found then
        return query
        select null::integer, null::text, null::text, null::text, null::bigint, null::timestamptz,
               extract(epoch from t.fire_at - v_now)::double precision
        from queen.timers t
        where t.fire_at > v_now
        order by t.fire_at
        limit 1;
    end if;
end;
$$;

comment on function queen._timers_due(integer, timestamptz, integer, text, text, integer[], text[], text[]) is
    'The oldest due timers behind a place, but for some partitions; or, when there are none, the seconds until the next one.';

-- Fire those of a tenant's timers that are still due and still for the partition that was found: push their
-- messages and remove them. A transaction id that its partition still remembers is not pushed again, and its
-- timer is done (step 3.4-4); unless careful, that raises unique_violation and the call is to be made again.
-- Answers how many timers fired in each partition, and no row for those that somebody holds. If there are no others,
-- it waits for those for so long, unless it is 0, and then raises lock_not_available; as it does while another step fires.
create or replace function queen._timers_fire(
    tenant integer,
    queue text[],
    timer_key text[],
    partition text[],
    partition_id bigint[],
    careful boolean,
    wait_ms integer
) returns table (fired_queue text, fired_partition text, timer_count integer)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_held bigint[];
    v_timer record;
    v_groups integer := 0;
    v_group_queue text[] := '{}';
    v_group_partition text[] := '{}';
    v_group_partition_id bigint[] := '{}';
    v_queue text[] := '{}';
    v_partition text[] := '{}';
    v_place tid[] := '{}';
    v_item_group integer[] := '{}';
    v_message_id uuid[] := '{}';
    v_transaction_id text[] := '{}';
    v_producer_sub text[] := '{}';
    v_payload text[] := '{}';
begin
    if not queen._switched_on('timers_fire') then
        return;
    elsif not pg_try_advisory_xact_lock(hashtext('queen.timers'), _timers_fire.tenant) then
        perform queen._fail('55P03', 'another step is firing timers');
    end if;

    -- A partition that somebody holds is left for the next pass: his transaction may take its time, and timers of
    -- other partitions need not wait for it. But one that is never free for long is had by waiting only.
    v_held := array(
        select p.id
        from queen.partitions p
        where p.id = any(_timers_fire.partition_id)
        order by p.id
        for no key update skip locked
    );
    if v_held = '{}' and _timers_fire.wait_ms > 0 then
        -- Behind a pooler the session has no such setting.
        perform set_config('lock_timeout', _timers_fire.wait_ms::text, true);
        v_held := array(
            select p.id
            from queen.partitions p
            where p.id = any(_timers_fire.partition_id)
            order by p.id
            for no key update
        );
    end if;

    -- Found by key and judged after: a condition on fire_at in the search would offer the planner that index, and
    -- a walk through all that is due.
    for v_timer in
        with held as materialized (
            select t.*, u.partition as found_partition, u.partition_id
            from unnest(_timers_fire.queue, _timers_fire.timer_key, _timers_fire.partition, _timers_fire.partition_id)
                 u (queue, timer_key, partition, partition_id)
            cross join lateral (
                select t.ctid as place, t.*
                from queen.timers t
                where t.tenant_id = _timers_fire.tenant and t.queue = u.queue and t.timer_key = u.timer_key
                for update skip locked
            ) t
        )
        select h.*
        from held h
        where h.partition = h.found_partition and h.fire_at <= v_now
          and (h.partition_id = any(v_held) or h.partition_id is null)
        order by h.queue, h.partition, h.fire_at, h.timer_key
    loop
        if v_groups = 0 or v_timer.queue <> v_group_queue[v_groups] or v_timer.partition <> v_group_partition[v_groups] then
            v_groups := v_groups + 1;
            v_group_queue := v_group_queue || v_timer.queue;
            v_group_partition := v_group_partition || v_timer.partition;
            v_group_partition_id := v_group_partition_id || v_timer.partition_id;
        end if;
        v_queue := v_queue || v_timer.queue;
        v_partition := v_partition || v_timer.partition;
        v_place := v_place || v_timer.place;
        v_item_group := v_item_group || v_groups;
        v_message_id := v_message_id || v_timer.message_id;
        v_transaction_id := v_transaction_id || v_timer.transaction_id;
        v_producer_sub := v_producer_sub || v_timer.producer_sub;
        v_payload := v_payload || v_timer.payload::text;
    end loop;
    if v_groups = 0 then
        return;
    end if;

    perform p.item
    from queen._push(_timers_fire.tenant, v_group_queue, v_group_partition, v_group_partition_id, v_item_group,
                     v_message_id, v_transaction_id, array_fill(null::uuid, array[cardinality(v_item_group)]),
                     v_producer_sub, v_payload, _timers_fire.careful) p;

    -- They are where they were locked.
    delete from queen.timers t where t.ctid = any(v_place);

    return query
    select u.queue, u.partition, count(*)::integer
    from unnest(v_queue, v_partition) u (queue, partition)
    group by u.queue, u.partition;
end;
$$;

comment on function queen._timers_fire(integer, text[], text[], text[], bigint[], boolean, integer) is
    'Fire those of the named timers that are still due; how many, by partition.';

-- A timer cannot fire, and not for a passing reason: try again later, and after the last attempt file it as a dead
-- letter of its queue (step 3.4-9).
create or replace function queen._timer_fail(tenant integer, queue text, timer_key text, error text, attempts_max integer)
returns table (dead boolean)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_timer queen.timers;
    v_queue_id bigint;
    v_partition_id bigint;
begin
    dead := false;
    select t.* into v_timer
    from queen.timers t
    where t.tenant_id = _timer_fail.tenant and t.queue = _timer_fail.queue and t.timer_key = _timer_fail.timer_key
    for update;
    if found and v_timer.fire_at <= v_now then
        v_timer.attempts := v_timer.attempts + 1;
        dead := v_timer.attempts >= _timer_fail.attempts_max;
        update queen.timers t
        set attempts = v_timer.attempts,
            last_error = _timer_fail.error,
            fire_at = v_now + least(interval '1 second' * power(2, v_timer.attempts), interval '60 seconds')
        where t.tenant_id = _timer_fail.tenant and t.queue = _timer_fail.queue and t.timer_key = _timer_fail.timer_key;
    end if;
    if dead then
        v_queue_id := queen._ensure_queue(_timer_fail.tenant, _timer_fail.queue);
        insert into queen.partitions (queue_id, name, created_at) values (v_queue_id, v_timer.partition, v_now)
        on conflict (queue_id, name) do nothing;
        select p.id into v_partition_id
        from queen.partitions p
        where p.queue_id = v_queue_id and p.name = v_timer.partition;

        insert into queen.dead_letters (id, queue_id, partition_id, consumer_group, message_offset, message_id,
                                        transaction_id, payload, error, retry_count, failed_at)
        values (queen._uuid_v7(v_now), v_queue_id, v_partition_id, '__timer__', -1, v_timer.message_id,
                v_timer.transaction_id, v_timer.payload, _timer_fail.error, v_timer.attempts, v_now);
        delete from queen.timers t
        where t.tenant_id = _timer_fail.tenant and t.queue = _timer_fail.queue and t.timer_key = _timer_fail.timer_key;
    end if;
    return next;
end;
$$;

comment on function queen._timer_fail(integer, text, text, text, integer) is
    'Count a timer''s failed attempt: it waits for the next, or becomes a dead letter after the last.';
