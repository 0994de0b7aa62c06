-- A single message, as people look at it. The message is the oldest kept one with the transaction id.

create or replace function queen._find_message(tenant integer, partition_id bigint, transaction_id text)
returns table (
    message_offset bigint, id uuid, transaction_id text, trace_id uuid, producer_sub text, created_at timestamptz,
    payload json, partition text, queue text, namespace text, task text, options json,
    dead_letter boolean, error text, retry_count integer
)
language sql stable as $$
    select m.message_offset, m.id, m.transaction_id, m.trace_id, m.producer_sub, m.created_at,
           m.payload, p.name, q.name, q.namespace, q.task, queen._options(q),
           d.id is not null, d.error, coalesce(d.retry_count, 0)
    from queen.partitions p
    join queen.queues q on q.id = p.queue_id and q.tenant_id = _find_message.tenant
    cross join lateral (
        select m.*
        from queen.messages m
        where m.partition_id = p.id
          and hashtextextended(m.transaction_id, 0) = hashtextextended(_find_message.transaction_id, 0)
          and m.transaction_id = _find_message.transaction_id
        -- A sum, which no index has: for the order of one, the partition would be walked through.
        order by m.message_offset + 0
        limit 1
    ) m
    left join lateral (
        select l.id, l.error, l.retry_count
        from queen.dead_letters l
        where l.partition_id = p.id and l.transaction_id = m.transaction_id
        order by l.failed_at desc, l.id desc
        limit 1
    ) d on true
    where p.id = _find_message.partition_id;
$$;

comment on function queen._find_message(integer, bigint, text) is
    'The oldest kept message of a transaction id, with its queue and its newest dead letter; no row when there is none.';

create or replace function queen._partition_cursors(partition_id bigint)
returns table (consumer_group text, committed_offset bigint, lease_expires_at timestamptz, leased boolean)
language sql stable as $$
    select g.name, c.committed_offset, c.lease_expires_at, coalesce(c.lease_expires_at > queen.now(), false)
    from queen.cursors c
    join queen.consumer_groups g on g.id = c.group_id
    where c.partition_id = _partition_cursors.partition_id
    order by g.name;
$$;

comment on function queen._partition_cursors(bigint) is
    'Where each consumer group stands in a partition, and whether its lease is live.';
