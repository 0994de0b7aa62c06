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

-- Lock the partitions of a call's messages, creating those that do not exist; for each message its partition's id. Those
-- that exist are locked by id, then the others are created by name, in the order of every step. So a search for
-- duplicates finds all that will ever be in it.
create or replace function queen._hold_partitions(tenant integer, item_queue text[], item_partition text[])
returns bigint[]
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_queue_id bigint;
    v_id bigint[];
    v_locked integer;
    v_missing integer[];
begin
    loop
        if _hold_partitions.item_queue[1] = all(_hold_partitions.item_queue) then
            select q.id into v_queue_id
            from queen.queues q
            where q.tenant_id = _hold_partitions.tenant and q.name = _hold_partitions.item_queue[1];
        end if;
        -- Not by joins: planned while there are few queues, they would go on to look through all of them.
        select array_agg((select p.id from queen.partitions p where p.queue_id = i.queue_id and p.name = i.partition)
                         order by i.place)
        into v_id
        from (
            select u.place, u.partition,
                   coalesce(v_queue_id, (select q.id from queen.queues q
                                         where q.tenant_id = _hold_partitions.tenant and q.name = u.queue)) as queue_id
            from unnest(_hold_partitions.item_queue, _hold_partitions.item_partition)
                 with ordinality u (queue, partition, place)
            offset 0
        ) i;
        v_missing := array_positions(v_id, null);

        perform from queen.partitions p where p.id = any(v_id) order by p.id for no key update;
        get diagnostics v_locked = row_count;
        -- Fewer: one was deleted since we looked.
        continue when v_locked <> cardinality(v_id) and v_locked <> (select count(distinct u.id) from unnest(v_id) u (id));
        exit when v_missing = '{}';

        perform queen._hold_queue(_hold_partitions.tenant, m.queue)
        from (select distinct _hold_partitions.item_queue[n] as queue from unnest(v_missing) n order by 1) m;
        perform queen._create_partitions(_hold_partitions.tenant, array_agg(m.queue), array_agg(m.partition))
        from (select distinct _hold_partitions.item_queue[n] as queue, _hold_partitions.item_partition[n] as partition
              from unnest(v_missing) n) m;
    end loop;
    return v_id;
end;
$$;

comment on function queen._hold_partitions(integer, text[], text[]) is
    'Lock the partitions of messages until the transaction ends, creating those that do not exist; the id for each message.';

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
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_held record;
    v_stored record;
    v_repeats boolean := false;
    v_now timestamptz;
    v_appended record;
begin
    loop
        select p.id, make_interval(secs => q.dedup_window_seconds) as dedup_window
        into v_held
        from queen.partitions p
        join queen.queues q on q.id = any(array[p.queue_id])
        where p.queue_id = (select q.id from queen.queues q where q.tenant_id = _push_one.tenant and q.name = _push_one.queue)
          and p.name = _push_one.partition
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
            -- A sum, which no index has: for the order of one, all messages of the partition would be read.
            order by m.message_offset + 0
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

    v_appended := queen._append_one(v_held.id, null, _push_one.transaction_id, _push_one.trace_id, null, _push_one.payload);
    status := 'queued';
    message_id := queen._appended_id(v_appended.head, 1, v_appended.tail);
    message_offset := v_appended.message_offset;
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
        left join lateral (
            select q.id from queen.queues q where q.tenant_id = _arrange.tenant and q.name = u.queue offset 0
        ) q on true
        left join lateral (
            select p.id from queen.partitions p where p.queue_id = q.id and p.name = u.partition offset 0
        ) p on true
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

-- In PL/pgSQL, which takes its arrays apart as it begins: to look up element by element walks through no array then.
create or replace function queen._rearrange(
    item_place integer[],
    inout transaction_id text[],
    inout trace_id uuid[],
    inout payload text[]
)
language plpgsql immutable parallel safe as $$
#variable_conflict use_variable
begin
    select array_agg(transaction_id[u.place] order by u.at), array_agg(trace_id[u.place] order by u.at),
           array_agg(payload[u.place] order by u.at)
    into transaction_id, trace_id, payload
    from unnest(_rearrange.item_place) with ordinality u (place, at);
end;
$$;

comment on function queen._rearrange(integer[], text[], uuid[], text[]) is
    'What the messages of a call hold, in the order that _arrange found.';

-- Push a call that may repeat what is stored, or itself. It takes as long again as one that does not.
create or replace function queen._push_carefully(
    tenant integer,
    item_queue text[],
    item_partition text[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_payload json[]
) returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    v_call record;
    v_items record;
begin
    v_call := queen._arrange(_push_carefully.tenant, _push_carefully.item_queue, _push_carefully.item_partition);
    v_items := queen._rearrange(v_call.item_place, _push_carefully.item_transaction_id, _push_carefully.item_trace_id,
                                _push_carefully.item_payload::text[]);
    return query
    select v_call.item_place[p.item], p.status, p.message_id, p.message_offset
    from queen._push(
        _push_carefully.tenant, v_call.group_queue, v_call.group_partition, v_call.group_partition_id, v_call.item_group,
        array_fill(null::uuid, array[cardinality(v_call.item_place)]), v_items.transaction_id, v_items.trace_id,
        array_fill(null::text, array[cardinality(v_call.item_place)]), v_items.payload, true) p
    order by 1;
end;
$$;

comment on function queen._push_carefully(integer, text[], text[], text[], uuid[], json[]) is
    'Push the messages of a call to partitions that are locked, with a search for what each of them repeats.';

-- Push messages to one partition: what _push_one does for one, and _append for many. Nothing has to be sorted, and what
-- is stored is answered by the INSERT that stores it.
create or replace function queen._push_share(
    tenant integer,
    queue text,
    partition text,
    item_transaction_id text[],
    item_trace_id uuid[],
    item_payload json[]
) returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_size integer := cardinality(_push_share.item_payload);
    v_held record;
    v_repeats boolean;
    v_now timestamptz;
    v_stamp timestamptz;
    v_before bigint;
    v_head text;
    v_tail text := queen._id_tail();
begin
    loop
        select p.id, p.queue_id,
               make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0)) as hold
        into v_held
        from queen.partitions p
        join queen.queues q on q.id = any(array[p.queue_id])
        where p.queue_id = (select q.id from queen.queues q where q.tenant_id = _push_share.tenant and q.name = _push_share.queue)
          and p.name = _push_share.partition
        for no key update of p;
        exit when found;
        perform queen._hold_partitions(_push_share.tenant, array[_push_share.queue], array[_push_share.partition]);
    end loop;
    v_now := queen.now();

    if _push_share.item_transaction_id is not null then
        -- Each id by a subquery of its own: a search for all of them at once, planned while there was no message, would go on
        -- to read the whole partition.
        select count(s.hash) <> count(distinct s.hash) or count(s.stored) > 0 into v_repeats
        from (
            select h.hash,
                   (select m.partition_id
                    from queen.messages m
                    where m.partition_id = v_held.id and hashtextextended(m.transaction_id, 0) = h.hash and m.repeat = 0) as stored
            from (select hashtextextended(u.transaction_id, 0) as hash
                  from unnest(_push_share.item_transaction_id) u (transaction_id)) h
        ) s;
        if v_repeats then
            return query
            select c.place, c.status, c.message_id, c.message_offset
            from queen._push_carefully(
                _push_share.tenant, array_fill(_push_share.queue, array[v_size]), array_fill(_push_share.partition, array[v_size]),
                _push_share.item_transaction_id, _push_share.item_trace_id, _push_share.item_payload) c;
            return;
        end if;
    end if;

    update queen.partitions p
    set next_offset = p.next_offset + v_size,
        last_append_at = greatest(v_now, p.last_append_at + interval '1 microsecond')
    where p.id = v_held.id
    returning p.next_offset - v_size - 1, p.last_append_at into v_before, v_stamp;
    v_head := queen._uuid_v7_head(v_stamp);

    return query
    insert into queen.messages as m (partition_id, message_offset, created_at, id, trace_id, transaction_id, payload)
    select v_held.id, v_before + i.place, v_stamp, i.id, i.trace_id, coalesce(i.transaction_id, i.id::text), i.payload
    from (
        select u.place, u.transaction_id, u.trace_id, u.payload, queen._appended_id(v_head, u.place, v_tail) as id
        from unnest(_push_share.item_transaction_id, _push_share.item_trace_id, _push_share.item_payload)
             with ordinality u (transaction_id, trace_id, payload, place)
        offset 0
    ) i
    returning (m.message_offset - v_before)::integer, 'queued', m.id, m.message_offset;

    insert into queen.ready (group_id, partition_id, ready_at, next_offset)
    select g.id, v_held.id, least(v_stamp, v_now) + v_held.hold, v_before + v_size + 1
    from queen.consumer_groups g
    where g.queue_id = v_held.queue_id
    -- A sum, as in _append_one.
    order by g.id + 0
    on conflict (group_id, partition_id) do update
    set next_offset = excluded.next_offset,
        ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
end;
$$;

comment on function queen._push_share(integer, text, text, text[], uuid[], json[]) is
    'Push messages to one partition, which is created when there is none.';

-- Push messages, each to a partition of its own: what _push_share does, with the messages numbered share by share.
create or replace function queen._push_shares(
    tenant integer,
    item_queue text[],
    item_partition text[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_payload json[]
) returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_item_id bigint[];
    v_share integer[];
    v_behind integer[];
    v_now timestamptz;
    v_now_head text;
    v_tail text := queen._id_tail();
    v_id bigint[];
    v_queue_id bigint[];
    v_next bigint[];
    v_stamp timestamptz[];
    v_reader record;
begin
    if _push_shares.item_partition[1] = all(_push_shares.item_partition)
        and _push_shares.item_queue[1] = all(_push_shares.item_queue)
    then
        return query
        select s.place, s.status, s.message_id, s.message_offset
        from queen._push_share(_push_shares.tenant, _push_shares.item_queue[1], _push_shares.item_partition[1],
                               _push_shares.item_transaction_id, _push_shares.item_trace_id, _push_shares.item_payload) s;
        return;
    end if;

    v_item_id := queen._hold_partitions(_push_shares.tenant, _push_shares.item_queue, _push_shares.item_partition);
    v_now := queen.now();
    v_now_head := queen._uuid_v7_head(v_now);

    -- Each id by a subquery of its own: a join planned while there was no message would go on to read all of them.
    if _push_shares.item_transaction_id is not null
        and (select count(s.hash) <> count(distinct s.hash) or count(s.stored) > 0
             from (
                 select hashtextextended(u.transaction_id, u.id) as hash,
                        (select m.partition_id
                         from queen.messages m
                         where m.partition_id = u.id
                           and hashtextextended(m.transaction_id, 0) = hashtextextended(u.transaction_id, 0)
                           and m.repeat = 0) as stored
                 from unnest(v_item_id, _push_shares.item_transaction_id) u (id, transaction_id)
             ) s)
    then
        return query
        select c.place, c.status, c.message_id, c.message_offset
        from queen._push_carefully(_push_shares.tenant, _push_shares.item_queue, _push_shares.item_partition,
                                   _push_shares.item_transaction_id, _push_shares.item_trace_id, _push_shares.item_payload) c;
        return;
    end if;

    -- Each message's share, in the order of the partitions' ids, and how far it is from the end of it.
    select array_agg(s.share order by s.place), array_agg(s.behind order by s.place)
    into v_share, v_behind
    from (
        select u.place, dense_rank() over (order by u.id)::integer as share,
               (row_number() over (partition by u.id order by u.place desc))::integer as behind
        from unnest(v_item_id) with ordinality u (id, place)
    ) s;

    -- Where no partition comes twice, which is what many partitions mostly mean, they need not be joined to anything.
    if v_behind = array_fill(1, array[cardinality(v_behind)]) then
        with moved as (
            update queen.partitions p
            set next_offset = p.next_offset + 1,
                last_append_at = greatest(v_now, p.last_append_at + interval '1 microsecond')
            where p.id = any(v_item_id)
            returning p.id, p.queue_id, p.next_offset, p.last_append_at
        )
        select array_agg(m.id), array_agg(m.queue_id), array_agg(m.next_offset), array_agg(m.last_append_at)
        into v_id, v_queue_id, v_next, v_stamp
        from (select m.* from moved m order by m.id) m;
    else
        with moved as (
            update queen.partitions p
            set next_offset = p.next_offset + u.size,
                last_append_at = greatest(v_now, p.last_append_at + interval '1 microsecond')
            from (select i.id, count(*) as size from unnest(v_item_id) i (id) group by i.id order by i.id) u
            where p.id = any(array[u.id])
            returning p.id, p.queue_id, p.next_offset, p.last_append_at
        )
        select array_agg(m.id), array_agg(m.queue_id), array_agg(m.next_offset), array_agg(m.last_append_at)
        into v_id, v_queue_id, v_next, v_stamp
        from (select m.* from moved m order by m.id) m;
    end if;

    return query
    with stored as (
        insert into queen.messages (partition_id, message_offset, created_at, id, trace_id, transaction_id, payload)
        select i.partition_id, v_next[i.share] - i.behind, i.created_at, i.id, i.trace_id,
               coalesce(i.transaction_id, i.id::text), i.payload
        from (
            select u.partition_id, u.share, u.behind, u.transaction_id, u.trace_id, u.payload, v_stamp[u.share] as created_at,
                   queen._appended_id(case v_stamp[u.share] when v_now then v_now_head else queen._uuid_v7_head(v_stamp[u.share]) end,
                                      u.place, v_tail) as id
            from unnest(v_item_id, v_share, v_behind, _push_shares.item_transaction_id, _push_shares.item_trace_id,
                        _push_shares.item_payload)
                 with ordinality u (partition_id, share, behind, transaction_id, trace_id, payload, place)
            offset 0
        ) i
        returning id, message_offset
    )
    -- They come back as they went in.
    select (row_number() over ())::integer, 'queued', s.id, s.message_offset from stored s;

    select array_agg(q.id) as queue_id, array_agg(c.id) as group_id,
           array_agg(make_interval(secs => greatest(q.delayed_processing_seconds, q.window_buffer_seconds, 0))) as hold
    into v_reader
    from (select distinct u.id from unnest(v_queue_id) u (id)) d
    join queen.queues q on q.id = any(array[d.id])
    join queen.consumer_groups c on c.queue_id = any(array[q.id]);
    if v_reader.group_id is not null then
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select r.group_id, u.id, least(u.stamp, v_now) + r.hold, u.next_offset
        from unnest(v_reader.queue_id, v_reader.group_id, v_reader.hold) r (queue_id, group_id, hold)
        join unnest(v_id, v_queue_id, v_next, v_stamp) u (id, queue_id, next_offset, stamp) on u.queue_id = r.queue_id
        order by r.group_id, u.id
        on conflict (group_id, partition_id) do update
        set next_offset = excluded.next_offset,
            ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end;
    end if;
end;
$$;

comment on function queen._push_shares(integer, text[], text[], text[], uuid[], json[]) is
    'Push messages, each to the partition that it names; what repeats a transaction id is a duplicate.';

create or replace function queen.push_batch(
    queue text,
    payloads json[],
    partition text default 'Default',
    transaction_ids text[] default null,
    partitions text[] default null,
    notify boolean default null
) returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_size integer := cardinality(push_batch.payloads);
    v_partition text := coalesce(nullif(push_batch.partition, ''), 'Default');
    v_partitions text[] := push_batch.partitions;
    v_plain boolean;
    v_named boolean;
begin
    perform queen._check_names(push_batch.queue, v_partition);
    if push_batch.payloads is null then
        perform queen._refuse_argument('payloads', 'payloads must be an array', 'array[''{"paid": true}'']::json[]');
    elsif cardinality(push_batch.transaction_ids) <> v_size then
        perform queen._refuse_argument('transaction_ids', 'there must be as many transaction ids as payloads',
                                       'A null stands for a message without one.');
    elsif cardinality(push_batch.partitions) <> v_size then
        perform queen._refuse_argument('partitions', 'there must be as many partitions as payloads',
                                       'One partition for all goes into the argument partition.');
    elsif v_size = 0 then
        return;
    end if;

    -- Far from every limit, nothing needs a closer look. An element's size is its bytes and four.
    select bool_and(coalesce(pg_column_size(u.payload) < 1000000 and coalesce(octet_length(u.transaction_id) < 1000, true)
                             and coalesce(octet_length(u.partition) + octet_length(push_batch.queue) < 400, true), false)),
           bool_and(coalesce(u.partition <> '', false))
    into v_plain, v_named
    from unnest(push_batch.payloads, push_batch.transaction_ids, push_batch.partitions) u (payload, transaction_id, partition);
    if not v_plain then
        perform queen._check_message(u.payload, u.transaction_id, format('payloads[%s]', u.place), format('transaction_ids[%s]', u.place)),
                queen._check_names(push_batch.queue, u.partition)
        from unnest(push_batch.payloads, push_batch.transaction_ids, push_batch.partitions)
             with ordinality u (payload, transaction_id, partition, place);
    end if;

    if push_batch.partitions is null then
        return query
        select s.place, s.status, s.message_id, s.message_offset
        from queen._push_share(v_tenant, push_batch.queue, v_partition, push_batch.transaction_ids, null, push_batch.payloads) s;
    else
        -- Nor is an array of strange bounds or dimensions what anybody below expects.
        if not v_named or array_ndims(v_partitions) <> 1 or array_lower(v_partitions, 1) <> 1 then
            select array_agg(coalesce(nullif(u.partition, ''), v_partition) order by u.place) into v_partitions
            from unnest(push_batch.partitions) with ordinality u (partition, place);
        end if;
        return query
        select s.place, s.status, s.message_id, s.message_offset
        from queen._push_shares(v_tenant, array_fill(push_batch.queue, array[v_size]), v_partitions,
                                push_batch.transaction_ids, null, push_batch.payloads) s;
    end if;
    perform queen._tell_pushed(v_tenant, array[push_batch.queue], push_batch.notify);
end;
$$;

comment on function queen.push_batch(text, json[], text, text[], text[], boolean) is
    'Push an array of payloads to a partition of a queue, or each to its own; a row for each, by its place from 1.';

create or replace function queen.push_many(messages json, notify boolean default null)
returns table (place integer, status text, message_id uuid, message_offset bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_items record;
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
               array_agg(i.payload order by m.place) as payload
        into v_items
        from json_array_elements(push_many.messages) with ordinality m (message, place)
        cross join lateral queen._read_item(m.message, format('messages[%s].', m.place - 1)) i;
    end if;
    return query
    select s.place, s.status, s.message_id, s.message_offset
    from queen._push_shares(v_tenant, v_items.queue, v_items.partition, v_items.transaction_id, v_items.trace_id,
                            v_items.payload) s;
    perform queen._tell_pushed(v_tenant, v_items.queue, push_many.notify);
end;
$$;

comment on function queen.push_many(json, boolean) is
    'Push an array of messages, each with its queue, partition, payload and transactionId; a row for each, by its place from 1.';
