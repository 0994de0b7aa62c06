-- Timers, for SQL users: a message that is pushed later, promised in the user's own transaction. A timer is known by its
-- queue and key; scheduling it again replaces it. Once fired it is an ordinary message, and there is nothing to cancel.

create or replace function queen.timer_schedule(
    queue text,
    timer_key text,
    payload json,
    delay interval default null,
    deliver_at timestamptz default null,
    partition text default 'Default',
    transaction_id text default null
) returns table (status text, message_id uuid, due_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_now timestamptz := queen.now();
    v_partition text := coalesce(nullif(timer_schedule.partition, ''), 'Default');
    -- A delay beyond these ends is one beyond what a moment can be, and the end of time is when it is due.
    v_due_at timestamptz := coalesce(
        timer_schedule.deliver_at, v_now + least(greatest(timer_schedule.delay, interval '-5000 years'), interval '10000 years'));
    v_result json;
begin
    if num_nonnulls(timer_schedule.delay, timer_schedule.deliver_at) <> 1 then
        perform queen._refuse_argument('delay', 'a timer is due either after a delay or at a moment',
                                       'Give one of delay and deliver_at.');
    elsif not isfinite(timer_schedule.delay) or not isfinite(timer_schedule.deliver_at) then
        perform queen._refuse_argument(case when timer_schedule.delay is null then 'deliver_at' else 'delay' end,
                                       'a timer is due at some time');
    elsif not queen._switched_on('timers_schedule') then
        perform queen._fail('QU200', 'scheduling timers is switched off', '{"reason": "timers_disabled"}',
                            'Somebody has paused it for everybody; cancels still work.');
    end if;
    perform queen._check_message(timer_schedule.payload, timer_schedule.transaction_id);
    perform queen._check_timer(timer_schedule.queue, timer_schedule.timer_key, v_partition, 0);
    if timer_schedule.transaction_id = '' then
        perform queen._refuse_argument('transaction_id', 'a timer''s transaction id is not empty', 'Leave it out to have one made.');
    end if;

    v_result := queen._timer_schedule(
        v_tenant,
        jsonb_build_object(
            'queue', timer_schedule.queue, 'timerKey', timer_schedule.timer_key, 'partition', v_partition,
            'payload', timer_schedule.payload::text, 'delayMs', extract(epoch from v_due_at - v_now) * 1000,
            'txn', coalesce(timer_schedule.transaction_id, queen._uuid_v7(v_now)::text)),
        v_now, 0);
    return query select v_result ->> 'status', (v_result ->> 'messageId')::uuid, (v_result ->> 'deliverAt')::timestamptz;
end;
$$;

comment on function queen.timer_schedule(text, text, json, interval, timestamptz, text, text) is
    'Have a message pushed after a delay or at a moment; scheduled, or rescheduled in place of a pending timer of the key.';

create or replace function queen.timer_cancel(queue text, timer_key text) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform queen._check_timer(timer_cancel.queue, timer_cancel.timer_key, null, 0);
    return (queen._timer_cancel(
        queen.current_tenant(),
        jsonb_build_object('queue', timer_cancel.queue, 'timerKey', timer_cancel.timer_key)) ->> 'ok')::boolean;
end;
$$;

comment on function queen.timer_cancel(text, text) is
    'Cancel a pending timer; false when there is none, because it has fired or never was.';
