-- Pop, for SQL users: lease a consumer group's next messages.
--
-- Pop in a transaction of its own and commit at once: it is the lease that keeps others away meanwhile, and a
-- claim that is not committed yet makes the pushes to its partitions wait. Pop does not wait for messages.
-- Right at READ COMMITTED and above: what was proposed is locked, then judged again, as in pop.sql; a first cursor
-- is created before it is claimed, so that a race for it cannot fail.

-- Enter the group on the queue, and keep it from being deleted until the transaction ends; the ids of both. An
-- unknown partition is looked for in vain, so nothing is entered for it (data-plane 4.3-2). No row: nothing to pop.
create or replace function queen._enter_group(
    tenant integer, queue text, consumer_group text, partition text, subscription_mode text, subscription_from timestamptz,
    conflation boolean
) returns table (queue_id bigint, group_id bigint, conflated boolean, seeding boolean)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_found record;
    v_subscribing boolean := _enter_group.partition is null or _enter_group.conflation;
begin
    loop
        select s.* into v_found
        from queen._subscription(_enter_group.tenant, _enter_group.queue, _enter_group.consumer_group) s;
        if not found or v_found.group_id is null or v_subscribing and not v_found.registered then
            if _enter_group.partition is not null and not exists (
                select from queen._resolve_partitions(_enter_group.tenant, array[_enter_group.queue], array[_enter_group.partition]))
            then
                return;
            end if;
            perform queen._hold_queue(_enter_group.tenant, _enter_group.queue);
            perform queen._register_group(
                _enter_group.tenant, _enter_group.queue, _enter_group.consumer_group, v_subscribing,
                _enter_group.subscription_mode, _enter_group.subscription_from, _enter_group.conflation);
            continue;
        end if;
        perform from queen.consumer_groups g where g.id = v_found.group_id for key share;
        exit when found;
    end loop;
    return query select v_found.queue_id, v_found.group_id, v_found.conflation, v_found.seeding;
end;
$$;

comment on function queen._enter_group(integer, text, text, text, text, timestamptz, boolean) is
    'Enter a consumer group on a queue for a pop, with its subscription when it has none; no row when there is nothing to pop from.';

-- What the group may claim now, at most message_max messages of partition_max partitions. Hints that prove wrong are
-- corrected only where nothing is found before them: correcting one locks it until the transaction ends.
create or replace function queen._propose(
    queue_id bigint, group_id bigint, partition text, subscription_mode text, subscription_from timestamptz, conflated boolean,
    seeding boolean, message_max integer, partition_max integer
) returns table (
    place integer, partition_id bigint, partition_name text, cursor_exists boolean, committed_offset bigint,
    start_offset bigint, end_offset bigint, next_offset bigint, lease_time_seconds integer
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_budget integer := _propose.message_max;
    v_seeding boolean := _propose.seeding and _propose.partition is null;
    v_wrong boolean;
    v_row record;
begin
    for v_look in 1 .. 20 loop
        v_wrong := false;
        -- Before the look: what is found there must not keep the rest from being seeded.
        if v_seeding then
            v_seeding := queen._seed_ready(_propose.group_id, 1000) > 0;
        end if;
        for v_row in
            select c.*
            from queen._candidates(_propose.queue_id, _propose.group_id, _propose.partition, _propose.subscription_mode,
                                   _propose.subscription_from, _propose.conflated, array[_propose.message_max],
                                   array[_propose.partition_max]) c
        loop
            if v_row.end_offset is null then
                v_wrong := true;
                -- Where a group without a subscription begins, its next pop is to find it beginning (data-plane 4.8-2).
                if _propose.partition is not null and _propose.subscription_mode <> 'all' and not v_row.cursor_exists
                   and exists (select from queen.consumer_groups g where g.id = _propose.group_id and g.registered_at is null)
                then
                    perform queen._place_cursor(v_row.partition_id, _propose.group_id, v_row.committed_offset);
                end if;
                continue;
            end if;
            continue when v_budget <= 0;
            place := coalesce(place, 0) + 1;
            partition_id := v_row.partition_id;
            partition_name := v_row.partition_name;
            cursor_exists := v_row.cursor_exists;
            committed_offset := v_row.committed_offset;
            start_offset := v_row.start_offset;
            next_offset := v_row.next_offset;
            lease_time_seconds := v_row.lease_time_seconds;
            if _propose.conflated then
                end_offset := v_row.end_offset;
                v_budget := v_budget - 1;
            else
                end_offset := least(v_row.end_offset, v_row.start_offset + v_budget - 1);
                v_budget := v_budget - (end_offset - start_offset + 1)::integer;
            end if;
            return next;
        end loop;
        exit when v_budget < _propose.message_max or _propose.partition is not null or not (v_wrong or v_seeding);

        if v_wrong then
            perform queen._rearm(_propose.group_id, array_agg(c.partition_id), array_agg(c.next_offset), array_agg(c.hinted_at),
                                 array_agg(c.ready_at), array_agg(c.lease_id))
            from queen._candidates(_propose.queue_id, _propose.group_id, null, _propose.subscription_mode,
                                   _propose.subscription_from, _propose.conflated, array[_propose.message_max],
                                   array[_propose.partition_max]) c
            where c.end_offset is null;
        end if;
    end loop;
end;
$$;

comment on function queen._propose(bigint, bigint, text, text, timestamptz, boolean, boolean, integer, integer) is
    'Spans of offsets that a group may claim now, within a budget; what is ready is entered and corrected on the way.';

create or replace function queen.pop(
    queue text,
    consumer_group text default null,
    partition text default null,
    batch integer default 1,
    partitions integer default 1,
    lease_seconds integer default null,
    subscription_mode text default 'new',
    subscription_from timestamptz default null,
    commit_on_delivery boolean default false,
    conflation boolean default false
) returns table (
    partition_id bigint, partition_name text, message_offset bigint, message_id uuid, transaction_id text, payload json,
    created_at timestamptz, lease_id uuid, delivery_attempt integer, trace_id uuid, producer_sub text
)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_tenant integer := queen.current_tenant();
    v_group text := coalesce(nullif(pop.consumer_group, ''), '__QUEUE_MODE__');
    v_conflation boolean := coalesce(pop.conflation, false);
    v_mode text := case when v_group = '__QUEUE_MODE__' then 'all' when pop.subscription_from is not null then 'from'
                        else coalesce(pop.subscription_mode, 'new') end;
    v_entered record;
    v_claim record;
    v_lease_id uuid;
begin
    perform queen._check_names(pop.queue, pop.partition, v_group);
    if v_mode not in ('all', 'new', 'from') then
        perform queen._refuse_argument('subscription_mode', 'a group starts with all messages or with new ones',
                                       'Say ''all'' or ''new'', or give subscription_from.');
    elsif v_conflation and (v_group = '__QUEUE_MODE__' or pop.commit_on_delivery) then
        perform queen._refuse_argument('conflation', 'conflation needs a consumer group, and a lease');
    end if;

    for v_round in 1 .. 3 loop
        select e.* into v_entered
        from queen._enter_group(v_tenant, pop.queue, v_group, pop.partition, v_mode, pop.subscription_from, v_conflation) e;
        exit when not found;
        select array_agg(p.place order by p.partition_id) as place,
               array_agg(p.partition_id order by p.partition_id) as partition_id,
               array_agg(p.partition_name order by p.partition_id) as partition_name,
               array_agg(p.cursor_exists order by p.partition_id) as cursor_exists,
               array_agg(p.committed_offset order by p.partition_id) as committed_offset,
               array_agg(p.start_offset order by p.partition_id) as start_offset,
               array_agg(p.end_offset order by p.partition_id) as end_offset,
               array_agg(p.next_offset order by p.partition_id) as next_offset,
               array_agg(coalesce(nullif(greatest(pop.lease_seconds, 0), 0), p.lease_time_seconds) order by p.partition_id) as seconds,
               array[count(*)::integer] as size
        into v_claim
        from queen._propose(v_entered.queue_id, v_entered.group_id, pop.partition, v_mode, pop.subscription_from,
                            v_entered.conflated, v_entered.seeding, greatest(pop.batch, 1), least(greatest(pop.partitions, 1), 64)) p;
        exit when v_claim.place is null;

        -- A first cursor is entered as the proposal saw it; where a rival was faster, the claim judges the rival's.
        insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)
        select u.partition_id, v_entered.group_id, u.committed_offset, queen.now()
        from unnest(v_claim.partition_id, v_claim.cursor_exists, v_claim.committed_offset)
             u (partition_id, cursor_exists, committed_offset)
        where not u.cursor_exists
        on conflict (partition_id, group_id) do nothing;

        v_lease_id := queen._uuid_v7(queen.now());
        return query
        select m.partition_id, v_claim.partition_name[c.place], m.message_offset, m.id, m.transaction_id, m.payload, m.created_at,
               case when not coalesce(pop.commit_on_delivery, false) then v_lease_id end, c.delivery_attempt, m.trace_id, m.producer_sub
        from queen._claim(
            v_claim.partition_id, array_fill(v_entered.group_id, v_claim.size), array_fill(true, v_claim.size),
            v_claim.committed_offset, v_claim.start_offset, v_claim.end_offset, v_claim.next_offset,
            array_fill(v_lease_id, v_claim.size), v_claim.seconds,
            array_fill(coalesce(pop.commit_on_delivery, false), v_claim.size), array_fill(v_entered.conflated, v_claim.size)) c
        cross join lateral (
            select m.*
            from queen.messages m
            where m.partition_id = v_claim.partition_id[c.place]
              and m.message_offset <= v_claim.end_offset[c.place]
              and m.message_offset >= case when v_entered.conflated then v_claim.end_offset[c.place] else v_claim.start_offset[c.place] end
        ) m
        order by v_claim.place[c.place], m.message_offset;
        exit when found;
    end loop;
end;
$$;

comment on function queen.pop(text, text, text, integer, integer, integer, text, timestamptz, boolean, boolean) is
    'Lease a consumer group''s next messages, at most batch of them from at most so many partitions; no rows when there is nothing to claim.';
