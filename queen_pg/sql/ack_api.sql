-- Ack, nack and the lease, for SQL users. An ack moves the group's cursor past its message and all before it in the
-- partition, and commits with the caller's own rows; several acks with pushes and more in one are a step
-- (transaction_api.sql). Until the transaction ends, the partition is not handed to anybody else of the group.

create or replace function queen._ack_one(
    partition_id bigint, transaction_id text, lease_id uuid, consumer_group text, status text, error text, notify boolean
) returns table (success boolean, refusal text, lease_released boolean, dead_lettered boolean, noop boolean)
language plpgsql as $$
declare
    v_tenant integer := queen.current_tenant();
    v_answer record;
begin
    if _ack_one.partition_id is null then
        perform queen._refuse_argument('partition_id', 'an ack names the partition of its message',
                                       'It is in the row that queen.pop returned.');
    elsif _ack_one.transaction_id is null then
        perform queen._refuse_argument('transaction_id', 'an ack names the transaction id of its message',
                                       'It is in the row that queen.pop returned.');
    end if;
    v_answer := queen._ack(v_tenant, jsonb_build_array(jsonb_build_object(
        'partitionId', _ack_one.partition_id, 'transactionId', _ack_one.transaction_id, 'leaseId', _ack_one.lease_id,
        'consumerGroup', coalesce(nullif(_ack_one.consumer_group, ''), '__QUEUE_MODE__'),
        'status', _ack_one.status, 'error', _ack_one.error)));
    perform queen._tell_freed(v_answer.woken, _ack_one.notify);
    return query
    -- On the wire a repeat of the ack that settled a lease is told what the first one was told. Here it may be a transaction
    -- that is run again because its outcome was unknown, and must not write its rows twice.
    select (r ->> 'success')::boolean, r ->> 'error', (r ->> 'leaseReleased')::boolean, (r ->> 'dlq')::boolean,
           (r ->> 'noop')::boolean or r ? 'repeated'
    from jsonb_array_elements(v_answer.results) r;
end;
$$;

comment on function queen._ack_one(bigint, text, uuid, text, text, text, boolean) is 'One ack of the given status.';

create or replace function queen.ack(
    partition_id bigint,
    transaction_id text,
    lease_id uuid default null,
    consumer_group text default null,
    notify boolean default null
) returns table (success boolean, refusal text, lease_released boolean, dead_lettered boolean, noop boolean)
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    select a.success, a.refusal, a.lease_released, a.dead_lettered, a.noop
    from queen._ack_one(ack.partition_id, ack.transaction_id, ack.lease_id, ack.consumer_group, 'completed', null, ack.notify) a;
$$;

comment on function queen.ack(bigint, text, uuid, text, boolean) is
    'Settle a message and all before it in its partition, in the caller''s transaction.';

create or replace function queen.nack(
    partition_id bigint,
    transaction_id text,
    lease_id uuid default null,
    consumer_group text default null,
    error text default null,
    status text default 'failed',
    notify boolean default null
) returns table (success boolean, refusal text, lease_released boolean, dead_lettered boolean, noop boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if nack.status is null or nack.status not in ('failed', 'retry', 'dlq') then
        perform queen._refuse_argument('status', 'a nack is failed, retry or dlq',
            'failed spends a retry, retry spends none, dlq files the message as a dead letter at once.');
    end if;
    return query
    select a.success, a.refusal, a.lease_released, a.dead_lettered, a.noop
    from queen._ack_one(nack.partition_id, nack.transaction_id, nack.lease_id, nack.consumer_group, nack.status, nack.error,
                        nack.notify) a;
end;
$$;

comment on function queen.nack(bigint, text, uuid, text, text, text, boolean) is
    'Give a message back, at the cost of a retry, of none, or for good into the dead letters.';

create or replace function queen.extend_lease(lease_id uuid, seconds integer default 60)
returns table (renewed integer, expires_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_partition_id bigint[];
    v_group_id bigint[];
begin
    if extend_lease.lease_id is null then
        perform queen._refuse_argument('lease_id', 'a lease has an id', 'It is in the rows that queen.pop returned.');
    end if;
    select array_agg(f.partition_id), array_agg(f.group_id) into v_partition_id, v_group_id
    from queen._find_lease(v_tenant, extend_lease.lease_id) f;
    return query
    select e.renewed, e.expires_at
    from queen._extend_lease(extend_lease.lease_id, greatest(coalesce(extend_lease.seconds, 60), 1),
                             coalesce(v_partition_id, '{}'), coalesce(v_group_id, '{}')) e;
end;
$$;

comment on function queen.extend_lease(uuid, integer) is
    'Let a lease last at least so many seconds from now; on how many partitions it was renewed, none when it is gone.';
