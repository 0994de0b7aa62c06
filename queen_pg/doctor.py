"""`queen-pg doctor`: what a database has, what that costs, and what to set."""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal

import asyncpg
import msgspec

from queen_pg import leader, migrate, sql
from queen_pg.config import Settings
from queen_pg.log.slot import slots

Grade = Literal["good", "poor", "bad"]
Row = Mapping[str, Any]

SERVER_VERSION_MIN = 150_000
PRED_LOCKS_PER_TRANSACTION = 2048
PRED_LOCKS_PER_PAGE = 200
PRED_LOCKS_PER_RELATION = 100_000
CLOCK_DIFFERENCE_SECONDS = 1.0
CONNECT_SECONDS = 10.0


class Finding(msgspec.Struct, frozen=True):
    """One line of the report; the advice is empty where there is nothing to do."""

    grade: Grade
    subject: str
    value: str
    advice: str = ""


async def examine(settings: Settings) -> list[Finding]:
    """Look at the database that the settings name; raise what the driver raises when it is away."""
    url = await leader.leading_url(settings.pg_url or "", pooler=settings.pg_pooler)
    connection = await asyncpg.connect(url, timeout=CONNECT_SECONDS)
    try:
        before = time.time()
        row = await connection.fetchrow(sql.read("reads/doctor"))
        middle = (before + time.time()) / 2
        log = [finding async for finding in _log(connection, row)]
    finally:
        await connection.close()
    findings = [*judge(row, middle, settings), *log]
    if row["may_use_schema"] or not row["installed"]:
        findings.append(_schema(await migrate.state(url)))
    return findings


def judge(row: Row, moment: float, settings: Settings) -> list[Finding]:
    """Judge what a server says of itself, and its clock against our moment."""
    return [
        *_server(row),
        *_predicate_locks(row),
        *_durability(row),
        *_connections(row, settings),
        *_rights(row, settings),
        clock(row["clock"] - moment),
    ]


def _server(row: Row) -> Iterator[Finding]:
    version = row["server_version"]
    yield _judge(
        version >= SERVER_VERSION_MIN,
        "bad",
        "server version",
        f"{version // 10_000}.{version % 10_000}",
        f"PostgreSQL {SERVER_VERSION_MIN // 10_000} or later is needed",
    )
    yield _judge(
        not row["in_recovery"],
        "bad",
        "takes writes",
        "no" if row["in_recovery"] else "yes",
        "this is a replica: name its primary, or all hosts, in QUEEN_PG_URL",
    )
    yield _judge(
        row["server_encoding"] == "UTF8",
        "bad",
        "server_encoding",
        row["server_encoding"],
        "create the database with encoding UTF8",
    )
    yield _judge(
        row["wal_level"] == "logical",
        "poor",
        "wal_level",
        row["wal_level"],
        "replicas follow by logical replication: set wal_level = logical and restart",
    )


def _predicate_locks(row: Row) -> Iterator[Finding]:
    per_transaction = row["max_pred_locks_per_transaction"]
    yield _judge(
        per_transaction >= PRED_LOCKS_PER_TRANSACTION,
        "poor",
        "max_pred_locks_per_transaction",
        str(per_transaction),
        "large steps lock whole tables and make others run again:"
        f" set it to {PRED_LOCKS_PER_TRANSACTION} and restart",
    )
    per_relation = row["max_pred_locks_per_relation"]
    # A negative value is a divisor of the limit per transaction.
    effective = per_relation if per_relation >= 0 else per_transaction // -per_relation
    yield _judge(
        effective >= PRED_LOCKS_PER_RELATION,
        "poor",
        "max_pred_locks_per_relation",
        str(per_relation),
        f"a step over more than {effective} partitions locks the whole table:"
        f" set it to {PRED_LOCKS_PER_RELATION} and reload",
    )
    yield _judge(
        row["max_pred_locks_per_page"] >= PRED_LOCKS_PER_PAGE,
        "poor",
        "max_pred_locks_per_page",
        str(row["max_pred_locks_per_page"]),
        "steps lock neighbours on the same page, which then run again:"
        f" set it to {PRED_LOCKS_PER_PAGE} and reload",
    )


def _durability(row: Row) -> Iterator[Finding]:
    for name, loss in (
        ("fsync", "a crash of the machine can destroy the database"),
        ("full_page_writes", "a crash of the machine can destroy pages"),
        ("synchronous_commit", "a crash can lose steps that were answered"),
    ):
        yield _judge(row[name] != "off", "bad", name, row[name], f"{loss}: set it to on")


def _connections(row: Row, settings: Settings) -> Iterator[Finding]:
    wanted = 2 * settings.pg_pool_size * settings.workers
    yield _judge(
        wanted <= row["connections"],
        "poor",
        "connections",
        f"{wanted} of {row['connections']}",
        "this broker alone may want more than the server has: lower QUEEN_PG_POOL_SIZE,"
        " or raise max_connections",
    )


def _rights(row: Row, settings: Settings) -> Iterator[Finding]:
    yield _judge(
        not row["superuser"],
        "poor",
        "role",
        row["role"],
        "a superuser is more than the broker needs: give it a role of its own with CREATE on the"
        " database",
    )
    able = row["owns_schema"] if row["installed"] else row["may_create"]
    yield _judge(
        able,
        "bad" if settings.migrate else "poor",
        "may migrate",
        "yes" if able else "no",
        "run `queen-pg migrate` as the owner of the schema queen, or apply `queen-pg migrate --sql`"
        if row["installed"]
        else "grant create on the database to this role, or migrate with another one",
    )
    if row["installed"]:
        yield _judge(
            row["may_use_schema"],
            "bad",
            "may use the schema",
            "yes" if row["may_use_schema"] else "no",
            "grant usage on the schema queen to this role",
        )


async def _log(connection: asyncpg.Connection, row: Row) -> AsyncIterator[Finding]:
    """Judge the replicated log: who takes writes, what an answer promises, what slots keep."""
    seen = await leader.look(connection, "")
    if not row["may_use_schema"] or not seen.epoch or seen.recovering:
        return
    yield _judge(
        seen.role == "primary",
        "bad",
        "role in the log",
        f"{seen.role}, epoch {seen.epoch}",
        "this node takes no writes: name every node of the log in QUEEN_PG_URL",
    )
    members = await connection.fetch(sql.read("reads/log_members"))
    followers = [member for member in members if member["name"] not in (None, seen.name)]
    if followers and seen.role == "primary":
        quorum = members[0]["quorum"]
        yield _judge(
            quorum > 0,
            "poor",
            "replication",
            f"quorum of {quorum}" if quorum else "asynchronous",
            "an answered step may be lost with the primary: queen-pg replica quorum 1",
        )
    found = await slots(connection)
    if found:
        yield _judge(
            found[0].kept_bytes_max >= 0,
            "poor",
            "max_slot_wal_keep_size",
            "no limit" if found[0].kept_bytes_max < 0 else f"{found[0].kept_bytes_max} bytes",
            "a slot that nobody reads fills the disk: set a limit that leaves room",
        )
    for slot in found:
        lost = slot.wal_status == "lost"
        if slot.forgotten or lost:
            yield Finding(
                "bad",
                f"slot {slot.name}",
                "has lost its place" if lost else f"keeps {slot.kept_bytes} bytes",
                f"nobody reads it ({slot.purpose}): drop it with queen-pg log drop, or bring its"
                " reader back",
            )


def clock(difference: float) -> Finding:
    """Judge how far the database's clock is ahead of ours, in seconds."""
    return _judge(
        abs(difference) <= CLOCK_DIFFERENCE_SECONDS,
        "poor",
        "clock difference",
        f"{difference:+.3f} s",
        "leases and timers go by the database's clock; synchronise both machines",
    )


def _schema(state: migrate.State) -> Finding:
    if not state.known:
        return Finding("bad", "schema", f"revision {state.revision}", "install a later release")
    if state.revision is None:
        return Finding("poor", "schema", "not installed", "run `queen-pg migrate`")
    if not state.current:
        return Finding("poor", "schema", f"revision {state.revision}", "run `queen-pg migrate`")
    return Finding("good", "schema", f"revision {state.revision}")


def _judge(good: bool, otherwise: Grade, subject: str, value: str, advice: str) -> Finding:
    return Finding("good", subject, value) if good else Finding(otherwise, subject, value, advice)
