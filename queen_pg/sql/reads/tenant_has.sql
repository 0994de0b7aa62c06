-- Whether a tenant has anything in this group.
select exists (select from queen.queues q where q.tenant_id = $1)
       or exists (select from queen.kv k where k.tenant_id = $1)
       or exists (select from queen.timers t where t.tenant_id = $1)
