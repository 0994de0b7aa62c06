-- A queue is a row with its options: created by the first push that names it or by configure, and deleted
-- whole. Partitions refer to their queue, so a push that brings a new partition and a delete of the queue
-- meet on the queue's row and one of them waits.
--
-- Deleting is written for READ COMMITTED: row locks first, reads after. At SERIALIZABLE every push that
-- commits meanwhile would send it back to its start, and a busy queue could not be deleted at all.

create or replace function queen._ensure_queue(tenant integer, queue text) returns bigint
language plpgsql volatile as $$
#variable_conflict use_column
declare
    v_queue_id bigint;
begin
    loop
        select q.id into v_queue_id
        from queen.queues q
        where q.tenant_id = _ensure_queue.tenant and q.name = _ensure_queue.queue;
        if found then
            return v_queue_id;
        end if;
        -- A queue that nobody configured takes its labels from its dotted name.
        insert into queen.queues (uid, tenant_id, name, namespace, task, lease_time_seconds)
        values (
            queen._uuid_v7(queen.now()), _ensure_queue.tenant, _ensure_queue.queue,
            split_part(_ensure_queue.queue, '.', 1), split_part(_ensure_queue.queue, '.', 2), 60
        )
        on conflict (tenant_id, name) do nothing
        returning id into v_queue_id;
        if found then
            return v_queue_id;
        end if;
    end loop;
end;
$$;

comment on function queen._ensure_queue(integer, text) is
    'The id of a queue, created with the options of a first push when there is none.';
