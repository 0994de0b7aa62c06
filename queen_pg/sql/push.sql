-- Push: messages go to the end of their partitions, each partition's share as one append.
--
-- The partition's row is updated first and numbers the messages, so offsets have no gaps and their order is
-- the order of commits. Stamps rise strictly along the partition; ids made from them rise with the offsets
-- (data-plane 2.2-7). Nothing here reads an index page that others insert into,
-- except the careful search for duplicates.
--
-- A call's messages come as arrays in the order of their groups; a group is the call's share for one
-- partition: its queue and name, and the partition's id, or null when it did not exist as the call began; the names are
-- for those, and where all exist their arrays may be null. Groups are in the order of their locks: by id, then those
-- without one by name.
--
-- A group is one append, whose messages share a stamp, unless item_append says that it holds those of several calls,
-- one after the other: then it numbers them, from 0 in each group, and each has a stamp of its own.

-- What _append does for one message to a partition that exists, as most calls bring it: without arrays it takes a
-- third of the time.
create or replace function queen._append_one(
    partition_id bigint,
    message_id uuid,
    transaction_id text,
    trace_id uuid,
    producer_sub text,
    payload json,
    out message_offset bigint,
    out head text,
    out tail text
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_moved record;
    v_id uuid;
begin
    update queen.partitions p
    set next_offset = p.next_offset + 1, last_append_at = greatest(v_now, p.last_append_at + interval '1 microsecond')
    where p.id = _append_one.partition_id
    returning p.queue_id, p.next_offset, p.last_append_at into v_moved;
    if not found then
        perform queen._fail('QU900', 'a partition of this call has been deleted');
    end if;
    message_offset := v_moved.next_offset - 1;
    head := queen._uuid_v7_head(v_moved.last_append_at);
    tail := queen._id_tail();
    v_id := coalesce(_append_one.message_id, queen._appended_id(head, 1, tail));

    insert into queen.messages (partition_id, message_offset, created_at, id, trace_id, transaction_id, producer_sub, payload)
    values (_append_one.partition_id, message_offset, v_moved.last_append_at, v_id, _append_one.trace_id,
            coalesce(_append_one.transaction_id, v_id::text), _append_one.producer_sub, _append_one.payload);

    insert into queen.ready (group_id, partition_id, ready_at, next_offset)
    select g.id, _append_one.partition_id,
           least(v_moved.last_append_at, v_now)
           + make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0)),
           v_moved.next_offset
    from queen.queues q
    join queen.consumer_groups g on g.queue_id = any(array[q.id])
    where q.id = v_moved.queue_id
    -- A sum, which no index has: for the order of one, the groups of all queues would be read.
    order by g.id + 0
    on conflict (group_id, partition_id) do update
    set next_offset = excluded.next_offset,
        ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
end;
$$;

comment on function queen._append_one(bigint, uuid, text, uuid, text, json) is
    'Append a message to a partition that exists: its offset, and what its id is made of unless it brings one.';

-- Append every message, and return for each group its partition, the offset of its first message and the head of its
-- ids; tail is one for all. The id of a message that brings none is _appended_id(head, its place in the call, tail).
-- group_first is the place of a group's first message. A stored or in-call duplicate of a transaction id raises
-- unique_violation on messages_transaction_id_key; a partition that is gone raises QU900.
create or replace function queen._append(
    tenant integer,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    group_first integer[],
    group_size integer[],
    item_group integer[],
    item_message_id uuid[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_producer_sub text[],
    item_payload text[],
    item_append integer[] default null,
    out partition_id bigint[],
    out first_offset bigint[],
    out head text[],
    out tail text
)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_groups integer := cardinality(_append.group_partition_id);
    v_now timestamptz := queen.now();
    v_head text := queen._uuid_v7_head(v_now);
    v_queue_id bigint[];
    v_next bigint[];
    v_stamp timestamptz[];
    v_base bigint[];
    v_reader record;
    v_one record;
begin
    partition_id := _append.group_partition_id;
    if v_groups = 1 and cardinality(_append.item_group) = 1 and partition_id[1] is not null then
        v_one := queen._append_one(partition_id[1], _append.item_message_id[1], _append.item_transaction_id[1],
                                   _append.item_trace_id[1], _append.item_producer_sub[1], _append.item_payload[1]::json);
        first_offset := array[v_one.message_offset];
        head := array[v_one.head];
        tail := v_one.tail;
        return;
    end if;
    -- In the order of the ids, which is the order of the locks. base turns a message's place into its offset.
    with moved as (
        update queen.partitions p
        set next_offset = p.next_offset + u.size,
            -- What only repeats earlier messages appends nothing, and the partition's quiet time goes on.
            last_append_at = case when u.size > 0 then greatest(v_now, p.last_append_at + interval '1 microsecond')
                                  else p.last_append_at end
        from unnest(_append.group_partition_id, _append.group_first, _append.group_size) with ordinality u (id, first, size, place)
        where p.id = any(array[u.id])
        returning u.place, u.first, u.size, p.queue_id, p.next_offset, p.last_append_at
    )
    select array_agg(m.queue_id order by m.place), array_agg(m.next_offset order by m.place),
           array_agg(m.last_append_at order by m.place), array_agg(m.next_offset - m.size order by m.place),
           array_agg(m.next_offset - m.size - m.first order by m.place),
           array_agg(case m.last_append_at when v_now then v_head else queen._uuid_v7_head(m.last_append_at) end order by m.place)
    into v_queue_id, v_next, v_stamp, first_offset, v_base, head
    from moved m;

    if coalesce(cardinality(v_next), 0) < v_groups then
        -- Those to be created come last.
        if array_position(_append.group_partition_id, null) is distinct from coalesce(cardinality(v_next), 0) + 1 then
            perform queen._fail('QU900', 'a partition of this call has been deleted');
        end if;
        select c.partition_id, v_queue_id || c.queue_id, v_next || c.next_offset, v_stamp || c.stamp
        into partition_id, v_queue_id, v_next, v_stamp
        from queen._append_to_new(_append.tenant, _append.group_queue, _append.group_partition, _append.group_partition_id,
                                  _append.group_size) c;
        select array_agg(u.next - u.size order by u.place), array_agg(u.next - u.size - u.first order by u.place),
               array_agg(queen._uuid_v7_head(u.stamp) order by u.place)
        into first_offset, v_base, head
        from unnest(v_next, _append.group_first, _append.group_size, v_stamp) with ordinality u (next, first, size, stamp, place);
    end if;
    tail := queen._id_tail();

    insert into queen.messages (partition_id, message_offset, created_at, id, trace_id, transaction_id, producer_sub, payload)
    select partition_id[n.item_group], v_base[n.item_group] + n.place,
           v_stamp[n.item_group] + coalesce(n.append, 0) * interval '1 microsecond', n.message_id, n.trace_id,
           coalesce(n.transaction_id, n.message_id::text), n.producer_sub, n.payload::json
    from (
        select i.item_group, i.append, i.place, i.transaction_id, i.trace_id, i.producer_sub, i.payload,
               coalesce(i.message_id, queen._appended_id(head[i.item_group], i.place, tail)) as message_id
        from unnest(_append.item_group, _append.item_append, _append.item_message_id, _append.item_transaction_id,
                    _append.item_trace_id, _append.item_producer_sub, _append.item_payload)
             with ordinality i (item_group, append, message_id, transaction_id, trace_id, producer_sub, payload, place)
        offset 0
    ) n;
    if _append.item_append is not null then
        update queen.partitions p
        set last_append_at = p.last_append_at + u.append * interval '1 microsecond'
        from (select i.item_group, max(i.append) as append
              from unnest(_append.item_group, _append.item_append) i (item_group, append)
              group by i.item_group) u
        where p.id = any(array[partition_id[u.item_group]]) and u.append > 0;
    end if;

    -- The hints of the queues' consumer groups, written even where that changes nothing: an ack that has judged the
    -- partition drained must meet this row changed, and judge again. A stamp may lie ahead of a clock that was set back.
    select array_agg(q.id) as queue_id, array_agg(c.id) as group_id,
           array_agg(make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0))) as delay
    into v_reader
    from (select distinct u.id from unnest(v_queue_id) u (id)) d
    join queen.queues q on q.id = any(array[d.id])
    join queen.consumer_groups c on c.queue_id = any(array[q.id]);
    if v_reader.group_id is not null then
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select r.group_id, u.id, least(u.stamp, v_now) + r.delay, u.next_offset
        from unnest(v_reader.queue_id, v_reader.group_id, v_reader.delay) r (queue_id, group_id, delay)
        join unnest(partition_id, v_queue_id, v_next, v_stamp, _append.group_size) u (id, queue_id, next_offset, stamp, size)
             on u.queue_id = r.queue_id and u.size > 0
        order by r.group_id, u.id
        on conflict (group_id, partition_id) do update
        set next_offset = excluded.next_offset,
            ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
    end if;
end;
$$;

comment on function queen._append(
    integer, text[], text[], bigint[], integer[], integer[], integer[], uuid[], text[], uuid[], text[], text[], integer[]
) is 'Append messages to their partitions; partitions and queues that do not exist are created.';

create or replace function queen._append_items(
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
    item_append integer[] default null
) returns table (item integer, message_id uuid, message_offset bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    v_first integer[];
    v_size integer[];
    v_first_offset bigint[];
    v_head text[];
    v_tail text;
begin
    -- Not by a join: with the settings that steps need, it would look at every pair.
    select array_agg(coalesce(s.first, 1) order by s.number), array_agg(s.size order by s.number)
    into v_first, v_size
    from (
        select u.number, min(u.place)::integer as first, count(u.place)::integer as size
        from (
            select i.number, i.place from unnest(_append_items.item_group) with ordinality i (number, place)
            union all
            select g.number, null from generate_subscripts(_append_items.group_partition_id, 1) g (number)
        ) u
        group by u.number
    ) s;

    -- Into variables: an array of texts in a row is walked through for each element that is taken from it.
    select a.first_offset, a.head, a.tail
    into v_first_offset, v_head, v_tail
    from queen._append(_append_items.tenant, _append_items.group_queue, _append_items.group_partition,
                       _append_items.group_partition_id, v_first, v_size, _append_items.item_group,
                       _append_items.item_message_id, _append_items.item_transaction_id, _append_items.item_trace_id,
                       _append_items.item_producer_sub, _append_items.item_payload, _append_items.item_append) a;
    return query
    select n.place::integer, coalesce(n.message_id, queen._appended_id(v_head[n.item_group], n.place, v_tail)),
           v_first_offset[n.item_group] + n.place - v_first[n.item_group]
    from unnest(_append_items.item_group, _append_items.item_message_id) with ordinality n (item_group, message_id, place)
    order by n.place;
end;
$$;

comment on function queen._append_items(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], integer[]) is
    'Append messages, and return the id and offset of each.';

-- A new partition is inserted as this append leaves it, so that a step which creates one reads nothing.
create or replace function queen._append_to_new(
    tenant integer,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    group_size integer[],
    out partition_id bigint[],
    out queue_id bigint[],
    out next_offset bigint[],
    out stamp timestamptz[]
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_row record;
    v_queue_id bigint;
    v_new record;
begin
    partition_id := _append_to_new.group_partition_id;
    for v_row in
        select g.place::integer as place, g.queue, g.partition, g.size
        from unnest(_append_to_new.group_queue, _append_to_new.group_partition, _append_to_new.group_partition_id,
                    _append_to_new.group_size) with ordinality g (queue, partition, id, size, place)
        where g.id is null
        order by g.place
    loop
        v_queue_id := queen._ensure_queue(_append_to_new.tenant, v_row.queue);
        insert into queen.partitions as p (queue_id, name, next_offset, last_append_at, created_at)
        select v_queue_id, v_row.partition, v_row.size, c.moment, c.moment
        from (select queen.now() as moment) c
        on conflict (queue_id, name) do nothing
        returning p.id, p.next_offset, p.last_append_at into v_new;
        if not found then
            -- Another call created it between this one's look and now.
            update queen.partitions p
            set next_offset = p.next_offset + v_row.size,
                last_append_at = greatest(queen.now(), p.last_append_at + interval '1 microsecond')
            where p.queue_id = v_queue_id and p.name = v_row.partition
            returning p.id, p.next_offset, p.last_append_at into v_new;
        end if;
        partition_id[v_row.place] := v_new.id;
        queue_id := queue_id || v_queue_id;
        next_offset := next_offset || v_new.next_offset;
        stamp := stamp || v_new.last_append_at;
    end loop;
end;
$$;

comment on function queen._append_to_new(integer, text[], text[], bigint[], integer[]) is
    'Create the partitions without an id, with the offsets that an append gives out; all ids, and the rest of the new ones.';

-- Which queues forget a transaction id so soon that a push whose answer was lost may not simply be sent again. One that
-- does not exist yet will remember.
create or replace function queen._forgetting(tenant integer, queue text[]) returns table (forgetting_queue text)
language sql stable parallel safe as $$
    select q.name
    from queen.queues q
    where q.tenant_id = _forgetting.tenant and q.name = any(_forgetting.queue) and q.dedup_window_seconds < 60;
$$;

comment on function queen._forgetting(integer, text[]) is
    'Those of the queues in which a push that is repeated within a minute may be stored twice.';

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
        join queen.partitions p on p.id = any(array[g.id])
        join queen.queues q on q.id = any(array[p.queue_id])
        order by g.id
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
        -- A sum, which no index has: for the order of one, all messages of the partition would be read.
        order by m.message_offset + 0
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
    where m.partition_id = any(array[u.partition_id])
      and hashtextextended(m.transaction_id, 0) = hashtextextended(u.transaction_id, 0)
      and m.repeat = 0;
$$;

comment on function queen._demote_repeats(bigint[], text[]) is
    'Make room for new messages whose transaction ids were stored before and may be used again.';

-- Append the chosen items of a call; item in the answer is the position among them.
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
    item_append integer[],
    item_chosen boolean[]
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
    v_append integer[];
begin
    select array_agg(i.item_group order by i.item), array_agg(_append_chosen.group_partition_id[i.item_group] order by i.item),
           array_agg(i.message_id order by i.item), array_agg(i.transaction_id order by i.item),
           array_agg(i.trace_id order by i.item), array_agg(i.producer_sub order by i.item), array_agg(i.payload order by i.item),
           array_agg(i.append order by i.item)
    into v_group, v_partition_id, v_message_id, v_transaction_id, v_trace_id, v_producer_sub, v_payload, v_append
    from unnest(_append_chosen.item_group, _append_chosen.item_message_id, _append_chosen.item_transaction_id,
                _append_chosen.item_trace_id, _append_chosen.item_producer_sub, _append_chosen.item_payload,
                _append_chosen.item_append, _append_chosen.item_chosen)
         with ordinality i (item_group, message_id, transaction_id, trace_id, producer_sub, payload, append, chosen, item)
    where i.chosen;
    perform queen._demote_repeats(v_partition_id, v_transaction_id);

    return query
    select a.item, a.message_id, a.message_offset
    from queen._append_items(_append_chosen.tenant, _append_chosen.group_queue, _append_chosen.group_partition,
                             _append_chosen.group_partition_id, v_group, v_message_id, v_transaction_id, v_trace_id,
                             v_producer_sub, v_payload, case when _append_chosen.item_append is not null then v_append end) a;
end;
$$;

comment on function queen._append_chosen(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], integer[], boolean[]) is
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
    careful boolean,
    item_append integer[] default null
) returns table (item integer, status text, message_id uuid, message_offset bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_leader integer[];
    v_stored_id uuid[];
    v_stored_offset bigint[];
    v_fresh integer[];
    v_is_fresh boolean[];
    v_id uuid[] := array_fill(null::uuid, array[cardinality(_push.item_group)]);
    v_offset bigint[] := array_fill(null::bigint, array[cardinality(_push.item_group)]);
    v_row record;
begin
    if not _push.careful then
        return query
        select a.item, 'queued', a.message_id, a.message_offset
        from queen._append_items(_push.tenant, _push.group_queue, _push.group_partition, _push.group_partition_id,
                                 _push.item_group, _push.item_message_id, _push.item_transaction_id,
                                 _push.item_trace_id, _push.item_producer_sub, _push.item_payload, _push.item_append) a;
        return;
    end if;

    select array_agg(d.leader order by d.item), array_agg(d.stored_id order by d.item),
           array_agg(d.stored_offset order by d.item),
           array_agg(d.item order by d.item) filter (where d.leader = d.item and d.stored_id is null),
           array_agg(d.leader = d.item and d.stored_id is null order by d.item)
    into v_leader, v_stored_id, v_stored_offset, v_fresh, v_is_fresh
    from queen._duplicates(_push.group_partition_id, _push.item_group, _push.item_transaction_id) d;

    if v_fresh is not null then
        for v_row in
            -- Never by a join: with the settings that steps need, it would look at every pair.
            select v_fresh[a.item] as item, a.message_id, a.message_offset
            from queen._append_chosen(_push.tenant, _push.group_queue, _push.group_partition, _push.group_partition_id,
                                    _push.item_group, _push.item_message_id, _push.item_transaction_id,
                                    _push.item_trace_id, _push.item_producer_sub, _push.item_payload,
                                    _push.item_append, v_is_fresh) a
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

comment on function queen._push(integer, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], boolean, integer[]) is
    'One push call of the broker: each message is queued, or a duplicate of a stored or an earlier one.';
