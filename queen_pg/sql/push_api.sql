-- Push, for SQL users: a message and their own rows commit together or not at all.
--
-- Right at READ COMMITTED and above: the partitions' rows are locked before anything is read, and held until the
-- user's transaction ends, so the order of offsets is the order of commits. Until then other pushes to those
-- partitions wait, and acks of their messages: push late, commit soon. A transaction that pushes to several
-- partitions should do so in one call, which takes the locks in order; several calls may meet a deadlock.

-- Lock a queue's row against its deletion, creating the queue when there is none.
create or replace function queen._hold_queue(tenant integer, queue text) returns void
language plpgsql as $$
#variable_conflict use_column
declare
    v_id bigint;
begin
    loop
        v_id := queen._ensure_queue(_hold_queue.tenant, _hold_queue.queue);
        perform from queen.queues q where q.id = v_id for key share;
        exit when found;
    end loop;
end;
$$;

comment on function queen._hold_queue(integer, text) is 'Keep a queue from being deleted, creating it when there is none.';

-- Lock partitions, creating those that do not exist; their ids. Those that exist are locked by id, then the others
-- are created by name, in the order of every step. So a search for duplicates finds all that will ever be in it.
create or replace function queen._hold_partitions(tenant integer, group_queue text[], group_partition text[])
returns bigint[]
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_id bigint[];
    v_locked integer;
    v_missing integer[];
begin
    loop
        select array_agg(p.id order by g.place) into v_id
        from unnest(_hold_partitions.group_queue, _hold_partitions.group_partition)
             with ordinality g (queue, partition, place)
        left join queen.queues q on q.tenant_id = _hold_partitions.tenant and q.name = g.queue
        left join queen.partitions p on p.queue_id = q.id and p.name = g.partition;
        v_missing := array_positions(v_id, null);

        perform from queen.partitions p where p.id = any(v_id) order by p.id for no key update;
        get diagnostics v_locked = row_count;
        -- Fewer: one was deleted since we looked.
        continue when v_locked <> cardinality(v_id) - cardinality(v_missing);
        exit when v_missing = '{}';

        perform queen._hold_queue(_hold_partitions.tenant, m.queue)
        from (select distinct _hold_partitions.group_queue[n] as queue from unnest(v_missing) n order by 1) m;
        perform queen._create_partitions(_hold_partitions.tenant, array_agg(_hold_partitions.group_queue[n]),
                                         array_agg(_hold_partitions.group_partition[n]))
        from unnest(v_missing) n;
    end loop;
    return v_id;
end;
$$;

comment on function queen._hold_partitions(integer, text[], text[]) is
    'Lock partitions until the transaction ends, creating those that do not exist; their ids.';

-- Append one message, unless its transaction id repeats one stored inside the dedup window. What _push does for a
-- batch, statement by statement without arrays: a quarter of its time (105 us against 440, one row and PostgreSQL 18).
create or replace function queen._push_one(
    tenant integer,
    queue text,
    partition text,
    transaction_id text,
    trace_id uuid,
    payload json,
    out status text,
    out message_id uuid,
    out message_offset bigint
)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_held record;
    v_stored record;
    v_repeats boolean := false;
    v_now timestamptz;
    v_stamp timestamptz;
begin
    loop
        select p.id, p.queue_id, make_interval(secs => q.dedup_window_seconds) as dedup_window,
               make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0)) as hold
        into v_held
        from queen.queues q
        join queen.partitions p on p.queue_id = q.id
        where q.tenant_id = _push_one.tenant and q.name = _push_one.queue and p.name = _push_one.partition
        for no key update of p;
        exit when found;
        perform queen._hold_partitions(_push_one.tenant, array[_push_one.queue], array[_push_one.partition]);
    end loop;
    v_now := queen.now();

    if _push_one.transaction_id is not null then
        for v_stored in
            select m.id, m.message_offset, m.created_at, m.transaction_id
            from queen.messages m
            where m.partition_id = v_held.id
              and hashtextextended(m.transaction_id, 0) = hashtextextended(_push_one.transaction_id, 0)
            order by m.message_offset
        loop
            if v_stored.transaction_id = _push_one.transaction_id
               and v_held.dedup_window > interval '0' and v_stored.created_at >= v_now - v_held.dedup_window
            then
                status := 'duplicate';
                message_id := v_stored.id;
                message_offset := v_stored.message_offset;
                return;
            end if;
            v_repeats := true;
        end loop;
        if v_repeats then
            perform queen._demote_repeats(array[v_held.id], array[_push_one.transaction_id]);
        end if;
    end if;

    update queen.partitions p
    set next_offset = p.next_offset + 1, last_append_at = greatest(v_now, p.last_append_at + interval '1 microsecond')
    where p.id = v_held.id
    returning p.next_offset - 1, p.last_append_at into message_offset, v_stamp;
    message_id := queen._uuid_v7(v_stamp);
    status := 'queued';

    insert into queen.messages (partition_id, message_offset, created_at, id, trace_id, transaction_id, payload)
    values (v_held.id, message_offset, v_stamp, message_id, _push_one.trace_id,
            coalesce(_push_one.transaction_id, message_id::text), _push_one.payload);

    insert into queen.ready (group_id, partition_id, ready_at, next_offset)
    select g.id, v_held.id, least(v_stamp, v_now) + v_held.hold, message_offset + 1
    from queen.consumer_groups g
    where g.queue_id = v_held.queue_id
    order by g.id
    on conflict (group_id, partition_id) do update
    set next_offset = excluded.next_offset,
        ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
end;
$$;

comment on function queen._push_one(integer, text, text, text, uuid, json) is
    'Append one message, or find the one that bears its transaction id; the partition is created when there is none.';

create or replace function queen.push(
    queue text,
    payload json,
    partition text default 'Default',
    transaction_id text default null,
    trace_id uuid default null,
    notify boolean default null
) returns table (status text, message_id uuid, message_offset bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_partition text := coalesce(nullif(push.partition, ''), 'Default');
begin
    perform queen._check_names(push.queue, v_partition);
    perform queen._check_message(push.payload, push.transaction_id);
    return query
    select p.status, p.message_id, p.message_offset
    from queen._push_one(v_tenant, push.queue, v_partition, push.transaction_id, push.trace_id, push.payload) p;
    perform queen._tell_pushed(v_tenant, array[push.queue], push.notify);
end;
$$;

comment on function queen.push(text, json, text, text, uuid, boolean) is
    'Push a message to a partition of a queue in the caller''s transaction; queued, or a duplicate of the message that bears its transaction id.';

-- The messages of a call in the order in which _push takes them: group by group, a group being the call's share for one
-- partition. Groups come in the order of the locks: by the partition's id, then those without one by name.
create or replace function queen._arrange(
    tenant integer,
    item_queue text[],
    item_partition text[],
    out group_queue text[],
    out group_partition text[],
    out group_partition_id bigint[],
    out item_group integer[],
    out item_place integer[]
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
    with items as materialized (
        select u.place::integer as place, u.queue, u.partition, p.id,
               dense_rank() over (order by p.id, u.queue collate "C", u.partition collate "C")::integer as number
        from unnest(_arrange.item_queue, _arrange.item_partition) with ordinality u (queue, partition, place)
        left join queen.queues q on q.tenant_id = _arrange.tenant and q.name = u.queue
        left join queen.partitions p on p.queue_id = q.id and p.name = u.partition
    ), groups as (
        select distinct on (i.number) i.number, i.queue, i.partition, i.id from items i order by i.number
    )
    select g.queue, g.partition, g.id, i.number, i.place
    into group_queue, group_partition, group_partition_id, item_group, item_place
    from (select array_agg(g.queue order by g.number) as queue, array_agg(g.partition order by g.number) as partition,
                 array_agg(g.id order by g.number) as id from groups g) g,
         (select array_agg(i.number order by i.number, i.place) as number,
                 array_agg(i.place order by i.number, i.place) as place from items i) i;
    group_queue := coalesce(group_queue, '{}');
    group_partition := coalesce(group_partition, '{}');
    group_partition_id := coalesce(group_partition_id, '{}');
    item_group := coalesce(item_group, '{}');
    item_place := coalesce(item_place, '{}');
end;
$$;

comment on function queen._arrange(integer, text[], text[]) is
    'Group the messages of a call by partition, in the order of the locks; item_place is where each stood in the call.';

-- By one join: to look up element by element would walk through the arrays each time.
create or replace function queen._rearrange(
    item_place integer[],
    inout transaction_id text[],
    inout trace_id uuid[],
    inout payload text[]
)
language sql immutable parallel safe as $$
    select array_agg(i.transaction_id order by u.at), array_agg(i.trace_id order by u.at), array_agg(i.payload order by u.at)
    from unnest(_rearrange.item_place) with ordinality u (place, at)
    join unnest(_rearrange.transaction_id, _rearrange.trace_id, _rearrange.payload)
         with ordinality i (transaction_id, trace_id, payload, place) on i.place = u.place;
$$;

comment on function queen._rearrange(integer[], text[], uuid[], text[]) is
    'What the messages of a call hold, in the order that _arrange found.';

create or replace function queen.push_many(messages json, notify boolean default null)
returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_items record;
    v_call record;
    v_held bigint[];
begin
    if push_many.messages is null or json_typeof(push_many.messages) <> 'array' then
        perform queen._refuse_argument('messages', 'messages must be a JSON array',
                                       '[{"queue": "orders", "partition": "order-9137", "payload": {"paid": true}}]');
    end if;
    perform queen._check_escapes('messages', push_many.messages);
    if json_array_length(push_many.messages) = 0 then
        return;
    end if;
    v_items := queen._read_plain_items(push_many.messages);
    if v_items.queue is null then
        select array_agg(i.queue order by m.place) as queue, array_agg(i.partition order by m.place) as partition,
               array_agg(i.transaction_id order by m.place) as transaction_id, array_agg(i.trace_id order by m.place) as trace_id,
               array_agg(i.payload::text order by m.place) as payload
        into v_items
        from json_array_elements(push_many.messages) with ordinality m (message, place)
        cross join lateral queen._read_item(m.message, format('messages[%s].', m.place - 1)) i;
    end if;

    v_call := queen._arrange(v_tenant, v_items.queue, v_items.partition);
    v_items := queen._rearrange(v_call.item_place, v_items.transaction_id, v_items.trace_id, v_items.payload);
    v_held := queen._hold_partitions(v_tenant, v_call.group_queue, v_call.group_partition);
    -- What repeats nothing needs none of the careful run, which takes as long again as the append.
    return query
    select v_call.item_place[p.item], p.status, p.message_id, p.message_offset
    from queen._push(
        v_tenant, v_call.group_queue, v_call.group_partition, v_held, v_call.item_group,
        array_fill(null::uuid, array[cardinality(v_call.item_place)]), v_items.transaction_id, v_items.trace_id,
        array_fill(null::text, array[cardinality(v_call.item_place)]), v_items.payload,
        not queen._all_new(v_held, v_call.item_group, v_items.transaction_id)) p
    order by 1;
    perform queen._tell_pushed(v_tenant, v_call.group_queue, push_many.notify);
end;
$$;

comment on function queen.push_many(json, boolean) is
    'Push an array of messages, each with its queue, partition, payload and transactionId; a row for each, by its place from 1.';
