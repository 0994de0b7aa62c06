-- Rights, last of all: what PUBLIC gets by itself is taken away, and the roles of roles.sql get theirs, those that exist. It is
-- run with every migration, and by `queen-pg roles` for roles that came later; a role has afterwards what stands
-- here, whatever it had before. Only the schema's owner can do this, so for anybody else it says so and does nothing.

do $$
begin
    if to_regnamespace('queen') is null
       or not pg_has_role((select n.nspowner from pg_namespace n where n.nspname = 'queen'), 'usage') then
        raise notice 'no rights were granted on the schema queen: it is not there yet, or somebody else''s';
        return;
    end if;

    revoke all on schema queen from public;
    revoke all on all tables in schema queen from public;
    revoke all on all sequences in schema queen from public;
    revoke all on all routines in schema queen from public;

    if to_regrole('queen_broker') is not null then
        revoke all on all tables in schema queen from queen_broker;
        grant usage on schema queen to queen_broker;
        grant select, insert, update, delete on all tables in schema queen to queen_broker;
        grant usage, select on all sequences in schema queen to queen_broker;
        grant execute on all routines in schema queen to queen_broker;
        -- Who may do what, what is installed, and who leads the log are not a broker's to write.
        revoke insert, update, delete on queen.tenant_roles, queen.alembic_version, queen.epoch, queen.nodes, queen.quorum,
            queen.placements from queen_broker;
    end if;

    if to_regrole('queen_reader') is not null then
        revoke all on all routines in schema queen from queen_reader;
        revoke all on all tables in schema queen from queen_reader;
        grant usage on schema queen to queen_reader;
        grant select on all tables in schema queen to queen_reader;
        grant execute on function
            queen.now(),
            queen.current_tenant(),
            -- What the views call: a function in a view is called with the rights of who reads it.
            queen._view_now(),
            queen._viewed_tenant(),
            queen._offset_at(bigint, timestamptz, bigint, bigint)
        to queen_reader;
    end if;

    if to_regrole('queen_application') is not null then
        revoke all on all routines in schema queen from queen_application;
        revoke all on all tables in schema queen from queen_application;
        grant usage on schema queen to queen_application;
        grant execute on function
            queen.ack(bigint, text, uuid, text, boolean),
            queen.configure(text, jsonb, boolean),
            queen.current_tenant(),
            queen.delete_queue(text),
            queen.dlq_replay(uuid, text, text, boolean),
            queen.extend_lease(uuid, integer),
            queen.kv_check(text, text, bigint),
            queen.kv_delete(text, text, bigint),
            queen.kv_get(text, text),
            queen.kv_incr(text, text, numeric, interval, numeric, numeric),
            queen.kv_list(text, text, text, integer),
            queen.kv_once(text, text, interval),
            queen.kv_put(text, text, json, interval, bigint),
            queen.lock_acquire(text, interval, text, integer),
            queen.lock_check(text, bigint, integer),
            queen.lock_holders(text),
            queen.lock_release(text, bigint, integer),
            queen.lock_renew(text, bigint, interval, text, integer),
            queen.nack(bigint, text, uuid, text, text, text, boolean),
            queen.now(),
            queen.pop(text, text, text, integer, integer, integer, text, timestamptz, boolean, boolean),
            queen.push(text, json, text, text, uuid, boolean),
            queen.push_batch(text, json[], text, text[], text[], boolean),
            queen.push_many(json, boolean),
            queen.seek(text, text, text, timestamptz, bigint, text, boolean),
            queen.timer_cancel(text, text),
            queen.timer_schedule(text, text, json, interval, timestamptz, text, text),
            queen.transaction(json, boolean)
        to queen_application;
    end if;
end;
$$;
