-- Seek: set where a consumer group reads on, in every partition of a queue or in one. Leases that the group had there are
-- revoked, so their holders' acks are refused, and the messages can be handed out again at once (admin R5).
--
-- Written for READ COMMITTED: the cursors are locked, in order, before anything is read. What is pushed meanwhile
-- lies behind the end that was found, and is read.

-- Returns the partitions moved. Of target ('beginning' or 'end'), moment and next_offset exactly one is not null. The
-- group's name is entered on the queue when it is new, without a subscription; an unknown queue or partition raises QU100.
create or replace function queen._seek(
    tenant integer,
    queue text,
    consumer_group text,
    partition text,
    target text,
    moment timestamptz,
    next_offset bigint,
    out partition_count integer,
    out group_id bigint
)
language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_queue_id bigint;
begin
    loop
        select q.id into v_queue_id
        from queen.queues q
        where q.tenant_id = _seek.tenant and q.name = _seek.queue
        for key share;
        if not found then
            perform queen._fail('QU100', format('there is no queue %s', _seek.queue), '{"argument": "queue"}');
        end if;
        group_id := queen._register_group(_seek.tenant, _seek.queue, _seek.consumer_group, false, null, null, false);
        perform from queen.consumer_groups g where g.id = group_id for key share;
        exit when found;
    end loop;

    perform from queen.cursors c
    join queen.partitions p on p.id = c.partition_id
    where p.queue_id = v_queue_id and (_seek.partition is null or p.name = _seek.partition) and c.group_id = _seek.group_id
    order by c.partition_id
    for update of c;
    v_now := queen.now();

    with sought as materialized (
        select p.id, p.next_offset, greatest(p.log_start_offset - 1, case
            when _seek.target = 'beginning' then p.log_start_offset - 1
            when _seek.target = 'end' then p.next_offset - 1
            when _seek.moment is not null then queen._offset_at(p.id, _seek.moment, p.log_start_offset, p.next_offset) - 1
            else least(_seek.next_offset, p.next_offset) - 1 end) as committed_offset
        from queen.partitions p
        where p.queue_id = v_queue_id and (_seek.partition is null or p.name = _seek.partition)
    ), moved as (
        insert into queen.cursors (partition_id, group_id, committed_offset, updated_at)
        select s.id, _seek.group_id, s.committed_offset, v_now from sought s order by s.id
        on conflict (partition_id, group_id) do update
        set committed_offset = excluded.committed_offset, lease_id = null, batch_start_offset = null, batch_end_offset = null,
            lease_expires_at = null, lease_conflated = false, retry_count = 0, attempt_offset = null, attempt_count = 0,
            settled_lease_id = null, settled_from_offset = null, settled_to_offset = null, updated_at = v_now
        returning partition_id
    ), hinted as (
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select _seek.group_id, s.id, case when s.next_offset > s.committed_offset + 1 then v_now else 'infinity' end, s.next_offset
        from sought s
        order by s.id
        on conflict (group_id, partition_id) do update
        set next_offset = greatest(ready.next_offset, excluded.next_offset), lease_id = null,
            -- A push that came meanwhile says so by a higher offset.
            ready_at = case when ready.next_offset > excluded.next_offset then v_now else excluded.ready_at end
    )
    select count(*) into partition_count from moved;
    if partition_count = 0 and _seek.partition is not null then
        perform queen._fail('QU100', format('the queue %s has no partition %s', _seek.queue, _seek.partition), '{"argument": "partition"}');
    end if;
end;
$$;

comment on function queen._seek(integer, text, text, text, text, timestamptz, bigint) is
    'Set where a group reads on, in all partitions of a queue or in one; how many, and the group''s id.';

create or replace function queen.seek(
    queue text,
    consumer_group text,
    target text default null,
    moment timestamptz default null,
    next_offset bigint default null,
    partition text default null,
    notify boolean default null
) returns integer
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_group text := coalesce(nullif(seek.consumer_group, ''), '__QUEUE_MODE__');
    v_moved record;
begin
    perform queen._check_names(seek.queue, seek.partition, v_group);
    if num_nonnulls(seek.target, seek.moment, seek.next_offset) <> 1 then
        perform queen._refuse_argument('target', 'say where to read on',
            'Give one of target (''beginning'' or ''end''), moment, and next_offset with a partition. What lies before it is skipped.');
    elsif seek.target not in ('beginning', 'end') then
        perform queen._refuse_argument('target', 'the target is ''beginning'' or ''end''');
    elsif seek.next_offset < 0 then
        perform queen._refuse_argument('next_offset', 'an offset is not negative', 'The oldest message that is kept is the target ''beginning''.');
    elsif seek.next_offset is not null and seek.partition is null then
        perform queen._refuse_argument('partition', 'an offset is one of a partition', 'Name the partition.');
    end if;
    v_moved := queen._seek(v_tenant, seek.queue, v_group, seek.partition, seek.target, seek.moment, seek.next_offset);
    perform queen._tell_freed(array[v_moved.group_id], seek.notify);
    return v_moved.partition_count;
end;
$$;

comment on function queen.seek(text, text, text, timestamptz, bigint, text, boolean) is
    'Have a consumer group read on from the beginning, the end, a moment or an offset; in how many partitions.';
