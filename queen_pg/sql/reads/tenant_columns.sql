-- The columns of tables, in the order of the tables given.
select u.name, array_agg(a.attname::text order by a.attnum) as columns
from unnest($1::text[]) with ordinality u (name, place)
join pg_attribute a on a.attrelid = ('queen.' || quote_ident(u.name))::regclass and a.attnum > 0 and not a.attisdropped
group by u.name, u.place
order by u.place
