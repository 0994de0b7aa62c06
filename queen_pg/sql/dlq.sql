-- Dead letters: the messages that spent their retries, with what was wrong. A record is a snapshot; the message
-- itself stays in its partition for other groups. Acks file them (ack.sql), and they are read and managed here.

-- A page of a tenant's dead letters, newest failure first, and how many match the filters in all. A null
-- filter matches everything. A page without records is one row whose id is null, so that the total is there.
create or replace function queen._dead_letters(
    tenant integer,
    queue text,
    partition text,
    consumer_group text,
    failed_from timestamptz,
    failed_to timestamptz,
    skip bigint,
    batch_max integer
) returns table (
    total bigint, id uuid, queue text, partition text, partition_id bigint, consumer_group text, message_offset bigint,
    message_id uuid, transaction_id text, payload json, error text, retry_count integer, failed_at timestamptz
)
language sql stable as $$
    with matching as materialized (
        select d.id, d.failed_at, q.name as queue, p.name as partition
        from queen.queues q
        join queen.dead_letters d on d.queue_id = q.id
        left join queen.partitions p on p.id = d.partition_id
        where q.tenant_id = _dead_letters.tenant
          and (_dead_letters.queue is null or q.name = _dead_letters.queue)
          and (_dead_letters.partition is null or p.name = _dead_letters.partition)
          and (_dead_letters.consumer_group is null or d.consumer_group = _dead_letters.consumer_group)
          and (_dead_letters.failed_from is null or d.failed_at >= _dead_letters.failed_from)
          and (_dead_letters.failed_to is null or d.failed_at <= _dead_letters.failed_to)
    ), page as (
        select m.id, m.queue, m.partition
        from matching m
        order by m.failed_at desc, m.id desc
        offset _dead_letters.skip
        limit _dead_letters.batch_max
    )
    select t.total, d.id, d.queue, d.partition, d.partition_id, d.consumer_group, d.message_offset,
           d.message_id, d.transaction_id, d.payload, d.error, d.retry_count, d.failed_at
    from (select count(*) as total from matching) t
    left join (
        select page.queue, page.partition, l.*
        from page
        join queen.dead_letters l on l.id = page.id
    ) d on true
    order by d.failed_at desc, d.id desc;
$$;

comment on function queen._dead_letters(
    integer, text, text, text, timestamptz, timestamptz, bigint, integer
) is 'A page of dead letters, newest first, each row with the number of all that match.';
