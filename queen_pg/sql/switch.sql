-- The kill switches: rows that a step reads by key, so that a paused surface refuses from the moment on which
-- the switch was thrown. A switch without a row is on.

-- In PL/pgSQL, which keeps the plan: before PostgreSQL 18 a function of SQL is planned anew by each statement that
-- calls it, and one that reads a table cannot become part of its caller.
create or replace function queen._switched_on(name text) returns boolean
language plpgsql stable parallel safe as $$
declare
    v_enabled boolean;
begin
    select s.enabled into v_enabled from queen.switches s where s.name = _switched_on.name;
    return v_enabled is not false;
end;
$$;

comment on function queen._switched_on(text) is 'Whether a surface is open: kv, timers_schedule or timers_fire.';

create or replace function queen._switches() returns table (kv boolean, timers_schedule boolean, timers_fire boolean)
language sql stable as $$
    select queen._switched_on('kv'), queen._switched_on('timers_schedule'), queen._switched_on('timers_fire');
$$;

comment on function queen._switches() is 'The switches as they stand.';

create or replace function queen._throw_switches(kv boolean, timers_schedule boolean, timers_fire boolean)
returns void
language sql volatile as $$
    insert into queen.switches as s (name, enabled, updated_at)
    select u.name, u.enabled, queen.now()
    from (values ('kv', _throw_switches.kv), ('timers_fire', _throw_switches.timers_fire),
                 ('timers_schedule', _throw_switches.timers_schedule)) u (name, enabled)
    where u.enabled is not null
    order by u.name
    on conflict (name) do update set enabled = excluded.enabled, updated_at = excluded.updated_at;
$$;

comment on function queen._throw_switches(boolean, boolean, boolean) is
    'Throw the switches that are given as not null.';
