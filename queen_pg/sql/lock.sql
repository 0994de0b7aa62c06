-- Locks and semaphores: a permit is a KV row in the namespace queen-locks, key <name>#<slot>, and its token is the
-- row's version. Nothing else is kept, so everything that holds for KV holds for a permit: it is dead at its
-- expiry, its token rises from holder to holder, and a step's check of it is the guard.
--
-- The operations of a call are independent, each on a name of its own; they run in the order of their keys.

create or replace function queen._lock_key(name text, slot integer) returns text
language sql immutable parallel safe as $$
    select name || '#' || slot;
$$;

comment on function queen._lock_key(text, integer) is 'The KV key of one slot.';

-- Anybody may write such a row by hand. Where the value holds escapes that no text of ours can hold, the
-- database cannot look inside it.
create or replace function queen._lock_text(value json, field text) returns text
language sql immutable parallel safe as $$
    select case when json_typeof(value) = 'object' and replace(value::text, '\\', '') !~* '\\u(0000|d[89a-f])'
                then case when json_typeof(value->field) = 'string' then value->>field end end;
$$;

comment on function queen._lock_text(json, text) is 'A field of a permit''s value, if it is a text.';

create or replace function queen._lock_permits(tenant integer, name text, first_slot integer, slot_count integer, moment timestamptz)
returns table (slot integer, token bigint, owner text, since text, value json, expires_at timestamptz, updated_at timestamptz)
language sql stable as $$
    select s.slot, k.version, queen._lock_text(k.value, 'owner'),
           coalesce(queen._lock_text(k.value, 'since'), queen._kv_time(k.updated_at)), k.value, k.expires_at, k.updated_at
    from generate_series(_lock_permits.first_slot, _lock_permits.first_slot + _lock_permits.slot_count - 1) s (slot)
    join queen.kv k
        on k.tenant_id = _lock_permits.tenant and k.namespace = 'queen-locks'
        and k.key = queen._lock_key(_lock_permits.name, s.slot)
    where queen._kv_live(k.expires_at, _lock_permits.moment)
    order by s.slot;
$$;

comment on function queen._lock_permits(integer, text, integer, integer, timestamptz) is
    'The live permits in a range of a name''s slots, by slot.';

create or replace function queen._lock_guard(name text, slot integer, token bigint) returns json
language sql immutable parallel safe as $$
    select json_build_object('op', 'check', 'ns', 'queen-locks', 'key', queen._lock_key(name, slot),
                             'expect', token, 'required', true);
$$;

comment on function queen._lock_guard(text, integer, bigint) is
    'The operation by which a step commits only while the permit is its holder''s.';

create or replace function queen._lock_grant(operation jsonb, slot integer, token bigint, already boolean) returns json
language sql immutable parallel safe as $$
    select case when already
        then json_build_object('op', 'acquire', 'name', operation->'name', 'acquired', true, 'slot', slot, 'token', token,
                               'owner', operation->'owner', 'guard', queen._lock_guard(operation->>'name', slot, token),
                               'already', true)
        else json_build_object('op', 'acquire', 'name', operation->'name', 'acquired', true, 'slot', slot, 'token', token,
                               'owner', operation->'owner', 'guard', queen._lock_guard(operation->>'name', slot, token))
    end;
$$;

comment on function queen._lock_grant(jsonb, integer, bigint, boolean) is 'The element of the answer for a granted acquire.';

-- The holders that are in an operation's way, as its answer names them.
create or replace function queen._lock_holders(tenant integer, name text, first_slot integer, slot_count integer, moment timestamptz)
returns json
language sql stable as $$
    select coalesce(json_agg(json_build_object('slot', p.slot, 'owner', p.owner) order by p.slot), '[]')
    from queen._lock_permits(_lock_holders.tenant, _lock_holders.name, _lock_holders.first_slot,
                             _lock_holders.slot_count, _lock_holders.moment) p;
$$;

comment on function queen._lock_holders(integer, text, integer, integer, timestamptz) is
    'The slots of a range that are held, and by whom.';

-- Take the slot of a lock, or a free one of a semaphore by chance (step 4.4-2, 4.4-3). A lock's slot is tried
-- without a look. The loop is for READ COMMITTED, where a slot seen free may be taken by now.
create or replace function queen._lock_acquire(tenant integer, operation jsonb, moment timestamptz) returns json
language plpgsql as $$
#variable_conflict use_column
declare
    v_name text := _lock_acquire.operation->>'name';
    v_slots integer := coalesce((_lock_acquire.operation->>'limit')::integer, 1);
    v_put jsonb := jsonb_build_object(
        'op', 'putIfAbsent', 'ns', 'queen-locks', 'ttlSeconds', _lock_acquire.operation->'ttlSeconds',
        'value', json_build_object('owner', _lock_acquire.operation->'owner')::text);
    v_slot integer := 0;
    v_token bigint;
    v_own record;
begin
    for v_try in 1 .. 4 loop
        if v_slots > 1 or v_try > 1 then
            select p.slot, p.token into v_own
            from queen._lock_permits(_lock_acquire.tenant, v_name, 0, v_slots, _lock_acquire.moment) p
            where p.owner = _lock_acquire.operation->>'owner'
            order by p.slot
            limit 1;
            if found then
                return queen._lock_grant(_lock_acquire.operation, v_own.slot, v_own.token, true);
            end if;
            select s.slot into v_slot
            from generate_series(0, v_slots - 1) s (slot)
            where s.slot not in (
                select p.slot from queen._lock_permits(_lock_acquire.tenant, v_name, 0, v_slots, _lock_acquire.moment) p)
            order by random()
            limit 1;
            if not found then
                return json_build_object(
                    'op', 'acquire', 'name', v_name, 'acquired', false, 'reason', 'held',
                    'holders', queen._lock_holders(_lock_acquire.tenant, v_name, 0, v_slots, _lock_acquire.moment));
            end if;
        end if;
        select p.version into v_token
        from queen._kv_put(_lock_acquire.tenant, v_put || jsonb_build_object('key', queen._lock_key(v_name, v_slot)),
                           _lock_acquire.moment) p;
        if v_token is not null then
            return queen._lock_grant(_lock_acquire.operation, v_slot, v_token, false);
        end if;
    end loop;
    return json_build_object(
        'op', 'acquire', 'name', v_name, 'acquired', false, 'reason', 'contended',
        'holders', queen._lock_holders(_lock_acquire.tenant, v_name, 0, v_slots, _lock_acquire.moment));
end;
$$;

comment on function queen._lock_acquire(integer, jsonb, timestamptz) is 'Take a permit; the element of the answer.';

-- Give a permit a new lifetime and a new token, if it is still the caller's (step 4.4-5): by the token, or by
-- the owner when the answer to an earlier renew was lost.
create or replace function queen._lock_renew(tenant integer, operation jsonb, moment timestamptz) returns json
language plpgsql as $$
#variable_conflict use_column
declare
    v_name text := _lock_renew.operation->>'name';
    v_slot integer := coalesce((_lock_renew.operation->>'slot')::integer, 0);
    v_put jsonb := jsonb_build_object(
        'op', 'put', 'ns', 'queen-locks', 'key', queen._lock_key(v_name, v_slot),
        'ttlSeconds', _lock_renew.operation->'ttlSeconds');
    v_permit record;
    v_value text;
    v_token bigint;
begin
    perform queen._kv_hold(_lock_renew.tenant, v_put, _lock_renew.moment);
    select p.* into v_permit
    from queen._lock_permits(_lock_renew.tenant, v_name, v_slot, 1, _lock_renew.moment) p;
    if not found or v_permit.token <> (_lock_renew.operation->>'token')::bigint
            and v_permit.owner is distinct from coalesce(_lock_renew.operation->>'owner', '') then
        return json_build_object(
            'op', 'renew', 'name', v_name, 'renewed', false, 'reason', 'lost', 'slot', v_slot,
            'holders', queen._lock_holders(_lock_renew.tenant, v_name, v_slot, 1, _lock_renew.moment));
    end if;

    v_value := v_permit.value::text;
    if json_typeof(v_permit.value) = 'object' and queen._lock_text(v_permit.value, 'since') is null then
        v_value := regexp_replace(v_value, '\s*\}\s*$', '')
            || case when v_value ~ '^\s*\{\s*\}\s*$' then '' else ',' end
            || '"since":' || to_json(v_permit.since)::text || '}';
    end if;
    select p.version into v_token
    from queen._kv_put(_lock_renew.tenant, v_put || jsonb_build_object('value', v_value), _lock_renew.moment) p;
    return json_build_object('op', 'renew', 'name', v_name, 'renewed', true, 'slot', v_slot, 'token', v_token,
                             'guard', queen._lock_guard(v_name, v_slot, v_token));
end;
$$;

comment on function queen._lock_renew(integer, jsonb, timestamptz) is 'Renew a permit; the element of the answer.';

create or replace function queen._lock_release(tenant integer, operation jsonb, moment timestamptz) returns json
language plpgsql as $$
#variable_conflict use_column
declare
    v_name text := _lock_release.operation->>'name';
    v_slot integer := coalesce((_lock_release.operation->>'slot')::integer, 0);
    v_reason text;
begin
    select a.reason into v_reason
    from queen._kv_apply(
        _lock_release.tenant,
        jsonb_build_object('op', 'delete', 'ns', 'queen-locks', 'key', queen._lock_key(v_name, v_slot),
                           'expect', _lock_release.operation->'token'),
        _lock_release.moment, true) a;
    if v_reason is null then
        return json_build_object('op', 'release', 'name', v_name, 'released', true, 'slot', v_slot);
    end if;
    return json_build_object(
        'op', 'release', 'name', v_name, 'released', false, 'reason', 'lost', 'slot', v_slot,
        'holders', queen._lock_holders(_lock_release.tenant, v_name, v_slot, 1, _lock_release.moment));
end;
$$;

comment on function queen._lock_release(integer, jsonb, timestamptz) is
    'Remove the permit that bears the token; the element of the answer.';

create or replace function queen._lock_get(tenant integer, operation jsonb, moment timestamptz) returns json
language sql stable as $$
    select json_build_object(
        'op', 'get', 'name', _lock_get.operation->'name', 'held', count(*) > 0,
        'holders', coalesce(json_agg(json_build_object(
            'slot', p.slot, 'owner', p.owner, 'token', p.token, 'since', p.since,
            'expiresAt', queen._kv_time(p.expires_at), 'renewedAt', queen._kv_time(p.updated_at)) order by p.slot), '[]'))
    from queen._lock_permits(_lock_get.tenant, _lock_get.operation->>'name', 0, 1024, _lock_get.moment) p;
$$;

comment on function queen._lock_get(integer, jsonb, timestamptz) is 'Who holds a name''s slots; the element of the answer.';

-- One lock call of the broker. The verdict is `done` beside each element, or one row says `disabled`.
create or replace function queen._locks(tenant integer, operations jsonb)
returns table (operation_index integer, verdict text, result json)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_row record;
begin
    if not queen._switched_on('kv') then
        return query select null::integer, 'disabled', null::json;
        return;
    end if;
    verdict := 'done';
    for v_row in
        select (o.place - 1)::integer as operation_index, o.operation
        from jsonb_array_elements(_locks.operations) with ordinality o (operation, place)
        order by queen._lock_key(o.operation->>'name', 0) collate "C"
    loop
        operation_index := v_row.operation_index;
        result := case v_row.operation->>'op'
            when 'acquire' then queen._lock_acquire(_locks.tenant, v_row.operation, v_now)
            when 'renew' then queen._lock_renew(_locks.tenant, v_row.operation, v_now)
            when 'release' then queen._lock_release(_locks.tenant, v_row.operation, v_now)
            else queen._lock_get(_locks.tenant, v_row.operation, v_now)
        end;
        return next;
    end loop;
end;
$$;

comment on function queen._locks(integer, jsonb) is 'One call of lock operations: each one''s element of the answer.';
