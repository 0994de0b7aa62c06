"""Followers: how a node becomes one, stops being one, and counts for a quorum.

The order of things makes each step safe to interrupt. A follower's tables are emptied in the
transaction that subscribes them. The table of nodes says that a node counts for the quorum before
the server counts it, and that it does not after, so that a promotion never trusts too few.
"""

import asyncio
import itertools
import re
import time

import msgspec

from queen_pg import migrate
from queen_pg.log import standby, statement
from queen_pg.log.node import (
    POLL_SECONDS,
    SERVER_VERSION_MIN,
    Cluster,
    LogError,
    Node,
    confirmed,
)

NAME = re.compile(r"[a-z0-9_]{1,48}\Z")
CONFIRM_SECONDS = 30.0
DRAIN_SECONDS = 5.0
PROGRESS_SECONDS = 1.0


Address = tuple[str, int]


class Naming(msgspec.Struct, frozen=True):
    """What an operator may choose when a node is added, and what is chosen otherwise.

    `primary` and `source` are the primary's name and its address, as the others reach it.
    """

    name: str | None = None
    primary: str | None = None
    source: Address | None = None


DEFAULT_NAMING = Naming()


async def add(cluster: Cluster, address: Address, naming: Naming = DEFAULT_NAMING) -> None:
    """Make a node a follower, with a copy of everything; or finish what was begun."""
    host, port = address
    primary = cluster.require_primary()
    follower = await _new_follower(cluster, primary, address)
    name = follower.sight.name or naming.name or default_name(host, port)
    if not NAME.match(name):
        raise LogError(f"a node's name is of a-z, 0-9 and _, at most 48: not {name}")
    if name in cluster.members and follower.sight.name != name:
        member = cluster.members[name]
        if (member.host, member.port) != (host, port):
            raise LogError(f"another node is named {name}; choose one with --name")
    await cluster.lock()
    _check_rights(primary, follower)
    # First: among databases that all say they lead, brokers go by who has a name.
    await _register(cluster, primary, name, address, naming)
    await _upgrade(follower)
    for node in (primary, follower):
        await _publish(node, primary.facts.tables)
    await _subscribe(cluster, primary, follower, name)
    await wait_for_copy(cluster, primary, follower)
    await _take_in(cluster, primary, name)


async def _new_follower(cluster: Cluster, primary: Node, address: Address) -> Node:
    host, port = address
    follower = await cluster.reach(host, port)
    if follower is primary:
        raise LogError(f"{host}:{port} is the primary itself")
    if follower.sight.recovering:
        raise LogError(f"{host}:{port} is a physical standby: it follows as it is")
    if follower.sight.role == "follower" and follower.epoch < primary.epoch:
        raise LogError(
            f"{follower.name} follows an earlier primary; finish that promotion first:"
            " queen-pg replica promote"
        )
    if follower.sight.role == "follower" or not follower.facts.installed:
        return follower
    # A broker that sees a fresh database beside a later epoch has fenced it, perhaps.
    [row] = await follower.fetch("log_holds")
    if row["holds"]:
        raise LogError(
            f"{follower.name} holds data of its own; to keep them under another name and follow,"
            f" say: queen-pg replica rejoin {host}:{port}"
        )
    return follower


def default_name(host: str, port: int) -> str:
    """Return a name for the node at an address."""
    text = re.sub(r"[^a-z0-9]+", "_", f"{host}_{port}".lower()).strip("_")
    return text[-48:].strip("_")


def _check_rights(primary: Node, follower: Node) -> None:
    """Raise LogError, naming each, for what is missing on both servers."""
    missing = []
    for node in (primary, follower):
        facts = node.facts
        if facts.server_version < SERVER_VERSION_MIN:
            missing.append((node, "PostgreSQL 15 or later"))
        if facts.wal_level != "logical":
            missing.append((node, "wal_level = logical, and a restart"))
        if not facts.may_publish:
            missing.append((node, statement.RIGHT_TO_PUBLISH))
        if not facts.may_replicate:
            missing.append((node, statement.RIGHT_TO_REPLICATE))
    facts = follower.facts
    if not facts.may_subscribe:
        old = facts.server_version < 160_000
        missing.append(
            (follower, statement.RIGHT_TO_SUBSCRIBE_15 if old else statement.RIGHT_TO_SUBSCRIBE)
        )
    if not facts.may_see_progress:
        missing.append((follower, statement.RIGHT_TO_SEE))
    if missing:
        lines = "\n".join(
            f"  on {node.name}: " + right.format(role=node.facts.role, database=node.facts.database)
            for node, right in missing
        )
        raise LogError(
            f"some things are missing; QUEEN_PG_ADMIN_URL may name another role:\n{lines}"
        )


async def _upgrade(node: Node) -> None:
    if node.dry:
        node.show("-- queen-pg migrate")
        return
    await migrate.upgrade_host(node.owner_url)
    await node.look()


async def _register(
    cluster: Cluster, primary: Node, name: str, address: Address, naming: Naming
) -> None:
    """Enter both nodes into the log's table, and name the primary when it is its first follower."""
    host, port = naming.source or (primary.host, primary.port)
    if not host:
        raise LogError("name the primary's host in QUEEN_PG_URL, as followers reach it")
    own = primary.sight.name or naming.primary or default_name(primary.host, primary.port)
    texts = []
    if primary.sight.name is None:
        texts.append(statement.name_node(own))
    if own not in cluster.members or naming.source is not None:
        texts.append(statement.enter_node(own, host, port, joined=True))
    if name not in cluster.members:
        texts.append(statement.enter_node(name, *address))
    if texts:
        await primary.batch(texts)
    if not cluster.dry:
        await cluster.refresh()


async def _publish(node: Node, tables: list[str]) -> None:
    """Have every table of ours in the publication."""
    unpublished = [table for table in tables if table not in node.facts.published]
    if not node.facts.publishes:
        await node.run(statement.create_publication(tables), right=statement.RIGHT_TO_PUBLISH)
    elif unpublished:
        await node.run(statement.extend_publication(unpublished), right=statement.RIGHT_TO_PUBLISH)


async def _subscribe(cluster: Cluster, primary: Node, follower: Node, name: str) -> None:
    subscription = follower.facts.subscription
    if subscription is None:
        # What it kept for others is of a copy that is no more.
        await _drop_slots(cluster, follower)
        await fresh_slot(primary, name)
        await follower.batch(copy_texts(cluster, primary, follower, name))
        await mark_read_only(follower)
        return
    if not follower.facts.enabled:
        await follower.run(statement.enable(subscription))
    await follower.run(statement.refresh(subscription, copy=True))


def copy_texts(cluster: Cluster, primary: Node, follower: Node, name: str) -> list[str]:
    """Return what makes a node without a subscription a follower, in one transaction."""
    tables = follower.facts.tables or primary.facts.tables
    return [
        statement.empty(tables),
        statement.follow(primary.epoch, name),
        statement.subscribe(name, cluster.source(primary), copy=True),
    ]


async def fresh_slot(primary: Node, name: str) -> None:
    """Keep the log for a follower from here on; what was kept for it before is of no use."""
    slot = statement.slot(name)
    if slot in primary.facts.slots:
        await primary.run(statement.drop_slot(slot), right=statement.RIGHT_TO_REPLICATE)
    await primary.run(statement.create_slot(slot), right=statement.RIGHT_TO_REPLICATE)


async def mark_read_only(node: Node, *, on: bool = True) -> None:
    """Tell clients that choose among hosts, where our role may say so."""
    if node.facts.owns_database:
        await node.run(statement.read_only(node.facts.database, on=on))


async def wait_for_copy(cluster: Cluster, primary: Node, follower: Node) -> None:
    """Say how far the copy is until it is there."""
    if cluster.dry:
        return
    await follower.look()
    [expected] = await primary.fetch("log_bytes")
    shown = time.monotonic()
    errors: int | None = None
    while True:
        [row] = await follower.fetch("log_copy", follower.facts.subscription_id)
        if row["tables"] and row["copied"] == row["tables"]:
            cluster.say(f"{follower.name}: copied, {_size(row['bytes'])}")
            return
        if errors is not None and row["errors"] > errors:
            raise LogError(
                f"the copy to {follower.name} fails; its server's log says why. It goes on by"
                " itself once that is mended: repeat this command then"
            )
        errors = row["errors"]
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            cluster.say(
                f"{follower.name}: {row['copied']} of {row['tables']} tables,"
                f" {_size(row['bytes'])} of about {_size(expected['bytes'])}"
            )
        await asyncio.sleep(POLL_SECONDS)


async def _take_in(cluster: Cluster, primary: Node, name: str) -> None:
    """Let a follower that has everything count, and keep the log for the others."""
    await touch(cluster, primary, [name])
    if cluster.quorum:
        if not cluster.dry:
            await cluster.refresh()
        await set_quorum(cluster, cluster.quorum)
    elif not cluster.dry:
        cluster.say(
            "replication is asynchronous: an answered step may be lost with the primary;"
            " queen-pg replica quorum 1 changes that"
        )
    await standby.arrange(cluster)


async def touch(cluster: Cluster, primary: Node, names: list[str]) -> None:
    """Send followers that have everything a first step, so that their progress can be told."""
    await primary.run(statement.join_nodes(names))
    if cluster.dry:
        return
    lsn = await primary.position()
    for name in names:
        if not await confirmed(primary, name, lsn, CONFIRM_SECONDS):
            raise LogError(f"{name} does not follow; its server's log says why")


async def set_quorum(cluster: Cluster, size: int) -> None:
    """Have steps answered when `size` followers have them on disk; 0: at once."""
    primary = cluster.require_primary()
    names = joined(cluster, primary)
    if size > len(names):
        raise LogError(f"there are {len(names)} followers with everything, fewer than {size}")
    if not primary.facts.may_set_quorum:
        right = statement.RIGHT_TO_QUORUM.format(role=primary.facts.role)
        raise LogError(
            f"replication stays asynchronous: on {primary.name}, the role {primary.facts.role} may"
            f" not set synchronous_standby_names. A superuser may allow it ({right}); a managed"
            " service may not"
        )
    if size:
        await primary.run(statement.count_nodes(names))
    if size < cluster.quorum:
        await primary.run(statement.set_quorum(size))
    await enforce(primary, size, names)
    if size > cluster.quorum:
        await primary.run(statement.set_quorum(size))
    if not size:
        await primary.run(statement.count_nodes([]))
    if not cluster.dry:
        await cluster.refresh()
        cluster.say(
            f"a step is answered when {size} of {len(names)} followers have it on disk too"
            if size
            else "replication is asynchronous: an answered step may be lost with the primary"
        )


def joined(cluster: Cluster, primary: Node) -> list[str]:
    """Return the followers that have everything."""
    return sorted(
        member.name
        for member in cluster.members.values()
        if member.joined and member.name != primary.name
    )


async def enforce(node: Node, size: int, names: list[str]) -> None:
    """Have a server wait for its followers, and wait until it does."""
    await node.run(statement.standby_names(size, names), right=statement.RIGHT_TO_QUORUM)
    await node.run(statement.RELOAD, right=statement.RIGHT_TO_QUORUM)
    while not node.dry:
        await node.look()
        if bool(node.facts.standby_names) == bool(size):
            return
        await asyncio.sleep(POLL_SECONDS)


async def remove(cluster: Cluster, name: str) -> None:
    """Let a follower go; its copy stays, fenced."""
    primary = cluster.require_primary()
    follower = cluster.node(name)
    if name == primary.sight.name:
        raise LogError(f"{name} is the primary; promote another node first")
    if name not in cluster.members and follower is None:
        cluster.say(f"there is no node {name}")
        return
    await cluster.lock()
    rest = [other for other in joined(cluster, primary) if other != name]
    if cluster.quorum > len(rest):
        raise LogError(
            f"a quorum of {cluster.quorum} needs {name}; lower it first:"
            f" queen-pg replica quorum {len(rest)}"
        )
    if cluster.quorum:
        await enforce(primary, cluster.quorum, rest)
    if follower is not None and follower.facts.subscription is not None:
        await follower.batch(
            [*statement.unsubscribe(follower.facts.subscription), statement.retire()]
        )
    for node in (primary, *cluster.followers):
        if node is follower:
            await _drop_slots(cluster, node)
        else:
            await drop_slot_of(node, name)
    await primary.run(statement.forget_node(name))
    if not cluster.dry:
        await cluster.refresh()
        await standby.arrange(cluster)


async def _drop_slots(cluster: Cluster, node: Node) -> None:
    """Keep nothing on a node for any other."""
    for member in cluster.members:
        await drop_slot_of(node, member)


async def drop_slot_of(node: Node, name: str) -> None:
    """Keep nothing for a follower that is gone, not even while it still reads."""
    slot = statement.slot(name)
    if slot not in node.facts.slots:
        return
    row = await node.fetchrow("log_confirmed", slot)
    if row is not None and row["active_pid"] is not None:
        await node.run(statement.terminate(row["active_pid"]))
        while not node.dry:
            row = await node.fetchrow("log_confirmed", slot)
            if row is None or not row["active"]:
                break
            await asyncio.sleep(POLL_SECONDS)
    await node.run(statement.drop_slot(slot), right=statement.RIGHT_TO_REPLICATE)


async def rejoin(cluster: Cluster, address: Address, name: str | None = None) -> None:
    """Bring a former primary back as a follower; what it holds stays under another name."""
    host, port = address
    primary = cluster.require_primary()
    node = await cluster.reach(host, port)
    if node is primary:
        raise LogError(f"{node.name} is the primary")
    name = node.sight.name or name or _name_at(cluster, host, port)
    subscription = node.facts.subscription
    if node.sight.role != "follower" and node.facts.installed:
        _check_rights(primary, node)
        await cluster.lock()
        if node.facts.standby_names:
            # First: nobody follows it, so what it commits would wait for ever.
            await enforce(node, 0, [])
        if node.sight.leads:
            await node.run(statement.fence(primary.epoch))
        await drain(node)
        await _drop_slots(cluster, node)
        aside = _unused(f"queen_before_epoch_{primary.epoch}", node.facts.kept)
        await node.batch(
            [
                *(statement.unsubscribe(subscription) if subscription is not None else []),
                statement.drop_publication(),
                statement.move_aside(aside),
            ],
            right=statement.RIGHT_TO_PUBLISH,
        )
        cluster.say(
            f"what {node.name} had, and perhaps nobody else, is in its schema {aside};"
            " drop it once you have looked"
        )
        if cluster.dry:
            # What is shown next is for the node as it would be then.
            node.facts = msgspec.structs.replace(
                node.facts, installed=False, publishes=False, published=[], subscription=None
            )
        else:
            await node.look()
    await add(cluster, address, Naming(name))


def _unused(name: str, taken: list[str]) -> str:
    """Return a name like this one that is not taken."""
    candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _name_at(cluster: Cluster, host: str, port: int) -> str | None:
    for member in cluster.members.values():
        if (member.host, member.port) == (host, port):
            return member.name
    return None


async def until_stopped(node: Node) -> None:
    """Wait until a disabled subscription applies nothing any more."""
    while not node.dry:
        [row] = await node.fetch("log_worker", node.facts.subscription_id)
        if not row["workers"]:
            return
        await asyncio.sleep(POLL_SECONDS)


async def drain(node: Node) -> None:
    """Wait for every transaction that runs, and end those that do not end."""
    if node.dry:
        return
    clock = asyncio.get_running_loop().time
    deadline = clock() + DRAIN_SECONDS
    running = {row["transaction"] for row in await node.fetch("log_running")}
    while running:
        rows = [row for row in await node.fetch("log_running") if row["transaction"] in running]
        if not rows:
            return
        if clock() >= deadline:
            for row in rows:
                await node.run(statement.terminate(row["pid"]), right=statement.RIGHT_TO_TERMINATE)
            deadline = clock() + DRAIN_SECONDS
        await asyncio.sleep(POLL_SECONDS)


def _size(number: int) -> str:
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
