-- Queues, for SQL users: configure and delete. Both change what everybody else sees, when the transaction commits.

create or replace function queen.configure(queue text, options jsonb default '{}', replace boolean default false)
returns table (queue_id uuid, namespace text, task text, settings json)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
    v_unknown text;
begin
    perform queen._check_names(configure.queue);
    if jsonb_typeof(configure.options) is distinct from 'object' then
        perform queen._refuse_argument('options', 'options must be a JSON object', '{"leaseTime": 60, "retryLimit": 5}');
    end if;
    select k into v_unknown from jsonb_object_keys(configure.options) k where k <> all(queen._option_names()) order by k limit 1;
    if found then
        perform queen._refuse_argument('options.' || v_unknown, format('a queue has no option %s', v_unknown),
                                       'The options are ' || array_to_string(queen._option_names(), ', ') || '.');
    end if;
    return query
    select c.uid, c.namespace, c.task, c.options
    from queen._configure(v_tenant, configure.queue, configure.options, coalesce(configure.replace, false)) c;
end;
$$;

comment on function queen.configure(text, jsonb, boolean) is
    'Create a queue or change its options, those given or, to replace, all; answers with the options as they then are.';

create or replace function queen.delete_queue(queue text) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_tenant integer := queen.current_tenant();
begin
    perform queen._check_names(delete_queue.queue);
    return queen._delete_queue(v_tenant, delete_queue.queue);
end;
$$;

comment on function queen.delete_queue(text) is
    'Delete a queue with its partitions, messages, consumer groups and dead letters; false when there is none.';
