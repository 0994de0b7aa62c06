-- The roles of a deployment, for an administrator to make once in the broker's database: `queen-pg roles | psql …`. It needs
-- CREATEROLE and the right to grant CREATE on the database. It can be run again at any time; it never takes
-- anything from a role but what is ours to give.
--
--   queen_owner        migrates, and owns the schema
--   queen_broker       serves: calls every function, reads and writes the model's tables, changes no schema
--   queen_application  calls the public functions, and can do nothing else
--   queen_reader       reads tables and views
--
-- They cannot log in. Login roles become members, and whoever migrates acts as the owner:
--
--   create role deploy login password '…' in role queen_owner;   alter role deploy set role = queen_owner;
--   create role broker login password '…' in role queen_broker;
--   create role shop   login password '…' in role queen_application;
--   create role anna   login password '…' in role queen_reader;

do $$
begin
    -- Whoever finds them made by somebody else may not be allowed to comment on them.
    if to_regrole('queen_owner') is null then
        create role queen_owner nologin;
        comment on role queen_owner is 'Migrates and owns the schema queen.';
    end if;
    if to_regrole('queen_broker') is null then
        create role queen_broker nologin;
        comment on role queen_broker is 'Serves the schema queen: every function, and the tables'' rows.';
    end if;
    if to_regrole('queen_application') is null then
        create role queen_application nologin;
        comment on role queen_application is 'Calls the public functions of the schema queen, and nothing else.';
    end if;
    if to_regrole('queen_reader') is null then
        create role queen_reader nologin;
        comment on role queen_reader is 'Reads the tables and views of the schema queen.';
    end if;
    execute format('grant create on database %I to queen_owner', current_database());
end;
$$;
