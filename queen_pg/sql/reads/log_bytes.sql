-- How much there is to copy.
select coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as bytes
from pg_class c
where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r'
