"""Standby slots: on each follower a slot for each other one, so that a promotion copies nothing.

Followers differ by a few steps when their primary dies. Whoever is promoted has the most; the
others go on from its log at exactly the step that each of them lacks. For that it must have kept
that log since a place where the other had everything before. Two facts make such places findable:
a follower applies steps in its primary's order, and its own log says of each from which place in
its primary's log it came.

A slot that nobody moves keeps the log until the disk is full. Brokers and `queen-pg failover` move
them (`Mover`), so there are none where the brokers' role may not. A slot that is missing or was
given up costs a copy at the next promotion, and nothing else.
"""

import asyncio
import contextlib
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from queen_pg import leader, sql
from queen_pg.log import statement
from queen_pg.log.node import POLL_SECONDS, Cluster, Node

CATCH_UP_SECONDS = 10.0
ADVANCE_SECONDS = 30.0

# Somebody else is at the slot, or has moved it further.
MOVED_BY_OTHERS = (
    asyncpg.ObjectInUseError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.InvalidParameterValueError,
)


async def arrange(cluster: Cluster) -> None:
    """Give each follower a slot for each other one, and nobody else any."""
    followers = [node for node in cluster.followers if node.facts.subscription is not None]
    if cluster.dry:
        for node in followers:
            node.show("-- a slot for each other follower")
        return
    names = {node.name for node in followers}
    for node in followers:
        await node.look()
        movable = await _movable(node)
        if len(names) > 1 and not movable:
            cluster.say(
                f"{node.name} keeps no log for the other followers, so they need a copy once it is"
                " promoted: the role in QUEEN_PG_URL may not move slots there. It needs: alter role"
                " … replication; grant execute on function pg_replication_origin_progress(text,"
                " boolean) to …"
            )
        wanted = {statement.slot(name) for name in names - {node.name}}
        ours = {statement.slot(name) for name in cluster.members}
        for slot in node.facts.slots:
            if slot in ours - wanted:
                await node.run(statement.drop_slot(slot))
        for other in followers:
            slot = statement.slot(other.name)
            if slot in wanted and slot not in node.facts.slots and movable:
                await _create(node, other)


async def _movable(node: Node) -> bool:
    """Whether brokers, whose role the owner's URL names, may move slots on a node."""
    role = urlsplit(node.owner_url).username
    if role is None:
        return False
    row = await node.fetchrow("log_movable", unquote(role))
    return bool(row and row["movable"])


async def _create(node: Node, other: Node) -> None:
    """Create a slot on a follower from a place before which the other one has everything.

    It is temporary until that is known, so that an interruption leaves none that keeps too little.
    """
    draft = f"{statement.slot(other.name)}_draft"
    await node.run(statement.draft_slot(draft))
    try:
        progress = await node.progress()
        if progress and await _reaches(other, progress):
            await node.run(statement.copy_slot(draft, statement.slot(other.name)))
    finally:
        await node.run(statement.drop_slot(draft))


async def _reaches(follower: Node, lsn: int) -> bool:
    clock = asyncio.get_running_loop().time
    deadline = clock() + CATCH_UP_SECONDS
    while await follower.progress() < lsn:
        if clock() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


class Mover:
    """Moves the slots on followers up to where the others have everything.

    Any number may do so at once. It needs the right to replicate on every node; without it the
    slots do not exist (`arrange`).
    """

    def __init__(self, url: str) -> None:
        self._urls = leader.hosts(url)
        self._connections: dict[str, asyncpg.Connection] = {}

    def close(self) -> None:
        """Close every connection."""
        for url in self._urls:
            self._drop(url)

    async def run(self) -> None:
        """Look at every follower that can be reached, and move what can be moved."""
        # The followers' own logs first, then how far they are: whatever is in a follower's log
        # before `own` came from before `progress`.
        seen = await asyncio.gather(*map(self._look, self._urls))
        found = [(url, row) for url, row in zip(self._urls, seen, strict=True) if row is not None]
        # Only places in one primary's log compare, and an epoch has one.
        progress_of = {(row["epoch"], row["name"]): row["progress"] for _, row in found}
        for url, row in found:
            for name in row["slots"]:
                if progress_of.get((row["epoch"], name), 0) >= row["progress"] > 0:
                    await self._advance(url, statement.slot(name), row["own"])

    async def _look(self, url: str) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(leader.LOOK_SECONDS):
                if url not in self._connections:
                    self._connections[url] = await leader.connect(url)
                connection = self._connections[url]
                row = await connection.fetchrow(sql.read("reads/log_standby"))
                if row is None or not row["slots"]:
                    return None
                progress = await connection.fetchval(
                    sql.read("reads/log_progress"), row["subscription_id"]
                )
                return {**row, "progress": progress}
        except leader.UNREACHABLE:
            self._drop(url)
            return None

    async def _advance(self, url: str, slot: str, lsn: int) -> None:
        try:
            async with asyncio.timeout(ADVANCE_SECONDS):
                await self._connections[url].execute(statement.advance_slot(slot, lsn))
        except MOVED_BY_OTHERS:
            return
        except leader.UNREACHABLE:
            self._drop(url)

    def _drop(self, url: str) -> None:
        connection = self._connections.pop(url, None)
        if connection is not None:
            connection.terminate()


async def position(candidate: Node, follower: str, progress: int) -> int | None:
    """Return the place in a candidate's log before which a follower has everything.

    None when the candidate has not kept its log since there; 0 when its slot is there already.
    """
    slot = statement.slot(follower)
    row = await candidate.fetchrow("log_confirmed", slot)
    if row is None or row["lsn"] is None or row["wal_status"] == "lost":
        return None
    try:
        steps = await candidate.fetch("log_origins", slot, statement.PUBLICATION)
    except asyncpg.PostgresError:
        # Whatever is wrong with it, a copy mends it.
        return None
    found = 0
    came_from = None
    for step in steps:
        data: bytes = step["data"]
        if data[:1] == b"B":
            came_from = None
        elif data[:1] == b"O":
            came_from = int.from_bytes(data[1:9])
        elif came_from is not None and came_from <= progress:
            found = int.from_bytes(data[10:18])
        else:
            break
    return found


async def move(primary: Node, follower: str, place: int) -> None:
    """Move a slot up to a place, unless a broker has moved it further meanwhile."""
    text = statement.advance_slot(statement.slot(follower), place)
    if primary.dry:
        primary.show(f"{text};")
        return
    with contextlib.suppress(asyncpg.ObjectNotInPrerequisiteStateError):
        await primary.attempt(text, ADVANCE_SECONDS)
