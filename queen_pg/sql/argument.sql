-- What the public functions check in their arguments. A refusal's detail names the argument, or the path inside
-- a document, and its hint says what would do. The limits are the wire's (data-plane 12).

create or replace function queen._refuse_argument(argument text, message text, hint text default null) returns void
language plpgsql immutable as $$
begin
    perform queen._fail('QU000', _refuse_argument.message, jsonb_build_object('argument', _refuse_argument.argument),
                        _refuse_argument.hint);
end;
$$;

comment on function queen._refuse_argument(text, text, text) is 'Raise QU000, invalid argument, naming the argument.';

create or replace function queen._refuse_size(argument text, message text, bytes_max integer) returns void
language plpgsql immutable as $$
begin
    perform queen._fail('QU001', _refuse_size.message,
                        jsonb_build_object('argument', _refuse_size.argument, 'maximum_bytes', _refuse_size.bytes_max));
end;
$$;

comment on function queen._refuse_size(text, text, integer) is 'Raise QU001, too large, naming the argument and its limit.';

-- PostgreSQL takes no part out of a document that holds the escape \u0000, or one of half a character: neither is text. To try
-- costs a savepoint, so a document without such escapes is not tried.
create or replace function queen._check_escapes(argument text, document json) returns void
language plpgsql immutable as $$
declare
    v_text text := _check_escapes.document::text;
begin
    if strpos(v_text, '\u') = 0
        or strpos(v_text, '\u0000') = 0 and strpos(v_text, '\ud') = 0 and strpos(v_text, '\uD') = 0
    then
        return;
    end if;
    begin
        perform _check_escapes.document #> '{}';
    exception when untranslatable_character or invalid_text_representation then
        perform queen._refuse_argument(_check_escapes.argument, 'an escape stands for no character: \u0000, or half of a pair',
                                       'A payload that holds one can be pushed with queen.push or queen.push_batch.');
    end;
end;
$$;

comment on function queen._check_escapes(text, json) is 'Refuse a document of several things with an escape that is no character.';

-- A queue's name and the longer one of the two others share a budget of bytes (data-plane 12).
create or replace function queen._check_names(
    queue text, partition text default null, consumer_group text default null, path text default ''
) returns void
language plpgsql immutable as $$
begin
    if coalesce(_check_names.queue, '') = '' then
        perform queen._refuse_argument(_check_names.path || 'queue', 'a queue needs a name');
    end if;
    if octet_length(_check_names.queue)
        + greatest(octet_length(_check_names.partition), octet_length(_check_names.consumer_group), 0) > 411
    then
        perform queen._refuse_size(_check_names.path || 'queue',
            'a queue''s name and the longer one of partition and consumer group share 411 bytes', 411);
    end if;
end;
$$;

comment on function queen._check_names(text, text, text, text) is 'Refuse names that no queue, partition or consumer group can have.';

create or replace function queen._check_message(
    payload json, transaction_id text, payload_argument text default 'payload', id_argument text default 'transaction_id'
) returns void
language plpgsql immutable as $$
begin
    if _check_message.payload is null then
        perform queen._refuse_argument(_check_message.payload_argument, 'a message needs a payload',
                                       'A JSON null is a payload: ''null''.');
    elsif octet_length(_check_message.payload::text) > 16777216 then
        perform queen._refuse_size(_check_message.payload_argument, 'a payload is at most 16 MiB', 16777216);
    elsif octet_length(_check_message.transaction_id) > 65535 then
        perform queen._refuse_size(_check_message.id_argument, 'a transaction id is at most 65535 bytes', 65535);
    end if;
end;
$$;

comment on function queen._check_message(json, text, text, text) is
    'Refuse what no message can hold; the last two say where its parts stand in the call.';
