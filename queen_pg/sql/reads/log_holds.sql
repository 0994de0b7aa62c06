-- Whether a node has a history of its own.
select (select count(*) from queen.queues) as queues
