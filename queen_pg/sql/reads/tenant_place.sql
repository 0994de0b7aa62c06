-- Where a tenant lives, or whence it is on its way.
select p.log_group, p.moved_from from queen.placements p where p.tenant = $1
