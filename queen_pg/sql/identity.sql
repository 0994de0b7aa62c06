-- Identifiers that the broker mints: UUID version 7, so that ids rise with time. PostgreSQL has a function
-- of its own for this only from 18 on, and ours also takes the moment and the place inside one append: a
-- partition's stamps rise strictly, so the ids of its messages rise with their offsets.

create or replace function queen._uuid_v7(moment timestamptz, place bigint default 0) returns uuid
language sql volatile parallel safe as $$
    -- 48 bits of milliseconds | version | 12 bits for the microseconds | variant, 20 bits of place | random
    select (lpad(to_hex(v.us / 1000), 12, '0')
            || '7' || lpad(to_hex(v.us % 1000), 3, '0')
            || to_hex(8 + (place >> 18 & 3)) || lpad(to_hex(place >> 6 & 4095), 3, '0')
            || lpad(to_hex((place & 63) * 4), 2, '0')
            || v.random)::uuid
    from (select (extract(epoch from moment) * 1000000)::bigint as us,
                 right(gen_random_uuid()::text, 10) as random) v;
$$;

comment on function queen._uuid_v7(timestamptz, bigint) is
    'A version 7 UUID of the given moment; place (0 to 2^20 - 1) orders ids that share a moment.';
