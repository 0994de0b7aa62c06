-- Identifiers that the broker mints: UUID version 7, so that ids rise with time. PostgreSQL has a function
-- of its own for this only from 18 on, and ours also takes the moment and the place inside one append: a
-- partition's stamps rise strictly, so the ids of its messages rise with their offsets.
--
-- 48 bits of milliseconds | version | 12 bits for the microseconds | variant, 22 bits of place | 40 random bits

-- One expression, and not declared immutable, which `extract` is not: so it becomes part of whatever calls it.
create or replace function queen._uuid_v7_head(moment timestamptz) returns text
language sql stable parallel safe as $$
    select lpad(to_hex((extract(epoch from _uuid_v7_head.moment) * 1000000)::bigint / 1000), 12, '0') || '7'
        || lpad(to_hex((extract(epoch from _uuid_v7_head.moment) * 1000000)::bigint % 1000), 3, '0');
$$;

comment on function queen._uuid_v7_head(timestamptz) is 'The first 16 digits of the ids of a moment.';

-- The ids of one append share their tail: their places tell them apart.
create or replace function queen._appended_id(head text, place bigint, tail text) returns uuid
language sql immutable parallel safe as $$
    select (_appended_id.head || to_hex(8388608 + _appended_id.place) || _appended_id.tail)::uuid;
$$;

comment on function queen._appended_id(text, bigint, text) is
    'The id of the message at a place (1 to 2^22 - 1) of an append, of the head and the tail that it drew.';

-- Drawn without the system's entropy, for which the server opens a file each time: it only has to be another.
create or replace function queen._id_tail() returns text
language sql volatile parallel restricted as $$
    select lpad(to_hex((random() * 1099511627775)::bigint), 10, '0');
$$;

comment on function queen._id_tail() is 'The last 10 digits of ids, at random.';

create or replace function queen._uuid_v7(moment timestamptz, place bigint default 0) returns uuid
language sql volatile parallel restricted as $$
    select queen._appended_id(queen._uuid_v7_head(moment), place, queen._id_tail());
$$;

comment on function queen._uuid_v7(timestamptz, bigint) is
    'A version 7 UUID of the given moment; place (0 to 2^22 - 1) orders ids that share a moment.';
