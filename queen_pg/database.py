"""The one door to PostgreSQL: pools, calls, the translation of errors, and the retry of steps.

Every state change runs through `Database.step`, the only place that chooses SERIALIZABLE, and is
repeated by `Database.retry`, the only place that knows what a lost race is worth. A call is one
statement in a transaction of its own, so it costs one round trip. Nothing here reads a message
text: an error is what its SQLSTATE says.

The connections lead to one server in one reign. When another one leads, new pools take their place
and what was in flight on the old ones is given up (`_Reign`).
"""

import asyncio
import contextlib
import random
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg
import msgspec

from queen_pg import plans, turns
from queen_pg.config import Settings
from queen_pg.errors import (
    AnswerLost,
    BadRequest,
    Conflict,
    DuplicateMessage,
    Held,
    Internal,
    NameTooLong,
    NotFound,
    PayloadTooLarge,
    QueenError,
    Refused,
    Signal,
    Stale,
    StorageFull,
    Unavailable,
)
from queen_pg.leader import NotLeading, Sight, Watch, look, sight
from queen_pg.telemetry import INCIDENTS, STEP_RETRIES, STEP_SECONDS, logger

T = TypeVar("T")

# A call without a deadline of its own gets the wire's default.
DEFAULT_DEADLINE_SECONDS = 30.0
# The longest deadline on the wire is 60 s: a statement that outlives it has lost its caller.
STATEMENT_TIMEOUT_MS = 65_000
# An application may hold a partition for as long as its own transaction lasts. A step that meets it
# lets go of what it holds itself, and comes again.
LOCK_WAIT_MS = 250
CONNECT_SECONDS = 10.0
# How long a step that got no answer is run again to find out what became of it. A server that was
# killed is back by then, mostly; and others wait behind it.
DOUBT_SECONDS = 3.0
RELEASE_SECONDS = 1.0
# Transactions of a process that take turns with other processes at one time.
TURNS_MAX = 8
IDLE_CONNECTION_SECONDS = 300.0
# How often it is asked, of several hosts, which one leads.
FOLLOW_SECONDS = 1.0
# What is prepared stays prepared: a connection is replaced when it is idle, not when it is busy.
QUERIES_PER_CONNECTION = 100_000_000
STATEMENTS_PER_CONNECTION = 1024

FIRST_PAUSE_SECONDS = 0.004
LONGEST_PAUSE_SECONDS = 0.1

# Of what an array may be that is sent in its text form.
ELEMENTS = frozenset({"integer", "bigint", "uuid", "boolean"})
WARNING = "01000"
LOST_RACES = ("40001", "40P01")
TRANSACTION_ID_INDEX = "messages_transaction_id_key"

_log = logger("database")


def array(values: Iterable[object]) -> str:
    """Return numbers, UUIDs or truth values as an array's text form, None being a null.

    It is the value of an argument named `name::type[]`. The driver examines each element of a list,
    which takes it longer than all of this.
    """
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


class Repeat(msgspec.Struct, frozen=True):
    """How a step that got no answer is run again, to find out whether it was committed.

    `safe` says whether the ids that the step carries keep it from being done twice, and `tells`
    whether what another run returns is the answer, whatever became of the first.
    """

    safe: Callable[[], Awaitable[bool]]
    tells: Callable[[Any], bool] = lambda _: True


class Database:
    """One broker process's connections; a `deadline` is always an instant on the loop's clock."""

    def __init__(self, settings: Settings) -> None:
        if settings.pg_url is None:
            raise ValueError("a database needs a URL")
        self._settings = settings
        self._watch = Watch(settings.pg_url, pooler=settings.pg_pooler)
        self._texts: dict[tuple[str, tuple[str, ...]], str] = {}
        self._reign: _Reign | None = None
        self._turns = turns.Turns()
        self._doubted = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._planning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open both pools with a connection each; raise Unavailable if the server is not there."""
        try:
            self._reign = await self._begin(await self._leader())
        except Exception as error:
            await self.close()
            raise translate(error, "start", in_flight=False) from error
        self._following = asyncio.create_task(self._follow(), name="leader")
        if not self._settings.pg_pooler:
            # The sessions behind a pooler are not ours.
            self._planning = asyncio.create_task(self._plan(), name="plans")

    async def close(self) -> None:
        """Close every connection, waiting a moment for calls that are still running."""
        for task in (self._following, self._planning):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._following = self._planning = None
        self._watch.close()
        if self._reign is not None:
            await self._reign.close()
            self._reign = None

    async def read(
        self, function: str, /, *, deadline: float | None = None, **arguments: Any
    ) -> list[asyncpg.Record]:
        """Call queen.<function> at READ COMMITTED and return its rows.

        The arguments are the function's, or named `name::type[]` for what `array` returns.
        """
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + DEFAULT_DEADLINE_SECONDS
        return await self._call(False, "read_committed", function, deadline, arguments)

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        """Call queen.<function> as one SERIALIZABLE transaction and return its rows.

        Raises Conflict (or DuplicateMessage), Stale or Refused when the transaction was rolled back
        and should be run again, and a QueenError when it failed for good. After
        Unavailable("outcome_unknown") and Unavailable("timeout"), and after no other error, the
        step may have happened.
        """
        started = time.perf_counter()
        try:
            return await self._call(True, "serializable", function, deadline, arguments)
        finally:
            STEP_SECONDS.labels(function).observe(time.perf_counter() - started)

    def turn(self, partitions: Collection[int]) -> AbstractAsyncContextManager[None]:
        """Have partitions to oneself among processes, where races have been lost lately."""
        contested = self._turns.contested(partitions)
        # A session's lock is none behind a pooler.
        if not contested or self._reign is None or self._settings.pg_pooler:
            return contextlib.nullcontext()
        return self._turns.at(self._reign.turns, contested)

    async def retry(
        self,
        name: str,
        deadline: float,
        attempt: Callable[[], Awaitable[T]],
        on: tuple[type[Signal], ...] = (Conflict, Stale),
        *,
        patient: bool = True,
        repeat: Repeat | None = None,
        partitions: Collection[int] = (),
    ) -> T:
        """Run an attempt again for as long as it loses races; then raise Unavailable("retry").

        `on` names the signals that another run of this attempt can mend. A race that it loses is
        remembered for its `partitions`: there it takes its `turn` from now on. Unless `patient`,
        Held is not mended but raised. An attempt whose answer was lost is run again if there is a
        way to `repeat` it, and is AnswerLost when that does not tell in time.
        """
        clock = asyncio.get_running_loop().time
        longest = FIRST_PAUSE_SECONDS
        doubt: AnswerLost | None = None
        while True:
            try:
                if repeat is not None and doubt is not None and not await repeat.safe():
                    raise doubt
                result = await attempt()
            except on as signal:
                if isinstance(signal, Held) and not patient and doubt is None:
                    raise
                STEP_RETRIES.labels(name, signal.sqlstate).inc()
                if signal.sqlstate in LOST_RACES:
                    self._turns.lost(partitions)
                # With its traceback it would hold this frame, and the frame holds it.
                failure: Exception = signal.with_traceback(None)
            except Unavailable as error:
                if doubt is None:
                    if repeat is None or not isinstance(error, AnswerLost):
                        raise
                    doubt = error.with_traceback(None)
                    deadline = min(deadline, clock() + DOUBT_SECONDS)
                elif error is doubt:
                    raise
                failure = error
            except (QueenError, Signal) as error:
                if doubt is None:
                    raise
                raise doubt from error
            else:
                if repeat is not None and doubt is not None and not repeat.tells(result):
                    raise doubt
                return result
            pause = random.uniform(longest / 4, longest)
            if clock() + pause >= deadline:
                raise doubt or Unavailable(
                    "retry", "the step lost every race; try again"
                ) from failure
            await asyncio.sleep(pause)
            longest = min(2 * longest, LONGEST_PAUSE_SECONDS)

    async def _leader(self) -> Sight:
        """Return the server that leads now; raise NotLeading when none does."""
        if self._watch.several:
            found = await self._watch.leader()
        else:
            found = await sight(self._watch.urls[0], pooler=self._settings.pg_pooler)
        if found is None or not found.leads:
            raise NotLeading("no host takes writes")
        return found

    async def _begin(self, leader: Sight) -> "_Reign":
        reign = _Reign(leader, self._settings, self._doubted.set)
        await reign.open()
        return reign

    async def _follow(self) -> None:
        """Move to another leader whenever there is one."""
        settled = True
        while True:
            wait = FOLLOW_SECONDS if self._watch.several or not settled else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._doubted.wait()
                # Whoever has noticed is not alone, and one look a second is enough.
                await asyncio.sleep(0 if settled else FOLLOW_SECONDS)
            self._doubted.clear()
            try:
                settled = await self._move()
            except Exception as error:
                if settled:
                    _log.warning("leader.lost", error=str(error) or type(error).__name__)
                settled = False

    async def _move(self) -> bool:
        """Look who leads, and go there; return that the connections lead to who leads."""
        leader = await self._leader()
        old = self._reign
        if old is not None and leader.same(old.leader):
            return True
        self._reign = await self._begin(leader)
        if old is not None:
            old.terminate()
        _log.info("leader.followed", node=leader.name, epoch=leader.epoch)
        return True

    async def _plan(self) -> None:
        """Have sessions plan anew whenever the tables have outgrown their plans."""
        made = plans.Plans()
        while (reign := self._reign) is not None:
            # Where the database is away, all sessions will be new ones.
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                async with asyncio.timeout(CONNECT_SECONDS), reign.reads.acquire() as connection:
                    sizes = await plans.sizes(connection)
                if made.outgrown(sizes):
                    reign.outgrown()
            await asyncio.sleep(plans.LOOK_SECONDS)

    async def _call(
        self,
        changes: bool,
        isolation: str,
        function: str,
        deadline: float,
        arguments: dict[str, Any],
    ) -> list[asyncpg.Record]:
        reign = self._reign
        if reign is None:
            raise Unavailable("retry", "the connection to the database is closed")
        pool = reign.steps if changes else reign.reads
        text = self._text(function, tuple(arguments))
        connection = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = await reign.session(pool)
                rows: list[asyncpg.Record]
                with _Notices(connection) if changes else contextlib.nullcontext():
                    if not self._settings.pg_pooler:
                        rows = await connection.fetch(text, *arguments.values())
                        return rows
                    async with connection.transaction(isolation=isolation):
                        rows = await connection.fetch(text, *arguments.values())
                return rows
        except Exception as error:
            in_flight = connection is not None
            # The driver's frames may hold the error that holds them, and by this one the arguments.
            raise self._translate(
                error, function, in_flight=in_flight, changes=changes
            ) from error.with_traceback(None)
        finally:
            if connection is not None:
                await _release(pool, connection)

    def _translate(
        self, error: Exception, function: str, *, in_flight: bool, changes: bool = False
    ) -> Exception:
        translated = translate(error, function, in_flight=in_flight, changes=changes)
        if isinstance(translated, Unavailable) and translated.code == "no_leader":
            self._doubted.set()
        return translated

    def _text(self, function: str, names: tuple[str, ...]) -> str:
        try:
            return self._texts[function, names]
        except KeyError:
            return self._texts.setdefault((function, names), call_text(function, names))


def call_text(function: str, names: Iterable[str]) -> str:
    """Return the statement that calls queen.<function> with arguments so named, in their order.

    Of an argument named `name::type[]` the array's text form is sent.
    """
    if not function.isidentifier():
        raise ValueError(f"not a name of a function: {function}")
    arguments = ", ".join(_argument(name, place) for place, name in enumerate(names, 1))
    return f"select * from queen.{function}({arguments})"


def _argument(name: str, place: int) -> str:
    name, _, kind = name.partition("::")
    if not name.isidentifier() or (kind and kind.removesuffix("[]") not in ELEMENTS):
        raise ValueError(f"not a name of an argument: {name} {kind}")
    return f"{name} => ${place}::text::{kind}" if kind else f"{name} => ${place}"


class _Reign:
    """The pools of connections to a leader, for as long as it leads.

    `on_doubt` is called when a connection turns out to lead to another server, or to another reign.
    """

    def __init__(self, leader: Sight, settings: Settings, on_doubt: Callable[[], None]) -> None:
        self.leader = leader
        self.steps: asyncpg.Pool
        self.reads: asyncpg.Pool
        self.turns: asyncpg.Pool
        self._pools: list[asyncpg.Pool] = []
        self._settings = settings
        self._on_doubt = on_doubt
        self._over = False
        # By the process ids of their servers: those that are open, and those that have old plans.
        self._sessions: set[int] = set()
        self._early: set[int] = set()

    async def open(self) -> None:
        """Open the pools; those for steps and reads with a connection each."""
        size = {"min_size": 1, "max_size": self._settings.pg_pool_size}
        try:
            self.steps = await self._pool("serializable", **size, reset=_leave_as_it_is)
            self.reads = await self._pool("read committed", **size, reset=_leave_as_it_is)
            # Most processes never have competitors.
            self.turns = await self._pool(
                "read committed", min_size=0, max_size=TURNS_MAX, reset=turns.end
            )
        except BaseException:
            self.terminate()
            raise

    def outgrown(self) -> None:
        """Have each session plan anew before it is used again."""
        self._early = set(self._sessions)

    async def session(self, pool: asyncpg.Pool) -> asyncpg.Connection:
        """Return a connection of a pool whose plans suit the tables."""
        connection = await pool.acquire()
        if self._early and (session := connection.get_server_pid()) in self._early:
            self._early.remove(session)
            try:
                await connection.execute(plans.DISCARD)
            except BaseException:
                await _release(pool, connection)
                raise
        return connection

    async def close(self) -> None:
        """Close the pools, waiting a moment for calls that are still running."""
        self._over = True
        for pool in self._pools:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    def terminate(self) -> None:
        """Close the pools at once: nobody waits for an answer of who does not lead any more."""
        self._over = True
        for pool in self._pools:
            pool.terminate()

    async def _pool(self, isolation: str, **options: Any) -> asyncpg.Pool:
        pool: asyncpg.Pool = await asyncpg.create_pool(
            self.leader.url,
            connect=self._connect,
            max_queries=QUERIES_PER_CONNECTION,
            max_inactive_connection_lifetime=IDLE_CONNECTION_SECONDS,
            **connection_options(self.leader.url, isolation, pooler=self._settings.pg_pooler),
            **options,
        )
        self._pools.append(pool)
        return pool

    async def _connect(self, url: str, **options: Any) -> asyncpg.Connection:
        """Connect, and make sure that it is the leader who answers."""
        if self._over:
            raise NotLeading("another server leads")
        connection = await asyncpg.connect(url, **options)
        try:
            seen = await look(connection, url)
        except BaseException:
            connection.terminate()
            raise
        if not (seen.leads and seen.same(self.leader)):
            connection.terminate()
            self._on_doubt()
            raise NotLeading("this server does not lead")
        self._sessions.add(connection.get_server_pid())
        connection.add_termination_listener(self._ended)
        return connection

    def _ended(self, connection: asyncpg.Connection) -> None:
        self._sessions.discard(connection.get_server_pid())
        self._early.discard(connection.get_server_pid())


async def _release(pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
    # One that cannot be released is closed by the pool; the call's outcome stands.
    with contextlib.suppress(Exception):
        await pool.release(connection, timeout=RELEASE_SECONDS)


class _Notices:
    """Listens to what the server says beside the answer to a step.

    The only warning that it has for us is that somebody ended a commit's wait for the followers: it
    is committed here, the answer looks like any other, and it may be lost with this server.
    """

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._warned = False

    def __enter__(self) -> None:
        self._connection.add_log_listener(self._hear)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(asyncpg.InterfaceError):
            self._connection.remove_log_listener(self._hear)
        if kind is None and self._warned:
            raise Unavailable(
                "outcome_unknown", "the followers have not confirmed; the call has been carried out"
            )

    def _hear(self, _: asyncpg.Connection, message: asyncpg.PostgresLogMessage) -> None:
        if message.severity_en == "WARNING" and message.sqlstate == WARNING:
            self._warned = True


async def _leave_as_it_is(_: asyncpg.Connection) -> None:
    """Reset nothing on release: our calls leave nothing behind, and a reset is a round trip."""


def connection_options(url: str, isolation: str, *, pooler: bool) -> dict[str, Any]:
    """Return what each connection to a URL is opened with."""
    query = parse_qs(urlsplit(url).query)
    options: dict[str, Any] = {"timeout": CONNECT_SECONDS}
    if "target_session_attrs" not in query:
        # Never a physical standby, even if it was the leader a moment ago.
        options["target_session_attrs"] = "read-write"
    if pooler:
        # Such a pooler gives each transaction another session, and refuses most start parameters.
        options["statement_cache_size"] = 0
        options["server_settings"] = {"application_name": "queen-pg", "timezone": "UTC"}
        return options
    options["statement_cache_size"] = STATEMENTS_PER_CONNECTION
    options["max_cached_statement_lifetime"] = 0
    options["server_settings"] = {
        "application_name": "queen-pg",
        "timezone": "UTC",
        "default_transaction_isolation": isolation,
        # Compiling a plan costs more than any of our statements takes.
        "jit": "off",
        "statement_timeout": str(STATEMENT_TIMEOUT_MS),
        "idle_in_transaction_session_timeout": str(STATEMENT_TIMEOUT_MS),
    }
    if isolation == "serializable":
        options["server_settings"]["lock_timeout"] = str(LOCK_WAIT_MS)
    return options


def translate(
    error: Exception, function: str, *, in_flight: bool, changes: bool = False
) -> Exception:
    """Return the error of ours that a driver's error means.

    `in_flight` says whether the call had been sent, and `changes` whether it changes state: a
    connection lost under a change leaves its outcome unknown.
    """
    if isinstance(error, QueenError | Signal):
        return error
    if isinstance(error, TimeoutError):
        return Unavailable("timeout", "timeout: the database did not answer before the deadline")
    if isinstance(error, asyncpg.PostgresError) and not _lost(error):
        return _translate_sqlstate(error, function)
    if isinstance(error, NotLeading | asyncpg.TargetServerAttributeNotMatched):
        return Unavailable("no_leader", "no connection to a database that takes writes")
    if isinstance(error, OSError | ssl.SSLError | asyncpg.InterfaceError | asyncpg.PostgresError):
        if in_flight and changes:
            return AnswerLost("the connection was lost; the call may have been carried out")
        return Unavailable("retry", "the connection to the database failed; try again")
    return _incident(error, function, "")


def _lost(error: asyncpg.PostgresError) -> bool:
    """Whether the driver, or a pooler in between, says that the connection to the server broke."""
    sqlstate: str = error.sqlstate
    return sqlstate.startswith("08") or sqlstate == "40003"


def _translate_sqlstate(error: asyncpg.PostgresError, function: str) -> Exception:
    sqlstate: str = error.sqlstate
    message = error.message or ""
    match sqlstate:
        case "QU000":
            return BadRequest(message, detail=_detail(error))
        case "QU001":
            detail = _detail(error)
            too_long = detail.get("code") == NameTooLong.code
            return (NameTooLong if too_long else PayloadTooLarge)(message, detail=detail)
        case "QU100":
            return NotFound(message, detail=_detail(error))
        case "QU900":
            return Stale(message, sqlstate=sqlstate, detail=_detail(error))
        case "QU901":
            return Refused(message, sqlstate=sqlstate, detail=_detail(error))
        case "QU910":
            return Unavailable("no_leader", message, detail=_detail(error))
        case "40001" | "40P01":
            return Conflict(message, sqlstate=sqlstate)
        case "23505" if error.constraint_name == TRANSACTION_ID_INDEX:
            return DuplicateMessage(message, sqlstate=sqlstate)
        case "23505":
            return Conflict(message, sqlstate=sqlstate)
        case "23503":
            # Only a row that was resolved before BEGIN, and deleted since, can be missing.
            return Stale(message, sqlstate=sqlstate)
        case "53100":
            return StorageFull("the database has no room left")
        case "54001":
            return BadRequest("a document is nested too deeply")
        case "55P03":
            return Held(message, sqlstate=sqlstate)
        case "57014":
            return Unavailable("timeout", "timeout: the database gave the call up")
        case "25006":
            return Unavailable("no_leader", "the connection is to a database that takes no writes")
        case "25P03" | "3D000" | "28000" | "28P01":
            return Unavailable("retry", "the connection to the database failed; try again")
    if sqlstate.startswith(("53", "57P0")):
        return Unavailable("retry", "the connection to the database failed; try again")
    return _incident(error, function, sqlstate)


def _detail(error: asyncpg.PostgresError) -> dict[str, Any]:
    if not error.detail:
        return {}
    return msgspec.json.decode(error.detail, type=dict[str, Any])


def _incident(error: Exception, function: str, sqlstate: str) -> Internal:
    incident = secrets.token_hex(6)
    INCIDENTS.labels(sqlstate).inc()
    _log.error(
        "database.incident", incident=incident, function=function, sqlstate=sqlstate, exc_info=error
    )
    return Internal(f"internal error, incident {incident}")
