-- The nodes of the log and its quorum, as this node knows them.
select n.name, n.host, n.port, n.synchronous, n.joined_at is not null as joined, q.size as quorum
from queen.quorum q
left join queen.nodes n on true
where q.sole
order by n.name
