"""The routes: Queen MQ's wire, in and out. Nothing is decided here."""

from litestar.types import ControllerRouterHandler

from queen_pg.routes import ack, dlq, health, lease, message, pop, push, queue, transaction

ROUTES: list[ControllerRouterHandler] = [
    *ack.ROUTES,
    *dlq.ROUTES,
    *health.ROUTES,
    *lease.ROUTES,
    *message.ROUTES,
    *pop.ROUTES,
    *push.ROUTES,
    *queue.ROUTES,
    *transaction.ROUTES,
]
"""Everything that the application answers at."""
