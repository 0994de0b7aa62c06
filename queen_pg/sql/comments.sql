-- What every table and column holds, for \d+ and for whoever reads state by SQL. The views have their comments in views.sql.
-- Tables are for reading: they change only through the functions, which keep them true to one another.

comment on table queen.tenants is 'Isolated sets of queues, KV namespaces and timers.';
comment on column queen.tenants.id is 'Number by which rows of a tenant name it; 1 is the default tenant.';
comment on column queen.tenants.name is 'Name by which requests and sessions choose the tenant.';
comment on column queen.tenants.created_at is 'When the tenant was made.';

comment on table queen.tenant_roles is 'Which tenants a database role may work for by SQL; a role that no row names works for the default tenant.';
comment on column queen.tenant_roles.role is 'Name of a database role; it counts for every login role that is a member of it.';
comment on column queen.tenant_roles.tenant_id is 'Tenant that the role may work for.';

comment on table queen.queues is 'Queues with their options; made by the first push that names them, or by configure.';
comment on column queen.queues.id is 'Number by which rows of a queue name it.';
comment on column queen.queues.uid is 'Id of the queue on the wire.';
comment on column queen.queues.tenant_id is 'Tenant of the queue.';
comment on column queen.queues.name is 'Name of the queue, unique in its tenant.';
comment on column queen.queues.namespace is 'Label by which a pop can discover the queue.';
comment on column queen.queues.task is 'Second label by which a pop can discover the queue.';
comment on column queen.queues.lease_time_seconds is 'How long a lease lasts when the pop does not say.';
comment on column queen.queues.retry_limit is 'How many failures a batch survives before its message becomes a dead letter.';
comment on column queen.queues.dead_letter_queue is 'Whether a message that has spent its retries is kept as a dead letter.';
comment on column queen.queues.dlq_after_max_retries is 'The same by its older name: either switches dead letters on.';
comment on column queen.queues.delayed_processing_seconds is 'How long a message is hidden after its push.';
comment on column queen.queues.window_buffer_seconds is 'How long a partition must have been quiet before it delivers.';
comment on column queen.queues.dedup_window_seconds is 'For how long a transaction id stays taken in its partition; 0 for not at all.';
comment on column queen.queues.retention_enabled is 'Whether the next two remove anything.';
comment on column queen.queues.retention_seconds is 'Age at which messages are removed, consumed or not; 0 for never.';
comment on column queen.queues.completed_retention_seconds is 'Age at which messages are removed that every group has consumed; 0 for never.';
comment on column queen.queues.max_wait_time_seconds is 'Age at which messages are removed in any case; 0 for never.';
comment on column queen.queues.encryption_enabled is 'Whether payloads are to be encrypted at rest.';
comment on column queen.queues.priority is 'Kept for clients; without effect.';
comment on column queen.queues.max_size is 'Kept for clients; without effect.';
comment on column queen.queues.retry_delay_ms is 'Kept for clients; without effect.';
comment on column queen.queues.ttl_seconds is 'Kept for clients; without effect.';
comment on column queen.queues.min_pop_wait_time_ms is 'Kept for clients; without effect.';
comment on column queen.queues.retention_sink_hold is 'Kept for clients; without effect.';
comment on column queen.queues.retention_sink_hold_max_seconds is 'Kept for clients; without effect.';
comment on column queen.queues.created_at is 'When the queue was made.';

comment on table queen.partitions is 'Partitions: one entity''s ordered stream each, born with its first message.';
comment on column queen.partitions.id is 'Id of the partition, on the wire too; never used again.';
comment on column queen.partitions.queue_id is 'Queue of the partition.';
comment on column queen.partitions.name is 'Name of the partition, unique in its queue.';
comment on column queen.partitions.next_offset is 'Offset that the next message gets: how many there have ever been.';
comment on column queen.partitions.log_start_offset is 'Lowest offset that is still there; retention has removed what lies below.';
comment on column queen.partitions.last_append_at is 'Moment of the newest append; each is later than the one before it.';
comment on column queen.partitions.created_at is 'When the partition was made.';

comment on table queen.messages is 'Messages, in the order of their partitions. Below a partition''s log start they are kept for their ids only.';
comment on column queen.messages.partition_id is 'Partition of the message.';
comment on column queen.messages.message_offset is 'Place of the message in its partition, counted from 0 without gaps.';
comment on column queen.messages.created_at is 'When the message was appended; messages of one append share it.';
comment on column queen.messages.id is 'Id of the message, rising with its offset.';
comment on column queen.messages.repeat is '0 for the newest message of its transaction id, and counting up for older ones.';
comment on column queen.messages.trace_id is 'Id of the trace that the producer gave.';
comment on column queen.messages.transaction_id is 'Idempotency key of the message: a second push of it, inside the dedup window, stores nothing.';
comment on column queen.messages.producer_sub is 'Authenticated subject that pushed.';
comment on column queen.messages.payload is 'The JSON document as it was sent, to the byte.';

comment on table queen.consumer_groups is 'Consumer groups on a queue, with where they began. __QUEUE_MODE__ is the group of pops that name none.';
comment on column queen.consumer_groups.id is 'Number by which rows of a group name it.';
comment on column queen.consumer_groups.queue_id is 'Queue that the group reads.';
comment on column queen.consumer_groups.name is 'Name of the group, unique on its queue.';
comment on column queen.consumer_groups.subscription_mode is 'Where the group begins in a partition: all messages, new ones, or those from a moment on.';
comment on column queen.consumer_groups.subscription_from is 'The moment, for a group that begins at one.';
comment on column queen.consumer_groups.conflation is 'Whether a pop gets only the newest message of a partition.';
comment on column queen.consumer_groups.registered_at is 'When the group subscribed; null for one that has only read single partitions.';
comment on column queen.consumer_groups.registered_xid is 'Transaction of the subscription, until pushes that missed it have been looked for.';
comment on column queen.consumer_groups.seed_after is 'Partition up to whose name the queue''s backlog has been entered for a new group; null when it has been.';
comment on column queen.consumer_groups.created_at is 'When the group was entered.';

comment on table queen.cursors is 'How far a group has come in a partition, and its lease there. A lease''s fields stay when it runs out, until a claim or an ack.';
comment on column queen.cursors.partition_id is 'Partition that is read.';
comment on column queen.cursors.group_id is 'Group that reads.';
comment on column queen.cursors.committed_offset is 'Offset of the last message that the group has settled; -1 for none.';
comment on column queen.cursors.lease_id is 'Lease of the batch handed out last, while it is not settled.';
comment on column queen.cursors.batch_start_offset is 'First offset of the batch.';
comment on column queen.cursors.batch_end_offset is 'Last offset of the batch.';
comment on column queen.cursors.lease_expires_at is 'When the lease runs out and the batch may be handed out again.';
comment on column queen.cursors.lease_conflated is 'Whether only the newest message of the batch was handed out.';
comment on column queen.cursors.retry_count is 'Retries that the batch has spent.';
comment on column queen.cursors.attempt_offset is 'First offset of the batch that attempt_count counts the deliveries of.';
comment on column queen.cursors.attempt_count is 'How often that batch has been handed out.';
comment on column queen.cursors.settled_lease_id is 'Lease of the batch settled last, so that a repeated ack of it is answered again.';
comment on column queen.cursors.settled_from_offset is 'First offset of that batch.';
comment on column queen.cursors.settled_to_offset is 'Last offset of that batch.';
comment on column queen.cursors.position_metadata is 'What a client kept beside the position that it set.';
comment on column queen.cursors.updated_at is 'When the row was last written.';

comment on table queen.ready is 'Hints of where a group has something to claim, and from when. The truth is in cursors and partitions.';
comment on column queen.ready.group_id is 'Group that may claim.';
comment on column queen.ready.partition_id is 'Partition that it may claim.';
comment on column queen.ready.ready_at is 'From when; infinity when nothing waits.';
comment on column queen.ready.next_offset is 'Offset behind the newest message that the hint knows of.';
comment on column queen.ready.lease_id is 'Lease that the group holds on the partition, by which a lease is found.';

comment on table queen.dead_letters is 'Messages that a group gave up, as they were then. The message itself stays in its partition.';
comment on column queen.dead_letters.id is 'Id of the record; a replay pushes its copy with the transaction id dlq:<id>.';
comment on column queen.dead_letters.queue_id is 'Queue of the message.';
comment on column queen.dead_letters.partition_id is 'Partition of the message.';
comment on column queen.dead_letters.consumer_group is 'Name of the group; __timer__ for a timer that could not fire.';
comment on column queen.dead_letters.message_offset is 'Offset of the message; -1 for a timer''s.';
comment on column queen.dead_letters.message_id is 'Id of the message.';
comment on column queen.dead_letters.transaction_id is 'Transaction id of the message.';
comment on column queen.dead_letters.payload is 'Payload of the message.';
comment on column queen.dead_letters.error is 'What the consumer said, or what went wrong.';
comment on column queen.dead_letters.retry_count is 'Retries that the message had spent.';
comment on column queen.dead_letters.failed_at is 'When it was given up.';

comment on table queen.kv is 'Keys with their values. A row whose expiry has come reads as absent everywhere, and is removed later.';
comment on column queen.kv.tenant_id is 'Tenant of the key.';
comment on column queen.kv.namespace is 'Namespace of the key.';
comment on column queen.kv.key is 'The key, unique in its namespace.';
comment on column queen.kv.version is 'Number of the newest write; a key''s versions only rise, even over deletion and expiry.';
comment on column queen.kv.value is 'The JSON value as it was sent.';
comment on column queen.kv.expires_at is 'When the key dies; null for never.';
comment on column queen.kv.created_at is 'When the key came to life.';
comment on column queen.kv.updated_at is 'When the key was last written.';

comment on table queen.timers is 'Messages that are to be pushed later. A timer that has fired is gone: it is an ordinary message now.';
comment on column queen.timers.tenant_id is 'Tenant of the timer.';
comment on column queen.timers.queue is 'Name of the queue to push to; it need not exist yet.';
comment on column queen.timers.timer_key is 'Key of the timer, unique in its queue: scheduling it again replaces it.';
comment on column queen.timers.partition is 'Name of the partition to push to.';
comment on column queen.timers.transaction_id is 'Transaction id that the message will have.';
comment on column queen.timers.message_id is 'Id that the message will have.';
comment on column queen.timers.payload is 'The JSON document that will be pushed.';
comment on column queen.timers.encrypted is 'Whether its sender says that the payload is encrypted.';
comment on column queen.timers.producer_sub is 'Authenticated subject that scheduled.';
comment on column queen.timers.deliver_at is 'When the message is due.';
comment on column queen.timers.fire_at is 'When it is tried next: later than deliver_at only after a failure.';
comment on column queen.timers.attempts is 'Attempts that have failed.';
comment on column queen.timers.last_error is 'Why the last one failed.';
comment on column queen.timers.created_at is 'When the timer was first scheduled.';
comment on column queen.timers.updated_at is 'When it was last scheduled.';

comment on table queen.switches is 'Surfaces that an operator can pause for everybody.';
comment on column queen.switches.name is 'Name of the surface: kv, timers_schedule or timers_fire.';
comment on column queen.switches.enabled is 'Whether it is open.';
comment on column queen.switches.updated_at is 'When it was last switched.';

comment on table queen.epoch is 'What this node is in the replicated log; one row, the only one that is not replicated.';
comment on column queen.epoch.sole is 'True: there is one row.';
comment on column queen.epoch.number is 'Number of the epoch that the node knows of.';
comment on column queen.epoch.role is 'What the node is in it: primary, follower or fenced. Only a primary takes writes.';
comment on column queen.epoch.fenced_by is 'Epoch that has passed by this node, once it is fenced.';
comment on column queen.epoch.node is 'Name of the node.';
comment on column queen.epoch.changed_at is 'When the node last changed its role.';

comment on table queen.nodes is 'Nodes of the replicated log, once there is more than one.';
comment on column queen.nodes.name is 'Name of the node.';
comment on column queen.nodes.host is 'Host by which the others reach it.';
comment on column queen.nodes.port is 'Port by which the others reach it.';
comment on column queen.nodes.synchronous is 'Whether its confirmation can count for a commit''s quorum.';
comment on column queen.nodes.joined_at is 'When it joined as a follower.';

comment on table queen.quorum is 'How many followers have a step on disk before it is answered, at least; one row.';
comment on column queen.quorum.sole is 'True: there is one row.';
comment on column queen.quorum.size is 'The number of followers.';

comment on table queen.placements is 'Where tenants live that do not live in this group; in the home group only.';
comment on column queen.placements.tenant is 'Name by which requests choose the tenant.';
comment on column queen.placements.log_group is 'Group where the tenant lives; null while it is being moved, when nobody may work for it.';
comment on column queen.placements.moved_from is 'Group that the tenant is being moved from; null once it has arrived.';
comment on column queen.placements.placed_at is 'When the row last changed.';

comment on table queen.alembic_version is 'Revision that the tables are at.';
comment on column queen.alembic_version.version_num is 'Number of the revision.';
