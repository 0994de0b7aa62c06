"""The statements of replication: none of them takes parameters, so names and texts are quoted here.

A node's subscription, the slot that it reads and its name as a synchronous standby are one word.
"""

from collections.abc import Sequence

PUBLICATION = "queen_log"
FEED = "queen_feed"
FEED_TABLES = ("messages", "cursors", "kv", "timers", "partitions", "queues", "consumer_groups")
# What a tenant has, in the order in which rows refer to one another.
TENANT_TABLES = (
    "queues", "partitions", "messages", "consumer_groups", "cursors", "ready", "dead_letters",
    "kv", "timers",
)  # fmt: skip
SHIFTED = {"queue_id", "partition_id", "group_id"}
WITH_IDS = {"queues", "partitions", "consumer_groups"}

# What a role needs, in words for whoever may grant it.
RIGHT_TO_REPLICATE = "alter role {role} replication"
RIGHT_TO_PUBLISH = "grant create on database {database}, and to be the owner of the schema queen"
RIGHT_TO_SUBSCRIBE = "grant pg_create_subscription to {role}, and create on the database"
RIGHT_TO_SUBSCRIBE_15 = "to be a superuser (PostgreSQL 15 lets nobody else subscribe)"
RIGHT_TO_SEE = "grant execute on function pg_replication_origin_progress(text, boolean) to {role}"
RIGHT_TO_QUORUM = (
    "grant alter system on parameter synchronous_standby_names to {role};"
    " grant execute on function pg_reload_conf() to {role}"
)
RIGHT_TO_TERMINATE = "grant pg_signal_backend to {role}"


def slot(node: str) -> str:
    """Return the name of a node's subscription, and of the slots that are kept for it."""
    return f"queen_{node}"


def identifier(text: str) -> str:
    """Quote a name."""
    return '"' + text.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote a text."""
    quoted = "'" + text.replace("'", "''") + "'"
    return quoted if "\\" not in quoted else " E" + quoted.replace("\\", "\\\\")


def _tables(tables: Sequence[str]) -> str:
    return ", ".join(f"queen.{identifier(table)}" for table in tables)


def create_publication(tables: Sequence[str]) -> str:
    """Publish every change of the tables."""
    return f"create publication {PUBLICATION} for table {_tables(tables)}"


def create_feed() -> str:
    """Publish what steps change, and what gives names to it."""
    return f"create publication {FEED} for table {_tables(FEED_TABLES)}"


def extend_publication(tables: Sequence[str]) -> str:
    """Publish the changes of more tables."""
    return f"alter publication {PUBLICATION} add table {_tables(tables)}"


def drop_publication() -> str:
    """Publish nothing any more."""
    return f"drop publication if exists {PUBLICATION}"


def empty(tables: Sequence[str]) -> str:
    """Make room for a copy."""
    return f"truncate {_tables(tables)}"


def create_slot(name: str) -> str:
    """Keep the log, from here on, for whoever reads this slot."""
    return f"select pg_create_logical_replication_slot({literal(name)}, 'pgoutput')"


def draft_slot(name: str) -> str:
    """Keep the log from here on, for as long as this session lasts."""
    return f"select pg_create_logical_replication_slot({literal(name)}, 'pgoutput', true)"


def copy_slot(source: str, name: str) -> str:
    """Keep the log from where another slot keeps it, for good."""
    return f"select pg_copy_logical_replication_slot({literal(source)}, {literal(name)}, false)"


def drop_slot(name: str) -> str:
    """Keep nothing for whoever read this slot."""
    return f"select pg_drop_replication_slot({literal(name)})"


def advance_slot(name: str, lsn: int) -> str:
    """Keep only what is later."""
    return f"select pg_replication_slot_advance({literal(name)}, '{lsn_text(lsn)}')"


def subscribe(node: str, source: str, *, copy: bool) -> str:
    """Follow a primary from where the slot is; `source` is its URL with credentials.

    With the default, synchronous_commit = off, a follower confirms a commit only when some later
    write happens to flush it: a quorum commit then takes 200 ms instead of one.
    """
    return (
        f"create subscription {identifier(slot(node))}\n"
        f"    connection {literal(source)}\n"
        f"    publication {PUBLICATION}\n"
        f"    with (slot_name = {literal(slot(node))}, create_slot = false,"
        f" copy_data = {'true' if copy else 'false'}, synchronous_commit = 'local')"
    )


def enable(subscription: str) -> str:
    """Let a subscription go on."""
    return f"alter subscription {identifier(subscription)} enable"


def disable(subscription: str) -> str:
    """Stop a subscription: its primary hears no confirmation any more."""
    return f"alter subscription {identifier(subscription)} disable"


def refresh(subscription: str, *, copy: bool) -> str:
    """Take in the tables that were published since, by way of a connection to the primary."""
    return (
        f"alter subscription {identifier(subscription)} refresh publication"
        f" with (copy_data = {'true' if copy else 'false'})"
    )


def unsubscribe(subscription: str) -> list[str]:
    """Forget a subscription without a word to its primary, which may be gone; keeps its slot."""
    return [
        disable(subscription),
        f"alter subscription {identifier(subscription)} set (slot_name = none)",
        f"drop subscription {identifier(subscription)}",
    ]


def standby_names(size: int, nodes: Sequence[str]) -> str:
    """Answer commits when `size` of the nodes have confirmed them; with 0 at once."""
    if not size:
        return "alter system reset synchronous_standby_names"
    names = ", ".join(f'"{slot(node)}"' for node in sorted(nodes))
    return f"alter system set synchronous_standby_names = {literal(f'ANY {size} ({names})')}"


RELOAD = "select pg_reload_conf()"


def read_only(database: str, *, on: bool) -> str:
    """Tell clients that choose among hosts (target_session_attrs) whether this one takes writes."""
    change = (
        "set default_transaction_read_only = on" if on else "reset default_transaction_read_only"
    )
    return f"alter database {identifier(database)} {change}"


def terminate(pid: int) -> str:
    """End a session."""
    return f"select pg_terminate_backend({pid})"


def fence(epoch: int) -> str:
    """Refuse writes on a primary that an epoch has passed by."""
    return f"select queen._fence({epoch})"


def follow(epoch: int, node: str) -> str:
    """Be a follower."""
    return f"select queen._follow({epoch}, {literal(node)})"


def lead(epoch: int, node: str) -> str:
    """Be the primary."""
    return f"select queen._lead({epoch}, {literal(node)})"


def begin(epoch: int) -> str:
    """Be the primary of a log that has no other node."""
    return f"select queen._begin({epoch})"


def reinstate() -> str:
    """Take writes again, after a hand-over that did not come about."""
    return "update queen.epoch set role = 'primary', fenced_by = null where role = 'fenced'"


def retire() -> str:
    """Belong to no log, and take no writes."""
    return "update queen.epoch set role = 'fenced', node = null"


def name_node(node: str) -> str:
    """Give a primary its name."""
    return f"update queen.epoch set node = {literal(node)}"


def enter_node(node: str, host: str, port: int, *, joined: bool = False) -> str:
    """Enter a node into the log's table, or its new address."""
    joined_at = "clock_timestamp()" if joined else "null"
    return (
        "insert into queen.nodes (name, host, port, joined_at)"
        f" values ({literal(node)}, {literal(host)}, {port}, {joined_at})"
        " on conflict (name) do update set host = excluded.host, port = excluded.port"
    )


def join_nodes(nodes: Sequence[str]) -> str:
    """Note that nodes have everything; written even where it is noted already."""
    return (
        "update queen.nodes set joined_at = coalesce(joined_at, clock_timestamp())"
        f" where name in ({_literals(nodes)})"
    )


def part_nodes(nodes: Sequence[str]) -> str:
    """Note that nodes have not everything, or not what the others have."""
    return f"update queen.nodes set joined_at = null where name in ({_literals(nodes)})"


def forget_node(node: str) -> str:
    """Take a node out of the log's table."""
    return f"delete from queen.nodes where name = {literal(node)}"


def count_nodes(nodes: Sequence[str]) -> str:
    """Let these nodes, and no others, count for the quorum."""
    return f"update queen.nodes set synchronous = coalesce(name in ({_literals(nodes)}), false)"


def set_quorum(size: int) -> str:
    """Note how many followers each step waits for."""
    return f"update queen.quorum set size = {size}"


def _literals(texts: Sequence[str]) -> str:
    return ", ".join(map(literal, texts)) or "null"


def move_aside(schema: str) -> str:
    """Keep a schema under another name."""
    return f"alter schema queen rename to {identifier(schema)}"


def lsn_text(lsn: int) -> str:
    """Return a place in the log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the place in the log that a text like 0/16B3748 names."""
    high, slash, low = text.partition("/")
    if not slash:
        raise ValueError(f"{text} is not a place in the log, like 0/16B3748")
    return int(high, 16) << 32 | int(low, 16)


def place_tenant(tenant: str, group: str) -> str:
    """Let a tenant live in a group."""
    return (
        "insert into queen.placements (tenant, log_group)"
        f" values ({literal(tenant)}, {literal(group)}) on conflict (tenant) do update"
        " set log_group = excluded.log_group, moved_from = null, placed_at = clock_timestamp()"
    )


def unplace_tenant(tenant: str, origin: str) -> str:
    """Let a tenant live nowhere, on its way from a group."""
    return (
        "insert into queen.placements (tenant, moved_from)"
        f" values ({literal(tenant)}, {literal(origin)}) on conflict (tenant) do update"
        " set log_group = null, moved_from = excluded.moved_from, placed_at = clock_timestamp()"
    )


def tenant_rows(table: str, columns: Sequence[str], old: int, new: int, shift: int) -> str:
    """Select a tenant's rows of a table as they are to be elsewhere: its id, and shifted ids."""
    chosen = []
    for column in columns:
        if column == "tenant_id":
            chosen.append(f"{new}::integer")
        elif column in SHIFTED or (column == "id" and table in WITH_IDS):
            chosen.append(f"t.{identifier(column)} + {shift}::bigint")
        elif column == "registered_xid":
            # Transactions are numbered by each server for itself.
            chosen.append("null::xid8")
        else:
            chosen.append(f"t.{identifier(column)}")
    return f"select {', '.join(chosen)} from queen.{identifier(table)} t where {_of(table, old)}"


def forget_rows(table: str, tenant_id: int) -> str:
    """Delete a tenant's rows of a table."""
    return f"delete from queen.{identifier(table)} t where {_of(table, tenant_id)}"


def _of(table: str, tenant_id: int) -> str:
    queues = f"(select q.id from queen.queues q where q.tenant_id = {tenant_id})"
    if table in ("queues", "kv", "timers"):
        return f"t.tenant_id = {tenant_id}"
    if table in ("partitions", "consumer_groups", "dead_letters"):
        return f"t.queue_id in {queues}"
    return f"t.partition_id in (select p.id from queen.partitions p where p.queue_id in {queues})"


# Numbers that come next are beyond those that have arrived.
AFTER_ARRIVAL = """
select setval('queen.queues_id_seq', greatest(max(t.id), s.last_value))
from queen.queues t cross join queen.queues_id_seq s group by s.last_value;
select setval('queen.partitions_id_seq', greatest(max(t.id), s.last_value))
from queen.partitions t cross join queen.partitions_id_seq s group by s.last_value;
select setval('queen.consumer_groups_id_seq', greatest(max(t.id), s.last_value))
from queen.consumer_groups t cross join queen.consumer_groups_id_seq s group by s.last_value;
select setval('queen.kv_version', greatest(max(k.version), s.last_value))
from queen.kv k cross join queen.kv_version s group by s.last_value
"""
