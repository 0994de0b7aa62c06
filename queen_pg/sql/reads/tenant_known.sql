-- A tenant's id in this group, if it has one.
select t.id from queen.tenants t where t.name = $1
