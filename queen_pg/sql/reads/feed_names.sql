-- The names of partitions, consumer groups and queues, and of the queues of those partitions.
select 'partition' as kind, p.id::text as id, p.name, p.queue_id::text as parent
from queen.partitions p
where p.id = any($1::bigint[])
union all
select 'group', g.id::text, g.name, null
from queen.consumer_groups g
where g.id = any($2::bigint[])
union all
select 'queue', q.id::text, q.name, q.tenant_id::text
from queen.queues q
where q.id = any($3::bigint[]) or q.id in (select p.queue_id from queen.partitions p where p.id = any($1::bigint[]))
