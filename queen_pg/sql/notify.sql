-- Telling brokers at once what would else wait for their next look (at most half a second): a message on the
-- channel `queen`, sent when the transaction commits. For SQL users it is opt-in, call by call or by the
-- session's setting queen.notify, because commits that notify run one at a time on the whole server. Nothing
-- relies on it. A message is an array: ["pushed", tenant, queue] or ["freed", group].

create or replace function queen._notifying(notify boolean) returns boolean
language sql stable as $$
    select coalesce(_notifying.notify, lower(current_setting('queen.notify', true)) in ('on', 'true', 'yes', '1'), false);
$$;

comment on function queen._notifying(boolean) is 'Whether a call tells the brokers: its argument, or else the session''s setting queen.notify.';

create or replace function queen._tell_pushed(tenant integer, queue text[], notify boolean) returns void
language plpgsql as $$
begin
    if queen._notifying(_tell_pushed.notify) then
        perform pg_notify('queen', json_build_array('pushed', _tell_pushed.tenant, q.name)::text)
        from (select distinct u from unnest(_tell_pushed.queue) u) q (name);
    end if;
end;
$$;

comment on function queen._tell_pushed(integer, text[], boolean) is 'Tell the brokers, if they are to be told, that something was pushed to the queues.';

create or replace function queen._tell_freed(group_id bigint[], notify boolean) returns void
language plpgsql as $$
begin
    if queen._notifying(_tell_freed.notify) then
        perform pg_notify('queen', json_build_array('freed', g)::text) from unnest(_tell_freed.group_id) g;
    end if;
end;
$$;

comment on function queen._tell_freed(bigint[], boolean) is 'Tell the brokers, if they are to be told, that the groups can claim something again.';
