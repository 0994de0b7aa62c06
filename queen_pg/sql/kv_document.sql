-- The KV operations of a step, read in the wire's form and handed on in that of kv.sql. The checks come in the order of
-- step 2.3, and a refusal bears the wire's reason.

create or replace function queen._read_kv_names(operation json, op text, path text) returns jsonb
language plpgsql immutable as $$
declare
    v_namespace text := coalesce(_read_kv_names.operation ->> 'ns', '');
    v_keys json := case when _read_kv_names.op = 'getMany' then coalesce(_read_kv_names.operation -> 'keys', '[]')
                        else json_build_array(_read_kv_names.operation ->> 'key') end;
    v_key text;
begin
    if json_typeof(v_keys) <> 'array' then
        perform queen._refuse_document(_read_kv_names.path || 'keys', 'keys must be an array', 'kv_bad_request');
    end if;
    if v_namespace !~ '^[a-z0-9][a-z0-9._-]{0,63}$' and json_array_length(v_keys) > 0 then
        perform queen._refuse_document(_read_kv_names.path || 'ns',
            'ns is 1 to 64 characters of a-z, 0-9, dot, underscore and hyphen', 'kv_bad_namespace');
    end if;
    for v_key in select k from json_array_elements_text(v_keys) k loop
        if coalesce(v_key, '') = '' then
            perform queen._refuse_document(_read_kv_names.path || 'key', 'a key is not empty', 'kv_bad_key');
        elsif octet_length(v_key) > 512 then
            perform queen._fail('QU001', 'a key is at most 512 bytes',
                jsonb_build_object('argument', _read_kv_names.path || 'key', 'reason', 'kv_key_too_large', 'maximum_bytes', 512));
        end if;
    end loop;
    if _read_kv_names.op = 'getMany' then
        return jsonb_build_object('ns', v_namespace, 'keys', v_keys);
    end if;
    return jsonb_build_object('ns', v_namespace, 'key', v_key);
end;
$$;

comment on function queen._read_kv_names(json, text, text) is 'The namespace and the key or keys of a KV operation.';

create or replace function queen._read_kv_lifetime(operation json, path text) returns numeric
language plpgsql immutable as $$
declare
    v_seconds numeric := queen._whole_number(_read_kv_lifetime.operation -> 'ttlSeconds');
    v_sent boolean := _read_kv_lifetime.operation -> 'ttlSeconds' is not null;
begin
    if v_sent and (v_seconds is null or v_seconds <= 0) then
        perform queen._refuse_document(_read_kv_lifetime.path || 'ttlSeconds', 'ttlSeconds must be an integer above 0', 'kv_bad_ttl');
    elsif v_sent = coalesce(json_typeof(_read_kv_lifetime.operation -> 'forever') = 'boolean'
                            and (_read_kv_lifetime.operation ->> 'forever')::boolean, false) then
        perform queen._refuse_document(_read_kv_lifetime.path || 'ttlSeconds', 'say either ttlSeconds or forever: true',
                                       'kv_expiry_not_specified');
    end if;
    return v_seconds;
end;
$$;

comment on function queen._read_kv_lifetime(json, text) is 'The lifetime that a write gives its row, in seconds; null for ever.';

create or replace function queen._read_kv(operation json, path text) returns jsonb
language plpgsql immutable as $$
declare
    v_op text;
    v_read jsonb;
    v_field text;
    v_expect numeric;
begin
    if json_typeof(_read_kv.operation) is distinct from 'object' then
        perform queen._refuse_document(rtrim(_read_kv.path, '.'), 'an operation must be an object', 'kv_bad_request');
    end if;
    v_op := _read_kv.operation ->> 'op';
    if v_op is null or v_op not in ('get', 'getMany', 'getPrefix', 'put', 'putIfAbsent', 'incr', 'delete', 'check') then
        perform queen._refuse_document(_read_kv.path || 'op', 'op must be one of get, getMany, put, putIfAbsent, incr, delete, check',
                                       'kv_unknown_op');
    elsif v_op = 'getPrefix' then
        perform queen._refuse_document(_read_kv.path || 'op', 'a step reads by key', 'kv_get_prefix_not_allowed_in_transaction');
    end if;
    foreach v_field in array '{tenant,tenantId,_tenant}'::text[] loop
        if _read_kv.operation -> v_field is not null then
            perform queen._refuse_document(_read_kv.path || v_field, 'the tenant is the session''s', 'kv_tenant_not_an_input');
        end if;
    end loop;
    v_read := jsonb_build_object('op', v_op) || queen._read_kv_names(_read_kv.operation, v_op, _read_kv.path);

    if v_op in ('put', 'putIfAbsent', 'incr') then
        v_read := v_read || jsonb_build_object('ttlSeconds', queen._read_kv_lifetime(_read_kv.operation, _read_kv.path));
    end if;
    if v_op in ('put', 'putIfAbsent') then
        if _read_kv.operation -> 'value' is null then
            perform queen._refuse_document(_read_kv.path || 'value', 'a value is needed; it may be null', 'kv_bad_request');
        elsif octet_length((_read_kv.operation -> 'value')::text) > 65536 then
            perform queen._fail('QU001', 'a value is at most 65536 bytes',
                jsonb_build_object('argument', _read_kv.path || 'value', 'reason', 'kv_value_too_large', 'maximum_bytes', 65536));
        end if;
        v_read := v_read || jsonb_build_object('value', (_read_kv.operation -> 'value')::text);
    end if;
    if v_op = 'incr' then
        foreach v_field in array '{delta,min,max}'::text[] loop
            if _read_kv.operation -> v_field is null then
                continue when v_field <> 'delta';
                perform queen._refuse_document(_read_kv.path || 'delta', 'incr needs a delta', 'kv_bad_request');
            elsif queen._kv_number(_read_kv.operation -> v_field) is null or length(_read_kv.operation ->> v_field) > 400 then
                perform queen._refuse_document(_read_kv.path || v_field, format('%s must be a number', v_field), 'kv_bad_request');
            end if;
            v_read := v_read || jsonb_build_object(v_field, queen._kv_number(_read_kv.operation -> v_field));
        end loop;
    end if;
    if _read_kv.operation -> 'expect' is not null then
        if v_op = 'incr' then
            perform queen._refuse_document(_read_kv.path || 'expect', 'incr takes no expect', 'kv_bad_request');
        end if;
        v_expect := queen._whole_number(_read_kv.operation -> 'expect');
        if v_expect is null or v_expect < 0 or v_op = 'putIfAbsent' and v_expect <> 0 then
            perform queen._refuse_document(_read_kv.path || 'expect', 'expect must be a version, or 0 for a key that is not there',
                                           'kv_bad_expect');
        end if;
        v_read := v_read || jsonb_build_object('expect', least(v_expect, 9223372036854775807));
    elsif v_op = 'check' then
        perform queen._refuse_document(_read_kv.path || 'expect', 'check needs an expect', 'kv_bad_expect');
    end if;
    if _read_kv.operation -> 'required' is not null then
        if json_typeof(_read_kv.operation -> 'required') <> 'boolean' then
            perform queen._refuse_document(_read_kv.path || 'required', 'required must be a boolean', 'kv_bad_request');
        end if;
        v_read := v_read || jsonb_build_object('required', (_read_kv.operation ->> 'required')::boolean);
    end if;
    return v_read;
end;
$$;

comment on function queen._read_kv(json, text) is 'One KV operation of a step, checked.';

create or replace function queen._read_kv_all(operations json) returns jsonb
language plpgsql immutable as $$
declare
    v_read jsonb;
    v_repeated text;
begin
    if json_array_length(_read_kv_all.operations) > 64 then
        perform queen._refuse_document('kv', 'a step has at most 64 KV operations', 'kv_too_many_ops');
    end if;
    select coalesce(jsonb_agg(queen._read_kv(o.operation, format('kv[%s].', o.place - 1)) order by o.place), '[]') into v_read
    from json_array_elements(_read_kv_all.operations) with ordinality o (operation, place);

    select o ->> 'key' into v_repeated
    from jsonb_array_elements(v_read) o
    where o ->> 'op' not in ('get', 'getMany')
    group by o ->> 'ns', o ->> 'key'
    having count(*) > 1
    limit 1;
    if found then
        perform queen._refuse_document('kv', format('the key %s is written or checked twice', v_repeated), 'kv_duplicate_key_in_call');
    elsif (select sum(case when o ->> 'op' = 'getMany' then jsonb_array_length(o -> 'keys') else 1 end) from jsonb_array_elements(v_read) o) > 256 then
        perform queen._refuse_document('kv', 'a step names at most 256 keys', 'kv_too_many_keys');
    end if;
    return v_read;
end;
$$;

comment on function queen._read_kv_all(json) is 'The KV operations of a step, checked one by one and together.';
