-- Push: messages go to the end of their partitions, each partition's share as one append.
--
-- The partition's row is updated first and numbers the messages, so offsets have no gaps and their order is
-- the order of commits. Stamps are taken under that lock and rise strictly along the partition; ids made from
-- them rise with the offsets (data-plane 2.2-7). Nothing here reads an index page that others insert into,
-- except the careful search for duplicates.
--
-- A call's messages come as arrays in the order of their groups; a group is the call's share for one
-- partition: its queue and name, and the partition's id, or null when it did not exist as the call began.

-- Append every message, and return them in their order. A stored or in-call duplicate of a transaction id raises
-- unique_violation on messages_transaction_id_key; a partition that is gone raises QU900.
create or replace function queen._append(
    tenant integer,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    item_group integer[],
    item_message_id uuid[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_producer_sub text[],
    item_payload text[]
) returns table (message_id uuid, message_offset bigint, partition_id bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_groups integer := cardinality(_append.group_queue);
    v_id bigint[] := _append.group_partition_id;
    v_queue_id bigint[] := array_fill(0::bigint, array[v_groups]);
    v_size integer[] := array_fill(0, array[v_groups]);
    v_first bigint[] := array_fill(0::bigint, array[v_groups]);
    v_next bigint[] := array_fill(0::bigint, array[v_groups]);
    v_stamp timestamptz[] := array_fill(null::timestamptz, array[v_groups]);
    v_head text[] := array_fill(''::text, array[v_groups]);
    v_found integer := 0;
    v_row record;
    v_new record;
begin
    -- v_first: where a group's items begin, and from below, what turns an item's place into its offset.
    for v_row in
        select i.item_group, min(i.place) as first, count(*) as size
        from unnest(_append.item_group) with ordinality i (item_group, place)
        group by i.item_group
    loop
        v_first[v_row.item_group] := v_row.first;
        v_size[v_row.item_group] := v_row.size;
    end loop;

    -- In the order of the ids, which is the order of the locks; the stamp is taken once the row is held.
    for v_row in
        update queen.partitions p
        set next_offset = p.next_offset + u.size,
            -- What only repeats earlier messages appends nothing, and the partition's quiet time goes on.
            last_append_at = case when u.size > 0 then greatest(queen.now(), p.last_append_at + interval '1 microsecond')
                                  else p.last_append_at end
        from unnest(v_id, v_size) with ordinality u (id, size, place)
        where p.id = u.id
        returning u.place::integer as place, p.queue_id, p.next_offset, p.last_append_at
    loop
        v_queue_id[v_row.place] := v_row.queue_id;
        v_next[v_row.place] := v_row.next_offset;
        v_stamp[v_row.place] := v_row.last_append_at;
        v_found := v_found + 1;
    end loop;

    if v_found < v_groups then
        if v_found <> v_groups - coalesce(cardinality(array_positions(v_id, null)), 0) then
            perform queen._fail('QU900', 'a partition of this call has been deleted');
        end if;
        -- A new partition is inserted as this append leaves it, so that a step which creates one reads nothing.
        for v_row in
            select g.place::integer as place, g.queue, g.partition
            from unnest(_append.group_queue, _append.group_partition, v_id) with ordinality g (queue, partition, id, place)
            where g.id is null
            order by g.queue, g.partition
        loop
            v_queue_id[v_row.place] := queen._ensure_queue(_append.tenant, v_row.queue);
            insert into queen.partitions as p (queue_id, name, next_offset, last_append_at, created_at)
            select v_queue_id[v_row.place], v_row.partition, v_size[v_row.place], c.moment, c.moment
            from (select queen.now() as moment) c
            on conflict (queue_id, name) do nothing
            returning p.id, p.next_offset, p.last_append_at into v_new;
            if not found then
                -- Another call created it between this one's look and now.
                update queen.partitions p
                set next_offset = p.next_offset + v_size[v_row.place],
                    last_append_at = greatest(queen.now(), p.last_append_at + interval '1 microsecond')
                where p.queue_id = v_queue_id[v_row.place] and p.name = v_row.partition
                returning p.id, p.next_offset, p.last_append_at into v_new;
            end if;
            v_id[v_row.place] := v_new.id;
            v_next[v_row.place] := v_new.next_offset;
            v_stamp[v_row.place] := v_new.last_append_at;
        end loop;
    end if;

    for v_group in 1 .. v_groups loop
        v_first[v_group] := v_next[v_group] - v_size[v_group] - v_first[v_group];
        v_head[v_group] := queen._uuid_v7_head(v_stamp[v_group]);
    end loop;

    return query
    insert into queen.messages (partition_id, message_offset, created_at, id, trace_id, transaction_id, producer_sub, payload)
    select v_id[n.item_group], v_first[n.item_group] + n.place, v_stamp[n.item_group], n.message_id, n.trace_id,
           coalesce(n.transaction_id, n.message_id::text), n.producer_sub, n.payload::json
    from (
        select i.item_group, i.place, i.transaction_id, i.trace_id, i.producer_sub, i.payload,
               coalesce(i.message_id, (v_head[i.item_group] || to_hex(8388608 + i.place) || right(gen_random_uuid()::text, 10))::uuid)
                   as message_id
        from unnest(_append.item_group, _append.item_message_id, _append.item_transaction_id,
                    _append.item_trace_id, _append.item_producer_sub, _append.item_payload)
             with ordinality i (item_group, message_id, transaction_id, trace_id, producer_sub, payload, place)
        offset 0
    ) n
    returning queen.messages.id, queen.messages.message_offset, queen.messages.partition_id;

    -- Written even where it changes nothing: an ack that has judged the partition drained must meet this row
    -- changed, and judge again.
    insert into queen.ready (group_id, partition_id, ready_at, next_offset)
    select c.id, u.id,
           u.stamp + make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0)),
           u.next_offset
    from unnest(v_id, v_queue_id, v_next, v_stamp, v_size) u (id, queue_id, next_offset, stamp, size)
    join queen.queues q on q.id = u.queue_id
    join queen.consumer_groups c on c.queue_id = u.queue_id
    where u.size > 0
    order by c.id, u.id
    on conflict (group_id, partition_id) do update
    set next_offset = excluded.next_offset,
        ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
end;
$$;

comment on function queen._append(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[]) is
    'Append messages to their partitions; partitions and queues that do not exist are created.';

-- What the call's messages repeat: an earlier item of the call (leader, by position), or a message stored
-- inside the queue's dedup window, the oldest of several. Locks the partitions that exist, so that the answer
-- holds until the end of the transaction.
create or replace function queen._duplicates(
    group_partition_id bigint[],
    item_group integer[],
    item_transaction_id text[]
) returns table (item integer, leader integer, stored_id uuid, stored_offset bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    v_windows integer[] := array_fill(0, array[cardinality(_duplicates.group_partition_id)]);
    v_row record;
    v_now timestamptz;
begin
    for v_row in
        select g.place::integer as place, q.dedup_window_seconds
        from unnest(_duplicates.group_partition_id) with ordinality g (id, place)
        join queen.partitions p on p.id = g.id
        join queen.queues q on q.id = p.queue_id
        order by p.id
        for no key update of p
    loop
        v_windows[v_row.place] := greatest(v_row.dedup_window_seconds, 0);
    end loop;
    v_now := queen.now();

    return query
    select i.item, i.leader, m.id, m.message_offset
    from (
        select u.place::integer as item, u.item_group, u.transaction_id,
               case when u.transaction_id is null then u.place
                    else min(u.place) over (partition by u.item_group, u.transaction_id) end::integer as leader
        from unnest(_duplicates.item_group, _duplicates.item_transaction_id)
             with ordinality u (item_group, transaction_id, place)
    ) i
    left join lateral (
        select m.id, m.message_offset
        from queen.messages m
        where m.partition_id = _duplicates.group_partition_id[i.item_group]
          and hashtextextended(m.transaction_id, 0) = hashtextextended(i.transaction_id, 0)
          and m.transaction_id = i.transaction_id
          and v_windows[i.item_group] > 0
          and m.created_at >= v_now - make_interval(secs => v_windows[i.item_group])
        order by m.message_offset
        limit 1
    ) m on true
    order by i.item;
end;
$$;

comment on function queen._duplicates(bigint[], integer[], text[]) is
    'For each message of a call: the first item with its transaction id, and the stored message it repeats.';

-- Let the ids of the call be stored again: a message that bears the same hash keeps its row and loses the
-- place of the newest.
create or replace function queen._demote_repeats(partition_id bigint[], transaction_id text[]) returns void
language sql volatile as $$
    update queen.messages m
    set repeat = (select max(r.repeat) + 1
                  from queen.messages r
                  where r.partition_id = m.partition_id
                    and hashtextextended(r.transaction_id, 0) = hashtextextended(m.transaction_id, 0))
    from unnest(_demote_repeats.partition_id, _demote_repeats.transaction_id) u (partition_id, transaction_id)
    where m.partition_id = u.partition_id
      and hashtextextended(m.transaction_id, 0) = hashtextextended(u.transaction_id, 0)
      and m.repeat = 0;
$$;

comment on function queen._demote_repeats(bigint[], text[]) is
    'Make room for new messages whose transaction ids were stored before and may be used again.';

-- Append the chosen items of a call; item in the answer is the position in chosen.
create or replace function queen._append_chosen(
    tenant integer,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    item_group integer[],
    item_message_id uuid[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_producer_sub text[],
    item_payload text[],
    chosen integer[]
) returns table (item integer, message_id uuid, message_offset bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    v_group integer[];
    v_partition_id bigint[];
    v_message_id uuid[];
    v_transaction_id text[];
    v_trace_id uuid[];
    v_producer_sub text[];
    v_payload text[];
begin
    select array_agg(i.item_group order by i.item), array_agg(_append_chosen.group_partition_id[i.item_group] order by i.item),
           array_agg(i.message_id order by i.item), array_agg(i.transaction_id order by i.item),
           array_agg(i.trace_id order by i.item), array_agg(i.producer_sub order by i.item), array_agg(i.payload order by i.item)
    into v_group, v_partition_id, v_message_id, v_transaction_id, v_trace_id, v_producer_sub, v_payload
    from unnest(_append_chosen.item_group, _append_chosen.item_message_id, _append_chosen.item_transaction_id,
                _append_chosen.item_trace_id, _append_chosen.item_producer_sub, _append_chosen.item_payload)
         with ordinality i (item_group, message_id, transaction_id, trace_id, producer_sub, payload, item)
    where i.item = any(_append_chosen.chosen);

    perform queen._demote_repeats(v_partition_id, v_transaction_id);
    return query
    select a.item::integer, a.message_id, a.message_offset
    from queen._append(_append_chosen.tenant, _append_chosen.group_queue, _append_chosen.group_partition,
                       _append_chosen.group_partition_id, v_group, v_message_id, v_transaction_id, v_trace_id,
                       v_producer_sub, v_payload) with ordinality a (message_id, message_offset, partition_id, item);
end;
$$;

comment on function queen._append_chosen(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], integer[]) is
    'Append the chosen items of a call that has been searched for duplicates.';

-- One push call. Optimistic unless careful: a duplicate then raises unique_violation and the call is to be
-- made again, carefully. Careful: duplicates are found first and answered as such.
create or replace function queen._push(
    tenant integer,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    item_group integer[],
    item_message_id uuid[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_producer_sub text[],
    item_payload text[],
    careful boolean
) returns table (item integer, status text, message_id uuid, message_offset bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_leader integer[];
    v_stored_id uuid[];
    v_stored_offset bigint[];
    v_fresh integer[];
    v_id uuid[] := array_fill(null::uuid, array[cardinality(_push.item_group)]);
    v_offset bigint[] := array_fill(null::bigint, array[cardinality(_push.item_group)]);
    v_row record;
begin
    if not _push.careful then
        return query
        select a.item::integer, 'queued', a.message_id, a.message_offset
        from queen._append(_push.tenant, _push.group_queue, _push.group_partition, _push.group_partition_id,
                           _push.item_group, _push.item_message_id, _push.item_transaction_id,
                           _push.item_trace_id, _push.item_producer_sub, _push.item_payload)
             with ordinality a (message_id, message_offset, partition_id, item);
        return;
    end if;

    select array_agg(d.leader order by d.item), array_agg(d.stored_id order by d.item),
           array_agg(d.stored_offset order by d.item),
           array_agg(d.item order by d.item) filter (where d.leader = d.item and d.stored_id is null)
    into v_leader, v_stored_id, v_stored_offset, v_fresh
    from queen._duplicates(_push.group_partition_id, _push.item_group, _push.item_transaction_id) d;

    if v_fresh is not null then
        for v_row in
            select f.item, a.message_id, a.message_offset
            from queen._append_chosen(_push.tenant, _push.group_queue, _push.group_partition, _push.group_partition_id,
                                    _push.item_group, _push.item_message_id, _push.item_transaction_id,
                                    _push.item_trace_id, _push.item_producer_sub, _push.item_payload, v_fresh) a
            join unnest(v_fresh) with ordinality f (item, place) on f.place = a.item
        loop
            v_id[v_row.item] := v_row.message_id;
            v_offset[v_row.item] := v_row.message_offset;
        end loop;
    end if;

    return query
    select i.item::integer,
           case when i.leader = i.item and i.stored_id is null then 'queued' else 'duplicate' end,
           coalesce(v_stored_id[i.leader], v_id[i.leader]),
           coalesce(v_stored_offset[i.leader], v_offset[i.leader])
    from unnest(v_leader, v_stored_id) with ordinality i (leader, stored_id, item)
    order by i.item;
end;
$$;

comment on function queen._push(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], boolean) is
    'One push call of the broker: each message is queued, or a duplicate of a stored or an earlier one.';
