-- KV, for SQL users: the conditions and versions of the wire, in the user's own transaction and at any isolation
-- level. A row is locked before it is judged, and where there is none the insert is the lock. The key stays
-- locked until the user's transaction ends.

create or replace function queen._kv_check(
    namespace text, key text, value json, ttl interval, expect bigint
) returns void
language plpgsql stable as $$
begin
    if not queen._switched_on('kv') then
        perform queen._fail('QU200', 'KV is switched off', '{"reason": "kv_disabled"}', 'Somebody has paused it for everybody; it will come back.');
    elsif coalesce(_kv_check.namespace, '') !~ '^[a-z0-9][a-z0-9._-]{0,63}$' then
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

comment on function queen._kv_check(text, text, json, interval, bigint) is
    'Refuse what no key, value or condition can be, and everything while KV is switched off.';

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
    perform queen._kv_check(kv_get.namespace, kv_get.key, null, null, null);
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

create or replace function queen.kv_check(namespace text, key text, expect bigint)
returns table (applied boolean, reason text, version bigint, stored json)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    perform queen._kv_check(kv_check.namespace, kv_check.key, null, null, kv_check.expect);
    if kv_check.expect is null then
        perform queen._refuse_argument('expect', 'a check expects a version', '0 expects that there is no such key.');
    end if;
    return query
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(
        queen.current_tenant(),
        jsonb_build_object('op', 'check', 'ns', kv_check.namespace, 'key', kv_check.key, 'expect', kv_check.expect),
        queen.now(), true) a;
end;
$$;

comment on function queen.kv_check(text, text, bigint) is
    'Whether a key is at the expected version; if it is, it stays so until the transaction ends.';

create or replace function queen.kv_once(namespace text, key text, ttl interval default '1 day') returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_applied boolean;
begin
    select p.applied into v_applied from queen.kv_put(kv_once.namespace, kv_once.key, 'true', kv_once.ttl, expect => 0) p;
    return v_applied;
end;
$$;

comment on function queen.kv_once(text, text, interval) is
    'True for the first transaction that asks for the key, false for the others until ttl is over: the gate of work that is to be done once.';

create or replace function queen.kv_list(
    namespace text, prefix text default '', after text default null, row_max integer default 100
) returns table (key text, value json, version bigint, expires_at timestamptz, updated_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_now timestamptz := queen.now();
    v_prefix text := coalesce(kv_list.prefix, '');
begin
    perform queen._kv_check(kv_list.namespace, 'a key', null, null, null);
    return query
    select k.key, k.value, k.version, k.expires_at, k.updated_at
    from queen.kv k
    where k.tenant_id = v_tenant and k.namespace = kv_list.namespace
      and k.key >= v_prefix and k.key < queen._prefix_end(v_prefix) and k.key > coalesce(kv_list.after, '')
      and queen._kv_live(k.expires_at, v_now)
    order by k.key
    limit least(greatest(coalesce(kv_list.row_max, 100), 1), 1000);
end;
$$;

comment on function queen.kv_list(text, text, text, integer) is
    'The live keys of a namespace that begin with prefix, in byte order, behind the key after; at most row_max of them, and 1000.';
