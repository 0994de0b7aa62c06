-- Views for people: what is in the queues, who is behind, who holds what, what failed, what is due. They show the tenant of
-- the session (tenant.sql), only what is there for everybody else too: no message below its partition's log start, no
-- lease that has run out, no dead key. They lock nothing, and at READ COMMITTED they take no predicate locks either.
--
-- Three are lists, narrow enough for a terminal, with moments cut to the second; of the others one looks at few rows, with
-- \x auto. A view's columns are a promise: new ones come last, none goes and none changes its type, so that `create or replace`
-- always does, and views of users over ours stay. What a column costs is paid by those who select it.

-- Volatile functions keep the planner from looking into a view.
create or replace function queen._view_now() returns timestamptz
language plpgsql stable as $$
begin
    return queen.now();
end;
$$;

comment on function queen._view_now() is 'The broker''s clock, for views.';

create or replace view queen.message as
select q.name as queue,
       p.name as partition,
       m.message_offset,
       m.created_at,
       m.transaction_id,
       m.payload,
       m.id as message_id,
       m.trace_id,
       m.producer_sub,
       p.id as partition_id
from queen.queues q
join queen.partitions p on p.queue_id = q.id
join queen.messages m on m.partition_id = p.id and m.message_offset >= p.log_start_offset
where q.tenant_id = (select queen._viewed_tenant());

comment on view queen.message is 'Messages with the names of their queues and partitions.';
comment on column queen.message.queue is 'Queue of the message.';
comment on column queen.message.partition is 'Partition of the message.';
comment on column queen.message.message_offset is 'Place in the partition, counted from 0.';
comment on column queen.message.created_at is 'When it was appended.';
comment on column queen.message.transaction_id is 'Its idempotency key.';
comment on column queen.message.payload is 'The JSON document as it was sent.';
comment on column queen.message.message_id is 'Its id.';
comment on column queen.message.trace_id is 'Id of the trace that the producer gave.';
comment on column queen.message.producer_sub is 'Authenticated subject that pushed.';
comment on column queen.message.partition_id is 'Id of the partition, by which acks address it.';

create or replace view queen.queue_state as
select q.name as queue,
       (select count(*) from queen.partitions p where p.queue_id = q.id) as partitions,
       (select coalesce(sum(p.next_offset - p.log_start_offset), 0)::bigint from queen.partitions p where p.queue_id = q.id) as messages,
       (select count(*) from queen.dead_letters d where d.queue_id = q.id) as dead_letters,
       (select date_trunc('second', max(p.last_append_at)) from queen.partitions p where p.queue_id = q.id) as last_push_at
from queen.queues q
where q.tenant_id = (select queen._viewed_tenant());

comment on view queen.queue_state is 'Queues with what is in them.';
comment on column queen.queue_state.queue is 'Name of the queue.';
comment on column queen.queue_state.partitions is 'How many partitions it has.';
comment on column queen.queue_state.messages is 'How many messages are kept, consumed or not.';
comment on column queen.queue_state.dead_letters is 'How many dead letters it has.';
comment on column queen.queue_state.last_push_at is 'When something was last pushed, to the second.';

create or replace view queen.partition_state as
select q.name as queue,
       p.name as partition,
       p.id as partition_id,
       p.next_offset - p.log_start_offset as messages,
       date_trunc('second', p.last_append_at) as last_push_at
from queen.queues q
join queen.partitions p on p.queue_id = q.id
where q.tenant_id = (select queen._viewed_tenant());

comment on view queen.partition_state is 'Partitions with what is in them.';
comment on column queen.partition_state.queue is 'Queue of the partition.';
comment on column queen.partition_state.partition is 'Name of the partition.';
comment on column queen.partition_state.partition_id is 'Its id, by which acks address it.';
comment on column queen.partition_state.messages is 'How many messages are kept, consumed or not.';
comment on column queen.partition_state.last_push_at is 'When something was last pushed, to the second.';

-- A group without a cursor on a partition waits there from where its subscription begins (data-plane 4.8-4).
create or replace view queen.lag as
select q.name as queue,
       g.name as consumer_group,
       p.name as partition,
       p.next_offset - w.from_offset as waiting,
       -- In this form only the primary key will do: the other index knows a partition's messages in no order.
       (select date_trunc('second', m.created_at) from queen.messages m
        where m.partition_id = p.id and m.message_offset >= w.from_offset
        order by m.message_offset limit 1) as oldest_at
from queen.queues q
join queen.consumer_groups g on g.queue_id = q.id
join queen.partitions p on p.queue_id = q.id
left join queen.cursors c on c.partition_id = p.id and c.group_id = g.id
cross join lateral (
    select greatest(p.log_start_offset, case
        when c.group_id is not null then c.committed_offset + 1
        when g.registered_at is null then p.next_offset
        when g.subscription_mode = 'all' then p.log_start_offset
        else queen._offset_at(p.id, case g.subscription_mode when 'new' then g.registered_at else g.subscription_from end,
                              p.log_start_offset, p.next_offset) end) as from_offset
    offset 0
) w
where q.tenant_id = (select queen._viewed_tenant()) and p.next_offset > w.from_offset;

comment on view queen.lag is 'Where a consumer group has messages that it has not settled.';
comment on column queen.lag.queue is 'Queue that is read.';
comment on column queen.lag.consumer_group is 'Group that reads it.';
comment on column queen.lag.partition is 'Partition where messages wait.';
comment on column queen.lag.waiting is 'How many wait there, leased ones included.';
comment on column queen.lag.oldest_at is 'When the oldest of them was pushed, to the second.';

-- ready notes every lease by its id, and the cursor says whether it is one still.
create or replace view queen.lease as
select q.name as queue,
       g.name as consumer_group,
       p.name as partition,
       c.lease_expires_at as expires_at,
       c.batch_start_offset as first_offset,
       c.batch_end_offset as last_offset,
       c.committed_offset,
       c.attempt_count as delivery_attempt,
       c.retry_count,
       c.lease_id,
       c.updated_at,
       p.id as partition_id
from queen.queues q
join queen.consumer_groups g on g.queue_id = q.id
join queen.ready r on r.group_id = g.id and r.lease_id is not null
join queen.cursors c on c.partition_id = r.partition_id and c.group_id = g.id
join queen.partitions p on p.id = c.partition_id
where q.tenant_id = (select queen._viewed_tenant()) and c.lease_expires_at > (select queen._view_now());

comment on view queen.lease is 'Leases that are live: which batches are being worked on, and until when.';
comment on column queen.lease.queue is 'Queue of the batch.';
comment on column queen.lease.consumer_group is 'Group that holds the lease.';
comment on column queen.lease.partition is 'Partition of the batch.';
comment on column queen.lease.expires_at is 'When the lease runs out.';
comment on column queen.lease.first_offset is 'First offset of the batch.';
comment on column queen.lease.last_offset is 'Last offset of the batch.';
comment on column queen.lease.committed_offset is 'Offset of the last message settled.';
comment on column queen.lease.delivery_attempt is 'How often the batch has been handed out.';
comment on column queen.lease.retry_count is 'Retries that it has spent.';
comment on column queen.lease.lease_id is 'Id of the lease.';
comment on column queen.lease.updated_at is 'When it was taken, renewed or acked in part.';
comment on column queen.lease.partition_id is 'Id of the partition.';

create or replace view queen.dead_letter as
select q.name as queue,
       d.consumer_group,
       p.name as partition,
       d.failed_at,
       d.error,
       d.transaction_id,
       d.message_offset,
       d.retry_count,
       d.payload,
       d.id,
       d.message_id,
       d.partition_id
from queen.queues q
join queen.dead_letters d on d.queue_id = q.id
left join queen.partitions p on p.id = d.partition_id
where q.tenant_id = (select queen._viewed_tenant());

comment on view queen.dead_letter is 'Messages that a consumer group gave up, with what was wrong.';
comment on column queen.dead_letter.queue is 'Queue of the message.';
comment on column queen.dead_letter.consumer_group is 'Group that gave up; __timer__ for a timer that could not fire.';
comment on column queen.dead_letter.partition is 'Partition of the message.';
comment on column queen.dead_letter.failed_at is 'When it was given up.';
comment on column queen.dead_letter.error is 'What the consumer said.';
comment on column queen.dead_letter.transaction_id is 'Idempotency key of the message.';
comment on column queen.dead_letter.message_offset is 'Offset of the message.';
comment on column queen.dead_letter.retry_count is 'Retries that it had spent.';
comment on column queen.dead_letter.payload is 'Its payload.';
comment on column queen.dead_letter.id is 'Id of the record, for queen.dlq_replay.';
comment on column queen.dead_letter.message_id is 'Id of the message.';
comment on column queen.dead_letter.partition_id is 'Id of the partition.';

create or replace view queen.timer as
select t.queue,
       t.timer_key,
       t.deliver_at,
       t.fire_at <= (select queen._view_now()) as due,
       t.attempts,
       t.last_error,
       t.partition,
       t.transaction_id,
       t.payload,
       t.message_id,
       t.fire_at,
       t.created_at,
       t.updated_at
from queen.timers t
where t.tenant_id = (select queen._viewed_tenant());

comment on view queen.timer is 'Timers that have not fired yet.';
comment on column queen.timer.queue is 'Queue that the message is for.';
comment on column queen.timer.timer_key is 'Key of the timer.';
comment on column queen.timer.deliver_at is 'When the message is due.';
comment on column queen.timer.due is 'Whether it should have fired by now.';
comment on column queen.timer.attempts is 'Attempts that have failed.';
comment on column queen.timer.last_error is 'Why the last one failed.';
comment on column queen.timer.partition is 'Partition that the message is for.';
comment on column queen.timer.transaction_id is 'Idempotency key that the message will have.';
comment on column queen.timer.payload is 'The JSON document that will be pushed.';
comment on column queen.timer.message_id is 'Id that the message will have.';
comment on column queen.timer.fire_at is 'When it is tried next.';
comment on column queen.timer.created_at is 'When it was first scheduled.';
comment on column queen.timer.updated_at is 'When it was last scheduled.';

create or replace view queen.kv_live as
select k.namespace,
       k.key,
       k.value,
       k.version,
       k.expires_at,
       k.updated_at,
       k.created_at
from queen.kv k
where k.tenant_id = (select queen._viewed_tenant())
  and (k.expires_at is null or k.expires_at > (select queen._view_now()));

comment on view queen.kv_live is 'Keys that are alive, with their values.';
comment on column queen.kv_live.namespace is 'Namespace of the key.';
comment on column queen.kv_live.key is 'The key.';
comment on column queen.kv_live.value is 'Its JSON value, as it was sent.';
comment on column queen.kv_live.version is 'Number of its newest write.';
comment on column queen.kv_live.expires_at is 'When it dies; null for never.';
comment on column queen.kv_live.updated_at is 'When it was last written.';
comment on column queen.kv_live.created_at is 'When it came to life.';
