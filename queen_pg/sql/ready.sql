-- The hints of `ready`: what writes them besides push, claim and ack. They are corrected at READ COMMITTED, by
-- statements that judge the row they write, and no step reads them.

-- Correct hints that a pop found wrong. Whatever has come since made its hint right: a push raised next_offset, and
-- everything else set another moment than the one that the pop saw.
create or replace function queen._rearm(
    group_id bigint, partition_id bigint[], next_offset bigint[], hinted_at timestamptz[], ready_at timestamptz[], lease_id uuid[]
) returns void
language sql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
    update queen.ready r
    set ready_at = u.ready_at, next_offset = u.next_offset, lease_id = u.lease_id
    from unnest(_rearm.partition_id, _rearm.next_offset, _rearm.hinted_at, _rearm.ready_at, _rearm.lease_id)
         u (partition_id, next_offset, hinted_at, ready_at, lease_id)
    -- Found by key first: a plan for a group of few hints would go on to walk through them for each.
    cross join lateral (
        select r.ctid from queen.ready r where r.group_id = _rearm.group_id and r.partition_id = u.partition_id offset 0
    ) k
    where r.ctid = k.ctid and r.next_offset <= u.next_offset and r.ready_at = u.hinted_at;
$$;

comment on function queen._rearm(bigint, bigint[], bigint[], timestamptz[], timestamptz[], uuid[]) is
    'Set the moments from which a group may claim partitions, unless something has changed them since.';

-- Walk on over a queue's partitions, by name, and enter for a group those whose messages it has no hint of.
create or replace function queen._walk_ready(group_id bigint, queue_id bigint, after_name text, batch_max integer)
returns table (last_name text, seen integer)
language sql volatile as $$
    with walked as materialized (
        select p.id, p.name, p.next_offset, p.last_append_at
        from queen.partitions p
        where p.queue_id = _walk_ready.queue_id and p.name > _walk_ready.after_name
        order by p.name
        limit _walk_ready.batch_max
    ), entered as (
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        select g.id, w.id, queen.now(), w.next_offset
        from walked w
        join queen.consumer_groups g on g.id = _walk_ready.group_id
        left join lateral (
            select r.next_offset, r.ready_at from queen.ready r where r.group_id = g.id and r.partition_id = w.id offset 0
        ) r on true
        left join lateral (
            select c.partition_id from queen.cursors c where c.group_id = g.id and c.partition_id = w.id offset 0
        ) c on true
        where (w.next_offset > coalesce(r.next_offset, 0)
               -- A push that came before the seeding knows when its own messages may be claimed, not the older ones.
               or g.seed_after is not null and c.partition_id is null and r.ready_at > queen.now())
          -- What is older than the subscription is not for a group that has no cursor there yet.
          and (c.partition_id is not null
               or w.last_append_at >= case g.subscription_mode when 'new' then coalesce(g.registered_at, '-infinity')
                                                               when 'from' then g.subscription_from
                                                               else '-infinity' end)
        order by w.id
        on conflict (group_id, partition_id) do update
        set next_offset = greatest(ready.next_offset, excluded.next_offset),
            ready_at = case when ready.lease_id is null then least(ready.ready_at, excluded.ready_at) else ready.ready_at end
    )
    -- A short walk has reached the end.
    select case when count(*) = _walk_ready.batch_max then max(w.name) end, count(*)::integer from walked w;
$$;

comment on function queen._walk_ready(bigint, bigint, text, integer) is
    'Enter missing hints for the next partitions of a queue; the last name, null at the end, and how many were seen.';

-- When the groups that wait can next be served: asked by the poll, for all waiting groups at once.
create or replace function queen._next_ready(group_id bigint[], within_seconds double precision)
returns table (group_id bigint, wait_seconds double precision)
language sql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
    select u.group_id, case when g.id is not null then extract(epoch from r.ready_at - c.moment) end
    from (select queen.now() as moment) c
    cross join unnest(_next_ready.group_id) u (group_id)
    left join queen.consumer_groups g on g.id = any(array[u.group_id])
    left join lateral (
        select r.ready_at
        from queen.ready r
        where r.group_id = u.group_id and r.ready_at < 'infinity'
        order by r.ready_at
        limit 1
    ) r on true
    where g.id is null or r.ready_at <= c.moment + make_interval(secs => _next_ready.within_seconds);
$$;

comment on function queen._next_ready(bigint[], double precision) is
    'The groups that can claim something now or soon, and in how many seconds; null for a group that is gone.';

-- The same for pops of single partitions, which look at their partition whatever the hints say.
create or replace function queen._claimable(
    tenant integer[], queue text[], partition text[], consumer_group text[], group_id bigint[]
) returns table (place integer, gone boolean)
language sql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
    select u.place::integer, u.group_id is not null and g.id is distinct from u.group_id
    from (select queen.now() as moment) k
    cross join unnest(_claimable.tenant, _claimable.queue, _claimable.partition, _claimable.consumer_group, _claimable.group_id)
         with ordinality u (tenant, queue, partition, consumer_group, group_id, place)
    left join queen.queues q on q.tenant_id = u.tenant and q.name = any(array[u.queue])
    left join queen.partitions p on p.queue_id = any(array[q.id]) and p.name = u.partition
    left join queen.consumer_groups g on g.queue_id = any(array[q.id]) and g.name = u.consumer_group
    left join queen.cursors c on c.partition_id = any(array[p.id]) and c.group_id = g.id
    where u.group_id is not null and g.id is distinct from u.group_id
       or p.next_offset > p.log_start_offset
          and case when c.partition_id is null
                   then p.last_append_at >= case g.subscription_mode when 'new' then g.registered_at
                                                                     when 'from' then g.subscription_from end is not false
                   else p.next_offset > c.committed_offset + 1
                        and (c.lease_id is null or c.lease_expires_at <= k.moment) end;
$$;

comment on function queen._claimable(integer[], text[], text[], text[], bigint[]) is
    'Which single partitions may have something for the groups that wait for it, and which of those groups are gone.';

create or replace function queen._group_from(group_id bigint) returns table (group_id bigint, queue_id bigint)
language sql stable
set enable_seqscan = off set enable_bitmapscan = off
as $$
    select g.id, g.queue_id from queen.consumer_groups g where g.id >= _group_from.group_id order by g.id limit 1;
$$;

comment on function queen._group_from(bigint) is 'The first consumer group whose id is not below the one given.';
