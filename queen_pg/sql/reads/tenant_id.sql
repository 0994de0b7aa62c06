-- A tenant's id in this group, entering it when it is new.
select queen._tenant_id($1)
