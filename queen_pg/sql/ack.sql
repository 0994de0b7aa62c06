-- Acks: move a group's cursor, spend a retry, file a dead letter. An ack is a commit of offsets: it settles its
-- message and all before it (data-plane 6.4).
--
-- Names and transaction ids are resolved to offsets first; they never change, so this may happen before the
-- step begins. The step then locks the cursors FOR UPDATE in key order, judges every target against them, and
-- writes only afterwards. A target is a cursor and the lease that its acks name; targets of one cursor are
-- judged in the order in which they came, each seeing what the one before it decided.
--
-- acks: [{"partitionId": 12, "consumerGroup": "g", "leaseId": "…" or null, "transactionId": "t",
--         "status": "completed" | "failed" | "retry" | "dlq", "error": "…" or null, "call": 1}, …]
-- call tells the calls apart that share one transaction; acks of different calls are never judged together.

-- The common ack, of a call that completes messages of one live lease and says nothing else, needs none of that: it
-- is judged and written in one statement (_complete). Whatever is different in the least is judged by _judge_target.

-- For each ack its group, and the offset of its message when there is exactly one of its transaction id.
create or replace function queen._locate_acks(
    tenant integer, partition_id bigint[], consumer_group text[], transaction_id text[]
) returns table (place integer, group_id bigint, message_offset bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
as $$
    select a.place::integer, g.id, o.message_offset
    from unnest(_locate_acks.partition_id, _locate_acks.consumer_group, _locate_acks.transaction_id)
         with ordinality a (partition_id, consumer_group, transaction_id, place)
    cross join lateral (select p.id, p.queue_id from queen.partitions p where p.id = a.partition_id offset 0) p
    cross join lateral (
        select q.id from queen.queues q where q.id = p.queue_id and q.tenant_id = _locate_acks.tenant offset 0
    ) q
    cross join lateral (
        select g.id from queen.consumer_groups g where g.queue_id = q.id and g.name = a.consumer_group offset 0
    ) g
    cross join lateral (
        select min(m.message_offset) as message_offset
        from queen.messages m
        where m.partition_id = p.id and hashtextextended(m.transaction_id, 0) = hashtextextended(a.transaction_id, 0)
          and m.transaction_id = a.transaction_id
        having count(*) = 1
    ) o;
$$;

comment on function queen._locate_acks(integer, bigint[], text[], text[]) is
    'For acks whose messages can be told, the group and the offset; place is the position in the arguments.';

-- Complete messages of live leases: element by element a cursor, the lease on it, and the lowest and the highest offset
-- that one call completes. Elements are in the order of their keys, and no cursor comes twice. Answers the places where
-- every message was in the lease's span (data-plane 6.4, rules 3, 4, 7, 9 and 12, without signals), and whether the
-- lease was released; of the others nothing is written, and they are to be judged.
create or replace function queen._complete(
    partition_id bigint[],
    group_id bigint[],
    lease_id uuid[],
    first_offset bigint[],
    last_offset bigint[],
    out place integer[],
    out released boolean[],
    out woken bigint[]
)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_next bigint[];
begin
    with moved as (
        update queen.cursors c
        set committed_offset = u.last_offset,
            retry_count = case when u.last_offset >= c.batch_end_offset then 0 else c.retry_count end,
            attempt_offset = case when u.last_offset >= c.batch_end_offset then null
                                  when c.attempt_offset <= u.last_offset then u.last_offset + 1
                                  else c.attempt_offset end,
            attempt_count = case when u.last_offset >= c.batch_end_offset then 0 else c.attempt_count end,
            settled_lease_id = case when u.last_offset >= c.batch_end_offset then c.lease_id else c.settled_lease_id end,
            settled_from_offset = case when u.last_offset >= c.batch_end_offset then c.batch_start_offset else c.settled_from_offset end,
            settled_to_offset = case when u.last_offset >= c.batch_end_offset then c.batch_end_offset else c.settled_to_offset end,
            lease_id = case when u.last_offset >= c.batch_end_offset then null else c.lease_id end,
            batch_start_offset = case when u.last_offset >= c.batch_end_offset then null else c.batch_start_offset end,
            batch_end_offset = case when u.last_offset >= c.batch_end_offset then null else c.batch_end_offset end,
            lease_expires_at = case when u.last_offset >= c.batch_end_offset then null else c.lease_expires_at end,
            updated_at = v_now
        from unnest(_complete.partition_id, _complete.group_id, _complete.lease_id, _complete.first_offset, _complete.last_offset)
             with ordinality u (partition_id, group_id, lease_id, first_offset, last_offset, place)
        where c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id
          and c.lease_id = u.lease_id and c.lease_expires_at >= v_now and not c.lease_conflated
          and c.committed_offset < u.first_offset and c.batch_end_offset >= u.last_offset
        returning u.place, c.lease_id is null as released
    )
    select array_agg(m.place::integer order by m.place), array_agg(m.released order by m.place)
    into place, released
    from moved m;

    -- A cursor that still holds its lease keeps its hint: the lease's expiry. Where all do, as in most transactions,
    -- there is nothing to write, and a statement that writes nothing costs as much as a small one.
    woken := '{}';
    if true = any(released) then
        with hinted as (
            insert into queen.ready (group_id, partition_id, ready_at, next_offset)
            select _complete.group_id[u.place], _complete.partition_id[u.place], 'infinity', _complete.last_offset[u.place] + 1
            from unnest(place, released) u (place, released)
            where u.released
            order by 1, 2
            on conflict (group_id, partition_id) do update
            set lease_id = null,
                ready_at = case when ready.next_offset > excluded.next_offset then v_now else 'infinity' end
            returning group_id, ready_at
        )
        select coalesce(array_agg(distinct h.group_id), '{}') into woken from hinted h where h.ready_at < 'infinity';
    end if;
end;
$$;

comment on function queen._complete(bigint[], bigint[], uuid[], bigint[], bigint[]) is
    'The common acks: the places of those that were granted, whether each released its lease, and the groups to wake.';

-- For each ack of a JSON array its queue and group, and all offsets of its transaction id in the partition, in order.
create or replace function queen._resolve_acks(tenant integer, acks jsonb) returns jsonb
language sql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
as $$
    select coalesce(jsonb_agg(jsonb_build_object('queueId', q.id, 'groupId', g.id, 'offsets', coalesce(o.offsets, '[]'))
                              order by a.place), '[]')
    from jsonb_array_elements(_resolve_acks.acks) with ordinality a (ack, place)
    left join queen.partitions p on p.id = any(array[(a.ack ->> 'partitionId')::bigint])
    left join lateral (
        select q.id, q.tenant_id from queen.queues q where q.id = p.queue_id offset 0
    ) q on q.tenant_id = _resolve_acks.tenant
    left join queen.consumer_groups g on g.queue_id = any(array[q.id]) and g.name = a.ack ->> 'consumerGroup'
    left join lateral (
        select jsonb_agg(m.message_offset order by m.message_offset) as offsets
        from queen.messages m
        where m.partition_id = p.id and q.id is not null
          and hashtextextended(m.transaction_id, 0) = hashtextextended(a.ack ->> 'transactionId', 0)
          and m.transaction_id = a.ack ->> 'transactionId'
    ) o on true;
$$;

comment on function queen._resolve_acks(integer, jsonb) is
    'For each ack the ids of its queue and group, and the offsets that its transaction id has in the partition.';

-- Judge the acks of one target. Returns the cursor as it would be afterwards, a result per item and the
-- offsets to file as dead letters. Rule numbers are those of data-plane 6.4.
create or replace function queen._judge_target(
    cursor queen.cursors,
    lease_id text,
    items jsonb,
    retry_limit integer,
    dead_letters boolean,
    in_transaction boolean,
    moment timestamptz,
    out after queen.cursors,
    out results jsonb,
    out filed bigint[]
)
language plpgsql as $$
declare
    v_cursor queen.cursors := _judge_target.cursor;
    v_committed bigint := v_cursor.committed_offset;
    v_leased boolean := v_cursor.lease_id is not null;
    v_end bigint := v_cursor.batch_end_offset;
    v_spent boolean := v_cursor.retry_count >= greatest(_judge_target.retry_limit, 0);
    v_head bigint;
    v_signal text;
    v_prefix bigint;
    v_highest bigint;
    v_released boolean := false;
    v_status text;
begin
    after := v_cursor;
    filed := '{}';
    -- 3: the fence. 11: a repeat of the acks that settled this very lease is answered again.
    if _judge_target.lease_id is not null
       and (not v_leased or v_cursor.lease_id::text <> _judge_target.lease_id or v_cursor.lease_expires_at < _judge_target.moment)
    then
        select jsonb_agg(case
            when not s.settled then queen._ack_result('lease')
            when exists (select from jsonb_array_elements(i.item -> 'offsets') o
                         where o::bigint between v_cursor.settled_from_offset and v_cursor.settled_to_offset)
            then queen._ack_result(null, released => true) || '{"repeated": true}'
            else queen._ack_result('unresolvable') end order by i.place)
        into results
        from jsonb_array_elements(_judge_target.items) with ordinality i (item, place),
             (select not _judge_target.in_transaction
                     and coalesce(v_cursor.settled_lease_id::text = _judge_target.lease_id, false) as settled) s;
        return;
    end if;

    -- 4: an item resolves to its lowest offset in the span. 6: the head signal. 7: the completed prefix.
    with resolved as materialized (
        select i.item ->> 'status' as status,
               (select min(o::bigint) from jsonb_array_elements(i.item -> 'offsets') o
                where o::bigint > v_committed and (not v_leased or o::bigint <= v_end)) as message_offset
        from jsonb_array_elements(_judge_target.items) i (item)
    ), head as (
        select r.message_offset, r.status
        from resolved r
        where r.status <> 'completed' and r.message_offset is not null
        order by r.message_offset, array_position(array['dlq', 'failed', 'retry'], r.status)
        limit 1
    )
    select h.message_offset, h.status,
           coalesce(max(r.message_offset) filter (where r.status = 'completed'
                                                    and (h.message_offset is null or r.message_offset < h.message_offset)), v_committed),
           coalesce(max(r.message_offset) filter (where r.status = 'completed'), v_committed)
    into v_head, v_signal, v_prefix, v_highest
    from resolved r left join head h on true
    group by h.message_offset, h.status;

    if not v_leased then
        -- 8: without a lease, signals do nothing.
        after.committed_offset := v_highest;
    elsif v_head is null then
        -- 5: a batch that holds an id twice is settled when every id in it is acked under its lease.
        if v_cursor.lease_conflated and v_prefix > v_committed
           or _judge_target.lease_id is not null and v_prefix < v_end and v_end - v_committed = (
               select count(distinct o::bigint)
               from jsonb_array_elements(_judge_target.items) i (item), jsonb_array_elements(i.item -> 'offsets') o
               where o::bigint between v_committed + 1 and v_end)
        then
            v_prefix := v_end;
        end if;
        after.committed_offset := v_prefix;
        v_released := v_prefix >= v_end;
        if v_released then
            after.retry_count := 0;
        end if;
    elsif v_signal = 'retry' or (v_signal = 'failed' and not v_spent) then
        after.committed_offset := v_prefix;
        after.retry_count := v_cursor.retry_count + case v_signal when 'failed' then 1 else 0 end;
        v_released := true;
    else
        -- 9: the head is filed, or dropped. 10: then settle above it, position by position.
        after.committed_offset := v_head;
        after.retry_count := 0;
        v_released := true;
        if v_signal = 'dlq' or _judge_target.dead_letters then
            filed := filed || v_head;
        end if;
        while after.committed_offset < v_end loop
            v_status := queen._strongest_status(_judge_target.items, after.committed_offset + 1, v_committed, v_end);
            if v_status = 'failed' and not v_spent then
                after.retry_count := v_cursor.retry_count;
                exit;
            end if;
            exit when v_status = 'retry' or (v_status is null and v_highest <= after.committed_offset);
            after.committed_offset := after.committed_offset + 1;
            if v_status = 'dlq' or (v_status = 'failed' and _judge_target.dead_letters) then
                filed := filed || after.committed_offset;
            end if;
        end loop;
    end if;

    if v_released then
        if after.committed_offset >= v_end then
            after.settled_lease_id := v_cursor.lease_id;
            after.settled_from_offset := v_cursor.batch_start_offset;
            after.settled_to_offset := v_end;
            after.attempt_offset := null;
            after.attempt_count := 0;
        end if;
        after.lease_id := null;
        after.batch_start_offset := null;
        after.batch_end_offset := null;
        after.lease_expires_at := null;
        after.lease_conflated := false;
    end if;
    -- The rest of a batch counts its deliveries on from the batch's (decision on deliveryAttempt).
    if after.attempt_offset <= after.committed_offset then
        after.attempt_offset := after.committed_offset + 1;
    end if;

    -- 12: what each item is told.
    select jsonb_agg(case
        when o.in_span is not null then queen._ack_result(null, released => v_released, filed => o.in_span = any(filed)
                                                               and i.item ->> 'status' <> 'completed')
        when o.below and i.item ->> 'status' = 'completed' then queen._ack_result(null, released => v_released, noop => true)
        else queen._ack_result('unresolvable', released => v_released) end order by i.place)
    into results
    from jsonb_array_elements(_judge_target.items) with ordinality i (item, place)
    cross join lateral (
        select min(o::bigint) filter (where o::bigint > v_committed and (not v_leased or o::bigint <= v_end)) as in_span,
               coalesce(bool_or(o::bigint <= v_committed), false) as below
        from jsonb_array_elements(i.item -> 'offsets') o
    ) o;
end;
$$;

comment on function queen._judge_target(queen.cursors, text, jsonb, integer, boolean, boolean, timestamptz) is
    'What the acks of one lease would make of its cursor, and what each of them is told.';

create or replace function queen._strongest_status(items jsonb, message_offset bigint, committed_offset bigint, end_offset bigint)
returns text
language sql immutable parallel safe as $$
    select i.item ->> 'status'
    from jsonb_array_elements(_strongest_status.items) i (item)
    where (select min(o::bigint) from jsonb_array_elements(i.item -> 'offsets') o
           where o::bigint > _strongest_status.committed_offset and o::bigint <= _strongest_status.end_offset)
          = _strongest_status.message_offset
    order by array_position(array['dlq', 'failed', 'retry', 'completed'], i.item ->> 'status')
    limit 1;
$$;

comment on function queen._strongest_status(jsonb, bigint, bigint, bigint) is
    'What a call says of one position of its batch; null where it does not mention it.';

create or replace function queen._ack_result(
    refusal text, released boolean default false, filed boolean default false, noop boolean default false
) returns jsonb
language sql immutable parallel safe as $$
    select jsonb_build_object(
        'success', _ack_result.refusal is null,
        'error', case _ack_result.refusal
            when 'lease' then 'ack refused: its lease has expired, was released, or belongs to another consumer'
            when 'unresolvable' then 'ack refused: message already committed or unresolvable in this partition'
            when 'partition' then 'ack refused: no such partition' end,
        'leaseReleased', _ack_result.released,
        'dlq', _ack_result.filed,
        'noop', _ack_result.noop);
$$;

comment on function queen._ack_result(text, boolean, boolean, boolean) is 'One ack''s result; refusal is null for success.';

-- Lock the cursors of the acks and judge all targets. Writes nothing: returns the results in the order of the
-- acks, the cursors as they would be, and the dead letters to file.
create or replace function queen._judge_acks(
    acks jsonb,
    resolved jsonb,
    in_transaction boolean,
    out results jsonb,
    out cursors queen.cursors[],
    out filings jsonb,
    out moment timestamptz
)
language plpgsql as $$
declare
    v_results jsonb[] := array_fill(null::jsonb, array[jsonb_array_length(_judge_acks.acks)]);
    v_cursor queen.cursors;
    v_verdict record;
    v_target record;
    v_at integer;
begin
    cursors := '{}';
    filings := '[]';
    for v_cursor in
        select c.*
        from (select distinct (a.ack ->> 'partitionId')::bigint as partition_id, (r.fact ->> 'groupId')::bigint as group_id
              from jsonb_array_elements(_judge_acks.acks) with ordinality a (ack, place)
              join jsonb_array_elements(_judge_acks.resolved) with ordinality r (fact, place) using (place)) t
        join queen.cursors c on c.partition_id = any(array[t.partition_id]) and c.group_id = t.group_id
        order by t.partition_id, t.group_id
        for update of c
    loop
        cursors := cursors || v_cursor;
    end loop;
    moment := queen.now();

    for v_target in
        select (a.ack ->> 'partitionId')::bigint as partition_id, (r.fact ->> 'groupId')::bigint as group_id,
               (r.fact ->> 'queueId')::bigint as queue_id, nullif(a.ack ->> 'leaseId', '') as lease_id,
               a.ack -> 'call' as call,
               array_agg(a.place::integer order by a.place) as places,
               jsonb_agg(jsonb_build_object('status', a.ack -> 'status', 'offsets', r.fact -> 'offsets',
                                            'error', a.ack -> 'error') order by a.place) as items
        from jsonb_array_elements(_judge_acks.acks) with ordinality a (ack, place)
        join jsonb_array_elements(_judge_acks.resolved) with ordinality r (fact, place) using (place)
        group by 1, 2, 3, 4, 5
        order by min(a.place)
    loop
        select n into v_at
        from generate_subscripts(cursors, 1) n
        where cursors[n].partition_id = v_target.partition_id and cursors[n].group_id = v_target.group_id;

        if v_at is null then
            -- 1 and 2: no such partition, or nothing was ever delivered to this group there.
            for v_place in 1 .. cardinality(v_target.places) loop
                v_results[v_target.places[v_place]] := queen._ack_result(case
                    when v_target.queue_id is null then 'partition'
                    when v_target.lease_id is not null then 'lease'
                    else 'unresolvable' end);
            end loop;
            continue;
        end if;

        select v.* into v_verdict
        from queen.queues q
        cross join lateral queen._judge_target(
            cursors[v_at], v_target.lease_id, v_target.items, q.retry_limit,
            q.dead_letter_queue or q.dlq_after_max_retries, _judge_acks.in_transaction, moment) v
        where q.id = v_target.queue_id;
        if cardinality(v_verdict.filed) > 0 then
            filings := filings || jsonb_build_object(
                'queueId', v_target.queue_id, 'partitionId', v_target.partition_id,
                'groupId', v_target.group_id, 'offsets', to_jsonb(v_verdict.filed), 'items', v_target.items,
                'retryCount', cursors[v_at].retry_count);
        end if;
        cursors[v_at] := v_verdict.after;
        for v_place in 1 .. cardinality(v_target.places) loop
            v_results[v_target.places[v_place]] := v_verdict.results -> (v_place - 1);
        end loop;
    end loop;
    results := to_jsonb(v_results);
end;
$$;

comment on function queen._judge_acks(jsonb, jsonb, boolean) is
    'Lock the cursors that acks name and judge the acks; nothing is written.';

-- Write what _judge_acks decided. Returns the groups that can claim something again at once.
create or replace function queen._write_acks(cursors queen.cursors[], filings jsonb, moment timestamptz)
returns bigint[]
language plpgsql as $$
#variable_conflict use_column
declare
    v_changed queen.cursors[];
    v_woken bigint[];
begin
    with moved as (
        update queen.cursors c
        set committed_offset = u.committed_offset, lease_id = u.lease_id, batch_start_offset = u.batch_start_offset,
            batch_end_offset = u.batch_end_offset, lease_expires_at = u.lease_expires_at,
            lease_conflated = u.lease_conflated, retry_count = u.retry_count, attempt_offset = u.attempt_offset,
            attempt_count = u.attempt_count, settled_lease_id = u.settled_lease_id,
            settled_from_offset = u.settled_from_offset, settled_to_offset = u.settled_to_offset,
            updated_at = _write_acks.moment
        from unnest(_write_acks.cursors) u
        where c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id
          and (c.committed_offset, c.lease_id, c.retry_count) is distinct from (u.committed_offset, u.lease_id, u.retry_count)
        returning c.*
    )
    select array_agg(m::queen.cursors) into v_changed from moved m;

    insert into queen.dead_letters (id, queue_id, partition_id, consumer_group, message_offset, message_id, transaction_id,
                                    payload, error, retry_count, failed_at)
    select queen._uuid_v7(_write_acks.moment, o.place), (f.filing ->> 'queueId')::bigint, m.partition_id, g.name,
           m.message_offset, m.id, m.transaction_id, m.payload,
           coalesce(queen._filing_error(f.filing -> 'items', m.message_offset), 'failed by its consumer'),
           (f.filing ->> 'retryCount')::integer, _write_acks.moment
    from jsonb_array_elements(_write_acks.filings) f (filing)
    cross join lateral jsonb_array_elements_text(f.filing -> 'offsets') with ordinality o (message_offset, place)
    join queen.messages m
        on m.partition_id = any(array[(f.filing ->> 'partitionId')::bigint]) and m.message_offset = o.message_offset::bigint
    join queen.consumer_groups g on g.id = any(array[(f.filing ->> 'groupId')::bigint]);

    -- A cursor that still holds its lease keeps its hint: the lease's expiry.
    with hinted as (
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select u.group_id, u.partition_id, 'infinity', u.committed_offset + 1
        from unnest(v_changed) u
        where u.lease_id is null
        order by u.group_id, u.partition_id
        on conflict (group_id, partition_id) do update
        set lease_id = null,
            ready_at = case when ready.next_offset > excluded.next_offset then _write_acks.moment else 'infinity' end
        returning group_id, ready_at
    )
    select array_agg(distinct h.group_id) into v_woken from hinted h where h.ready_at < 'infinity';
    return coalesce(v_woken, '{}');
end;
$$;

comment on function queen._write_acks(queen.cursors[], jsonb, timestamptz) is
    'Write the cursors and dead letters that _judge_acks decided.';

create or replace function queen._filing_error(items jsonb, message_offset bigint) returns text
language sql immutable parallel safe as $$
    select i.item ->> 'error'
    from jsonb_array_elements(_filing_error.items) with ordinality i (item, place)
    where i.item ->> 'status' <> 'completed' and i.item ->> 'error' is not null
    order by (i.item -> 'offsets' @> to_jsonb(_filing_error.message_offset)) desc, i.place
    limit 1;
$$;

comment on function queen._filing_error(jsonb, bigint) is
    'The error that a dead letter keeps: its own ack''s, or else that of another ack of the call that did not complete.';

-- One ack call of the broker: every target is decided on its own (data-plane 6.3).
create or replace function queen._ack(tenant integer, acks jsonb, out results jsonb, out woken bigint[])
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
declare
    v_judged record;
begin
    v_judged := queen._judge_acks(_ack.acks, queen._resolve_acks(_ack.tenant, _ack.acks), false);
    results := v_judged.results;
    woken := queen._write_acks(v_judged.cursors, v_judged.filings, v_judged.moment);
end;
$$;

comment on function queen._ack(integer, jsonb) is 'One ack call of the broker: a result for each ack, in order, and the groups that can claim again at once.';
