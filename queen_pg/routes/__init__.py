"""The routes: Queen MQ's wire, in and out. Nothing is decided here."""

from litestar.types import ControllerRouterHandler

from queen_pg.routes import (
    ack,
    dlq,
    health,
    kv,
    lease,
    lock,
    message,
    metrics,
    pop,
    push,
    queue,
    switch,
    timer,
    transaction,
)

ROUTES: list[ControllerRouterHandler] = [
    *ack.ROUTES,
    *dlq.ROUTES,
    *health.ROUTES,
    *kv.ROUTES,
    *lease.ROUTES,
    *lock.ROUTES,
    *message.ROUTES,
    *metrics.ROUTES,
    *pop.ROUTES,
    *push.ROUTES,
    *queue.ROUTES,
    *switch.ROUTES,
    *timer.ROUTES,
    *transaction.ROUTES,
]
"""Everything that the application answers at."""
