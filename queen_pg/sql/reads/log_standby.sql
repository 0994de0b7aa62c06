-- A follower, and the other followers for which it keeps its log.
select e.node as name, e.number as epoch, pg_current_wal_flush_lsn() as own, b.oid as subscription_id,
       array(select n.name from queen.nodes n join pg_replication_slots r on r.slot_name = 'queen_' || n.name
             where not r.active and r.wal_status <> 'lost' order by 1) as slots
from queen.epoch e
join pg_database d on d.datname = current_database()
join pg_subscription b on b.subdbid = d.oid and b.subname = 'queen_' || e.node
where e.role = 'follower'
