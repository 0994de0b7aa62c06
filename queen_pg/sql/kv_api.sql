-- KV, for SQL users: the conditions and versions of the wire, in the user's own transaction and at any isolation
-- level. A row is locked before it is judged, and where there is none the insert is the lock. The key stays
-- locked until the user's transaction ends.

create or replace function queen._kv_check(
    namespace text, key text, value json, ttl interval, expect bigint
) returns void
language plpgsql immutable as $$
begin
    if coalesce(_kv_check.namespace, '') !~ '^[a-z0-9][a-z0-9._-]{0,63}$' then
        perform queen._refuse_argument('namespace', 'a namespace is 1 to 64 characters of a-z, 0-9, dot, underscore and hyphen');
    elsif coalesce(_kv_check.key, '') = '' then
        perform queen._refuse_argument('key', 'a key is not empty');
    elsif octet_length(_kv_check.key) > 512 then
        perform queen._refuse_size('key', 'a key is at most 512 bytes', 512);
    elsif octet_length(_kv_check.value::text) > 65536 then
        perform queen._refuse_size('value', 'a value is at most 65536 bytes', 65536);
    elsif _kv_check.ttl <= interval '0' then
        perform queen._refuse_argument('ttl', 'a lifetime is longer than nothing', 'Leave ttl out for a key that never expires.');
    elsif _kv_check.expect < 0 then
        perform queen._refuse_argument('expect', 'an expected version is not negative', '0 expects that there is no such key.');
    end if;
end;
$$;

comment on function queen._kv_check(text, text, json, interval, bigint) is 'Refuse what no key, value or condition can be.';

create or replace function queen.kv_get(namespace text, key text)
returns table (value json, version bigint, expires_at timestamptz, updated_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_now timestamptz := queen.now();
begin
    return query
    select k.value, k.version, k.expires_at, k.updated_at
    from queen.kv k
    where k.tenant_id = v_tenant and k.namespace = kv_get.namespace and k.key = kv_get.key
      and queen._kv_live(k.expires_at, v_now);
end;
$$;

comment on function queen.kv_get(text, text) is 'Read a key: its value and version, or no row when it is absent or expired.';

create or replace function queen.kv_put(
    namespace text, key text, value json, ttl interval default null, expect bigint default null
) returns table (applied boolean, reason text, version bigint, stored json)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform queen._kv_check(kv_put.namespace, kv_put.key, kv_put.value, kv_put.ttl, kv_put.expect);
    if kv_put.value is null then
        perform queen._refuse_argument('value', 'a key needs a value', 'A JSON null is a value: ''null''.');
    end if;
    return query
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(
        queen.current_tenant(),
        jsonb_build_object('op', 'put', 'ns', kv_put.namespace, 'key', kv_put.key, 'value', kv_put.value::text,
                           'ttlSeconds', extract(epoch from kv_put.ttl), 'expect', kv_put.expect),
        queen.now(), true) a;
end;
$$;

comment on function queen.kv_put(text, text, json, interval, bigint) is
    'Write a key, for ttl or for ever; with expect only over that version, and with expect 0 only where there is no such key.';

create or replace function queen.kv_delete(namespace text, key text, expect bigint default null)
returns table (applied boolean, reason text, version bigint, stored json)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform queen._kv_check(kv_delete.namespace, kv_delete.key, null, null, kv_delete.expect);
    return query
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(
        queen.current_tenant(),
        jsonb_build_object('op', 'delete', 'ns', kv_delete.namespace, 'key', kv_delete.key, 'expect', kv_delete.expect),
        queen.now(), true) a;
end;
$$;

comment on function queen.kv_delete(text, text, bigint) is
    'Remove a key, with expect only at that version; stored is what it held, or what is in the way.';

create or replace function queen.kv_incr(
    namespace text, key text, delta numeric default 1, ttl interval default null,
    minimum numeric default null, maximum numeric default null
) returns table (applied boolean, reason text, version bigint, stored json)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform queen._kv_check(kv_incr.namespace, kv_incr.key, null, kv_incr.ttl, null);
    if kv_incr.delta is null or kv_incr.delta in ('NaN', 'Infinity', '-Infinity') then
        perform queen._refuse_argument('delta', 'a delta is a number');
    end if;
    return query
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(
        queen.current_tenant(),
        jsonb_build_object('op', 'incr', 'ns', kv_incr.namespace, 'key', kv_incr.key, 'delta', kv_incr.delta,
                           'min', kv_incr.minimum, 'max', kv_incr.maximum, 'ttlSeconds', extract(epoch from kv_incr.ttl)),
        queen.now(), true) a;
end;
$$;

comment on function queen.kv_incr(text, text, numeric, interval, numeric, numeric) is
    'Add to a counter unless the sum would leave the bounds; a live counter keeps its lifetime.';
