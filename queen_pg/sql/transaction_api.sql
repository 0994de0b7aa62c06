-- The step, for SQL users: acks, pushes, KV, timers and positions, all of them or none, in the caller's transaction.
-- The document and the answer are those of POST /api/v1/transaction. A verdict against the step is an answer, not an
-- error: nothing of the step is written then, and the caller's transaction goes on.
--
-- Right at READ COMMITTED and above. The step runs carefully, as in transaction.sql, inside a savepoint: where a
-- rival creates a partition or a key between judgement and writing, what was written is undone and judged again.

create or replace function queen._rolled_back(reason text) returns text
language sql immutable parallel safe as $$
    select case reason
        when 'rejected_ack' then 'an ack was rejected: its lease is gone, or its message is already committed or unknown'
        when 'duplicate' then 'a pushed transaction id is already in its partition'
        when 'kv_precondition' then 'a required KV operation did not apply'
        when 'kv_disabled' then 'KV is switched off'
        when 'timers_disabled' then 'scheduling timers is switched off'
        when 'queue_not_found' then 'a position names a queue that does not exist'
        when 'too_large' then 'the pushes to one partition are over 96 MiB'
    end || '; the step was rolled back';
$$;

comment on function queen._rolled_back(text) is 'The sentence for a step''s verdict.';

-- The acks and messages of a step's operations, in order; slot says which of them each operation is, and an operation
-- that pushes several messages takes as many.
create or replace function queen._read_operations(
    operations json,
    required_leases json,
    out slot text[],
    out acks jsonb,
    out item_queue text[],
    out item_partition text[],
    out item_transaction_id text[],
    out item_trace_id uuid[],
    out item_payload text[]
)
language plpgsql immutable as $$
declare
    v_operation record;
    v_item record;
    v_path text;
    v_leases text[];
begin
    slot := '{}';
    acks := '[]';
    item_queue := '{}';
    item_partition := '{}';
    -- The one lease that the step names is that of its acks which name none (step 1.4).
    select array_agg(distinct l.lease) into v_leases
    from (select o.operation ->> 'leaseId' as lease
          from json_array_elements(_read_operations.operations) o (operation)
          where json_typeof(o.operation) = 'object' and o.operation ->> 'type' = 'ack'
          union all
          select r.lease from json_array_elements_text(_read_operations.required_leases) r (lease)) l
    where l.lease <> '';

    for v_operation in
        select o.operation, o.place - 1 as place, o.operation ->> 'type' as type
        from json_array_elements(_read_operations.operations) with ordinality o (operation, place)
        order by o.place
    loop
        v_path := format('operations[%s].', v_operation.place);
        if v_operation.type = 'ack' then
            acks := acks || queen._read_ack(v_operation.operation, v_path, case when cardinality(v_leases) = 1 then v_leases[1] end);
            slot := slot || 'ack'::text;
        elsif v_operation.type = 'push' then
            for v_item in
                select i.*
                from (select v_operation.operation as item, v_path as path
                      where v_operation.operation -> 'items' is null
                      union all
                      select e.item, format('%sitems[%s].', v_path, e.place - 1)
                      from json_array_elements(queen._array_field(v_operation.operation, 'items', v_path || 'items'))
                           with ordinality e (item, place)) m
                cross join lateral queen._read_item(m.item, m.path) i
            loop
                item_queue := item_queue || v_item.queue;
                item_partition := item_partition || v_item.partition;
                item_transaction_id := item_transaction_id || v_item.transaction_id;
                item_trace_id := item_trace_id || v_item.trace_id;
                item_payload := item_payload || v_item.payload::text;
                slot := slot || 'push'::text;
            end loop;
        else
            perform queen._refuse_document(v_path || 'type', 'type must be ack or push', hint =>
                'KV operations, timers and positions have arrays of their own: kv, timers, positions.');
        end if;
    end loop;
end;
$$;

comment on function queen._read_operations(json, json) is 'The acks and messages of a step, and in which order they stand.';

-- The results of a step that is done, in one flat index space (step 1.8). Those of KV and timers are texts that stay as
-- they are, but for their place in front.
create or replace function queen._step_results(
    slot text[],
    acks jsonb,
    ack_results jsonb,
    item_queue text[],
    item_transaction_id text[],
    item_message_id uuid[],
    item_duplicate boolean[],
    kv_results text[],
    timer_results text[],
    positions integer
) returns json
language sql immutable parallel safe as $$
    with operations as (
        select s.place - 1 as index, s.slot,
               (count(*) filter (where s.slot = 'ack') over w)::integer - 1 as ack,
               (count(*) filter (where s.slot = 'push') over w)::integer as push
        from unnest(_step_results.slot) with ordinality s (slot, place)
        window w as (order by s.place)
    ), riders as (
        select row_number() over (order by r.kind, r.place) + cardinality(_step_results.slot) - 1 as index,
               r.place - 1 as place, r.type, r.result
        from (
            select 1 as kind, 'kv' as type, k.place, k.result from unnest(_step_results.kv_results) with ordinality k (result, place)
            union all
            select 2, 'timer', t.place, t.result from unnest(_step_results.timer_results) with ordinality t (result, place)
            union all
            select 3, 'position', p, '{"success":true}' from generate_series(1, _step_results.positions) p
        ) r
    ), results as (
        select o.index, case o.slot
            when 'ack' then json_build_object(
                'index', o.index, 'type', 'ack', 'success', true,
                'transactionId', _step_results.acks -> o.ack -> 'transactionId', 'error', null,
                'dlq', _step_results.ack_results -> o.ack -> 'dlq')::text
            else json_strip_nulls(json_build_object(
                'index', o.index, 'type', 'push', 'success', true,
                'transactionId', coalesce(_step_results.item_transaction_id[o.push], _step_results.item_message_id[o.push]::text),
                'messageId', _step_results.item_message_id[o.push], 'queueName', _step_results.item_queue[o.push],
                'duplicate', _step_results.item_duplicate[o.push]))::text end as result
        from operations o
        union all
        select r.index, format('{"index":%s,"opIndex":%s,"type":"%s",%s', r.index, r.place, r.type, substr(ltrim(r.result), 2))
        from riders r
    )
    select ('[' || coalesce(string_agg(r.result, ',' order by r.index), '') || ']')::json from results r;
$$;

comment on function queen._step_results(text[], jsonb, jsonb, text[], text[], uuid[], boolean[], text[], text[], integer) is
    'The results of a step that is done, in the order of its parts.';

-- Carry the step out in a savepoint, as often as a rival makes it necessary; reason and failure are its verdict.
create or replace function queen._run_step(
    tenant integer,
    acks jsonb,
    item_queue text[],
    item_partition text[],
    item_transaction_id text[],
    item_trace_id uuid[],
    item_payload text[],
    positions jsonb,
    kv jsonb,
    timers jsonb,
    out reason text,
    out failure jsonb,
    out ack_results jsonb,
    out item_message_id uuid[],
    out item_duplicate boolean[],
    out kv_results text[],
    out timer_results text[],
    out woken bigint[]
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_none uuid[] := array_fill(null::uuid, array[cardinality(_run_step.item_queue)]);
    v_call record;
    v_items record;
    v_positions jsonb;
    v_done record;
begin
    for v_try in 1 .. 20 loop
        begin
            v_positions := queen._resolve_positions(_run_step.tenant, _run_step.positions);
            v_call := queen._arrange(_run_step.tenant, _run_step.item_queue, _run_step.item_partition);
            v_items := queen._rearrange(v_call.item_place, _run_step.item_transaction_id, _run_step.item_trace_id, _run_step.item_payload);
            select t.* into v_done
            from queen._transaction(
                _run_step.tenant, _run_step.acks, queen._resolve_acks(_run_step.tenant, _run_step.acks),
                v_call.group_queue, v_call.group_partition, v_call.group_partition_id, v_call.item_group, v_none,
                coalesce(v_items.transaction_id, '{}'), coalesce(v_items.trace_id, '{}'),
                array_fill(null::text, array[cardinality(v_none)]), coalesce(v_items.payload, '{}'),
                coalesce(v_positions, '[]'), _run_step.kv, _run_step.timers, true) t;
            reason := case when v_positions is null then 'queue_not_found' else v_done.reason end;
            failure := v_done.failure;
            if reason is not null then
                -- Nothing was written but what the names of positions needed; that goes too.
                perform queen._fail('QU902', 'a step was refused');
            end if;
            ack_results := v_done.ack_results;
            kv_results := v_done.kv_results;
            timer_results := v_done.timer_results;
            woken := v_done.woken;
            item_message_id := v_none;
            for v_place in 1 .. coalesce(cardinality(v_done.push_item), 0) loop
                item_message_id[v_call.item_place[v_done.push_item[v_place]]] := v_done.push_message_id[v_place];
                item_duplicate[v_call.item_place[v_done.push_item[v_place]]] := v_done.push_duplicate[v_place] or null;
            end loop;
            return;
        exception
            when sqlstate 'QU902' then
                return;
            when sqlstate 'QU900' or sqlstate 'QU901' or unique_violation or foreign_key_violation then
                null;
        end;
    end loop;
    -- At READ COMMITTED every try sees what the last one lost to; above, only a new transaction does.
    perform queen._fail('40001', 'could not serialize the step: another transaction was in the way', null, 'Run the transaction again.');
end;
$$;

comment on function queen._run_step(integer, jsonb, text[], text[], text[], uuid[], text[], jsonb, jsonb, jsonb) is
    'Carry out a step whose parts are read, or find the reason against it; then nothing is written.';

create or replace function queen.transaction(step json, notify boolean default null) returns json
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_id uuid := queen._uuid_v7(queen.now());
    v_parts record;
    v_kv jsonb;
    v_timers jsonb;
    v_positions jsonb;
    v_done record;
begin
    if transaction.step is null or json_typeof(transaction.step) <> 'object' then
        perform queen._refuse_argument('step', 'a step is a JSON object', '{"operations": [], "kv": [], "timers": []}');
    end if;
    perform queen._check_escapes('step', transaction.step);
    v_timers := queen._read_timers_all(queen._array_field(transaction.step, 'timers', 'timers'));
    v_kv := queen._read_kv_all(queen._array_field(transaction.step, 'kv', 'kv'));
    select coalesce(jsonb_agg(queen._read_position(p.document, format('positions[%s].', p.place - 1)) order by p.place), '[]')
    into v_positions
    from json_array_elements(queen._array_field(transaction.step, 'positions', 'positions')) with ordinality p (document, place);
    v_parts := queen._read_operations(queen._array_field(transaction.step, 'operations', 'operations'),
                                      queen._array_field(transaction.step, 'requiredLeases', 'requiredLeases'));
    if v_parts.slot = '{}' and '[]'::jsonb = all(array[v_kv, v_timers, v_positions]) then
        perform queen._refuse_document('step', 'the step has no parts');
    elsif jsonb_array_length(v_positions) > 16384 then
        perform queen._refuse_document('positions', 'a step has at most 16384 positions');
    elsif exists (select from unnest(v_parts.item_queue, v_parts.item_partition, v_parts.item_payload) i (queue, partition, payload)
                  group by i.queue, i.partition having sum(octet_length(i.payload)) > 96 * 1024 * 1024) then
        return json_build_object('transactionId', v_id, 'success', false, 'reason', 'too_large',
                                 'error', queen._rolled_back('too_large'), 'results', json '[]');
    end if;
    perform queen._check_timers_encryption(v_tenant, v_timers);

    v_done := queen._run_step(v_tenant, v_parts.acks, v_parts.item_queue, v_parts.item_partition, v_parts.item_transaction_id,
                              v_parts.item_trace_id, v_parts.item_payload, v_positions, v_kv, v_timers);
    if v_done.reason = 'kv_precondition' then
        return json_build_object(
            'transactionId', v_id, 'success', false, 'reason', v_done.reason, 'error', queen._rolled_back(v_done.reason),
            'results', json '[]', 'ok', false,
            'failedIndex', cardinality(v_parts.slot) + (v_done.failure ->> 'failedIndex')::integer,
            'kvReason', v_done.failure ->> 'kvReason', 'version', v_done.failure -> 'version',
            'value', (v_done.failure ->> 'value')::json);
    elsif v_done.reason is not null then
        return json_build_object('transactionId', v_id, 'success', false, 'reason', v_done.reason,
                                 'error', queen._rolled_back(v_done.reason), 'results', json '[]');
    end if;
    perform queen._tell_pushed(v_tenant, v_parts.item_queue, transaction.notify);
    perform queen._tell_freed(v_done.woken, transaction.notify);
    return json_build_object(
        'transactionId', v_id, 'success', true,
        'results', queen._step_results(
            v_parts.slot, v_parts.acks, v_done.ack_results, v_parts.item_queue, v_parts.item_transaction_id,
            v_done.item_message_id, v_done.item_duplicate, v_done.kv_results, v_done.timer_results, jsonb_array_length(v_positions)));
end;
$$;

comment on function queen.transaction(json, boolean) is
    'One step in the caller''s transaction: acks, pushes, KV, timers and positions, all or none; the answer of POST /api/v1/transaction.';
