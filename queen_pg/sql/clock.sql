-- The one clock. Every expiry, due time and stamp is judged by it, inside the database, so that the clocks
-- of brokers and of the database never meet in one comparison. A call reads it once, into a local: in a
-- WHERE clause a volatile function is never an index condition.
--
-- The owner of the schema may set queen.fake_now in a session, so that tests of leases and timers need not
-- wait. Anybody else's setting is ignored: whoever chose the time would own every lease.
--
-- Whoever may execute a function gets to compile it, with types of their own in the way of ours, and what is compiled is
-- what functions with the owner's rights then run in that session. So types are qualified here, as in _offset_at.

create or replace function queen.now() returns timestamptz
language plpgsql volatile parallel restricted as $$
declare
    v_fake_now pg_catalog.text := current_setting('queen.fake_now', true);
begin
    if v_fake_now is null or v_fake_now = '' then
        return clock_timestamp();
    end if;
    if pg_has_role(session_user, (select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'queen'), 'member') then
        return v_fake_now::timestamptz;
    end if;
    return clock_timestamp();
end;
$$;

comment on function queen.now() is 'The broker''s clock: the wall clock, or the fake one of the owner''s session.';
