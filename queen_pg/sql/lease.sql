-- Leases: a lease lives in the cursors it claims; `ready` says which those may be.

-- Extend the live leases of the id among the cursors given; a lease never gets shorter, and an expired one is not
-- renewed (data-plane 7).
create or replace function queen._extend_lease(
    lease_id uuid, seconds integer, partition_id bigint[], group_id bigint[]
) returns table (renewed integer, expires_at timestamptz)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_partition_id bigint[] := '{}';
    v_group_id bigint[] := '{}';
    v_expires_at timestamptz[] := '{}';
    v_row record;
begin
    for v_row in
        select c.partition_id, c.group_id, c.lease_expires_at, c.lease_id
        from unnest(_extend_lease.partition_id, _extend_lease.group_id) u (partition_id, group_id)
        join queen.cursors c on c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id
        order by u.partition_id, u.group_id
        for update of c
    loop
        v_now := coalesce(v_now, queen.now());
        if v_row.lease_id = _extend_lease.lease_id and v_row.lease_expires_at >= v_now then
            v_partition_id := v_partition_id || v_row.partition_id;
            v_group_id := v_group_id || v_row.group_id;
            v_expires_at := v_expires_at
                || greatest(v_row.lease_expires_at, v_now + make_interval(secs => _extend_lease.seconds));
        end if;
    end loop;

    update queen.cursors c
    set lease_expires_at = u.expires_at, updated_at = v_now
    from unnest(v_partition_id, v_group_id, v_expires_at) u (partition_id, group_id, expires_at)
    where c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id;

    insert into queen.ready (group_id, partition_id, ready_at, next_offset, lease_id)
    select u.group_id, u.partition_id, u.expires_at, 0, _extend_lease.lease_id
    from unnest(v_partition_id, v_group_id, v_expires_at) u (partition_id, group_id, expires_at)
    order by u.group_id, u.partition_id
    on conflict (group_id, partition_id) do update
    set ready_at = excluded.ready_at, lease_id = excluded.lease_id;

    return query select cardinality(v_partition_id), (select min(e) from unnest(v_expires_at) e);
end;
$$;

comment on function queen._extend_lease(uuid, integer, bigint[], bigint[]) is
    'Extend the live leases of an id; how many, and the earliest new expiry.';

create or replace function queen._find_lease(tenant integer, lease_id uuid)
returns table (partition_id bigint, group_id bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select r.partition_id, r.group_id
    from queen.ready r
    join queen.consumer_groups g on g.id = any(array[r.group_id])
    cross join lateral (select q.tenant_id from queen.queues q where q.id = g.queue_id offset 0) q
    where r.lease_id = _find_lease.lease_id and q.tenant_id = _find_lease.tenant
    order by r.partition_id, r.group_id;
$$;

comment on function queen._find_lease(integer, uuid) is 'The partitions and groups on which a lease of this id was taken.';

-- Give back leases whose answer could not be handed over: the batch may be claimed again at once, and the delivery
-- does not count (data-plane 4.3-12).
create or replace function queen._return_lease(lease_id uuid, partition_id bigint[], group_id bigint[]) returns integer
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_cursors queen.cursors[] := '{}';
    v_cursor queen.cursors;
begin
    for v_cursor in
        select c.*
        from unnest(_return_lease.partition_id, _return_lease.group_id) u (partition_id, group_id)
        join queen.cursors c on c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id
        where c.lease_id = _return_lease.lease_id
        order by u.partition_id, u.group_id
        for update of c
    loop
        if v_cursor.lease_id = _return_lease.lease_id then
            v_cursor.lease_id := null;
            v_cursor.batch_start_offset := null;
            v_cursor.batch_end_offset := null;
            v_cursor.lease_expires_at := null;
            v_cursor.lease_conflated := false;
            v_cursor.attempt_count := greatest(v_cursor.attempt_count - 1, 0);
            v_cursors := v_cursors || v_cursor;
        end if;
    end loop;
    perform queen._write_acks(v_cursors, '[]', queen.now());
    return cardinality(v_cursors);
end;
$$;

comment on function queen._return_lease(uuid, bigint[], bigint[]) is
    'Release leases that nobody received, and take back the delivery attempt; how many.';
