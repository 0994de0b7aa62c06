-- KV: a row is (tenant, namespace, key) with a JSON value, a version and an expiry. A row whose expiry has come
-- is dead: it reads as absent everywhere, and the sweep only frees its space.
--
-- A call's operations come as one array, already validated, with the wire's names; a value is a JSON string
-- that holds the value's JSON text, so that the text is kept as sent. They are carried out in apply order:
-- by namespace and key, ties by position, then the reads of many keys (step 2.6).
--
-- A write is tried blindly first, as one upsert whose WHERE is the condition: a look at an absent key would
-- read an index page into which others insert their keys, and SERIALIZABLE would abort one of them. Only what
-- the upsert refused is read, by then under this transaction's lock. Careful calls lock and judge each row
-- first; so do the functions for SQL users, which are right at READ COMMITTED.

create or replace function queen._kv_live(expires_at timestamptz, moment timestamptz) returns boolean
language sql immutable parallel safe as $$
    select coalesce(expires_at > moment, true);
$$;

comment on function queen._kv_live(timestamptz, timestamptz) is
    'Whether a row with this expiry, null for never, is alive at the moment; at its expiry it is dead.';

-- Not declared immutable, which the sum of a moment and an interval is not: so it becomes part of whatever calls it.
create or replace function queen._kv_expiry(ttl_seconds numeric, moment timestamptz) returns timestamptz
language sql stable parallel safe as $$
    -- The end of what a timestamp can hold lies a little behind this number of seconds. The planner may work out the interval
    -- before the condition is judged, so it must be one in either case.
    select case when extract(epoch from moment) + ttl_seconds < 9200000000000
                then moment + make_interval(secs => least(ttl_seconds, 9200000000000)::double precision) end;
$$;

comment on function queen._kv_expiry(numeric, timestamptz) is
    'The expiry of a row written at the moment with this lifetime; null, for ever, where none can be told.';

create or replace function queen._kv_number(value json) returns numeric
language sql immutable parallel safe as $$
    -- Numbers of a size that no counter has would leave the range of the database's arithmetic.
    select case when json_typeof(value) = 'number' and length(value::text) <= 1000 and value::text !~* 'e[+-]?\d{4}'
                then value::text::numeric end;
$$;

comment on function queen._kv_number(json) is 'A JSON number, exactly; null for any other value.';

-- Why an operation loses against a key's live row, or null when it applies. Version 0 says there is no such row.
create or replace function queen._kv_refusal(operation jsonb, live_version bigint, live_value json) returns text
language plpgsql immutable parallel safe as $$
declare
    v_op text := _kv_refusal.operation->>'op';
    v_expect bigint := case when v_op = 'putIfAbsent' then 0 else (_kv_refusal.operation->>'expect')::bigint end;
    v_sum numeric;
begin
    if v_op = 'incr' then
        v_sum := case when _kv_refusal.live_version = 0 then 0 else queen._kv_number(_kv_refusal.live_value) end + (_kv_refusal.operation->>'delta')::numeric;
        return case when v_sum is null then 'type'
                    when v_sum < (_kv_refusal.operation->>'min')::numeric or v_sum > (_kv_refusal.operation->>'max')::numeric then 'limit' end;
    elsif v_expect = 0 then
        return case when _kv_refusal.live_version > 0 then 'exists' end;
    elsif _kv_refusal.live_version = 0 then
        return case when v_expect > 0 or v_op = 'delete' then 'absent' end;
    end if;
    return case when v_expect <> _kv_refusal.live_version then 'version' end;
end;
$$;

comment on function queen._kv_refusal(jsonb, bigint, json) is
    'The reason why an operation loses against a key''s live row; null when it applies.';

-- Lock the row of an operation's key. A check only shares it, so that checks of one key do not wait for each
-- other; but it has it until the commit, so that no write of the key comes between.
create or replace function queen._kv_hold(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    out held boolean,
    out version bigint,
    out value json
)
language plpgsql as $$
declare
    v_row queen.kv;
begin
    if _kv_hold.operation->>'op' = 'check' then
        loop
            select k.* into v_row from queen.kv k
            where k.tenant_id = _kv_hold.tenant and k.namespace = _kv_hold.operation->>'ns' and k.key = _kv_hold.operation->>'key'
            for share;
            exit when found or (_kv_hold.operation->>'expect')::bigint > 0 or current_setting('transaction_isolation') = 'serializable';
            -- Only a row keeps a key from being created meanwhile, where SERIALIZABLE does not: one that is dead already.
            insert into queen.kv (tenant_id, namespace, key, version, value, expires_at, created_at, updated_at)
            values (_kv_hold.tenant, _kv_hold.operation->>'ns', _kv_hold.operation->>'key', nextval('queen.kv_version'), 'null',
                    _kv_hold.moment, _kv_hold.moment, _kv_hold.moment)
            on conflict (tenant_id, namespace, key) do nothing;
        end loop;
    else
        select k.* into v_row from queen.kv k
        where k.tenant_id = _kv_hold.tenant and k.namespace = _kv_hold.operation->>'ns' and k.key = _kv_hold.operation->>'key'
        for update;
    end if;
    held := found;
    version := 0;
    if held and queen._kv_live(v_row.expires_at, _kv_hold.moment) then
        version := v_row.version;
        value := v_row.value;
    end if;
end;
$$;

comment on function queen._kv_hold(integer, jsonb, timestamptz) is
    'Lock a key''s row, if there is one; its version and value, or version 0 when it is absent or dead.';

-- A version is drawn under its row's lock, so that a key's versions rise in the order of commits (step 2.7). A
-- new row is no lock before it is there, so its version is drawn again when anybody drew one since: they may
-- have written and deleted this very key. The row is found by its place: its key's index page is where others
-- insert their keys.
create or replace function queen._kv_settle(place tid, drawn bigint) returns bigint
language plpgsql as $$
declare
    v_version bigint;
begin
    if pg_sequence_last_value('queen.kv_version'::regclass) = _kv_settle.drawn then
        return _kv_settle.drawn;
    end if;
    update queen.kv k set version = nextval('queen.kv_version')
    where k.ctid = _kv_settle.place
    returning k.version into v_version;
    return v_version;
end;
$$;

comment on function queen._kv_settle(tid, bigint) is 'The version that a row just created, at its place, keeps.';

-- Carry out a put if its condition holds. An expected version is not looked for where there is no row at all:
-- the row is created then, and created says so.
create or replace function queen._kv_put(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    out version bigint,
    out created boolean
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_drawn bigint := nextval('queen.kv_version');
    v_expect bigint := case when _kv_put.operation->>'op' = 'putIfAbsent' then 0 else (_kv_put.operation->>'expect')::bigint end;
    v_place tid;
begin
    insert into queen.kv as k (tenant_id, namespace, key, version, value, expires_at, created_at, updated_at)
    values (_kv_put.tenant, _kv_put.operation->>'ns', _kv_put.operation->>'key', v_drawn, (_kv_put.operation->>'value')::json,
            queen._kv_expiry((_kv_put.operation->>'ttlSeconds')::numeric, _kv_put.moment), _kv_put.moment, _kv_put.moment)
    on conflict (tenant_id, namespace, key) do update
    set version = nextval('queen.kv_version'),
        value = excluded.value,
        expires_at = excluded.expires_at,
        created_at = case when queen._kv_live(k.expires_at, _kv_put.moment) then k.created_at else _kv_put.moment end,
        updated_at = _kv_put.moment
    where case
        when v_expect is null then true
        when queen._kv_live(k.expires_at, _kv_put.moment) then k.version = v_expect
        else v_expect = 0
    end
    returning k.version, k.ctid into version, v_place;

    created := coalesce(version = v_drawn, false);
    if created then
        version := queen._kv_settle(v_place, v_drawn);
    end if;
end;
$$;

comment on function queen._kv_put(integer, jsonb, timestamptz) is
    'Carry out a put or putIfAbsent; the new version, or null when its condition does not hold.';

-- Carry out an incr if the sum stays within its bounds. A live counter keeps its expiry; a new or dead one
-- starts from 0, with this operation's. A sum that starts a counter has been held against the bounds before.
create or replace function queen._kv_incr(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    out version bigint,
    out value json
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_drawn bigint := nextval('queen.kv_version');
    v_delta numeric := (_kv_incr.operation->>'delta')::numeric;
    v_place tid;
begin
    insert into queen.kv as k (tenant_id, namespace, key, version, value, expires_at, created_at, updated_at)
    values (_kv_incr.tenant, _kv_incr.operation->>'ns', _kv_incr.operation->>'key', v_drawn, trim_scale(v_delta)::text::json,
            queen._kv_expiry((_kv_incr.operation->>'ttlSeconds')::numeric, _kv_incr.moment), _kv_incr.moment, _kv_incr.moment)
    on conflict (tenant_id, namespace, key) do update
    set version = nextval('queen.kv_version'),
        value = case when queen._kv_live(k.expires_at, _kv_incr.moment)
                     then trim_scale(queen._kv_number(k.value) + v_delta)::text::json else excluded.value end,
        expires_at = case when queen._kv_live(k.expires_at, _kv_incr.moment) then k.expires_at else excluded.expires_at end,
        created_at = case when queen._kv_live(k.expires_at, _kv_incr.moment) then k.created_at else _kv_incr.moment end,
        updated_at = _kv_incr.moment
    where not queen._kv_live(k.expires_at, _kv_incr.moment) or queen._kv_refusal(_kv_incr.operation, k.version, k.value) is null
    returning k.version, k.value, k.ctid into version, value, v_place;

    if version = v_drawn then
        version := queen._kv_settle(v_place, v_drawn);
    end if;
end;
$$;

comment on function queen._kv_incr(integer, jsonb, timestamptz) is
    'Carry out an incr; the new version and the sum, or null when a bound or the value forbids it.';

-- Carry out one write or check (step 2.4). No reason means that it applied; else version and value are what is
-- there instead. A required operation that loses raises QU901: its caller undoes everything, judges carefully
-- and answers with the verdict.
create or replace function queen._kv_apply(
    tenant integer,
    operation jsonb,
    moment timestamptz,
    careful boolean,
    out reason text,
    out version bigint,
    out value json
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_op text := _kv_apply.operation->>'op';
    v_blind boolean := not _kv_apply.careful
        and (v_op in ('put', 'putIfAbsent') or v_op = 'incr' and queen._kv_refusal(_kv_apply.operation, 0, null) is null);
    v_held record;
    v_done record;
begin
    loop
        if not v_blind then
            v_held := queen._kv_hold(_kv_apply.tenant, _kv_apply.operation, _kv_apply.moment);
            reason := queen._kv_refusal(_kv_apply.operation, v_held.version, v_held.value);
            -- A dead row goes with the delete that finds it.
            if v_op = 'delete' and v_held.held and (reason is null or v_held.version = 0) then
                delete from queen.kv k
                where k.tenant_id = _kv_apply.tenant
                  and k.namespace = _kv_apply.operation->>'ns' and k.key = _kv_apply.operation->>'key';
            end if;
            version := v_held.version;
            value := v_held.value;
            exit when reason is not null;
        end if;
        case v_op
            when 'check' then
                version := (_kv_apply.operation->>'expect')::bigint;
            when 'delete' then
                null;
            when 'incr' then
                v_done := queen._kv_incr(_kv_apply.tenant, _kv_apply.operation, _kv_apply.moment);
                version := v_done.version;
                value := v_done.value;
            else
                value := (_kv_apply.operation->>'value')::json;
                v_done := queen._kv_put(_kv_apply.tenant, _kv_apply.operation, _kv_apply.moment);
                version := v_done.version;
                if v_done.created and (_kv_apply.operation->>'expect')::bigint > 0 then
                    perform queen._fail('QU901', 'a put that expects a version met no row');
                end if;
        end case;
        exit when version is not null;
        -- A row is in the way, locked by the attempt: judge it.
        v_blind := false;
    end loop;

    if reason is not null and (_kv_apply.operation->>'required')::boolean then
        perform queen._fail('QU901', 'a required operation has lost');
    end if;
end;
$$;

comment on function queen._kv_apply(integer, jsonb, timestamptz, boolean) is
    'Carry out one write or check: its version and value, or the reason why it lost and what is there instead.';

-- Not declared immutable, which `json_build_object` is not: so it becomes part of whatever calls it.
create or replace function queen._kv_element(operation jsonb, reason text, version bigint, value json) returns json
language sql stable parallel safe as $$
    select case
        when reason is not null then json_build_object(
            'op', operation->>'op', 'applied', false, 'reason', reason, 'key', operation->>'key',
            -- A counter that is none counts as 0 for its caller.
            'value', case when operation->>'op' = 'incr' and (version = 0 or reason = 'type') then json '0' else value end,
            'version', version)
        when operation->>'op' = 'check' then json_build_object(
            'op', operation->>'op', 'applied', true, 'key', operation->>'key', 'version', version)
        else json_build_object(
            'op', operation->>'op', 'applied', true, 'key', operation->>'key', 'value', value, 'version', version)
    end;
$$;

comment on function queen._kv_element(jsonb, text, bigint, json) is
    'The element of the answer for a write or check, without its index (step 2.5).';

create or replace function queen._kv_in_order(operations jsonb) returns table (operation_index integer, operation jsonb)
language sql immutable parallel safe as $$
    select (o.place - 1)::integer, o.operation
    from jsonb_array_elements(operations) with ordinality o (operation, place)
    order by o.operation->>'op' in ('getMany', 'getPrefix'),
             o.operation->>'ns' collate "C", o.operation->>'key' collate "C", o.place;
$$;

comment on function queen._kv_in_order(jsonb) is 'A call''s operations in the order in which they apply (step 2.6-1).';

-- Lock the rows of all writes and checks in apply order, and find the first required operation that loses.
create or replace function queen._kv_judge(tenant integer, operations jsonb, moment timestamptz) returns jsonb
language plpgsql as $$
declare
    v_row record;
    v_held record;
    v_reason text;
begin
    for v_row in select o.operation_index, o.operation from queen._kv_in_order(_kv_judge.operations) o loop
        continue when v_row.operation->>'op' in ('get', 'getMany', 'getPrefix');
        v_held := queen._kv_hold(_kv_judge.tenant, v_row.operation, _kv_judge.moment);
        v_reason := queen._kv_refusal(v_row.operation, v_held.version, v_held.value);
        if v_reason is not null and (v_row.operation->>'required')::boolean then
            return jsonb_build_object('failedIndex', v_row.operation_index, 'kvReason', v_reason,
                                      'version', v_held.version, 'value', coalesce(v_held.value::text, 'null'));
        end if;
    end loop;
    return null;
end;
$$;

comment on function queen._kv_judge(integer, jsonb, timestamptz) is
    'Lock what the operations write or check; null, or the verdict on the first required loser. Writes nothing.';

create or replace function queen._kv_change(tenant integer, operation jsonb, moment timestamptz, careful boolean) returns json
language plpgsql as $$
declare
    v_done record;
begin
    v_done := queen._kv_apply(_kv_change.tenant, _kv_change.operation, _kv_change.moment, _kv_change.careful);
    return queen._kv_element(_kv_change.operation, v_done.reason, v_done.version, v_done.value);
end;
$$;

comment on function queen._kv_change(integer, jsonb, timestamptz, boolean) is
    'Carry out one write or check; its element of the answer.';

-- Carry out a call's operations. The values that one call reads share a budget of bytes (step 2.5).
create or replace function queen._kv_write(tenant integer, operations jsonb, moment timestamptz, careful boolean)
returns table (operation_index integer, result json)
language plpgsql as $$
#variable_conflict use_column
declare
    v_row record;
    v_budget bigint := 4 * 1024 * 1024;
    v_bytes bigint;
begin
    for v_row in select o.operation_index, o.operation from queen._kv_in_order(_kv_write.operations) o loop
        operation_index := v_row.operation_index;
        if v_row.operation->>'op' in ('get', 'getMany', 'getPrefix') then
            select r.result, r.bytes into result, v_bytes
            from queen._kv_read(_kv_write.tenant, v_row.operation, _kv_write.moment, v_budget) r;
            v_budget := v_budget - v_bytes;
        else
            result := queen._kv_change(_kv_write.tenant, v_row.operation, _kv_write.moment, _kv_write.careful);
        end if;
        return next;
    end loop;
end;
$$;

comment on function queen._kv_write(integer, jsonb, timestamptz, boolean) is
    'Carry out a call''s operations in apply order; the element of the answer for each, by its position.';

-- One KV call of the broker, atomic as a whole. The verdict is `done` beside each operation's element; else one
-- row says `disabled`, or `refused` beside the operation that lost and what a reader would see of its key.
create or replace function queen._kv(tenant integer, operations jsonb, careful boolean)
returns table (operation_index integer, verdict text, result json)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_refusal jsonb;
begin
    if not queen._switched_on('kv') then
        return query select null::integer, 'disabled', null::json;
        return;
    end if;
    if _kv.careful then
        v_refusal := queen._kv_judge(_kv.tenant, _kv.operations, v_now);
        if v_refusal is not null then
            return query select (v_refusal->>'failedIndex')::integer, 'refused',
                json_build_object('kvReason', v_refusal->'kvReason', 'version', v_refusal->'version',
                                  'value', (v_refusal->>'value')::json);
            return;
        end if;
    end if;
    return query select w.operation_index, 'done', w.result
    from queen._kv_write(_kv.tenant, _kv.operations, v_now, _kv.careful) w;
end;
$$;

comment on function queen._kv(integer, jsonb, boolean) is
    'One KV call: each operation''s element of the answer, or the required operation that lost.';

-- Free the space of dead rows. No index knows the expiries: it would make each write that renews a lifetime an
-- insert into the primary key too. So the sweep walks that key, a bounded stretch at a time, and says how far
-- it came, null at the end. At READ COMMITTED: a row that is being written is left to its writer, and a dead
-- row that goes was absent already.
create or replace function queen._kv_sweep(after_tenant integer, after_namespace text, after_key text, batch_max integer)
returns table (removed integer, last_tenant integer, last_namespace text, last_key text)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_seen integer := 0;
    v_row record;
begin
    removed := 0;
    for v_row in
        select k.tenant_id, k.namespace, k.key, k.expires_at
        from queen.kv k
        where (k.tenant_id, k.namespace, k.key) > (_kv_sweep.after_tenant, _kv_sweep.after_namespace, _kv_sweep.after_key)
        order by k.tenant_id, k.namespace, k.key
        limit _kv_sweep.batch_max
    loop
        v_seen := v_seen + 1;
        last_tenant := v_row.tenant_id;
        last_namespace := v_row.namespace;
        last_key := v_row.key;
        continue when queen._kv_live(v_row.expires_at, v_now);
        delete from queen.kv d
        where d.ctid = (
            select k.ctid
            from queen.kv k
            where k.tenant_id = v_row.tenant_id and k.namespace = v_row.namespace and k.key = v_row.key
              and not queen._kv_live(k.expires_at, v_now)
            for update skip locked
        );
        if found then
            removed := removed + 1;
        end if;
    end loop;
    if v_seen < _kv_sweep.batch_max then
        last_tenant := null;
    end if;
    return next;
end;
$$;

comment on function queen._kv_sweep(integer, text, text, integer) is
    'Remove the dead rows among the next batch_max keys; how many, and the last key seen, null at the end.';
