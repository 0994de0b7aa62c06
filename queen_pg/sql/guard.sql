-- The one place that raises, and the checks that other functions share. An error is its SQLSTATE: QU000
-- invalid argument, QU001 too large, QU100 not found, QU900 stale (a name or id resolved before the
-- transaction began is gone), QU901 refused (an optimistic run lost and must be judged carefully).
-- The detail is a JSON object for programs; the message and the hint are sentences for people.

create or replace function queen._fail(
    sqlstate text, message text, detail jsonb default null, hint text default null
) returns void
language plpgsql as $$
begin
    -- A part that is not given must be left out, or people would read an empty line.
    if _fail.detail is null and _fail.hint is null then
        raise exception using errcode = _fail.sqlstate, message = _fail.message;
    elsif _fail.hint is null then
        raise exception using errcode = _fail.sqlstate, message = _fail.message, detail = _fail.detail::text;
    elsif _fail.detail is null then
        raise exception using errcode = _fail.sqlstate, message = _fail.message, hint = _fail.hint;
    end if;
    raise exception using errcode = _fail.sqlstate, message = _fail.message, detail = _fail.detail::text, hint = _fail.hint;
end;
$$;

comment on function queen._fail(text, text, jsonb, text) is
    'Raise an error of class QU: its code, a sentence, a JSON object for programs, and advice.';

create or replace function queen._assert_serializable() returns void
language plpgsql stable as $$
begin
    if current_setting('transaction_isolation') <> 'serializable' then
        perform queen._fail('25001', 'this function must run in a SERIALIZABLE transaction',
            hint => 'Call the public function instead; it is right at every isolation level.');
    end if;
end;
$$;

comment on function queen._assert_serializable() is
    'Refuse to go on in a transaction that is not SERIALIZABLE: for functions that rely on it.';

-- A negative setting is a divisor of the locks per transaction.
create or replace function queen._predicate_locks_max() returns integer
language sql stable as $$
    select case when r.setting >= 0 then r.setting
                else current_setting('max_pred_locks_per_transaction')::integer / -r.setting end
    from (select current_setting('max_pred_locks_per_relation')::integer as setting) r;
$$;

comment on function queen._predicate_locks_max() is
    'How many predicate locks a transaction may hold in one table before they become one on the table.';
