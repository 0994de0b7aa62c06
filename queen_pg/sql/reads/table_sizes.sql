-- How many bytes each of our tables has on disk.
select c.relname as name, pg_relation_size(c.oid) as bytes
from pg_class c
where c.relnamespace = to_regnamespace('queen') and c.relkind = 'r'
