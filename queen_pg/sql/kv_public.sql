-- KV for SQL users: the same conditions and versions as on the wire, in the user's own transaction and at any
-- isolation level. Rows are locked first and judged after, and where there is no row the insert is the lock.

create or replace function queen._kv_check_names(namespace text, key text) returns void
language plpgsql immutable as $$
begin
    if coalesce(_kv_check_names.namespace, '') !~ '^[a-z0-9][a-z0-9._-]{0,63}$' then
        perform queen._fail('QU000', 'a namespace is 1 to 64 characters of a-z, 0-9, dot, underscore and hyphen');
    elsif coalesce(octet_length(_kv_check_names.key), 0) not between 1 and 512 then
        perform queen._fail('QU000', 'a key is 1 to 512 bytes');
    end if;
end;
$$;

comment on function queen._kv_check_names(text, text) is 'Refuse names that no KV row can have.';

-- The names are checked, and the expected version, a lifetime and a value are what the wire would have let in.
create or replace function queen._kv_operation(
    op text, namespace text, key text, value json default null, ttl interval default null, expect bigint default null
) returns jsonb
language plpgsql immutable as $$
begin
    perform queen._kv_check_names(_kv_operation.namespace, _kv_operation.key);
    if octet_length(_kv_operation.value::text) > 65536 then
        perform queen._fail('QU001', 'a value is at most 65536 bytes');
    elsif _kv_operation.ttl <= interval '0' then
        perform queen._fail('QU000', 'a lifetime is longer than nothing', hint => 'Leave ttl out for a row that never expires.');
    elsif _kv_operation.expect < 0 then
        perform queen._fail('QU000', 'an expected version is 0, for no row, or the version of a row');
    end if;
    return jsonb_build_object(
        'op', _kv_operation.op, 'ns', _kv_operation.namespace, 'key', _kv_operation.key,
        'value', _kv_operation.value::text, 'ttlSeconds', extract(epoch from _kv_operation.ttl), 'expect', _kv_operation.expect);
end;
$$;

comment on function queen._kv_operation(text, text, text, json, interval, bigint) is
    'A SQL user''s arguments, checked, as an operation of the wire.';

create or replace function queen.kv_get(namespace text, key text)
returns table (value json, version bigint, expires_at timestamptz, updated_at timestamptz)
language sql stable security definer set search_path = ''
as $$
    select k.value, k.version, k.expires_at, k.updated_at
    from queen.kv k
    where k.tenant_id = 1 and k.namespace = kv_get.namespace and k.key = kv_get.key
      and queen._kv_live(k.expires_at, queen.now());
$$;

comment on function queen.kv_get(text, text) is 'Read a key: its value and version, or no row when it is absent or expired.';

create or replace function queen.kv_put(
    namespace text, key text, value json, ttl interval default null, expect bigint default null
) returns table (applied boolean, reason text, version bigint, stored json)
language sql volatile security definer set search_path = ''
as $$
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(1, queen._kv_operation('put', kv_put.namespace, kv_put.key, kv_put.value, kv_put.ttl, kv_put.expect),
                         queen.now(), true) a;
$$;

comment on function queen.kv_put(text, text, json, interval, bigint) is
    'Write a key, for ttl or for ever; with expect only over that version, and with expect 0 only where there is none.';

create or replace function queen.kv_delete(namespace text, key text, expect bigint default null)
returns table (applied boolean, reason text, version bigint, stored json)
language sql volatile security definer set search_path = ''
as $$
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(1, queen._kv_operation('delete', kv_delete.namespace, kv_delete.key, expect => kv_delete.expect),
                         queen.now(), true) a;
$$;

comment on function queen.kv_delete(text, text, bigint) is 'Remove a key, with expect only at that version; answers what it held.';

create or replace function queen.kv_incr(
    namespace text, key text, delta numeric default 1, ttl interval default null,
    minimum numeric default null, maximum numeric default null
) returns table (applied boolean, reason text, version bigint, stored json)
language sql volatile security definer set search_path = ''
as $$
    select a.reason is null, a.reason, a.version, a.value
    from queen._kv_apply(
        1,
        queen._kv_operation('incr', kv_incr.namespace, kv_incr.key, ttl => kv_incr.ttl)
            || jsonb_build_object('delta', kv_incr.delta, 'min', kv_incr.minimum, 'max', kv_incr.maximum),
        queen.now(), true) a;
$$;

comment on function queen.kv_incr(text, text, numeric, interval, numeric, numeric) is
    'Add to a counter unless the sum would leave the bounds; a live counter keeps its lifetime.';
