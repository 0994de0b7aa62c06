-- Tenants for SQL users. Each call of a public function works for one tenant: by default the first one, else
-- the one that the session's setting queen.tenant names. A session cannot choose beyond what its login role is
-- granted in queen.tenant_roles; neither SET ROLE nor a function's owner changes whose session it is.

-- Members of the owner and of the broker's role may work for every tenant: they could anyway.
create or replace function queen._is_operator() returns boolean
language sql stable as $$
    select pg_has_role(session_user, n.nspowner, 'member')
           or exists (select from pg_roles r where r.rolname = 'queen_broker' and pg_has_role(session_user, r.oid, 'member'))
    from pg_namespace n
    where n.nspname = 'queen';
$$;

comment on function queen._is_operator() is 'Whether the session''s login role may work for every tenant.';

create or replace function queen._granted_tenants() returns integer[]
language sql stable as $$
    select array_agg(distinct t.tenant_id order by t.tenant_id)
    from queen.tenant_roles t
    join pg_roles r on r.rolname = t.role
    where pg_has_role(session_user, r.oid, 'member');
$$;

comment on function queen._granted_tenants() is
    'The tenants that queen.tenant_roles grants to the session''s login role; null when it names none of its roles.';

-- The tenant that the session's setting names, or without one the one it is for; with free_choice any may be named.
create or replace function queen._chosen_tenant(free_choice boolean) returns integer
language plpgsql stable as $$
declare
    v_name text := nullif(current_setting('queen.tenant', true), '');
    v_granted integer[] := queen._granted_tenants();
    v_tenant integer;
begin
    if v_name is null then
        if v_granted is null or _chosen_tenant.free_choice then
            return 1;
        elsif cardinality(v_granted) = 1 then
            return v_granted[1];
        end if;
        perform queen._fail('QU000', format('the role %I works for several tenants and has not said for which', session_user),
            '{"argument": "queen.tenant"}', 'Name one: set queen.tenant = ''…''.');
    end if;

    select t.id into v_tenant from queen.tenants t where t.name = v_name;
    if v_tenant = any(coalesce(v_granted, '{1}')) or v_tenant is not null and _chosen_tenant.free_choice then
        return v_tenant;
    end if;
    -- The same for a tenant that does not exist: names are not to be guessed.
    perform queen._fail('42501', format('the role %I does not work for the tenant %s', session_user, v_name),
        '{"argument": "queen.tenant"}', 'Have the owner of the schema grant it: insert into queen.tenant_roles …');
end;
$$;

comment on function queen._chosen_tenant(boolean) is 'The tenant that the session has chosen, or the one it is for.';

create or replace function queen.current_tenant() returns integer
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return queen._chosen_tenant(queen._is_operator());
end;
$$;

comment on function queen.current_tenant() is 'The id of the tenant for which this session''s calls work.';

-- Who may read the tables sees every tenant there, so in the views such a session chooses freely.
create or replace function queen._viewed_tenant() returns integer
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return queen._chosen_tenant(has_table_privilege(session_user, 'queen.messages', 'select'));
end;
$$;

comment on function queen._viewed_tenant() is 'The id of the tenant that the views show to this session.';
