-- Timers: a message that is to be pushed later, under a key of its queue. Scheduling is an upsert, firing pushes
-- the message and removes the timer in one commit; a cancel and a fire of one timer meet on its row.
--
-- Firing is two calls: `_timers_due` looks at READ COMMITTED, `_timers_fire` is the step that claims what was
-- found and judges it again. It takes the partitions before the timers, as every step does, and does not wait
-- for a timer that somebody is changing. One step at a time fires a tenant's timers, so that those of one
-- partition enter it in the order in which they fell due (step 3.4-5).

-- Moments that the wire's form cannot write are moved to the nearest one that it can. Not declared immutable, which the
-- sum of a moment and an interval is not: so it becomes part of whatever calls it.
create or replace function queen._timer_due_at(delay_ms numeric, moment timestamptz) returns timestamptz
language sql stable parallel safe as $$
    -- The planner may work out the interval before the conditions are judged, so it must be one in any case.
    select case
        when extract(epoch from moment) + delay_ms / 1000 >= 253402300800 then timestamptz '9999-12-31 23:59:59.999999+00'
        when extract(epoch from moment) + delay_ms / 1000 < -62135596800 then timestamptz '0001-01-01 00:00:00+00'
        else moment + round(greatest(least(delay_ms, 1e15), -1e15) * 1000)::double precision * interval '1 microsecond'
    end;
$$;

comment on function queen._timer_due_at(numeric, timestamptz) is 'The moment that lies a delay in milliseconds behind another.';

-- Schedule one timer (step 3.4-1). The id of its message is minted now and promised. Two are, one for each
-- branch of the upsert, so that the one which is stored tells whether a timer was pending.
create or replace function queen._timer_schedule(tenant integer, operation jsonb, moment timestamptz, place integer)
returns json
language plpgsql as $$
#variable_conflict use_column
declare
    v_due_at timestamptz := queen._timer_due_at((_timer_schedule.operation->>'delayMs')::numeric, _timer_schedule.moment);
    v_id uuid := queen._uuid_v7(_timer_schedule.moment, _timer_schedule.place);
    v_replacing_id uuid := queen._uuid_v7(_timer_schedule.moment, _timer_schedule.place);
    v_stored_id uuid;
begin
    insert into queen.timers as t (tenant_id, queue, timer_key, partition, transaction_id, message_id, payload,
                                   encrypted, producer_sub, deliver_at, fire_at, created_at, updated_at)
    values (_timer_schedule.tenant, _timer_schedule.operation->>'queue', _timer_schedule.operation->>'timerKey',
            coalesce(_timer_schedule.operation->>'partition', 'Default'), _timer_schedule.operation->>'txn', v_id,
            (_timer_schedule.operation->>'payload')::json, coalesce((_timer_schedule.operation->>'encrypted')::boolean, false),
            _timer_schedule.operation->>'producerSub', v_due_at, v_due_at, _timer_schedule.moment, _timer_schedule.moment)
    on conflict (tenant_id, queue, timer_key) do update
    set partition = excluded.partition, transaction_id = excluded.transaction_id, message_id = v_replacing_id,
        payload = excluded.payload, encrypted = excluded.encrypted, producer_sub = excluded.producer_sub,
        deliver_at = excluded.deliver_at, fire_at = excluded.fire_at, attempts = 0, last_error = null, updated_at = excluded.updated_at
    returning t.message_id into v_stored_id;

    return json_build_object(
        'ok', true, 'status', case when v_stored_id = v_id then 'scheduled' else 'rescheduled' end,
        'queue', _timer_schedule.operation->>'queue', 'timerKey', _timer_schedule.operation->>'timerKey',
        'txn', _timer_schedule.operation->>'txn', 'messageId', v_stored_id, 'deliverAt', queen._fixed_time(v_due_at));
end;
$$;

comment on function queen._timer_schedule(integer, jsonb, timestamptz, integer) is
    'Schedule or reschedule one timer; its element of the answer.';

create or replace function queen._timer_cancel(tenant integer, operation jsonb) returns json
language plpgsql as $$
#variable_conflict use_column
declare
    v_transaction_id text;
begin
    delete from queen.timers t
    where t.tenant_id = _timer_cancel.tenant
      and t.queue = _timer_cancel.operation->>'queue' and t.timer_key = _timer_cancel.operation->>'timerKey'
    returning t.transaction_id into v_transaction_id;

    return json_build_object(
        'ok', found, 'status', case when found then 'cancelled' else 'absent' end,
        'queue', _timer_cancel.operation->>'queue', 'timerKey', _timer_cancel.operation->>'timerKey',
        'txn', case when found then v_transaction_id else _timer_cancel.operation->>'txn' end);
end;
$$;

comment on function queen._timer_cancel(integer, jsonb) is 'Remove one timer, if it is pending; its element of the answer.';

create or replace function queen._timer_change(tenant integer, operation jsonb, moment timestamptz, place integer) returns json
language plpgsql as $$
begin
    if _timer_change.operation->>'op' = 'cancel' then
        return queen._timer_cancel(_timer_change.tenant, _timer_change.operation);
    end if;
    return queen._timer_schedule(_timer_change.tenant, _timer_change.operation, _timer_change.moment, _timer_change.place);
end;
$$;

comment on function queen._timer_change(integer, jsonb, timestamptz, integer) is
    'Schedule or cancel one timer; its element of the answer.';

-- Carry out a call's operations, each on a timer of its own, in the order of the timers' keys.
create or replace function queen._timers_apply(tenant integer, operations jsonb, moment timestamptz)
returns table (operation_index integer, result json)
language plpgsql as $$
#variable_conflict use_column
declare
    v_row record;
begin
    for v_row in
        select (o.place - 1)::integer as operation_index, o.operation
        from jsonb_array_elements(_timers_apply.operations) with ordinality o (operation, place)
        order by o.operation->>'queue' collate "C", o.operation->>'timerKey' collate "C"
    loop
        operation_index := v_row.operation_index;
        result := queen._timer_change(_timers_apply.tenant, v_row.operation, _timers_apply.moment, v_row.operation_index);
        return next;
    end loop;
end;
$$;

comment on function queen._timers_apply(integer, jsonb, timestamptz) is
    'Schedule and cancel timers; the element of the answer for each operation, by its position.';

-- One timer call of the broker, atomic as a whole. The verdict is `done` beside each element, or one row says
-- `disabled`: somebody has paused scheduling, which never refuses a cancel.
create or replace function queen._timers(tenant integer, operations jsonb)
returns table (operation_index integer, verdict text, result json)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
begin
    if jsonb_path_exists(_timers.operations, '$[*] ? (@.op != "cancel")') and not queen._switched_on('timers_schedule') then
        return query select null::integer, 'disabled', null::json;
        return;
    end if;
    return query select a.operation_index, 'done', a.result
    from queen._timers_apply(_timers.tenant, _timers.operations, v_now) a;
end;
$$;

comment on function queen._timers(integer, jsonb) is 'One call of timer operations: each one''s element of the answer.';

-- Which of these queues encrypt what they store: a payload that its sender has encrypted would be so twice.
create or replace function queen._timers_encrypting(tenant integer, queue text[]) returns table (encrypting_queue text)
language sql stable parallel safe as $$
    select q.name
    from queen.queues q
    where q.tenant_id = _timers_encrypting.tenant and q.name = any(_timers_encrypting.queue) and q.encryption_enabled;
$$;

comment on function queen._timers_encrypting(integer, text[]) is 'Those of the queues that encrypt their messages at rest.';

-- A timer as peek and list answer it, without its payload. Claims do not exist here, and payloads are kept as
-- the JSON that will be delivered.
create or replace function queen._timer_fields(timer queen.timers) returns json
language sql stable parallel safe as $$
    select json_build_object(
        'queue', timer.queue, 'timerKey', timer.timer_key, 'partition', timer.partition,
        'deliverAt', queen._fixed_time(timer.deliver_at), 'txn', timer.transaction_id, 'messageId', timer.message_id,
        'payloadZstd', false, 'encrypted', timer.encrypted, 'producerSub', timer.producer_sub, 'attempts', timer.attempts,
        'lastError', timer.last_error, 'claimed', false,
        'createdAt', queen._fixed_time(timer.created_at), 'updatedAt', queen._fixed_time(timer.updated_at));
$$;

comment on function queen._timer_fields(queen.timers) is 'The fields of a pending timer on the wire.';

create or replace function queen._timer_peek(tenant integer, queue text, timer_key text)
returns table (fields json, payload text)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select queen._timer_fields(t), t.payload::text
    from queen.timers t
    where t.tenant_id = _timer_peek.tenant and t.queue = _timer_peek.queue and t.timer_key = _timer_peek.timer_key;
$$;

comment on function queen._timer_peek(integer, text, text) is 'A pending timer with its payload; no row when there is none.';

create or replace function queen._timer_list(tenant integer, queue text, after text, size_max integer)
returns table (timer_key text, fields json)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select t.timer_key, queen._timer_fields(t)
    from queen.timers t
    where t.tenant_id = _timer_list.tenant and t.queue = _timer_list.queue and t.timer_key > _timer_list.after
    order by t.timer_key
    limit _timer_list.size_max;
$$;

comment on function queen._timer_list(integer, text, text, integer) is
    'The pending timers of a queue in the order of their keys, from behind one.';

create or replace function queen._timer_count(tenant integer, queue text, prefix text) returns table (timer_count bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select count(*)
    from queen.timers t
    where t.tenant_id = _timer_count.tenant and t.queue = _timer_count.queue
      and t.timer_key >= _timer_count.prefix and t.timer_key < queen._prefix_end(_timer_count.prefix);
$$;

comment on function queen._timer_count(integer, text, text) is 'How many timers of a queue are pending under a prefix.';
