-- KV, read: one key, many keys, the keys of a prefix, and what the console shows.
--
-- A prefix is a range of the primary key, whose order is that of bytes. Values are read one at a time and only
-- while the caller's budget of bytes lasts: the row that crosses the line is still returned (step 2.5).

-- The text is put together by hand: a value stays as it was sent, and a page of keys has none.
create or replace function queen._kv_row(kv_row queen.kv, keys_only boolean, console boolean, expired boolean)
returns json
language sql stable parallel safe as $$
    select (
        '{"key":' || to_json(kv_row.key)::text
        || case when keys_only then '' else ',"value":' || kv_row.value::text end
        || ',"version":' || kv_row.version
        || ',"expiresAt":' || coalesce('"' || t.expires_at || '"', 'null')
        || ',"updatedAt":"' || t.updated_at || '"'
        || coalesce(',"expired":' || expired::text, '')
        || '}'
    )::json
    from (
        select case when console then queen._fixed_time(kv_row.expires_at) else queen._kv_time(kv_row.expires_at) end as expires_at,
               case when console then queen._fixed_time(kv_row.updated_at) else queen._kv_time(kv_row.updated_at) end as updated_at
    ) t;
$$;

comment on function queen._kv_row(queen.kv, boolean, boolean, boolean) is
    'A row as getMany, getPrefix and the console list answer it; expired is left out when null.';

create or replace function queen._kv_get(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    out result json,
    out bytes bigint
)
language plpgsql stable as $$
declare
    v_row queen.kv;
begin
    select k.* into v_row
    from queen.kv k
    where k.tenant_id = _kv_get.tenant
      and k.namespace = _kv_get.operation->>'ns' and k.key = _kv_get.operation->>'key';
    if found and queen._kv_live(v_row.expires_at, _kv_get.moment) then
        bytes := octet_length(v_row.value::text);
        result := json_build_object(
            'op', 'get', 'found', true, 'key', v_row.key, 'value', v_row.value, 'version', v_row.version,
            'expiresAt', queen._kv_time(v_row.expires_at), 'updatedAt', queen._kv_time(v_row.updated_at));
    else
        bytes := 0;
        result := json_build_object('op', 'get', 'found', false, 'key', _kv_get.operation->>'key');
    end if;
end;
$$;

comment on function queen._kv_get(integer, jsonb, timestamptz) is 'The answer to a get, and the bytes of its value.';

create or replace function queen._kv_get_many(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    budget bigint,
    out result json,
    out bytes bigint
)
language plpgsql stable as $$
declare
    v_keys text[] := array(select jsonb_array_elements_text(_kv_get_many.operation->'keys'));
    v_rows json[] := '{}';
    v_found text[] := '{}';
    v_row queen.kv;
begin
    bytes := 0;
    for v_row in
        select k.*
        from queen.kv k
        where k.tenant_id = _kv_get_many.tenant and k.namespace = _kv_get_many.operation->>'ns'
          and k.key = any(v_keys) and queen._kv_live(k.expires_at, _kv_get_many.moment)
        order by k.key
    loop
        v_found := v_found || v_row.key;
        if bytes < _kv_get_many.budget then
            bytes := bytes + octet_length(v_row.value::text);
            v_rows := v_rows || queen._kv_row(v_row, false, false, null);
        end if;
    end loop;
    result := json_build_object(
        'op', 'getMany', 'rows', array_to_json(v_rows),
        'missing', array(select u.key from unnest(v_keys) with ordinality u (key, place)
                         where u.key <> all(v_found) order by u.place),
        'truncated', cardinality(v_rows) < cardinality(v_found));
end;
$$;

comment on function queen._kv_get_many(integer, jsonb, timestamptz, bigint) is
    'The answer to a getMany, and the bytes of the values in it.';

-- The console's pages may show dead rows too, and write moments in their own form.
create or replace function queen._kv_page(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    budget bigint,
    console boolean,
    out page json,
    out truncated boolean,
    out next_after text,
    out bytes bigint
)
language plpgsql stable as $$
declare
    v_prefix text := coalesce(_kv_page.operation->>'prefix', '');
    v_end text := queen._prefix_end(v_prefix);
    v_after text := coalesce(_kv_page.operation->>'after', '');
    v_size_max integer := coalesce((_kv_page.operation->>'limit')::integer, 100);
    v_keys_only boolean := coalesce((_kv_page.operation->>'keysOnly')::boolean, false);
    v_dead_too boolean := coalesce((_kv_page.operation->>'includeExpired')::boolean, false);
    v_rows json[] := '{}';
    v_row queen.kv;
begin
    bytes := 0;
    truncated := false;
    next_after := v_after;
    for v_row in
        select k.*
        from queen.kv k
        where k.tenant_id = _kv_page.tenant and k.namespace = _kv_page.operation->>'ns'
          and k.key >= v_prefix and k.key < v_end and k.key > v_after
          and (v_dead_too or queen._kv_live(k.expires_at, _kv_page.moment))
        order by k.key
        limit v_size_max + 1
    loop
        truncated := cardinality(v_rows) = v_size_max or bytes >= _kv_page.budget;
        exit when truncated;
        next_after := v_row.key;
        if not v_keys_only then
            bytes := bytes + octet_length(v_row.value::text);
        end if;
        v_rows := v_rows || queen._kv_row(
            v_row, v_keys_only, _kv_page.console,
            case when v_dead_too then not queen._kv_live(v_row.expires_at, _kv_page.moment) end);
    end loop;
    next_after := case when truncated then next_after end;
    page := array_to_json(v_rows);
end;
$$;

comment on function queen._kv_page(integer, jsonb, timestamptz, bigint, boolean) is
    'A page of the rows of a prefix, in key order, and the key to go on after when there are more.';

create or replace function queen._kv_read(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    budget bigint,
    out result json,
    out bytes bigint
)
language plpgsql stable as $$
begin
    case _kv_read.operation->>'op'
        when 'get' then
            select g.result, g.bytes into result, bytes
            from queen._kv_get(_kv_read.tenant, _kv_read.operation, _kv_read.moment) g;
        when 'getMany' then
            select m.result, m.bytes into result, bytes
            from queen._kv_get_many(_kv_read.tenant, _kv_read.operation, _kv_read.moment, _kv_read.budget) m;
        else
            select json_build_object('op', 'getPrefix', 'rows', p.page, 'truncated', p.truncated, 'nextAfter', p.next_after),
                   p.bytes
            into result, bytes
            from queen._kv_page(_kv_read.tenant, _kv_read.operation, _kv_read.moment, _kv_read.budget, false) p;
    end case;
end;
$$;

comment on function queen._kv_read(integer, jsonb, timestamptz, bigint) is
    'The answer to a get, getMany or getPrefix, and the bytes of the values in it.';

create or replace function queen._kv_list(tenant integer, operation jsonb)
returns table (page json, truncated boolean, next_after text, bytes bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select p.page, p.truncated, p.next_after, p.bytes
    from queen._kv_page(_kv_list.tenant, _kv_list.operation, queen.now(), 4 * 1024 * 1024, true) p;
$$;

comment on function queen._kv_list(integer, jsonb) is 'One page of the console''s list of a namespace''s rows.';

create or replace function queen._kv_namespaces(tenant integer) returns table (namespace text, key_count bigint)
language sql stable as $$
    select k.namespace, count(*)
    from queen.kv k
    where k.tenant_id = _kv_namespaces.tenant
    group by k.namespace
    order by k.namespace;
$$;

comment on function queen._kv_namespaces(integer) is 'The namespaces that hold rows, dead ones included, in byte order.';
