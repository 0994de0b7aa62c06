-- How moments are written in answers, and which stretch of a key's order a prefix is.

-- The fraction without trailing zeros, and none when it is zero (step 0.3).
create or replace function queen._kv_time(moment timestamptz) returns text
language sql stable parallel safe as $$
    select rtrim(rtrim(to_char(moment at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || '+00:00';
$$;

comment on function queen._kv_time(timestamptz) is 'A moment as KV answers it.';

-- Six digits always, so that texts order as the moments do (step 0.3).
create or replace function queen._fixed_time(moment timestamptz) returns text
language sql stable parallel safe as $$
    select to_char(moment at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"');
$$;

comment on function queen._fixed_time(timestamptz) is 'A moment as timers and the console''s KV list answer it.';

-- The first text behind all those that start with the prefix: its last character is raised, and dropped where
-- there is none higher. The last characters of Unicode stand for the end of everything; no key is so long.
create or replace function queen._prefix_end(prefix text) returns text
language plpgsql immutable parallel safe as $$
declare
    v_kept text := rtrim(prefix, chr(1114111));
    v_last integer;
begin
    if v_kept = '' then
        return repeat(chr(1114111), 200);
    end if;
    v_last := ascii(right(v_kept, 1));
    -- The surrogates between these two are no characters.
    return left(v_kept, -1) || chr(case when v_last = 55295 then 57344 else v_last + 1 end);
end;
$$;

comment on function queen._prefix_end(text) is 'The end, exclusive, of the range of keys that start with the prefix.';
