-- Tenants and groups. A group is one replicated log: a database and its followers. A tenant lives in exactly one, so a
-- step never spans two. The home group knows where each tenant lives that does not live at home; each group numbers
-- the tenants that it has. A tenant is entered by the first call that names it.

-- A row without a group: the tenant is being moved, and nobody may work for it.
create or replace function queen._placement(tenant text) returns table (log_group text)
language sql stable parallel safe as $$
    select p.log_group from queen.placements p where p.tenant = _placement.tenant;
$$;

comment on function queen._placement(text) is 'The group where a tenant lives; no row for one that lives at home.';

create or replace function queen._tenant_id(name text) returns integer
language plpgsql as $$
#variable_conflict use_column
declare
    v_id integer;
begin
    loop
        select t.id into v_id from queen.tenants t where t.name = _tenant_id.name;
        exit when found;
        insert into queen.tenants (name) values (_tenant_id.name) on conflict (name) do nothing;
    end loop;
    return v_id;
end;
$$;

comment on function queen._tenant_id(text) is 'A tenant''s id in this group; it is entered when it is new.';
