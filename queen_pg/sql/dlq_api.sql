-- Dead letters, for SQL users. A replay pushes a copy to the end of the partition and removes the record, in one; the copy's
-- transaction id is made from the record's, so a replay that is repeated stores nothing twice (admin R8).

-- A partition that is gone, or a null one, means the one of origin, or Default.
create or replace function queen._replay(
    tenant integer,
    dead_letter_id uuid,
    queue text,
    partition text,
    out result text,
    out message_id uuid,
    out message_offset bigint,
    out target_queue text
)
language plpgsql as $$
#variable_conflict use_column
declare
    v_letter record;
    v_pushed record;
begin
    select d.payload, q.name as queue, p.name as partition into v_letter
    from queen.dead_letters d
    join queen.queues q on q.id = d.queue_id
    left join queen.partitions p on p.id = d.partition_id
    where d.id = _replay.dead_letter_id and q.tenant_id = _replay.tenant
    for update of d;
    if not found then
        result := 'gone';
        return;
    end if;
    target_queue := coalesce(_replay.queue, v_letter.queue);
    v_pushed := queen._push_one(
        _replay.tenant, target_queue, coalesce(_replay.partition, v_letter.partition, 'Default'),
        'dlq:' || _replay.dead_letter_id, null, v_letter.payload);
    message_id := v_pushed.message_id;
    message_offset := v_pushed.message_offset;
    result := 'duplicate';
    if v_pushed.status = 'queued' then
        delete from queen.dead_letters d where d.id = _replay.dead_letter_id;
        result := 'moved';
    end if;
end;
$$;

comment on function queen._replay(integer, uuid, text, text) is
    'Push a dead letter again and remove its record: moved; duplicate, and the record kept; or gone.';

create or replace function queen.dlq_replay(id uuid, queue text default null, partition text default null, notify boolean default null)
returns table (result text, message_id uuid, message_offset bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_replayed record;
begin
    if dlq_replay.id is null then
        perform queen._refuse_argument('id', 'a dead letter has an id', 'It is a column of the view queen.dead_letter.');
    elsif dlq_replay.queue = '' or dlq_replay.partition = '' then
        perform queen._refuse_argument(case when dlq_replay.queue = '' then 'queue' else 'partition' end, 'the target''s name is empty',
                                       'Leave it out to push where the message came from.');
    end if;
    perform queen._check_names(coalesce(dlq_replay.queue, 'q'), dlq_replay.partition);
    v_replayed := queen._replay(v_tenant, dlq_replay.id, dlq_replay.queue, dlq_replay.partition);
    if v_replayed.result = 'moved' then
        perform queen._tell_pushed(v_tenant, array[v_replayed.target_queue], dlq_replay.notify);
    end if;
    return query select v_replayed.result, v_replayed.message_id, v_replayed.message_offset;
end;
$$;

comment on function queen.dlq_replay(uuid, text, text, boolean) is
    'Push a dead letter again, to where it came from or elsewhere, and remove its record: moved, duplicate (the record stays) or gone.';
