-- Identifiers that the broker mints: UUID version 7, so that ids rise with time. PostgreSQL has a function
-- of its own for this only from 18 on, and ours also takes the moment and the place inside one append: a
-- partition's stamps rise strictly, so the ids of its messages rise with their offsets.
--
-- 48 bits of milliseconds | version | 12 bits for the microseconds | variant, 22 bits of place | 40 random bits

create or replace function queen._uuid_v7_head(moment timestamptz) returns text
language plpgsql immutable parallel safe as $$
declare
    v_us bigint := extract(epoch from _uuid_v7_head.moment) * 1000000;
begin
    return lpad(to_hex(v_us / 1000), 12, '0') || '7' || lpad(to_hex(v_us % 1000), 3, '0');
end;
$$;

comment on function queen._uuid_v7_head(timestamptz) is 'The first 16 digits of the ids of a moment.';

create or replace function queen._uuid_v7(moment timestamptz, place bigint default 0) returns uuid
language sql volatile parallel safe as $$
    select (queen._uuid_v7_head(moment) || to_hex(8388608 + place) || right(gen_random_uuid()::text, 10))::uuid;
$$;

comment on function queen._uuid_v7(timestamptz, bigint) is
    'A version 7 UUID of the given moment; place (0 to 2^22 - 1) orders ids that share a moment.';
