-- Reading documents: the public functions that take several things at once take them in the wire's form, as json.
-- Whatever cannot be carried out as written is refused before anything is locked; the detail's argument is the path
-- to what is wrong, and its reason, where the wire has one, the wire's. Payloads and values stay as they were sent.

create or replace function queen._refuse_document(path text, message text, reason text default 'bad_request', hint text default null)
returns void
language plpgsql immutable as $$
begin
    perform queen._fail('QU000', _refuse_document.message,
                        jsonb_build_object('argument', _refuse_document.path, 'reason', _refuse_document.reason),
                        _refuse_document.hint);
end;
$$;

comment on function queen._refuse_document(text, text, text, text) is
    'Raise QU000 for a part of a document: the path to it, and the wire''s reason.';

create or replace function queen._array_field(document json, field text, path text) returns json
language plpgsql immutable as $$
declare
    v_value json := _array_field.document -> _array_field.field;
begin
    if v_value is null or json_typeof(v_value) = 'null' then
        return '[]';
    elsif json_typeof(v_value) <> 'array' then
        perform queen._refuse_document(_array_field.path, format('%s must be an array', _array_field.field));
    end if;
    return v_value;
end;
$$;

comment on function queen._array_field(json, text, text) is 'A field that is an array; an empty one when it is absent or null.';

create or replace function queen._text_field(document json, field text, path text, reason text default 'bad_request') returns text
language plpgsql immutable as $$
declare
    v_value json := _text_field.document -> _text_field.field;
begin
    if v_value is null or json_typeof(v_value) = 'null' then
        return null;
    elsif json_typeof(v_value) <> 'string' then
        perform queen._refuse_document(_text_field.path || _text_field.field, format('%s must be a string', _text_field.field),
                                       _text_field.reason);
    end if;
    return _text_field.document ->> _text_field.field;
end;
$$;

comment on function queen._text_field(json, text, text, text) is 'A field that is a string; null when it is absent or null.';

-- A number without a fraction; 60.0 and 6e1 are such.
create or replace function queen._whole_number(value json) returns numeric
language sql immutable parallel safe as $$
    select case when json_typeof(value) = 'number' and length(value::text) <= 400
                then case when value::text::numeric = trunc(value::text::numeric) then trunc(value::text::numeric) end end;
$$;

comment on function queen._whole_number(json) is 'A JSON number, if it is whole; null for any other value.';

create or replace function queen._uuid_or_null(value text) returns uuid
language sql immutable parallel safe as $$
    select case when value ~* '^\{?[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}\}?$' then value::uuid end;
$$;

comment on function queen._uuid_or_null(text) is 'The UUID that a text is; null when it is none.';

-- One message to push, as the push route takes it. The payload must be there, though it may be null.
create or replace function queen._read_item(
    item json,
    path text,
    out queue text,
    out partition text,
    out transaction_id text,
    out trace_id uuid,
    out payload json
)
language plpgsql immutable as $$
begin
    if json_typeof(_read_item.item) is distinct from 'object' then
        perform queen._refuse_document(rtrim(_read_item.path, '.'), 'a message must be an object');
    end if;
    queue := queen._text_field(_read_item.item, 'queue', _read_item.path);
    partition := coalesce(nullif(queen._text_field(_read_item.item, 'partition', _read_item.path), ''), 'Default');
    transaction_id := queen._text_field(_read_item.item, 'transactionId', _read_item.path);
    trace_id := queen._uuid_or_null(_read_item.item ->> 'traceId');
    payload := _read_item.item -> 'payload';
    if queue is null then
        perform queen._refuse_document(_read_item.path || 'queue', 'a message names its queue');
    end if;
    perform queen._check_names(queue, partition, path => _read_item.path);
    perform queen._check_message(payload, transaction_id, _read_item.path || 'payload', _read_item.path || 'transactionId');
end;
$$;

comment on function queen._read_item(json, text) is 'A message to push, as the wire writes it.';

-- The messages of a call at once, if nothing about any of them needs a closer look: fields of the right types, far from
-- every limit. Nulls when something does, and _read_item has to say what; it takes three times as long.
create or replace function queen._read_plain_items(
    items json,
    out queue text[],
    out partition text[],
    out transaction_id text[],
    out trace_id uuid[],
    out payload json[]
)
language plpgsql immutable as $$
#variable_conflict use_column
declare
    v_plain boolean;
begin
    select bool_and(coalesce(
               json_typeof(f.queue) = 'string' and octet_length(f.queue::text) between 3 and 200
               and coalesce(json_typeof(f.partition) = 'string' and octet_length(f.partition::text) between 3 and 200, true)
               and coalesce(json_typeof(f.transaction_id) = 'string' and octet_length(f.transaction_id::text) < 1000, true)
               and pg_column_size(f.payload) < 1000000, false)),
           array_agg(f.queue #>> '{}' order by f.place), array_agg(coalesce(f.partition #>> '{}', 'Default') order by f.place),
           array_agg(f.transaction_id #>> '{}' order by f.place),
           array_agg(queen._uuid_or_null(f.trace_id #>> '{}') order by f.place), array_agg(f.payload order by f.place)
    into v_plain, queue, partition, transaction_id, trace_id, payload
    from (
        select i.place, i.item -> 'queue' as queue, i.item -> 'partition' as partition,
               i.item -> 'transactionId' as transaction_id, i.item -> 'traceId' as trace_id, i.item -> 'payload' as payload
        from json_array_elements(_read_plain_items.items) with ordinality i (item, place)
        offset 0
    ) f;
    if v_plain is not true then
        queue := null;
    end if;
end;
$$;

comment on function queen._read_plain_items(json) is
    'The messages of a call, field by field; null when one of them has to be read by itself.';

-- One ack of a step. What is no other status means completed (step 1.3).
create or replace function queen._read_ack(operation json, path text, lent text) returns jsonb
language plpgsql immutable as $$
declare
    v_partition_id text := _read_ack.operation ->> 'partitionId';
    v_status text := lower(_read_ack.operation ->> 'status');
    v_transaction_id text := queen._text_field(_read_ack.operation, 'transactionId', _read_ack.path);
begin
    if v_partition_id is null or v_partition_id !~ '^[0-9]{1,18}$' then
        perform queen._refuse_document(_read_ack.path || 'partitionId', 'partitionId must be the id of a partition');
    end if;
    return jsonb_build_object(
        'partitionId', v_partition_id::bigint,
        'transactionId', coalesce(v_transaction_id, ''),
        'consumerGroup', coalesce(nullif(queen._text_field(_read_ack.operation, 'consumerGroup', _read_ack.path), ''), '__QUEUE_MODE__'),
        'leaseId', coalesce(nullif(queen._text_field(_read_ack.operation, 'leaseId', _read_ack.path), ''), _read_ack.lent),
        'status', case when v_status in ('failed', 'retry', 'dlq') then v_status else 'completed' end,
        'error', queen._text_field(_read_ack.operation, 'error', _read_ack.path));
end;
$$;

comment on function queen._read_ack(json, text, text) is 'An ack of a step; lent is the lease of an ack that names none.';

create or replace function queen._read_position(position_document json, path text) returns jsonb
language plpgsql immutable as $$
declare
    v_queue text;
    v_group text;
    v_offset numeric;
begin
    if json_typeof(_read_position.position_document) is distinct from 'object' then
        perform queen._refuse_document(rtrim(_read_position.path, '.'), 'a position must be an object');
    end if;
    v_queue := queen._text_field(_read_position.position_document, 'queue', _read_position.path);
    v_group := queen._text_field(_read_position.position_document, 'consumerGroup', _read_position.path);
    v_offset := queen._whole_number(_read_position.position_document -> 'offset');
    if v_queue is null or v_group is null then
        perform queen._refuse_document(rtrim(_read_position.path, '.'), 'a position names its queue and its consumer group');
    elsif (v_offset is null or v_offset not between 0 and 9223372036854775806)
          and json_typeof(_read_position.position_document -> 'offset') is distinct from 'null' then
        perform queen._refuse_document(_read_position.path || 'offset', 'offset must be an offset, or null to forget the position');
    elsif octet_length(_read_position.position_document ->> 'metadata') > 4096 then
        perform queen._refuse_document(_read_position.path || 'metadata', 'metadata is at most 4096 bytes');
    end if;
    return jsonb_build_object(
        'queue', v_queue, 'consumerGroup', v_group,
        'partition', coalesce(nullif(queen._text_field(_read_position.position_document, 'partition', _read_position.path), ''), 'Default'),
        'offset', v_offset,
        'metadata', queen._text_field(_read_position.position_document, 'metadata', _read_position.path));
end;
$$;

comment on function queen._read_position(json, text) is 'A position of a consumer group, as a step sets it.';
