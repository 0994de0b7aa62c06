-- The timer operations of a step, read in the wire's form and handed on in that of timer.sql (step 3.1). A refusal
-- bears the wire's reason. As on the wire, a step's timers have no horizon and no ceiling below a message's.

-- A timer's payload is base64 on the wire. Beside that, a value that is not a string is taken as it is.
create or replace function queen._read_timer_payload(payload json, path text) returns text
language plpgsql immutable as $$
declare
    v_text text;
begin
    if _read_timer_payload.payload is null then
        perform queen._refuse_document(_read_timer_payload.path, 'a timer needs a payload', 'timers_payload_required');
    elsif json_typeof(_read_timer_payload.payload) <> 'string' then
        return _read_timer_payload.payload::text;
    end if;
    begin
        v_text := convert_from(decode(_read_timer_payload.payload #>> '{}', 'base64'), 'UTF8');
    exception when data_exception then
        v_text := null;
    end;
    if v_text is null then
        perform queen._refuse_document(_read_timer_payload.path, 'payload must be the base64 of a JSON document',
            'timers_payload_not_base64', 'Or an object, an array, a number, a boolean or null, taken as it is.');
    end if;
    begin
        return coalesce(nullif(v_text, '')::json, 'null')::text;
    exception when data_exception then
        perform queen._refuse_document(_read_timer_payload.path, 'payload must decode to a JSON document', 'timers_payload_not_json');
    end;
end;
$$;

comment on function queen._read_timer_payload(json, text) is 'The JSON document that a timer will deliver.';

create or replace function queen._check_timer(queue text, timer_key text, partition text, payload_bytes integer, path text default '')
returns void
language plpgsql immutable as $$
declare
    v_key text := case _check_timer.path when '' then 'timer_key' else _check_timer.path || 'timerKey' end;
begin
    perform queen._check_names(_check_timer.queue, _check_timer.partition, path => _check_timer.path);
    if coalesce(_check_timer.timer_key, '') = '' then
        perform queen._refuse_document(v_key, 'a timer has a key', 'timers_key_required');
    elsif octet_length(_check_timer.timer_key) > 2048 then
        perform queen._refuse_document(v_key, 'a timer''s key is at most 2048 bytes', 'timers_key_too_long');
    elsif _check_timer.payload_bytes > 16777216 then
        perform queen._refuse_size(_check_timer.path || 'payload', 'a payload is at most 16 MiB', 16777216);
    end if;
end;
$$;

comment on function queen._check_timer(text, text, text, integer, text) is 'Refuse what no timer can be.';

create or replace function queen._read_timer(operation json, path text) returns jsonb
language plpgsql immutable as $$
declare
    v_op text;
    v_field text;
    v_queue text;
    v_key text;
    v_partition text;
    v_txn text;
    v_payload text;
begin
    if json_typeof(_read_timer.operation) is distinct from 'object' then
        perform queen._refuse_document(rtrim(_read_timer.path, '.'), 'an operation must be an object', 'timers_bad_op');
    end if;
    for v_field in select f from json_object_keys(_read_timer.operation) f loop
        if v_field like '\_%' or v_field in ('producerSub', 'producer_sub') then
            perform queen._refuse_document(_read_timer.path || v_field, 'the field is the broker''s to set', 'timers_server_owned_field');
        elsif v_field in ('messageId', 'message_id', 'tenant', 'tenantId', 'tenant_id', 'deliverAt', 'deliver_at', 'delaySeconds',
                          'delay_seconds', 'attempts', 'claimToken', 'claim_token', 'claimedUntil', 'claimed_until', 'payloadZstd') then
            perform queen._refuse_document(_read_timer.path || v_field, 'the field cannot be given; a delay is delayMs',
                                           'timers_field_not_allowed');
        end if;
    end loop;
    v_op := _read_timer.operation ->> 'op';
    if v_op is null or v_op not in ('schedule', 'reschedule', 'cancel') then
        perform queen._refuse_document(_read_timer.path || 'op', 'op must be schedule, reschedule or cancel', 'timers_unknown_op');
    end if;
    v_queue := queen._text_field(_read_timer.operation, 'queue', _read_timer.path, 'timers_queue_required');
    v_key := queen._text_field(_read_timer.operation, 'timerKey', _read_timer.path, 'timers_key_required');
    v_txn := queen._text_field(_read_timer.operation, 'txn', _read_timer.path, 'timers_bad_txn');
    v_partition := coalesce(queen._text_field(_read_timer.operation, 'partition', _read_timer.path, 'timers_bad_partition'), 'Default');
    if v_op = 'cancel' then
        perform queen._check_timer(v_queue, v_key, null, 0, _read_timer.path);
        return jsonb_build_object('op', v_op, 'queue', v_queue, 'timerKey', v_key, 'txn', v_txn);
    end if;

    if v_partition = '' then
        perform queen._refuse_document(_read_timer.path || 'partition', 'partition must not be empty', 'timers_bad_partition');
    elsif queen._kv_number(_read_timer.operation -> 'delayMs') is null then
        perform queen._refuse_document(_read_timer.path || 'delayMs', 'delayMs must be a number of milliseconds', 'timers_delay_required');
    elsif coalesce(v_txn, '') = '' or octet_length(v_txn) > 65535 then
        perform queen._refuse_document(_read_timer.path || 'txn', 'txn must be a string of 1 to 65535 bytes', 'timers_txn_required');
    end if;
    v_payload := queen._read_timer_payload(_read_timer.operation -> 'payload', _read_timer.path || 'payload');
    perform queen._check_timer(v_queue, v_key, v_partition, octet_length(v_payload), _read_timer.path);
    if json_typeof(_read_timer.operation -> 'encrypted') <> 'boolean' then
        perform queen._refuse_document(_read_timer.path || 'encrypted', 'encrypted must be a boolean', 'timers_bad_encrypted');
    end if;
    return jsonb_build_object(
        'op', v_op, 'queue', v_queue, 'timerKey', v_key, 'partition', v_partition, 'txn', v_txn, 'payload', v_payload,
        'encrypted', coalesce((_read_timer.operation ->> 'encrypted')::boolean, false),
        'delayMs', greatest(least(queen._kv_number(_read_timer.operation -> 'delayMs'), 1e18), -1e18));
end;
$$;

comment on function queen._read_timer(json, text) is 'One timer operation of a step, checked.';

create or replace function queen._read_timers_all(operations json) returns jsonb
language plpgsql immutable as $$
declare
    v_read jsonb;
    v_repeated text;
begin
    select coalesce(jsonb_agg(queen._read_timer(o.operation, format('timers[%s].', o.place - 1)) order by o.place), '[]') into v_read
    from json_array_elements(_read_timers_all.operations) with ordinality o (operation, place);
    select o ->> 'timerKey' into v_repeated
    from jsonb_array_elements(v_read) o
    group by o ->> 'queue', o ->> 'timerKey'
    having count(*) > 1
    limit 1;
    if found then
        perform queen._refuse_document('timers', format('the timer %s is named twice', v_repeated), 'timers_duplicate_key');
    end if;
    return v_read;
end;
$$;

comment on function queen._read_timers_all(json) is 'The timer operations of a step, checked one by one and together.';

-- A queue that encrypts what it stores would encrypt twice what its sender has encrypted.
create or replace function queen._check_timers_encryption(tenant integer, timers jsonb) returns void
language plpgsql stable as $$
declare
    v_queue text;
begin
    select e.encrypting_queue into v_queue
    from queen._timers_encrypting(
        _check_timers_encryption.tenant,
        array(select o ->> 'queue' from jsonb_array_elements(_check_timers_encryption.timers) o where (o ->> 'encrypted')::boolean)) e
    limit 1;
    if found then
        perform queen._refuse_document('timers', format('the queue %s encrypts what it stores by itself', v_queue),
                                       'timers_encrypted_conflict');
    end if;
end;
$$;

comment on function queen._check_timers_encryption(integer, jsonb) is
    'Refuse payloads that their sender has encrypted, for queues that encrypt at rest.';
