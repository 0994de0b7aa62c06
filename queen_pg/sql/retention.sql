-- Retention: take old messages from the front of a partition, whole appends at a time (data-plane 11).
--
-- Removal is in two parts. Raising log_start_offset takes the messages away from everybody at once. Their rows
-- stay for as long as their transaction ids must be known, for a push that repeats one and an ack that resolves
-- through one, and are deleted after that, in bounded chunks. What is due is found at READ COMMITTED; the steps
-- that act on it reach partitions by id and judge nothing that could have changed for the worse: stamps and
-- offsets only grow, and a cursor that a seek moves back meanwhile finds the log to start later.

-- The next queue, from an id on, that has a rule by which messages are removed.
create or replace function queen._next_retaining(queue_id bigint) returns table (queue_id bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select q.id
    from queen.queues q
    where q.id >= _next_retaining.queue_id
      and (q.retention_enabled and (q.retention_seconds > 0 or q.completed_retention_seconds > 0)
           or q.max_wait_time_seconds > 0)
    order by q.id
    limit 1;
$$;

comment on function queen._next_retaining(bigint) is 'The first queue with a retention rule whose id is not below the one given.';

-- The next partitions in the order of queue and name, of one queue or, with a null last_queue_id, of all that follow,
-- and what is due in each: keep_from is the offset at which its log should start, if not where it does, forget_below the
-- one below which rows may go, expired whether nothing holds the partition.
create or replace function queen._retention_due(
    after_queue_id bigint, after_name text, last_queue_id bigint, batch_max integer, cleanup_days integer
) returns table (
    queue_id bigint, name text, partition_id bigint, keep_from bigint, forget_below bigint, expired boolean
)
language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_row record;
    v_oldest bigint;
begin
    for v_row in
        select p.queue_id, p.name, p.id, p.next_offset, p.log_start_offset, p.last_append_at, p.created_at,
               case when q.retention_enabled and q.retention_seconds > 0 then q.retention_seconds end as age_seconds,
               case when q.retention_enabled and q.completed_retention_seconds > 0 then q.completed_retention_seconds end
                   as completed_seconds,
               case when q.max_wait_time_seconds > 0 then q.max_wait_time_seconds end as wait_seconds,
               greatest(q.dedup_window_seconds, q.completed_retention_seconds, 900) as known_seconds
        from queen.partitions p
        join queen.queues q on q.id = p.queue_id
        where (p.queue_id, p.name) > (_retention_due.after_queue_id, _retention_due.after_name)
          and p.queue_id <= coalesce(_retention_due.last_queue_id, 9223372036854775807)
        order by p.queue_id, p.name
        limit _retention_due.batch_max
    loop
        queue_id := v_row.queue_id;
        name := v_row.name;
        partition_id := v_row.id;
        keep_from := v_row.log_start_offset;
        if v_row.next_offset > v_row.log_start_offset
           and coalesce(v_row.age_seconds, v_row.completed_seconds, v_row.wait_seconds) is not null
        then
            -- A rule that the queue does not have gives no moment, and takes nothing.
            keep_from := greatest(
                keep_from,
                queen._offset_at(
                    v_row.id,
                    coalesce(v_now - make_interval(secs => least(v_row.age_seconds, v_row.wait_seconds)), '-infinity'),
                    v_row.log_start_offset, v_row.next_offset),
                queen._completed_below(
                    v_row.id, coalesce(v_now - make_interval(secs => v_row.completed_seconds), '-infinity'),
                    v_row.log_start_offset, v_row.next_offset));
        end if;

        select m.message_offset into v_oldest
        from queen.messages m
        where m.partition_id = v_row.id
        order by m.message_offset
        limit 1;
        forget_below := case when v_oldest < keep_from then least(
            keep_from,
            queen._offset_at(v_row.id, v_now - make_interval(secs => v_row.known_seconds), v_oldest, v_row.next_offset)) end;
        if forget_below <= v_oldest then
            forget_below := null;
        end if;

        expired := v_oldest is null
            and coalesce(v_row.last_append_at, v_row.created_at) < v_now - make_interval(days => _retention_due.cleanup_days)
            and not queen._partition_held(v_row.id, v_now);
        if keep_from = v_row.log_start_offset then
            keep_from := null;
        end if;
        return next;
    end loop;
end;
$$;

comment on function queen._retention_due(bigint, text, bigint, integer, integer) is
    'The next partitions in the order of queue and name, and what retention has to do in each.';

-- The offset up to which everything is old enough and lies at or below every cursor, as whole appends. Without a
-- cursor nothing does.
create or replace function queen._completed_below(
    partition_id bigint, moment timestamptz, log_start_offset bigint, next_offset bigint
) returns bigint
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_first_unread bigint;
    v_created_at timestamptz;
begin
    select min(c.committed_offset) + 1 into v_first_unread
    from queen.cursors c
    where c.partition_id = _completed_below.partition_id;
    if v_first_unread is null then
        return _completed_below.log_start_offset;
    end if;
    select m.created_at into v_created_at
    from queen.messages m
    where m.partition_id = _completed_below.partition_id and m.message_offset = v_first_unread;
    return queen._offset_at(_completed_below.partition_id, least(_completed_below.moment, v_created_at),
                            _completed_below.log_start_offset, _completed_below.next_offset);
end;
$$;

comment on function queen._completed_below(bigint, timestamptz, bigint, bigint) is
    'The offset below which a partition''s messages are older than the moment and read by every group.';

create or replace function queen._partition_held(partition_id bigint, moment timestamptz) returns boolean
language sql stable as $$
    select exists (select from queen.dead_letters d where d.partition_id = _partition_held.partition_id)
        or exists (select from queen.cursors c
                   where c.partition_id = _partition_held.partition_id and c.lease_expires_at > _partition_held.moment);
$$;

comment on function queen._partition_held(bigint, timestamptz) is
    'Whether a dead letter or a live lease keeps a partition that holds no message.';

create or replace function queen._raise_log_start(partition_id bigint[], keep_from bigint[]) returns integer
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_raised integer;
begin
    perform from queen.partitions p where p.id = any(_raise_log_start.partition_id) order by p.id for no key update;
    update queen.partitions p
    set log_start_offset = u.keep_from
    from unnest(_raise_log_start.partition_id, _raise_log_start.keep_from) u (partition_id, keep_from)
    where p.id = any(array[u.partition_id]) and p.log_start_offset < u.keep_from and u.keep_from <= p.next_offset;
    get diagnostics v_raised = row_count;
    return v_raised;
end;
$$;

comment on function queen._raise_log_start(bigint[], bigint[]) is
    'Take the messages below the given offsets away; offsets are never used again.';

create or replace function queen._forget_messages(partition_id bigint[], forget_below bigint[], batch_max integer) returns integer
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_deleted integer;
begin
    with gone as materialized (
        select m.partition_id, m.message_offset
        from unnest(_forget_messages.partition_id, _forget_messages.forget_below) u (partition_id, forget_below)
        join queen.partitions p on p.id = any(array[u.partition_id])
        cross join lateral (
            select m.partition_id, m.message_offset
            from queen.messages m
            where m.partition_id = u.partition_id and m.message_offset < least(u.forget_below, p.log_start_offset)
            order by m.message_offset
            limit _forget_messages.batch_max
        ) m
        limit _forget_messages.batch_max
    )
    delete from queen.messages m
    using gone g
    where m.partition_id = any(array[g.partition_id]) and m.message_offset = g.message_offset;
    get diagnostics v_deleted = row_count;
    return v_deleted;
end;
$$;

comment on function queen._forget_messages(bigint[], bigint[], integer) is
    'Delete rows that retention took away and whose ids need not be known any more; how many.';

create or replace function queen._delete_partitions(partition_id bigint[], cleanup_days integer) returns integer
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz;
    v_ids bigint[];
begin
    perform from queen.cursors c where c.partition_id = any(_delete_partitions.partition_id)
    order by c.partition_id, c.group_id for update;
    perform from queen.partitions p where p.id = any(_delete_partitions.partition_id) order by p.id for update;
    v_now := queen.now();
    select array_agg(p.id order by p.id) into v_ids
    from queen.partitions p
    where p.id = any(_delete_partitions.partition_id)
      and coalesce(p.last_append_at, p.created_at) < v_now - make_interval(days => _delete_partitions.cleanup_days)
      and not exists (select from queen.messages m where m.partition_id = p.id)
      and not queen._partition_held(p.id, v_now);

    delete from queen.ready r
    using queen.partitions p
    join queen.consumer_groups g on g.queue_id = any(array[p.queue_id])
    where p.id = any(v_ids) and r.group_id = any(array[g.id]) and r.partition_id = p.id;
    delete from queen.cursors c where c.partition_id = any(v_ids);
    delete from queen.partitions p where p.id = any(v_ids);
    return coalesce(cardinality(v_ids), 0);
end;
$$;

comment on function queen._delete_partitions(bigint[], integer) is
    'Delete those of the partitions that hold nothing and have not been written to for so many days; how many.';
