-- The step: one worker's acks, pushes, positions, KV writes and timers as ONE transaction, all or nothing.
--
-- Judgement goes acks, pushes, positions, KV (step 1.11-3); locks go cursors, partitions, KV keys, timers, each in
-- key order. A careful run judges everything before it writes anything, so a refusal leaves nothing to undo. An
-- optimistic run, which comes first, judges the acks and then writes blindly: blind writes take no predicate locks
-- on index pages that strangers insert into. Where it meets a duplicate or a lost condition it raises, is rolled
-- back, and the careful run finds the verdict.

-- The common step, whose acks only complete messages of live leases (_complete) and which has no positions: everything
-- is written blindly. Raises QU901 when an ack or a condition has to be judged, and what _append raises.
create or replace function queen._transact(
    tenant integer,
    ack_partition_id bigint[],
    ack_group_id bigint[],
    ack_lease_id uuid[],
    ack_first_offset bigint[],
    ack_last_offset bigint[],
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
    kv jsonb,
    timers jsonb,
    out reason text,
    out released boolean[],
    out first_offset bigint[],
    out head text[],
    out tail text,
    out kv_results text[],
    out timer_results text[],
    out woken bigint[]
)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
declare
    v_done record;
    v_moment timestamptz;
begin
    reason := queen._switched_off(_transact.kv, _transact.timers);
    if reason is not null then
        return;
    end if;
    if cardinality(_transact.ack_partition_id) > 0 then
        v_done := queen._complete(_transact.ack_partition_id, _transact.ack_group_id, _transact.ack_lease_id,
                                  _transact.ack_first_offset, _transact.ack_last_offset);
        if cardinality(v_done.place) is distinct from cardinality(_transact.ack_partition_id) then
            perform queen._fail('QU901', 'an ack is to be judged');
        end if;
        released := v_done.released;
        woken := v_done.woken;
    end if;
    if cardinality(_transact.item_group) > 0 then
        v_done := queen._append(
            _transact.tenant, _transact.group_queue, _transact.group_partition, _transact.group_partition_id, _transact.group_first,
            _transact.group_size, _transact.item_group, _transact.item_message_id, _transact.item_transaction_id,
            _transact.item_trace_id, _transact.item_producer_sub, _transact.item_payload);
        first_offset := v_done.first_offset;
        head := v_done.head;
        tail := v_done.tail;
    end if;
    v_moment := queen.now();
    -- A single operation has no order, and is carried out in half the time.
    if jsonb_array_length(_transact.kv) = 1 and _transact.kv->0->>'op' not in ('get', 'getMany', 'getPrefix') then
        kv_results := array[queen._kv_change(_transact.tenant, _transact.kv->0, v_moment, false)::text];
    elsif jsonb_array_length(_transact.kv) > 0 then
        select array_agg(k.result::text order by k.operation_index) into kv_results
        from queen._kv_write(_transact.tenant, _transact.kv, v_moment, false) k;
    end if;
    if jsonb_array_length(_transact.timers) = 1 then
        timer_results := array[queen._timer_change(_transact.tenant, _transact.timers->0, v_moment, 0)::text];
    elsif jsonb_array_length(_transact.timers) > 0 then
        select array_agg(t.result::text order by t.operation_index) into timer_results
        from queen._timers_apply(_transact.tenant, _transact.timers, v_moment) t;
    end if;
end;
$$;

comment on function queen._transact(
    integer, bigint[], bigint[], uuid[], bigint[], bigint[], text[], text[], bigint[], integer[], integer[], integer[], uuid[],
    text[], uuid[], text[], text[], jsonb, jsonb
) is 'The common step, written blindly; a reason, and nothing written, when a switch is thrown.';

create or replace function queen._switched_off(kv jsonb, timers jsonb) returns text
language plpgsql stable as $$
begin
    if jsonb_array_length(_switched_off.kv) > 0 and not queen._switched_on('kv') then
        return 'kv_disabled';
    end if;
    if jsonb_path_exists(_switched_off.timers, '$[*] ? (@.op != "cancel")') and not queen._switched_on('timers_schedule') then
        return 'timers_disabled';
    end if;
    return null;
end;
$$;

comment on function queen._switched_off(jsonb, jsonb) is 'The reason why a step with these KV and timer operations must not be, or null.';

create or replace function queen._transaction(
    tenant integer,
    acks jsonb,
    resolved jsonb,
    group_queue text[],
    group_partition text[],
    group_partition_id bigint[],
    item_group integer[],
    item_message_id uuid[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_producer_sub text[],
    item_payload text[],
    positions jsonb,
    kv jsonb,
    timers jsonb,
    careful boolean,
    out reason text,
    out failure jsonb,
    out ack_results jsonb,
    out push_item integer[],
    out push_duplicate boolean[],
    out push_message_id uuid[],
    out push_offset bigint[],
    out kv_results text[],
    out timer_results text[],
    out woken bigint[]
)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
declare
    v_judged record;
    v_repeats boolean;
    v_moment timestamptz;
begin
    reason := queen._switched_off(_transaction.kv, _transaction.timers);
    if reason is not null then
        return;
    end if;

    -- All cursors in one go: those of positions and then those of acks would be two orders.
    if jsonb_array_length(_transaction.positions) > 0 then
        perform from (
            select c.partition_id, c.group_id
            from (
                select (u.position ->> 'partitionId')::bigint as partition_id, (u.position ->> 'groupId')::bigint as group_id
                from jsonb_array_elements(_transaction.positions) u (position)
                union
                select (a.ack ->> 'partitionId')::bigint, (r.fact ->> 'groupId')::bigint
                from jsonb_array_elements(_transaction.acks) with ordinality a (ack, place)
                join jsonb_array_elements(_transaction.resolved) with ordinality r (fact, place) using (place)
            ) t
            join queen.cursors c on c.partition_id = any(array[t.partition_id]) and c.group_id = t.group_id
            order by t.partition_id, t.group_id
            for update of c) held;
    end if;
    v_judged := queen._judge_acks(_transaction.acks, _transaction.resolved, true);
    ack_results := v_judged.results;
    if exists (select from jsonb_array_elements(v_judged.results) r where not (r ->> 'success')::boolean) then
        reason := 'rejected_ack';
        return;
    end if;

    if _transaction.careful then
        select coalesce(bool_or(d.stored_id is not null), false) into v_repeats
        from queen._duplicates(_transaction.group_partition_id, _transaction.item_group, _transaction.item_transaction_id) d;
        if v_repeats then
            reason := 'duplicate';
            return;
        end if;
        v_moment := queen.now();
        failure := queen._kv_judge(_transaction.tenant, _transaction.kv, v_moment);
        if failure is not null then
            reason := 'kv_precondition';
            return;
        end if;
    end if;

    woken := queen._write_acks(v_judged.cursors, v_judged.filings, v_judged.moment);
    if cardinality(_transaction.item_group) > 0 then
        select array_agg(p.item order by p.item), array_agg(p.status = 'duplicate' order by p.item),
               array_agg(p.message_id order by p.item), array_agg(p.message_offset order by p.item)
        into push_item, push_duplicate, push_message_id, push_offset
        from queen._push(
            _transaction.tenant, _transaction.group_queue, _transaction.group_partition, _transaction.group_partition_id,
            _transaction.item_group, _transaction.item_message_id, _transaction.item_transaction_id,
            _transaction.item_trace_id, _transaction.item_producer_sub, _transaction.item_payload, _transaction.careful) p;
    end if;
    v_moment := coalesce(v_moment, queen.now());
    if jsonb_array_length(_transaction.positions) > 0 then
        perform queen._write_positions(_transaction.positions, v_moment);
    end if;
    if jsonb_array_length(_transaction.kv) > 0 then
        select array_agg(k.result::text order by k.operation_index) into kv_results
        from queen._kv_write(_transaction.tenant, _transaction.kv, v_moment, _transaction.careful) k;
    end if;
    if jsonb_array_length(_transaction.timers) > 0 then
        select array_agg(t.result::text order by t.operation_index) into timer_results
        from queen._timers_apply(_transaction.tenant, _transaction.timers, v_moment) t;
    end if;
end;
$$;

comment on function queen._transaction(
    integer, jsonb, jsonb, text[], text[], bigint[], integer[], uuid[], text[], uuid[], text[], text[], jsonb, jsonb, jsonb, boolean
) is 'One step: a null reason says that it is to be committed, with a result for each part; otherwise nothing was written.';
