"""Logging and counters: what the broker tells about itself. Carries no decision."""

import logging
import sys

import structlog
from prometheus_client import Counter, Gauge, Histogram

STEP_RETRIES = Counter(
    "queen_step_retries",
    "Steps run again, by function and by the SQLSTATE that rolled them back.",
    ["function", "sqlstate"],
)
STEP_SECONDS = Histogram(
    "queen_step_seconds",
    "Seconds that one run of a step took in the database, by function.",
    ["function"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
CONVEYOR_BATCH = Histogram(
    "queen_conveyor_batch_calls",
    "Calls (or their shares) that went into one transaction, by kind.",
    ["kind"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
CONVEYOR_WAIT = Histogram(
    "queen_conveyor_wait_seconds",
    "Seconds that the oldest call of a transaction had waited for it, by kind.",
    ["kind"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
LOG_EPOCH = Gauge("queen_log_epoch", "The epoch of a group's replicated log.", ["group"])
LOG_QUORUM = Gauge(
    "queen_log_quorum",
    "Followers that have a step on disk before it is answered; 0: asynchronous.",
    ["group"],
)
LOG_LAG = Gauge(
    "queen_log_follower_lag_bytes", "What a follower has not confirmed.", ["group", "node"]
)
SLOT_KEPT = Gauge(
    "queen_log_slot_kept_bytes",
    "What a replication slot keeps of the log; one that nobody reads (active 0) fills the disk.",
    ["group", "slot", "active"],
)
INCIDENTS = Counter(
    "queen_incidents", "Faults of ours: errors answered as `internal`, by SQLSTATE.", ["sqlstate"]
)


def configure_logging(level: str, *, json: bool) -> None:
    """Send every log line of the process, the libraries' too, to standard error in one form."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # Not the renderer's own: it prints locals, and payloads are among them.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their chatter at info says nothing that our own lines do not.
    for name in ("alembic", "httpx", "asyncio", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # Its pool warns with a traceback for each attempt while a database is away.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of one room of the house."""
    return structlog.stdlib.get_logger(name)
