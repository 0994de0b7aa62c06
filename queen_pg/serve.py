"""`queen-pg serve`: the processes of a broker, from the first check to the last answer.

The first process owns the embedded server, migrates, and either serves by itself or watches over
worker processes that share its port. A signal goes through the layers from above: parked pops are
answered empty, what is in flight is answered, the database is closed, the embedded server stops.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Semaphore

import asyncpg
import msgspec
import uvicorn
import uvloop

from queen_pg import __version__, migrate
from queen_pg.app import create_app, drain
from queen_pg.config import Settings, without_password
from queen_pg.embedded import EmbeddedError, EmbeddedServer
from queen_pg.joined import JoiningProtocol
from queen_pg.leader import require_leader
from queen_pg.telemetry import configure_logging, logger

BACKLOG = 1024
# Longer than clients and proxies keep an idle connection, so that they close it and not we: a
# request that crosses our closing would fail.
KEEP_ALIVE_SECONDS = 75
# A little more than the longest deadline on the wire.
DRAIN_SECONDS = 65
DATABASE_WAIT_SECONDS = 30.0
WATCH_SECONDS = 0.25
REVIVE_SECONDS = 5.0
# A message's objects die by reference count. The collector's usual pace, a look at every 700 new
# ones, costs a tenth of the processor time of pushes of 100.
COLLECT_OBJECTS = 50_000

_log = logger("serve")


class ServeError(Exception):
    """The broker cannot start, or cannot go on; the message says why."""


def serve(settings: Settings) -> None:
    """Run a broker until it is told to stop; raise ServeError when it cannot."""
    configure_logging(settings.log_level, json=settings.log_json)
    # Until the event loop takes over, a signal ends the process by the way of every `finally`.
    signal.signal(signal.SIGTERM, _end)
    settings = msgspec.structs.replace(settings, port=_claimed_port(settings))
    with _database(settings) as (settings, embedded):
        uvloop.run(_supervise(settings, embedded))


@contextlib.contextmanager
def _database(settings: Settings) -> Iterator[tuple[Settings, EmbeddedServer | None]]:
    """Yield the settings with a database's URL in them, and the embedded server if it is ours."""
    if settings.pg_url is not None:
        yield settings, None
        return
    with EmbeddedServer(settings.data_folder) as embedded:
        yield msgspec.structs.replace(settings, pg_url=embedded.url), embedded


async def _supervise(settings: Settings, embedded: EmbeddedServer | None) -> None:
    """Prepare the database, run the workers, and keep the embedded server alive meanwhile."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    version = await _prepare(settings, stop)
    if stop.is_set():
        return

    def ready() -> None:
        _log.info(
            "ready",
            url=_http_url(settings),
            database=without_password(settings.pg_url or ""),
            embedded=embedded is not None,
            postgresql=version,
            version=__version__,
            workers=settings.workers,
        )

    watch = loop.create_task(_keep_alive(embedded)) if embedded is not None else None
    try:
        if settings.workers == 1:
            await _work(settings, ready, stop)
        else:
            await _watch_workers(settings, ready, stop)
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])


async def _prepare(settings: Settings, stop: asyncio.Event) -> str:
    """Wait for every database, bring it up to date or check that it is; return home's version."""
    for url in settings.group_urls.values():
        await _prepare_one(url, settings, stop)
    return await _prepare_one(settings.pg_url or "", settings, stop)


async def _prepare_one(url: str, settings: Settings, stop: asyncio.Event) -> str:
    deadline = asyncio.get_running_loop().time() + DATABASE_WAIT_SECONDS
    warned = False
    while not stop.is_set():
        try:
            await require_leader(url, pooler=settings.pg_pooler)
            if settings.migrate:
                state = await migrate.upgrade(url)
            else:
                state = await migrate.state(url, pooler=settings.pg_pooler)
                _check(state)
            return state.server_version
        except (OSError, asyncpg.CannotConnectNowError, asyncpg.InternalClientError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ServeError(
                    f"no connection to {without_password(url)}: {error or type(error).__name__}"
                ) from error
            if not warned:
                _log.warning("database.awaited", database=without_password(url), error=str(error))
                warned = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await stop.wait()
        except (asyncpg.PostgresError, migrate.NewerDatabase) as error:
            raise ServeError(str(error)) from error
    return ""


def _check(state: migrate.State) -> None:
    if not state.known:
        raise migrate.NewerDatabase(
            f"the database is at revision {state.revision}; this release ends at {state.head}"
        )
    if state.revision != state.head:
        raise ServeError(
            f"the database is at revision {state.revision}, and this release needs {state.head};"
            " run `queen-pg migrate`, or set QUEEN_MIGRATE=on"
        )
    if not state.current:
        _log.warning("database.functions_differ", hint="run `queen-pg migrate`")


async def _work(settings: Settings, ready: Callable[[], None], stop: asyncio.Event) -> None:
    """Serve HTTP until told to stop; then answer what is in flight."""
    app = create_app(settings)
    async with app.lifespan():
        server = _Server(
            uvicorn.Config(
                app,
                interface="asgi3",
                http=JoiningProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
        )
        serving = asyncio.create_task(server.serve([_listening(settings)]))
        _collect_less()
        ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if serving.done():
            serving.result()
            raise ServeError("the HTTP server ended by itself")
        _log.info("stopping", url=_http_url(settings))
        await drain(app)
        server.should_exit = True
        await serving


def _collect_less() -> None:
    """Leave out what was made for the start, and look for cycles less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_OBJECTS, *gc.get_threshold()[1:])


class _Server(uvicorn.Server):
    """The HTTP server, which leaves the process's signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listening(settings: Settings) -> socket.socket:
    """Return a socket that listens where the settings say; worker processes share the port."""
    listening = socket.socket(_family(settings.host))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((settings.host, settings.port))
    listening.listen(BACKLOG)
    return listening


async def _watch_workers(
    settings: Settings, ready: Callable[[], None], stop: asyncio.Event
) -> None:
    """Run worker processes; stop all of them when told to, or when one ends by itself."""
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Semaphore(0)
    processes = [
        spawn.Process(target=_worker, args=(settings, started), name=f"queen-pg worker {place}")
        for place in range(1, settings.workers + 1)
    ]
    for process in processes:
        process.start()
    waiting = len(processes)
    failed = False
    while not stop.is_set() and not failed:
        failed = not all(process.is_alive() for process in processes)
        while waiting and started.acquire(block=False):
            waiting -= 1
            if not waiting:
                ready()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS):
                await stop.wait()
    for process in processes:
        process.terminate()
    for process in processes:
        await asyncio.to_thread(process.join)
    if failed:
        raise ServeError("a worker process ended by itself")


def _worker(settings: Settings, started: Semaphore) -> None:
    """The main function of a worker process."""
    configure_logging(settings.log_level, json=settings.log_json)
    # Ctrl-C at a terminal reaches every process; the first one passes it on in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        parent = multiprocessing.parent_process()
        if parent is not None:
            # Readable once the parent is gone, however it went.
            loop.add_reader(parent.sentinel, stop.set)
        await _work(settings, started.release, stop)

    uvloop.run(run())


async def _keep_alive(embedded: EmbeddedServer) -> None:
    """Start the embedded server again when it has died under us."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        if not embedded.alive():
            _log.error("embedded.died", folder=str(embedded.folder))
            try:
                await asyncio.to_thread(embedded.revive)
            except EmbeddedError as error:
                _log.error("embedded.not_revived", error=str(error))
                await asyncio.sleep(REVIVE_SECONDS)
            else:
                _log.info("embedded.revived", folder=str(embedded.folder))


def _claimed_port(settings: Settings) -> int:
    """Return the port, after a look that nobody listens there.

    Workers share the port by SO_REUSEPORT, so a second broker would silently share it too.
    """
    with socket.socket(_family(settings.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
            probe.listen()
        except OSError as error:
            raise ServeError(
                f"cannot listen on {settings.host} port {settings.port}: {error.strerror};"
                " choose others with HOST and PORT"
            ) from error
        port: int = probe.getsockname()[1]
        return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _http_url(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def _end(*_: object) -> None:
    raise SystemExit(0)
