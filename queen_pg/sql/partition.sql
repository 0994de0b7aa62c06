-- A partition is one entity's ordered stream. Its row hands out the offsets and is born with the first
-- message pushed to it (push.sql). Names are resolved to ids before a step begins, since neither changes:
-- a step that looked up a name would read index pages into which other steps insert new partitions.
--
-- Here and in every other file, rows are joined by key as `= any(array[u.id])` or in a subquery with `offset 0`: a plain
-- equality may have been planned as a walk through the table, while that was empty (decision 13).

create or replace function queen._resolve_partitions(
    tenant integer,
    group_queue text[],
    group_partition text[]
) returns table (place integer, partition_id bigint)
language sql stable parallel safe as $$
    select g.place::integer, p.id
    from unnest(_resolve_partitions.group_queue, _resolve_partitions.group_partition)
         with ordinality g (queue, partition, place)
    cross join lateral (
        select q.id from queen.queues q where q.tenant_id = _resolve_partitions.tenant and q.name = g.queue offset 0
    ) q
    cross join lateral (
        select p.id from queen.partitions p where p.queue_id = q.id and p.name = g.partition offset 0
    ) p;
$$;

comment on function queen._resolve_partitions(integer, text[], text[]) is
    'The ids of the partitions that exist among those named; place is the position in the arguments.';

-- Create partitions ahead of the pushes that need them, empty. Appends of many calls at once only update
-- partitions: a step that did both would read the index page into which its neighbour inserts.
create or replace function queen._create_partitions(
    tenant integer,
    group_queue text[],
    group_partition text[]
) returns table (place integer, partition_id bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set random_page_cost = 0 set cpu_operator_cost = 0
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_row record;
    v_queue text;
    v_queue_id bigint;
begin
    for v_row in
        select g.queue, g.partition, g.place::integer as place
        from unnest(_create_partitions.group_queue, _create_partitions.group_partition)
             with ordinality g (queue, partition, place)
        order by g.queue, g.partition
    loop
        if v_queue is distinct from v_row.queue then
            v_queue := v_row.queue;
            v_queue_id := queen._ensure_queue(_create_partitions.tenant, v_queue);
        end if;
        insert into queen.partitions as p (queue_id, name, created_at)
        values (v_queue_id, v_row.partition, queen.now())
        on conflict (queue_id, name) do nothing
        returning p.id into partition_id;
        if found then
            place := v_row.place;
            return next;
        end if;
    end loop;
end;
$$;

comment on function queen._create_partitions(integer, text[], text[]) is
    'Create partitions, and their queues; the ids of those that were not there.';

-- The first offset of a partition whose message was appended at or after the moment, or next_offset when
-- there is none. Stamps rise along a partition and offsets have no gaps, so a binary search over the primary
-- key finds it without an index on the stamp.
create or replace function queen._offset_at(
    partition_id bigint,
    moment timestamptz,
    log_start_offset bigint,
    next_offset bigint
) returns bigint
language plpgsql stable strict parallel safe as $$
#variable_conflict use_column
declare
    v_low bigint := _offset_at.log_start_offset;
    v_high bigint := _offset_at.next_offset;
    v_middle bigint;
    v_created_at pg_catalog.timestamptz;
begin
    while v_low < v_high loop
        v_middle := (v_low + v_high) / 2;
        select m.created_at into v_created_at
        from queen.messages m
        where m.partition_id = _offset_at.partition_id and m.message_offset = v_middle;
        -- A message missing here was removed while we searched: it is older than all that remain.
        if v_created_at >= _offset_at.moment then
            v_high := v_middle;
        else
            v_low := v_middle + 1;
        end if;
    end loop;
    return v_low;
end;
$$;

comment on function queen._offset_at(bigint, timestamptz, bigint, bigint) is
    'The first offset appended at or after the moment, or next_offset when there is none.';
