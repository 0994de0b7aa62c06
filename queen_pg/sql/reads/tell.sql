-- Tell whoever listens on a channel, in one commit.
select pg_notify($1, m) from unnest($2::text[]) m
