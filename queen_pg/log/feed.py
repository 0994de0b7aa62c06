"""The log as a feed: each committed step as one entry, in the order of the commits.

An ordinary connection looks into a logical slot (`pg_logical_slot_peek_binary_changes`), so nothing
is lost when the reader dies: what has been printed is confirmed later, a stretch behind, and a
reader that lost lines may ask for them again, from the LSN of the last entry that it has.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec

from queen_pg import sql
from queen_pg.log import statement
from queen_pg.log.node import LogError
from queen_pg.log.pgoutput import UNCHANGED, Begin, Change, Commit, Decoder

MESSAGES_MAX = 2000
KEPT_ENTRIES = 1000
KEPT_BYTES = 16 * 1024 * 1024
POLL_SECONDS = 0.25
# What is remembered of names and cursors: a long tail must not grow with the number of entities.
REMEMBERED_MAX = 200_000

Json = dict[str, Any]


class Seen(msgspec.Struct, frozen=True):
    """A transaction that the slot still keeps; `messages` is what it takes to look past it."""

    lsn: int
    messages: int
    printed: bool


class Names:
    """What the ids in the log stand for: learned from the log itself, or asked for."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._queues: dict[str, tuple[str, str]] = {}
        self._partitions: dict[str, tuple[str, str]] = {}
        self._groups: dict[str, str] = {}

    def learn(self, change: Change) -> None:
        """Remember a row that gives a name to an id."""
        if len(self._partitions) > REMEMBERED_MAX:
            self._partitions.clear()
        row = change.row
        if change.kind == "D":
            return
        match change.table:
            case "queues":
                self._queues[row["id"]] = row["name"], row["tenant_id"]
            case "partitions":
                self._partitions[row["id"]] = row["queue_id"], row["name"]
            case "consumer_groups":
                self._groups[row["id"]] = row["name"]

    async def look_up(self, changes: Sequence[Change]) -> None:
        """Ask for the names that these changes need and that are not known yet."""
        partitions = {
            change.row["partition_id"]
            for change in changes
            if change.table in ("messages", "cursors")
        } - self._partitions.keys()
        groups = {
            change.row["group_id"] for change in changes if change.table == "cursors"
        } - self._groups.keys()
        queues = {queue for queue, _ in self._partitions.values()} - self._queues.keys()
        if not partitions and not groups and not queues:
            return
        for row in await self._connection.fetch(
            sql.read("reads/feed_names"),
            [int(identity) for identity in partitions],
            [int(identity) for identity in groups],
            [int(identity) for identity in queues],
        ):
            match row["kind"]:
                case "queue":
                    self._queues[row["id"]] = row["name"], row["parent"]
                case "partition":
                    self._partitions[row["id"]] = row["parent"], row["name"]
                case "group":
                    self._groups[row["id"]] = row["name"]

    def place(self, partition_id: str) -> Json:
        """Return the names of a partition; null for those that are gone."""
        queue_id, partition = self._partitions.get(partition_id, ("", None))
        queue, tenant = self._queues.get(queue_id, (None, "1"))
        return {**_tenant(tenant), "queue": queue, "partition": partition}

    def group(self, group_id: str) -> str | None:
        """Return the name of a consumer group, or None when it is gone."""
        return self._groups.get(group_id)


class Feed:
    """Turns changes into entries."""

    def __init__(self, names: Names, epoch: int) -> None:
        self._names = names
        self._epoch = epoch
        self._committed: dict[tuple[str, str], str] = {}

    async def entry(self, begin: Begin, changes: Sequence[Change], commit: Commit) -> str | None:
        """Return a step's line, or None for a transaction that was no step."""
        for change in changes:
            self._names.learn(change)
        await self._names.look_up(changes)
        acks = list(self._acks(changes))
        pushes = [self._push(c.row) for c in changes if (c.kind, c.table) == ("I", "messages")]
        kv = [_kv(change) for change in changes if change.table == "kv"]
        timers = [_timer(change) for change in changes if change.table == "timers"]
        if not (acks or pushes or kv or timers):
            return None
        parts = {
            "lsn": statement.lsn_text(commit.end_lsn),
            "time": _iso(begin.committed_at),
            "epoch": self._epoch,
            "acks": acks,
            "pushes": pushes,
            "kv": kv,
            "timers": timers,
        }
        return msgspec.json.encode(parts).decode()

    def _acks(self, changes: Sequence[Change]) -> Iterator[Json]:
        """An ack is a cursor whose committed offset moves; a claim changes a cursor too."""
        last = {
            (change.row["partition_id"], change.row["group_id"]): change.row
            for change in changes
            if change.table == "cursors" and change.kind != "D"
        }
        if len(self._committed) > REMEMBERED_MAX:
            self._committed.clear()
        for key, row in last.items():
            before = self._committed.get(key)
            self._committed[key] = row["committed_offset"]
            if before == row["committed_offset"]:
                continue
            if before is None and not _moved(row):
                continue
            yield {
                **self._names.place(row["partition_id"]),
                "partitionId": row["partition_id"],
                "consumerGroup": self._names.group(row["group_id"]),
                "committedOffset": int(row["committed_offset"]),
            }

    def _push(self, row: Json) -> Json:
        return {
            **self._names.place(row["partition_id"]),
            "partitionId": row["partition_id"],
            "offset": int(row["message_offset"]),
            "id": row["id"],
            "transactionId": row["transaction_id"],
            "payload": msgspec.Raw(row["payload"].encode()),
        }


def _moved(row: Json) -> bool:
    """Whether a cursor of which nothing is known has moved: not by a claim of what comes next."""
    return row["lease_id"] is None or int(row["committed_offset"]) >= int(row["batch_start_offset"])


def _kv(change: Change) -> Json:
    row = change.row
    key = {**_tenant(row["tenant_id"]), "ns": row["namespace"], "key": row["key"]}
    if change.kind == "D":
        return {"op": "delete", **key}
    value = row["value"]
    return {
        "op": "put",
        **key,
        "version": int(row["version"]),
        **({} if value is UNCHANGED else {"value": msgspec.Raw(value.encode())}),
        "expiresAt": _moment(row["expires_at"]),
    }


def _timer(change: Change) -> Json:
    row = change.row
    key = {**_tenant(row["tenant_id"]), "queue": row["queue"], "timerKey": row["timer_key"]}
    if change.kind == "D":
        # Fired or cancelled: when it fired, its message is among the pushes.
        return {"op": "remove", **key}
    payload = row["payload"]
    return {
        "op": "schedule" if change.kind == "I" else "change",
        **key,
        "partition": row["partition"],
        "transactionId": row["transaction_id"],
        "deliverAt": _moment(row["deliver_at"]),
        **({} if payload is UNCHANGED else {"payload": msgspec.Raw(payload.encode())}),
    }


def _tenant(tenant_id: str) -> Json:
    """The first tenant is meant where none is named."""
    return {} if tenant_id == "1" else {"tenantId": int(tenant_id)}


def _moment(text: str | None) -> str | None:
    if text is None or text == "infinity":
        return None
    return _iso(datetime.fromisoformat(text))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


async def create(connection: asyncpg.Connection, slot: str) -> None:
    """Keep the log for a feed from now on, unless it is kept already."""
    [row] = await connection.fetch(sql.read("reads/feed_ready"), slot, statement.FEED)
    if not row["publishes"]:
        await connection.execute(statement.create_feed())
    if not row["kept"]:
        await connection.execute(statement.create_slot(slot))


class Tail:
    """Reads a slot from where it was confirmed, or from a later place, to the end and on."""

    def __init__(self, connection: asyncpg.Connection, slot: str, epoch: int) -> None:
        self._connection = connection
        self._slot = slot
        self._feed = Feed(Names(connection), epoch)
        self._kept: deque[Seen] = deque()
        self._after = 0
        self._at_end = False

    async def begin(self, after: int | None) -> None:
        """Take the slot; raise LogError when it is not there, or past the place asked for."""
        row = await self._connection.fetchrow(sql.read("reads/feed_slot"), self._slot)
        if row is None:
            raise LogError(f"there is no slot {self._slot}; --create makes it")
        if row["wal_status"] == "lost":
            raise LogError(f"the slot {self._slot} has lost its place: it was behind for too long")
        if after is not None and row["lsn"] > after:
            raise LogError(
                f"the slot {self._slot} has been confirmed up to"
                f" {statement.lsn_text(row['lsn'])}: what is before is gone"
            )
        self._after = row["lsn"] if after is None else after

    async def run(self, write: Callable[[str], None], *, follow: bool) -> None:
        """Write a line for each step."""
        while True:
            end = await self._connection.fetchval(sql.read("reads/log_position"))
            written = 0
            async for line in self._lines():
                write(line)
                written += 1
            await self._confirm(end)
            if not written and self._at_end:
                if not follow:
                    return
                await asyncio.sleep(POLL_SECONDS)

    async def _lines(self) -> AsyncIterator[str]:
        seen = self._kept[-1].lsn if self._kept else 0
        messages_max = MESSAGES_MAX + sum(kept.messages for kept in self._kept)
        rows = await self._connection.fetch(
            sql.read("reads/feed_changes"), self._slot, messages_max, statement.FEED
        )
        self._at_end = len(rows) < messages_max
        decoder = Decoder()
        begin: Begin | None = None
        messages = 0
        changes: list[Change] = []
        for row in rows:
            messages += 1
            for message in decoder.decode(row["data"]):
                if isinstance(message, Begin):
                    begin, messages, changes = message, 1, []
                elif isinstance(message, Change):
                    changes.append(message)
                elif begin is not None and message.end_lsn > seen:
                    printed = message.end_lsn <= self._after
                    if not printed:
                        line = await self._feed.entry(begin, changes, message)
                        if line is not None:
                            yield line
                            printed = True
                    self._kept.append(Seen(message.end_lsn, messages, printed))

    async def _confirm(self, end: int) -> None:
        """Let the server forget what is far enough behind; `end` is where its log was."""
        confirmed = 0
        printed = sum(kept.printed for kept in self._kept)
        while self._kept:
            first = self._kept[0]
            if first.printed and printed <= KEPT_ENTRIES and end - first.lsn <= KEPT_BYTES:
                break
            printed -= first.printed
            confirmed = self._kept.popleft().lsn
        if not self._kept and self._at_end:
            # Whatever was committed before is no step, or long printed.
            confirmed = end
        if confirmed:
            await self._connection.execute(statement.advance_slot(self._slot, confirmed))
