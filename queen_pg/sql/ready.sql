-- The hints of `ready`: what writes them besides push, claim and ack. They are corrected at READ COMMITTED, by
-- statements that judge the row they write, and no step reads them.

-- Correct hints that a pop found wrong at the moment given. next_offset and lease_id are the partition's and the
-- cursor's as the pop saw them: where a push or a claim has come since, the hint is right again already.
create or replace function queen._rearm(
    group_id bigint, partition_id bigint[], next_offset bigint[], ready_at timestamptz[], lease_id uuid[], moment timestamptz
) returns void
language sql volatile as $$
    update queen.ready r
    set ready_at = u.ready_at, next_offset = u.next_offset, lease_id = u.lease_id
    from unnest(_rearm.partition_id, _rearm.next_offset, _rearm.ready_at, _rearm.lease_id)
         u (partition_id, next_offset, ready_at, lease_id)
    where r.group_id = _rearm.group_id and r.partition_id = u.partition_id
      and r.next_offset <= u.next_offset and r.ready_at <= _rearm.moment;
$$;

comment on function queen._rearm(bigint, bigint[], bigint[], timestamptz[], uuid[], timestamptz) is
    'Set the moments from which a group may claim partitions, unless a push or a claim came first.';

-- Walk on over a queue's partitions, by name, and enter for a group those whose messages it has no hint of.
create or replace function queen._walk_ready(group_id bigint, queue_id bigint, after_name text, batch_max integer)
returns table (last_name text, seen integer)
language sql volatile as $$
    with walked as materialized (
        select p.id, p.name, p.next_offset
        from queen.partitions p
        where p.queue_id = _walk_ready.queue_id and p.name > _walk_ready.after_name
        order by p.name
        limit _walk_ready.batch_max
    ), entered as (
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select _walk_ready.group_id, w.id, queen.now(), w.next_offset
        from walked w
        left join queen.ready r on r.group_id = _walk_ready.group_id and r.partition_id = w.id
        where w.next_offset > coalesce(r.next_offset, 0)
        order by w.id
        on conflict (group_id, partition_id) do update
        set next_offset = greatest(ready.next_offset, excluded.next_offset),
            ready_at = case when ready.lease_id is null and ready.next_offset < excluded.next_offset
                            then least(ready.ready_at, excluded.ready_at) else ready.ready_at end
    )
    -- A short walk has reached the end.
    select case when count(*) = _walk_ready.batch_max then max(w.name) end, count(*)::integer from walked w;
$$;

comment on function queen._walk_ready(bigint, bigint, text, integer) is
    'Enter missing hints for the next partitions of a queue; the last name, null at the end, and how many were seen.';

-- When the groups that wait can next be served: asked by the poll, for all waiting groups at once.
create or replace function queen._next_ready(group_id bigint[]) returns table (group_id bigint, ready_at timestamptz, moment timestamptz)
language sql volatile
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select u.group_id, r.ready_at, queen.now()
    from unnest(_next_ready.group_id) u (group_id)
    cross join lateral (
        select r.ready_at
        from queen.ready r
        where r.group_id = u.group_id and r.ready_at < 'infinity'
        order by r.ready_at
        limit 1
    ) r;
$$;

comment on function queen._next_ready(bigint[]) is 'For each group the earliest moment at which a partition of it may be claimed.';

create or replace function queen._group_from(group_id bigint) returns table (group_id bigint, queue_id bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select g.id, g.queue_id from queen.consumer_groups g where g.id >= _group_from.group_id order by g.id limit 1;
$$;

comment on function queen._group_from(bigint) is 'The first consumer group whose id is not below the one given.';
