-- Whether a node has data of its own.
select exists (select from queen.queues) or exists (select from queen.kv) or exists (select from queen.timers) as holds
