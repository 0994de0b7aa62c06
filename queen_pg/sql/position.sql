-- Positions: set or forget where a consumer group reads on in a partition, as a rider of a transaction (step 1.7).
-- positions: [{"partitionId": 12, "groupId": 3, "offset": 17 or null, "metadata": "…" or null}, …]; offset is the next to
-- read, null forgets the position. Their cursors are locked with those of the acks, before anything is judged.

create or replace function queen._write_positions(positions jsonb, moment timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
declare
    v_position record;
begin
    for v_position in
        select (u.position ->> 'partitionId')::bigint as partition_id, (u.position ->> 'groupId')::bigint as group_id,
               (u.position ->> 'offset')::bigint as next_read, u.position ->> 'metadata' as metadata
        from jsonb_array_elements(_write_positions.positions) with ordinality u (position, place)
        order by 1, 2, u.place
    loop
        if v_position.next_read is null then
            delete from queen.cursors c
            where c.partition_id = v_position.partition_id and c.group_id = v_position.group_id;
        else
            insert into queen.cursors (partition_id, group_id, committed_offset, position_metadata, updated_at)
            values (v_position.partition_id, v_position.group_id, v_position.next_read - 1, v_position.metadata,
                    _write_positions.moment)
            on conflict (partition_id, group_id) do update
            set committed_offset = excluded.committed_offset, position_metadata = excluded.position_metadata,
                lease_id = null, batch_start_offset = null, batch_end_offset = null, lease_expires_at = null,
                lease_conflated = false, retry_count = 0, attempt_offset = null, attempt_count = 0,
                updated_at = excluded.updated_at;
        end if;
        insert into queen.ready (group_id, partition_id, ready_at, next_offset)
        values (v_position.group_id, v_position.partition_id, _write_positions.moment, 0)
        on conflict (group_id, partition_id) do update set ready_at = excluded.ready_at, lease_id = null;
    end loop;
end;
$$;

comment on function queen._write_positions(jsonb, timestamptz) is
    'Set or forget the positions of consumer groups; leases they had there are released.';

-- Names to ids. The group's name is entered on its queue if it is new; a position on a partition that does not
-- exist waits for nothing and is left out, as no position can be held there yet. Null: a queue is unknown.
create or replace function queen._resolve_positions(tenant integer, positions jsonb) returns jsonb
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_resolved jsonb := '[]';
    v_position jsonb;
    v_queue_id bigint;
    v_partition_id bigint;
    v_group_id bigint;
begin
    for v_position in select u.position from jsonb_array_elements(_resolve_positions.positions) u (position) loop
        select q.id into v_queue_id
        from queen.queues q
        where q.tenant_id = _resolve_positions.tenant and q.name = v_position ->> 'queue';
        if not found then
            return null;
        end if;
        select p.id into v_partition_id
        from queen.partitions p
        where p.queue_id = v_queue_id and p.name = v_position ->> 'partition';
        continue when not found;
        v_group_id := queen._register_group(_resolve_positions.tenant, v_position ->> 'queue', v_position ->> 'consumerGroup',
                                            false, null, null, false);
        v_resolved := v_resolved || jsonb_build_object(
            'partitionId', v_partition_id, 'groupId', v_group_id, 'offset', v_position -> 'offset',
            'metadata', v_position -> 'metadata');
    end loop;
    return v_resolved;
end;
$$;

comment on function queen._resolve_positions(integer, jsonb) is
    'Positions with the ids of their partitions and groups; null when a queue is unknown.';
