-- Locks and semaphores, for SQL users. A permit outlives the transaction that takes it, until it is released or its
-- lifetime is over; for mutual exclusion inside one transaction PostgreSQL has row locks. Each permit has a token that
-- is higher than its predecessor's: lock_check, in the transaction that writes what the lock protects, is the fence.

create or replace function queen._check_lock(name text, ttl interval, owner text, slot integer) returns void
language plpgsql stable as $$
begin
    if not queen._switched_on('kv') then
        perform queen._fail('QU200', 'KV, and locks with it, is switched off', '{"reason": "kv_disabled"}',
                            'Somebody has paused it for everybody; it will come back.');
    elsif coalesce(_check_lock.name, '') = '' or octet_length(_check_lock.name) > 256 or _check_lock.name ~ '[#[:cntrl:]]' then
        perform queen._refuse_argument('name', 'a lock''s name is 1 to 256 bytes without # and control characters');
    elsif _check_lock.ttl < interval '1 second' or _check_lock.ttl is null then
        perform queen._refuse_argument('ttl', 'a permit lasts at least a second', 'None lasts for ever: renew it.');
    elsif _check_lock.owner = '' or octet_length(_check_lock.owner) > 256 or _check_lock.owner ~ '[[:cntrl:]]' then
        perform queen._refuse_argument('owner', 'an owner is 1 to 256 bytes without control characters');
    elsif _check_lock.slot is null or _check_lock.slot not between 0 and 1023 then
        perform queen._refuse_argument('slot', 'a slot is from 0 to 1023');
    end if;
end;
$$;

comment on function queen._check_lock(text, interval, text, integer) is
    'Refuse what no permit can be, and everything while KV is switched off.';

create or replace function queen.lock_acquire(name text, ttl interval, owner text default null, slots integer default 1)
returns table (acquired boolean, token bigint, slot integer, already boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_result json;
begin
    if lock_acquire.slots is null or lock_acquire.slots not between 1 and 1024 then
        perform queen._refuse_argument('slots', 'a semaphore has from 1 to 1024 slots');
    end if;
    perform queen._check_lock(lock_acquire.name, lock_acquire.ttl, lock_acquire.owner, 0);
    v_result := queen._lock_acquire(
        queen.current_tenant(),
        jsonb_build_object('name', lock_acquire.name, 'ttlSeconds', extract(epoch from lock_acquire.ttl), 'owner', lock_acquire.owner,
                           'limit', lock_acquire.slots),
        queen.now());
    return query
    select (v_result ->> 'acquired')::boolean, (v_result ->> 'token')::bigint, (v_result ->> 'slot')::integer,
           coalesce((v_result ->> 'already')::boolean, false);
end;
$$;

comment on function queen.lock_acquire(text, interval, text, integer) is
    'Take a lock, or one of a semaphore''s slots, for a lifetime; already, with the lifetime unchanged, when the owner holds it.';

create or replace function queen.lock_renew(name text, token bigint, ttl interval, owner text default null, slot integer default 0)
returns table (renewed boolean, new_token bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_result json;
begin
    perform queen._check_lock(lock_renew.name, lock_renew.ttl, lock_renew.owner, lock_renew.slot);
    v_result := queen._lock_renew(
        queen.current_tenant(),
        jsonb_build_object('name', lock_renew.name, 'token', lock_renew.token, 'ttlSeconds', extract(epoch from lock_renew.ttl),
                           'owner', lock_renew.owner, 'slot', lock_renew.slot),
        queen.now());
    return query select (v_result ->> 'renewed')::boolean, (v_result ->> 'token')::bigint;
end;
$$;

comment on function queen.lock_renew(text, bigint, interval, text, integer) is
    'Give a permit a new lifetime and a new token; not renewed when it is lost.';

create or replace function queen.lock_release(name text, token bigint, slot integer default 0) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform queen._check_lock(lock_release.name, '1 second', null, lock_release.slot);
    return (queen._lock_release(
        queen.current_tenant(),
        jsonb_build_object('name', lock_release.name, 'token', lock_release.token, 'slot', lock_release.slot),
        queen.now()) ->> 'released')::boolean;
end;
$$;

comment on function queen.lock_release(text, bigint, integer) is 'Give a permit back; false when it was lost before.';

create or replace function queen.lock_check(name text, token bigint, slot integer default 0) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_reason text;
begin
    perform queen._check_lock(lock_check.name, '1 second', null, lock_check.slot);
    select a.reason into v_reason
    from queen._kv_apply(
        queen.current_tenant(),
        jsonb_build_object('op', 'check', 'ns', 'queen-locks', 'key', queen._lock_key(lock_check.name, lock_check.slot),
                           'expect', greatest(lock_check.token, 1)),
        queen.now(), true) a;
    return v_reason is null;
end;
$$;

comment on function queen.lock_check(text, bigint, integer) is
    'Whether a permit is still its token''s; if it is, nobody else gets it until the transaction ends.';

create or replace function queen.lock_holders(name text)
returns table (slot integer, owner text, token bigint, renewed_at timestamptz, expires_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform queen._check_lock(lock_holders.name, '1 second', null, 0);
    return query
    select p.slot, p.owner, p.token, p.updated_at, p.expires_at
    from queen._lock_permits(queen.current_tenant(), lock_holders.name, 0, 1024, queen.now()) p;
end;
$$;

comment on function queen.lock_holders(text) is 'Who holds a lock, or a semaphore''s slots.';
