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

create or replace function queen._option_names() returns text[]
language sql immutable parallel safe as $$
    select array[
        'namespace', 'task', 'leaseTime', 'retryLimit', 'deadLetterQueue', 'dlqAfterMaxRetries', 'delayedProcessing',
        'windowBuffer', 'dedupWindowSeconds', 'retentionEnabled', 'retentionSeconds', 'completedRetentionSeconds',
        'maxWaitTimeSeconds', 'encryptionEnabled', 'priority', 'maxSize', 'retryDelay', 'ttl', 'minPopWaitTime',
        'retentionSinkHold', 'retentionSinkHoldMaxSeconds'];
$$;

comment on function queen._option_names() is 'What configuring a queue can set, under its names on the wire.';

-- An option's value in the order of data-plane 9.1-6: what was sent, the default for an explicit null, and for
-- an option that was not sent what is stored, or the default when all options are replaced.
create or replace function queen._integer_option(options jsonb, name text, kept integer, standard integer)
returns integer
language plpgsql immutable parallel safe as $$
declare
    v_value jsonb := _integer_option.options -> _integer_option.name;
    v_number numeric;
begin
    if v_value is null then
        return _integer_option.kept;
    elsif v_value = 'null' then
        return _integer_option.standard;
    elsif jsonb_typeof(v_value) = 'number' then
        v_number := v_value::numeric;
        -- The scale tells 5 from 5.0, which is no integer on the wire.
        if scale(v_number) = 0 and v_number between -2147483648 and 2147483647 then
            return v_number;
        end if;
    end if;
    perform queen._refuse_argument('options.' || _integer_option.name, format('%s must be an integer', _integer_option.name));
end;
$$;

comment on function queen._integer_option(jsonb, text, integer, integer) is
    'The value that an integer option of a queue gets.';

create or replace function queen._boolean_option(options jsonb, name text, kept boolean, standard boolean)
returns boolean
language plpgsql immutable parallel safe as $$
declare
    v_value jsonb := _boolean_option.options -> _boolean_option.name;
begin
    if v_value is null then
        return _boolean_option.kept;
    elsif v_value = 'null' then
        return _boolean_option.standard;
    elsif jsonb_typeof(v_value) = 'boolean' then
        return v_value::boolean;
    end if;
    perform queen._refuse_argument('options.' || _boolean_option.name, format('%s must be a boolean', _boolean_option.name));
end;
$$;

comment on function queen._boolean_option(jsonb, text, boolean, boolean) is
    'The value that a boolean option of a queue gets.';

-- Every text option's default is empty, and so is what a value of another type means.
create or replace function queen._text_option(options jsonb, name text, kept text) returns text
language sql immutable parallel safe as $$
    select case
        when not _text_option.options ? _text_option.name then _text_option.kept
        when jsonb_typeof(_text_option.options -> _text_option.name) = 'string'
        then _text_option.options ->> _text_option.name
        else ''
    end;
$$;

comment on function queen._text_option(jsonb, text, text) is 'The value that a text option of a queue gets.';

-- The options as the wire writes them (data-plane 9.3).
create or replace function queen._options(queue queen.queues) returns json
language sql stable parallel safe as $$
    select json_build_object(
        'priority', queue.priority,
        'leaseTime', queue.lease_time_seconds,
        'retryLimit', queue.retry_limit,
        'retryDelay', queue.retry_delay_ms,
        'maxSize', queue.max_size,
        'maxQueueSize', queue.max_size,
        'ttl', queue.ttl_seconds,
        'deadLetterQueue', queue.dead_letter_queue,
        'dlqAfterMaxRetries', queue.dlq_after_max_retries,
        'delayedProcessing', queue.delayed_processing_seconds,
        'windowBuffer', queue.window_buffer_seconds,
        'retentionSeconds', queue.retention_seconds,
        'completedRetentionSeconds', queue.completed_retention_seconds,
        'retentionEnabled', queue.retention_enabled,
        'encryptionEnabled', queue.encryption_enabled,
        'maxWaitTimeSeconds', queue.max_wait_time_seconds,
        'minPopWaitTime', queue.min_pop_wait_time_ms,
        'dedupWindowSeconds', queue.dedup_window_seconds,
        'retentionSinkHold', queue.retention_sink_hold,
        'retentionSinkHoldMaxSeconds', queue.retention_sink_hold_max_seconds
    );
$$;

comment on function queen._options(queen.queues) is 'A queue''s options under their names on the wire.';

create or replace function queen._describe_queue(tenant integer, queue text)
returns table (uid uuid, namespace text, task text, options json)
language sql stable parallel safe as $$
    select q.uid, q.namespace, q.task, queen._options(q)
    from queen.queues q
    where q.tenant_id = _describe_queue.tenant and q.name = _describe_queue.queue;
$$;

comment on function queen._describe_queue(integer, text) is 'A queue and its options; no row when it does not exist.';

-- Create a queue or change its options; replace_all starts from the defaults instead of what is stored. The
-- queue's row is locked before it is read, so that two changes made at once both count.
create or replace function queen._configure(tenant integer, queue text, changes jsonb, replace_all boolean)
returns table (uid uuid, namespace text, task text, options json)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    v_now timestamptz := queen.now();
    v_sent jsonb := _configure.changes;
    v_old queen.queues;
    v_new queen.queues;
begin
    insert into queen.queues (uid, tenant_id, name)
    values (queen._uuid_v7(v_now), _configure.tenant, _configure.queue)
    on conflict (tenant_id, name) do nothing;

    select q.* into v_old
    from queen.queues q
    where q.tenant_id = _configure.tenant and q.name = _configure.queue
    for no key update;

    if _configure.replace_all then
        -- An explicit null is how an option goes back to its default.
        v_sent := (
            select jsonb_object_agg(n.name, null) from unnest(queen._option_names()) n (name)
        ) || v_sent;
    end if;

    v_new := v_old;
    v_new.namespace := queen._text_option(v_sent, 'namespace', v_old.namespace);
    v_new.task := queen._text_option(v_sent, 'task', v_old.task);
    v_new.lease_time_seconds := queen._integer_option(v_sent, 'leaseTime', v_old.lease_time_seconds, 300);
    v_new.retry_limit := queen._integer_option(v_sent, 'retryLimit', v_old.retry_limit, 3);
    v_new.dead_letter_queue := queen._boolean_option(v_sent, 'deadLetterQueue', v_old.dead_letter_queue, true);
    v_new.dlq_after_max_retries :=
        queen._boolean_option(v_sent, 'dlqAfterMaxRetries', v_old.dlq_after_max_retries, true);
    v_new.delayed_processing_seconds :=
        queen._integer_option(v_sent, 'delayedProcessing', v_old.delayed_processing_seconds, 0);
    v_new.window_buffer_seconds := queen._integer_option(v_sent, 'windowBuffer', v_old.window_buffer_seconds, 0);
    v_new.dedup_window_seconds :=
        greatest(queen._integer_option(v_sent, 'dedupWindowSeconds', v_old.dedup_window_seconds, 3600), 0);
    v_new.retention_enabled := queen._boolean_option(v_sent, 'retentionEnabled', v_old.retention_enabled, false);
    v_new.retention_seconds := queen._integer_option(v_sent, 'retentionSeconds', v_old.retention_seconds, 0);
    v_new.completed_retention_seconds :=
        queen._integer_option(v_sent, 'completedRetentionSeconds', v_old.completed_retention_seconds, 0);
    v_new.max_wait_time_seconds := queen._integer_option(v_sent, 'maxWaitTimeSeconds', v_old.max_wait_time_seconds, 0);
    v_new.encryption_enabled := queen._boolean_option(v_sent, 'encryptionEnabled', v_old.encryption_enabled, false);
    v_new.priority := queen._integer_option(v_sent, 'priority', v_old.priority, 0);
    v_new.max_size := queen._integer_option(v_sent, 'maxSize', v_old.max_size, 0);
    v_new.retry_delay_ms := queen._integer_option(v_sent, 'retryDelay', v_old.retry_delay_ms, 1000);
    v_new.ttl_seconds := queen._integer_option(v_sent, 'ttl', v_old.ttl_seconds, 3600);
    v_new.min_pop_wait_time_ms :=
        least(greatest(queen._integer_option(v_sent, 'minPopWaitTime', v_old.min_pop_wait_time_ms, 0), 0), 60000);
    v_new.retention_sink_hold := queen._text_option(v_sent, 'retentionSinkHold', v_old.retention_sink_hold);
    v_new.retention_sink_hold_max_seconds := queen._integer_option(
        v_sent, 'retentionSinkHoldMaxSeconds', v_old.retention_sink_hold_max_seconds, 604800);

    if v_new.retention_sink_hold !~ '^[A-Za-z0-9._-]{0,64}$' then
        perform queen._refuse_argument('options.retentionSinkHold',
            'retentionSinkHold may hold 64 letters, digits, dots, underscores and hyphens');
    end if;
    if v_new.retention_sink_hold_max_seconds not between 60 and 31536000 then
        perform queen._refuse_argument('options.retentionSinkHoldMaxSeconds',
            'retentionSinkHoldMaxSeconds must be from 60 to 31536000');
    end if;

    update queen.queues q
    set namespace = v_new.namespace,
        task = v_new.task,
        lease_time_seconds = v_new.lease_time_seconds,
        retry_limit = v_new.retry_limit,
        dead_letter_queue = v_new.dead_letter_queue,
        dlq_after_max_retries = v_new.dlq_after_max_retries,
        delayed_processing_seconds = v_new.delayed_processing_seconds,
        window_buffer_seconds = v_new.window_buffer_seconds,
        dedup_window_seconds = v_new.dedup_window_seconds,
        retention_enabled = v_new.retention_enabled,
        retention_seconds = v_new.retention_seconds,
        completed_retention_seconds = v_new.completed_retention_seconds,
        max_wait_time_seconds = v_new.max_wait_time_seconds,
        encryption_enabled = v_new.encryption_enabled,
        priority = v_new.priority,
        max_size = v_new.max_size,
        retry_delay_ms = v_new.retry_delay_ms,
        ttl_seconds = v_new.ttl_seconds,
        min_pop_wait_time_ms = v_new.min_pop_wait_time_ms,
        retention_sink_hold = v_new.retention_sink_hold,
        retention_sink_hold_max_seconds = v_new.retention_sink_hold_max_seconds
    where q.id = v_old.id;

    -- What was held back by the old delay or window may be due at once: let the next pops judge.
    if (v_new.delayed_processing_seconds, v_new.window_buffer_seconds)
       is distinct from (v_old.delayed_processing_seconds, v_old.window_buffer_seconds)
    then
        update queen.ready r
        set ready_at = v_now
        from queen.consumer_groups g
        where g.queue_id = v_old.id and r.group_id = g.id and r.lease_id is null
          and r.ready_at > v_now and r.ready_at < 'infinity';
    end if;

    return query select v_new.uid, v_new.namespace, v_new.task, queen._options(v_new);
end;
$$;

comment on function queen._configure(integer, text, jsonb, boolean) is
    'Create a queue or change its options; the options as they then are.';

-- Delete a queue with everything in it but its timers, which belong to its name. True when there was one.
-- The locks are taken in the order in which steps take them. After the queue's row is locked no partition can
-- be born, after the partitions' rows are locked no message can be pushed, and after the groups' rows are
-- locked no partition can be claimed for the first time.
create or replace function queen._delete_queue(tenant integer, queue text) returns boolean
language plpgsql as $$
#variable_conflict use_column
declare
    v_queue_id bigint;
begin
    select q.id into v_queue_id
    from queen.queues q
    where q.tenant_id = _delete_queue.tenant and q.name = _delete_queue.queue
    for update;
    if not found then
        return false;
    end if;

    perform from queen.cursors c
    where c.partition_id in (select p.id from queen.partitions p where p.queue_id = v_queue_id)
    order by c.partition_id, c.group_id
    for update;
    perform from queen.partitions p where p.queue_id = v_queue_id order by p.id for update;
    perform from queen.consumer_groups g where g.queue_id = v_queue_id order by g.id for update;

    delete from queen.messages m using queen.partitions p where p.queue_id = v_queue_id and m.partition_id = p.id;
    delete from queen.cursors c using queen.partitions p where p.queue_id = v_queue_id and c.partition_id = p.id;
    delete from queen.ready r using queen.consumer_groups g where g.queue_id = v_queue_id and r.group_id = g.id;
    delete from queen.partitions p where p.queue_id = v_queue_id;
    -- Its consumer groups and dead letters go with the row.
    delete from queen.queues q where q.id = v_queue_id;
    return true;
end;
$$;

comment on function queen._delete_queue(integer, text) is
    'Delete a queue, its partitions, messages, consumer groups and dead letters; whether it existed.';
