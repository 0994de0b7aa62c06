-- Pop: find where a consumer group may claim, claim it, read the messages.
--
-- Three calls, because only the middle one changes anything. `_candidates` looks at READ COMMITTED and
-- proposes spans of offsets; messages are immutable and offsets only grow, so a proposal stays true while the
-- cursor it was made from stays where it was. `_claim` is the SERIALIZABLE step: it locks the cursors by key,
-- checks exactly that, and writes the leases. `_read_messages` then fetches the payloads.
--
-- What a broker has just appended itself it may propose without a look; `_claim` then judges the queue's options too.

-- What a pop has to know of its queue and group. Null group_id: the name is new to this queue.
create or replace function queen._subscription(
    tenant integer,
    queue text,
    consumer_group text
) returns table (
    queue_id bigint, delaying boolean, group_id bigint, registered boolean, conflation boolean, seeding boolean
)
language sql stable parallel safe as $$
    select q.id, greatest(q.delayed_processing_seconds, q.window_buffer_seconds) > 0, g.id, g.registered_at is not null, g.conflation,
           g.seed_after is not null or g.registered_xid is not null
    from queen.queues q
    left join queen.consumer_groups g on g.queue_id = any(array[q.id]) and g.name = _subscription.consumer_group
    where q.tenant_id = _subscription.tenant and q.name = _subscription.queue;
$$;

comment on function queen._subscription(integer, text, text) is
    'A queue and a consumer group''s record on it; no row when the queue does not exist.';

-- Enter a group's name on a queue, and its subscription unless subscribing is false or it has one already: the
-- first subscription stays (data-plane 4.8-1). The queue is created when it does not exist.
create or replace function queen._register_group(
    tenant integer,
    queue text,
    consumer_group text,
    subscribing boolean,
    subscription_mode text,
    subscription_from timestamptz,
    conflation boolean
) returns bigint
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_queue_id bigint := queen._ensure_queue(_register_group.tenant, _register_group.queue);
    v_group_id bigint;
begin
    insert into queen.consumer_groups (queue_id, name) values (v_queue_id, _register_group.consumer_group)
    on conflict (queue_id, name) do nothing;

    if _register_group.subscribing then
        update queen.consumer_groups g
        set subscription_mode = _register_group.subscription_mode,
            subscription_from = _register_group.subscription_from,
            conflation = _register_group.conflation,
            registered_at = queen.now(),
            registered_xid = pg_current_xact_id(),
            seed_after = ''
        where g.queue_id = v_queue_id and g.name = _register_group.consumer_group and g.registered_at is null;
    end if;

    select g.id into v_group_id
    from queen.consumer_groups g
    where g.queue_id = v_queue_id and g.name = _register_group.consumer_group;
    return v_group_id;
end;
$$;

comment on function queen._register_group(integer, text, text, boolean, text, timestamptz, boolean) is
    'Enter a consumer group on a queue, with its subscription when it has none; the group''s id.';

-- Seeding: a new group has no hints for what was pushed before it existed. Each call walks on over the queue's
-- partitions, by name, and enters those that hold messages; pops call it while it has work. A push that was
-- under way as the group was registered may have missed the group, so there is a second walk once every
-- transaction that was writing during the first has ended, and those that were about to have had a second to begin.
-- Whatever even that misses, the sweep finds (ready.sql).
create or replace function queen._seed_ready(group_id bigint, batch_max integer) returns integer
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
as $$
#variable_conflict use_column
declare
    v_group queen.consumer_groups;
    v_last_name text;
    v_seen integer;
begin
    select g.* into v_group from queen.consumer_groups g where g.id = _seed_ready.group_id for no key update skip locked;
    if not found then
        return 0;
    end if;
    if v_group.seed_after is null then
        if v_group.registered_xid is null
           or v_group.registered_xid > pg_snapshot_xmin(pg_current_snapshot())
           or v_group.registered_at > queen.now() - interval '1 second'
        then
            return 0;
        end if;
        v_group.seed_after := '';
        v_group.registered_xid := null;
    elsif v_group.registered_xid is not null then
        -- The group is visible already: whoever begins to write after this transaction sees it.
        v_group.registered_xid := pg_current_xact_id();
    end if;

    select w.last_name, w.seen into v_last_name, v_seen
    from queen._walk_ready(v_group.id, v_group.queue_id, v_group.seed_after, _seed_ready.batch_max) w;

    update queen.consumer_groups g
    set seed_after = v_last_name, registered_xid = v_group.registered_xid
    where g.id = v_group.id;
    return v_seen;
end;
$$;

comment on function queen._seed_ready(bigint, integer) is
    'Enter the next partitions with messages as ready for a new consumer group; how many were looked at.';

-- Proposals for a group: partitions with something to claim, longest ready first, each with the span of offsets
-- that may be delivered now; and, with a null end_offset, partitions whose hint was wrong and the moment it
-- should say. Given a partition, only that one is looked at, whatever the hints say. mode and from are
-- the request's: they count for a group that has no subscription (data-plane 4.8-2). Each call that asks, a demand, is
-- one element of batch and width: at most so many messages from so many partitions. A partition goes to one
-- demand alone, so what a demand cannot use of its last one is nobody's; there are proposals for all demands, if enough is
-- ready. With recent_seconds, only those that became ready so recently are proposed: beside a reader that keeps an old
-- snapshot, what lies further back is mostly dead, cannot be removed, and would be walked over again.
create or replace function queen._candidates(
    queue_id bigint,
    group_id bigint,
    partition text,
    subscription_mode text,
    subscription_from timestamptz,
    conflated boolean,
    batch integer[],
    width integer[],
    recent_seconds double precision default null
) returns table (
    partition_id bigint, partition_name text, cursor_exists boolean, committed_offset bigint,
    start_offset bigint, end_offset bigint, next_offset bigint, hinted_at timestamptz, ready_at timestamptz,
    lease_id uuid, lease_time_seconds integer
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_queue queen.queues;
    v_group queen.consumer_groups;
    v_row record;
    v_start bigint;
    v_tail bigint;
    v_batch_max integer := (select max(b) from unnest(_candidates.batch) b);
    v_demand integer := 1;
    v_messages bigint := 0;
    v_partitions integer := 0;
begin
    select q.* into v_queue from queen.queues q where q.id = _candidates.queue_id;
    select g.* into v_group from queen.consumer_groups g where g.id = _candidates.group_id;
    if v_queue.id is null or v_group.id is null then
        perform queen._fail('QU900', 'the queue or the consumer group has been deleted');
    end if;
    lease_time_seconds := greatest(v_queue.lease_time_seconds, 1);

    for v_row in
        select p.id, p.name, p.next_offset, p.log_start_offset, p.last_append_at, r.ready_at, r.held, c.group_id as cursor_group_id,
               c.committed_offset, c.lease_id, c.lease_expires_at
        from queen._ready_partitions(_candidates.queue_id, _candidates.group_id, _candidates.partition,
                                     coalesce(v_now - make_interval(secs => _candidates.recent_seconds), '-infinity'), v_now,
                                     (select sum(least(u.batch, u.width)) + 16
                                      from unnest(_candidates.batch, _candidates.width) u (batch, width))::integer) r
        -- One lookup by key for each, whatever the planner believes about sizes.
        cross join lateral (select p.* from queen.partitions p where p.id = r.partition_id offset 0) p
        left join lateral (
            select c.* from queen.cursors c where c.partition_id = r.partition_id and c.group_id = _candidates.group_id offset 0
        ) c on true
        order by r.place
    loop
        partition_id := v_row.id;
        partition_name := v_row.name;
        next_offset := v_row.next_offset;
        hinted_at := v_row.ready_at;
        cursor_exists := v_row.cursor_group_id is not null;
        committed_offset := v_row.committed_offset;
        end_offset := null;
        lease_id := null;
        if not cursor_exists then
            committed_offset := queen._first_committed(
                v_row.id, v_row.log_start_offset, v_row.next_offset, v_group, _candidates.subscription_mode,
                _candidates.subscription_from, v_now);
        end if;
        v_start := greatest(committed_offset + 1, v_row.log_start_offset);
        start_offset := v_start;
        v_tail := v_row.next_offset;

        if v_row.held then
            ready_at := v_now;
            return next;
            continue;
        elsif v_row.lease_id is not null and v_row.lease_expires_at > v_now then
            ready_at := v_row.lease_expires_at;
            lease_id := v_row.lease_id;
            return next;
            continue;
        elsif v_start >= v_tail then
            ready_at := 'infinity';
            return next;
            continue;
        elsif v_queue.window_buffer_seconds > 0
              and v_row.last_append_at > v_now - make_interval(secs => v_queue.window_buffer_seconds) then
            ready_at := v_row.last_append_at + make_interval(secs => v_queue.window_buffer_seconds);
            return next;
            continue;
        elsif v_queue.delayed_processing_seconds > 0 then
            -- Visible: createdAt <= now - delay (data-plane 10.2). Stamps rise, so what is not visible is a tail.
            v_tail := queen._offset_at(
                v_row.id, v_now - make_interval(secs => v_queue.delayed_processing_seconds) + interval '1 microsecond',
                v_start, v_row.next_offset);
            if v_start >= v_tail then
                select m.created_at + make_interval(secs => v_queue.delayed_processing_seconds) into ready_at
                from queen.messages m
                where m.partition_id = v_row.id and m.message_offset = v_start;
                return next;
                continue;
            end if;
        end if;

        if _candidates.conflated then
            end_offset := v_tail - 1;
            v_messages := v_messages + 1;
        else
            end_offset := least(v_tail - 1, v_start + v_batch_max - 1);
            v_messages := v_messages + end_offset - v_start + 1;
        end if;
        v_partitions := v_partitions + 1;
        ready_at := v_now;
        return next;
        if v_messages >= _candidates.batch[v_demand] or v_partitions >= _candidates.width[v_demand] then
            v_demand := v_demand + 1;
            v_messages := 0;
            v_partitions := 0;
            exit when v_demand > cardinality(_candidates.batch);
        end if;
    end loop;
end;
$$;

comment on function queen._candidates(bigint, bigint, text, text, timestamptz, boolean, integer[], integer[], double precision) is
    'Spans that a group may claim now, longest ready first; with a null end_offset, hints to correct.';

-- Whether somebody else is changing a row and has not committed, by the row's xmin and xmax. An upsert leaves its own
-- number in both, and whose such a row we see has committed, or is us. What is beyond the snapshot's end has begun
-- since it was taken.
create or replace function queen._held(row_xmin xid, row_xmax xid) returns boolean
language plpgsql stable parallel safe as $$
declare
    v_next bigint;
    v_distance bigint;
begin
    if row_xmax = '0'::xid or row_xmax = row_xmin then
        return false;
    end if;
    v_next := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    -- xmax has the lower half of the transaction's number only.
    v_distance := ((row_xmax::text::bigint - v_next + 2147483648) & 4294967295) - 2147483648;
    return v_distance >= 0 or coalesce(pg_xact_status((v_next + v_distance)::text::xid8) = 'in progress', false);
end;
$$;

comment on function queen._held(xid, xid) is 'Whether another transaction that goes on has changed the row of this xmin and xmax.';

-- A hint that somebody holds is passed over: a claim would wait for it, and with it whatever else it claims. An application
-- that has pushed to a partition holds it until its own transaction ends. A partition named is returned even so.
create or replace function queen._ready_partitions(
    queue_id bigint, group_id bigint, partition text, since timestamptz, moment timestamptz, partition_max integer
) returns table (partition_id bigint, ready_at timestamptz, held boolean, place bigint)
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_oldest integer := age(pg_snapshot_xmin(pg_current_snapshot())::xid);
begin
    if _ready_partitions.partition is not null then
        return query
        select p.id, null::timestamptz, r.xmax is not null and queen._held(r.xmin, r.xmax), 1::bigint
        from queen.partitions p
        left join queen.ready r on r.group_id = _ready_partitions.group_id and r.partition_id = any(array[p.id])
        where p.queue_id = _ready_partitions.queue_id and p.name = _ready_partitions.partition;
    else
        return query
        select r.partition_id, r.ready_at, false, row_number() over (order by r.ready_at)
        from queen.ready r
        where r.group_id = _ready_partitions.group_id
          and r.ready_at >= _ready_partitions.since and r.ready_at <= _ready_partitions.moment and r.ready_at < 'infinity'
          -- Most are told without the call: nobody else has touched them, or nobody who goes on.
          and (r.xmax = r.xmin or age(r.xmax) > v_oldest or not queen._held(r.xmin, r.xmax))
        order by r.ready_at
        limit _ready_partitions.partition_max;
    end if;
end;
$$;

comment on function queen._ready_partitions(bigint, bigint, text, timestamptz, timestamptz, integer) is
    'The partition named, or those whose hints say since when the group may claim them, longest ready first.';

-- A group's place in a partition, before it has claimed anything there. The group's key is held as for a claim.
create or replace function queen._place_cursor(partition_id bigint, group_id bigint, committed_offset bigint) returns void
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
    perform from queen.consumer_groups g where g.id = _place_cursor.group_id for key share;
    if not found then
        perform queen._fail('QU900', 'the consumer group has been deleted');
    end if;
    insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)
    values (_place_cursor.partition_id, _place_cursor.group_id, _place_cursor.committed_offset, queen.now())
    on conflict (partition_id, group_id) do nothing;
end;
$$;

comment on function queen._place_cursor(bigint, bigint, bigint) is
    'Enter where a consumer group begins in a partition, unless it has a cursor there.';

-- Where a group starts on a partition on which it has no cursor yet (data-plane 4.8-2 to 4.8-5).
create or replace function queen._first_committed(
    partition_id bigint,
    log_start_offset bigint,
    next_offset bigint,
    consumer_group queen.consumer_groups,
    subscription_mode text,
    subscription_from timestamptz,
    moment timestamptz
) returns bigint
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_registered boolean := (_first_committed.consumer_group).registered_at is not null;
    v_mode text := _first_committed.subscription_mode;
    v_from timestamptz := _first_committed.subscription_from;
begin
    if v_registered then
        v_mode := (_first_committed.consumer_group).subscription_mode;
        v_from := case v_mode
            when 'new' then (_first_committed.consumer_group).registered_at
            else (_first_committed.consumer_group).subscription_from
        end;
    end if;
    if v_mode = 'all' then
        return _first_committed.log_start_offset - 1;
    elsif v_mode = 'new' and not v_registered then
        return _first_committed.next_offset - 1;
    end if;
    return queen._offset_at(_first_committed.partition_id, v_from, _first_committed.log_start_offset,
                            _first_committed.next_offset) - 1;
end;
$$;

comment on function queen._first_committed(bigint, bigint, bigint, queen.consumer_groups, text, timestamptz, timestamptz) is
    'The committed offset with which a group''s first cursor on a partition begins.';

-- Claim proposed spans, for one pop call or several: element by element a partition, a group, the cursor as the
-- proposal saw it, the span, and the call's lease. Elements are in the order of (partition_id, group_id).
-- What has changed since its proposal, or is locked by a step under way, is left out of the answer.
--
-- With a queue_id, nobody has looked: the span ends with messages just appended, and is granted only where the queue
-- delays none. What precedes it must be committed, or the cursor is not where the proposal says. Such an element may
-- leave its lease_seconds to the queue.
create or replace function queen._claim(
    partition_id bigint[],
    group_id bigint[],
    cursor_exists boolean[],
    committed_offset bigint[],
    start_offset bigint[],
    end_offset bigint[],
    next_offset bigint[],
    lease_id uuid[],
    lease_seconds integer[],
    commit_on_delivery boolean[],
    conflated boolean[],
    queue_id bigint[] default null
) returns table (place integer, delivery_attempt integer)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_places integer[] := '{}';
    v_attempts integer[] := '{}';
    v_seconds integer[] := _claim.lease_seconds;
    v_row record;
begin
    for v_row in
        select u.place::integer as place, u.committed_offset as expected_offset, u.start_offset, c.committed_offset,
               c.lease_id, c.lease_expires_at, c.attempt_offset, c.attempt_count, q.lease_time_seconds
        from unnest(_claim.partition_id, _claim.group_id, _claim.cursor_exists, _claim.committed_offset, _claim.start_offset,
                    _claim.queue_id)
             with ordinality u (partition_id, group_id, cursor_exists, committed_offset, start_offset, queue_id, place)
        join queen.cursors c on c.partition_id = any(array[u.partition_id]) and c.group_id = u.group_id
        left join queen.queues q on q.id = any(array[u.queue_id])
        where u.cursor_exists
          and (u.queue_id is null or greatest(q.delayed_processing_seconds, q.window_buffer_seconds) <= 0)
        order by u.place
        for update of c skip locked
    loop
        v_now := coalesce(v_now, queen.now());
        if v_row.committed_offset = v_row.expected_offset
           and (v_row.lease_id is null or v_row.lease_expires_at <= v_now)
        then
            v_places := v_places || v_row.place;
            v_attempts := v_attempts || case when v_row.attempt_offset = v_row.start_offset then v_row.attempt_count + 1 else 1 end;
            if v_seconds[v_row.place] is null then
                v_seconds[v_row.place] := greatest(v_row.lease_time_seconds, 1);
            end if;
        end if;
    end loop;

    -- A first cursor: its group's key is held, so that the group's deletion and this insertion exclude each other.
    -- Not its partition's: the index page of a new partition is the one into which others insert theirs.
    for v_row in
        select u.place::integer as place
        from unnest(_claim.group_id, _claim.cursor_exists) with ordinality u (group_id, cursor_exists, place)
        join queen.consumer_groups g on g.id = any(array[u.group_id])
        where not u.cursor_exists
        order by u.group_id, u.place
        for key share of g
    loop
        v_places := v_places || v_row.place;
        v_attempts := v_attempts || 1;
    end loop;

    v_now := queen.now();
    update queen.cursors c
    set committed_offset = case when _claim.commit_on_delivery[u.place] then _claim.end_offset[u.place] else c.committed_offset end,
        lease_id = case when _claim.commit_on_delivery[u.place] then null else _claim.lease_id[u.place] end,
        batch_start_offset = case when _claim.commit_on_delivery[u.place] then null else _claim.start_offset[u.place] end,
        batch_end_offset = case when _claim.commit_on_delivery[u.place] then null else _claim.end_offset[u.place] end,
        lease_expires_at = case when _claim.commit_on_delivery[u.place] then null
                                else v_now + make_interval(secs => v_seconds[u.place]) end,
        lease_conflated = _claim.conflated[u.place],
        attempt_offset = case when _claim.commit_on_delivery[u.place] then null else _claim.start_offset[u.place] end,
        attempt_count = case when _claim.commit_on_delivery[u.place] then 0 else u.attempt end,
        updated_at = v_now
    from unnest(v_places, v_attempts) u (place, attempt)
    where c.partition_id = any(array[_claim.partition_id[u.place]]) and c.group_id = _claim.group_id[u.place]
      and _claim.cursor_exists[u.place];

    insert into queen.cursors (partition_id, group_id, committed_offset, lease_id, batch_start_offset, batch_end_offset,
                               lease_expires_at, lease_conflated, attempt_offset, attempt_count, updated_at)
    select _claim.partition_id[u.place], _claim.group_id[u.place],
           case when d.commits then _claim.end_offset[u.place] else _claim.committed_offset[u.place] end,
           case when not d.commits then _claim.lease_id[u.place] end,
           case when not d.commits then _claim.start_offset[u.place] end,
           case when not d.commits then _claim.end_offset[u.place] end,
           case when not d.commits then v_now + make_interval(secs => v_seconds[u.place]) end,
           _claim.conflated[u.place],
           case when not d.commits then _claim.start_offset[u.place] end,
           case when d.commits then 0 else 1 end,
           v_now
    from unnest(v_places) u (place)
    cross join lateral (select _claim.commit_on_delivery[u.place] as commits) d
    where not _claim.cursor_exists[u.place];

    insert into queen.ready (group_id, partition_id, ready_at, next_offset, lease_id)
    select _claim.group_id[u.place], _claim.partition_id[u.place],
           case when not d.commits then v_now + make_interval(secs => v_seconds[u.place])
                when _claim.end_offset[u.place] + 1 >= _claim.next_offset[u.place] then 'infinity'
                else v_now end,
           _claim.next_offset[u.place],
           case when not d.commits then _claim.lease_id[u.place] end
    from unnest(v_places) u (place)
    cross join lateral (select _claim.commit_on_delivery[u.place] as commits) d
    order by 1, 2
    on conflict (group_id, partition_id) do update
    set next_offset = greatest(ready.next_offset, excluded.next_offset),
        lease_id = excluded.lease_id,
        ready_at = case when excluded.lease_id is null and ready.next_offset > excluded.next_offset then v_now
                        else excluded.ready_at end;

    return query
    select u.place, case when _claim.commit_on_delivery[u.place] then 1 else u.attempt end
    from unnest(v_places, v_attempts) u (place, attempt);
end;
$$;

comment on function queen._claim(
    bigint[], bigint[], boolean[], bigint[], bigint[], bigint[], bigint[], uuid[], integer[], boolean[], boolean[], bigint[]
) is
    'Lease proposed spans (or commit them on delivery); the places granted, with their delivery attempts.';

create or replace function queen._read_messages(partition_id bigint[], start_offset bigint[], end_offset bigint[])
returns table (
    place integer, message_offset bigint, id uuid, transaction_id text, trace_id uuid, producer_sub text,
    created_at timestamptz, payload text
)
language sql stable parallel safe as $$
    select u.place::integer, m.message_offset, m.id, m.transaction_id, m.trace_id, m.producer_sub, m.created_at, m.payload::text
    from unnest(_read_messages.partition_id, _read_messages.start_offset, _read_messages.end_offset)
         with ordinality u (partition_id, start_offset, end_offset, place)
    cross join lateral (
        select m.*
        from queen.messages m
        where m.partition_id = u.partition_id and m.message_offset between u.start_offset and u.end_offset
        order by m.message_offset
    ) m
    order by u.place, m.message_offset;
$$;

comment on function queen._read_messages(bigint[], bigint[], bigint[]) is
    'The messages of spans of offsets, span by span, in order.';

create or replace function queen._labelled_queues(tenant integer, namespace text, task text) returns table (queue text)
language sql stable parallel safe as $$
    select q.name
    from queen.queues q
    where q.tenant_id = _labelled_queues.tenant
      and (_labelled_queues.namespace = '' or q.namespace = _labelled_queues.namespace)
      and (_labelled_queues.task = '' or q.task = _labelled_queues.task)
    order by q.name;
$$;

comment on function queen._labelled_queues(integer, text, text) is
    'The queues whose labels equal the non-empty selectors, in name order (data-plane 4.3-3).';
