-- The epoch: which node of the replicated log takes writes. Each node keeps, in a row of its own that is never
-- replicated, the number of the epoch it knows and what it is in it: the primary, a follower, or fenced, which is
-- what a primary becomes when another node has been promoted. Whatever changes state is refused on a node that is
-- not the primary, whoever asks and by whichever function.
--
-- The row changes when a node is promoted, fenced or made a follower, and at no other time. So the check is one
-- read by key of a row that nobody writes: about 4 microseconds a statement, and no conflict with anybody.

-- Triggers do not fire for what a subscription applies, so a follower follows.
create or replace function queen._refuse_unless_primary() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
    v_epoch queen.epoch;
begin
    select e.* into v_epoch from queen.epoch e where e.sole;
    if v_epoch.role is distinct from 'primary' then
        perform queen._fail('QU910', format('this node is %s in epoch %s of the log, and takes no writes',
                                            case v_epoch.role when 'follower' then 'a follower' else 'fenced' end, v_epoch.number),
                            jsonb_build_object('role', v_epoch.role, 'epoch', v_epoch.number),
                            'Connect to the primary: name every node in QUEEN_PG_URL.');
    end if;
    return null;
end;
$$;

comment on function queen._refuse_unless_primary() is 'Refuse a statement that would change state on a node that is not the primary (QU910).';

-- Not on messages and ready: a step writes them together with one of these, and a hint that is wrong is mended.
create or replace trigger primary_only before insert or update or delete on queen.tenants
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.tenant_roles
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.queues
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.partitions
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.consumer_groups
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.cursors
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.dead_letters
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.kv
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.timers
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.switches
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.nodes
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.quorum
    for each statement execute function queen._refuse_unless_primary();
create or replace trigger primary_only before insert or update or delete on queen.placements
    for each statement execute function queen._refuse_unless_primary();

-- Anybody who sees a later epoch may do this, brokers too: it takes nothing from a node that has not lost it.
create or replace function queen._fence(number bigint) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update queen.epoch e
    set role = 'fenced', fenced_by = _fence.number, changed_at = clock_timestamp()
    where e.sole and e.role = 'primary' and e.number < _fence.number;
    return found;
end;
$$;

comment on function queen._fence(bigint) is
    'Refuse writes from now on if this node leads an epoch before the given one; whether it did.';

create or replace function queen._follow(number bigint, node text) returns void
language sql volatile as $$
    update queen.epoch e
    set number = _follow.number, role = 'follower', fenced_by = null, node = _follow.node, changed_at = clock_timestamp()
    where e.sole;
$$;

comment on function queen._follow(bigint, text) is 'Be a follower in an epoch, under a name.';

-- Sequences are not replicated. They move past every value that a row shows, and past what only lost or deleted rows
-- have shown: a broker or a client may still hold such an id or version, and it must never come to mean another thing.
-- So each epoch has numbers of its own: 2^40 of them, and 2^53, which JSON's numbers end at, is 8,192 promotions away.
-- Tenants, of which there are few, have 2^16. The margin is for rows that came from a group of later epochs.
create or replace function queen._lead(number bigint, node text) returns void
language plpgsql as $$
begin
    update queen.epoch e
    set number = _lead.number, role = 'primary', fenced_by = null, node = _lead.node, changed_at = clock_timestamp()
    where e.sole;

    perform setval(pg_get_serial_sequence('queen.tenants', 'id'),
                   greatest((select max(t.id) + 1000 from queen.tenants t), _lead.number << 16));
    perform setval(pg_get_serial_sequence('queen.queues', 'id'),
                   greatest((select max(q.id) + 1000000 from queen.queues q), _lead.number << 40));
    perform setval(pg_get_serial_sequence('queen.partitions', 'id'),
                   greatest((select max(p.id) + 1000000 from queen.partitions p), _lead.number << 40));
    perform setval(pg_get_serial_sequence('queen.consumer_groups', 'id'),
                   greatest((select max(g.id) + 1000000 from queen.consumer_groups g), _lead.number << 40));
    perform setval('queen.kv_version', greatest((select s.last_value from queen.kv_version s), _lead.number << 40));

    -- Transactions are numbered by each server for itself (pop.sql).
    update queen.consumer_groups g
    set registered_xid = pg_current_xact_id()
    where g.registered_xid is not null;
end;
$$;

comment on function queen._lead(bigint, text) is 'Be the primary of an epoch, under a name, with every sequence past what the log has shown.';

create or replace function queen._begin(number bigint) returns void
language plpgsql as $$
begin
    perform queen._lead(_begin.number, null);
    delete from queen.nodes;
    update queen.quorum q set size = 0 where q.sole;
end;
$$;

comment on function queen._begin(bigint) is 'Be the primary of an epoch in a log that has no other node: after a restore.';

-- Slots tell anybody what a follower has confirmed; the seconds are for those who may read statistics.
create or replace function queen._log_state() returns table (
    number bigint, role text, node text, in_recovery boolean, quorum integer, follower text, synchronous boolean,
    connected boolean, lag_bytes bigint, lag_seconds double precision
)
language sql stable as $$
    select e.number, e.role, e.node, pg_is_in_recovery(),
           case when current_setting('synchronous_standby_names') = '' then 0 else u.size end,
           n.name, n.synchronous, coalesce(s.active, false),
           case when pg_is_in_recovery() or s.confirmed_flush_lsn is null then null
                else greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn), 0)::bigint end,
           extract(epoch from r.flush_lag)::double precision
    from queen.epoch e
    left join queen.quorum u on u.sole
    left join queen.nodes n on n.name <> e.node and e.role = 'primary'
    left join pg_replication_slots s on s.slot_name = 'queen_' || n.name
    left join pg_stat_replication r on r.pid = s.active_pid
    order by n.name;
$$;

comment on function queen._log_state() is 'What this node is in the log, with a row for each follower of a primary.';

create or replace function queen._log_slots() returns table (name text, active boolean, kept_bytes bigint)
language sql stable as $$
    select r.slot_name::text, r.active, greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn), 0)::bigint
    from pg_replication_slots r
    where not pg_is_in_recovery() and r.restart_lsn is not null;
$$;

comment on function queen._log_slots() is 'The replication slots of this server, and how much of the log each keeps.';
