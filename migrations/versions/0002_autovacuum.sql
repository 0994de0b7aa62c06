-- When each table is vacuumed.
--
-- By default a table waits until a fifth of it is dead. That suits a table whose rows live long; here a row of
-- `ready` is rewritten three times for each message, and each version that stays is an index entry that the next
-- pop walks over. So the tables that are written with every message are vacuumed after a few thousand changes,
-- however large they are, and without the pauses that would let the changes get ahead. A pass is short, because
-- pages that hold nothing dead are not read.
--
-- The planner's statistics decide nothing in the functions, whose plans are fixed; they serve those who look.

-- Not HOT: the moment and the lease are indexed.
alter table queen.ready set (
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);

-- Not HOT either, and a timer that has fired is a dead row.
alter table queen.timers set (
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);

-- HOT: a page is cleaned by whoever updates it next. The vacuum is for the pages to which nobody comes back.
alter table queen.cursors set (
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
alter table queen.partitions set (
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
alter table queen.kv set (
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

-- Never updated: written once, and deleted from the front. A fifth of a large log would be a long pass over all of
-- it, and the room of what retention deleted would be reused only then. What is inserted is frozen by the way.
alter table queen.messages set (
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_vacuum_insert_scale_factor = 0.05
);
