-- The tenants that do not live in the home group.
select p.tenant, p.log_group from queen.placements p order by 1
