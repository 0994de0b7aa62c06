"""`GET /api/v1/dlq`: the dead letters, newest failure first (data-plane 8)."""

import msgspec
from litestar import get
from litestar.response.base import ASGIResponse

from queen_pg.broker import dlq
from queen_pg.broker.dlq import DeadLetter, Filters
from queen_pg.routes import wire

DEFAULT_LIMIT = 100
LIMIT_MAX = 1000


@get("/api/v1/dlq")
async def list_dead_letters(request: wire.AnyRequest) -> ASGIResponse:
    """List dead letters by queue, partition, consumer group and time of the failure."""
    query = wire.Query(request)
    limit = query.integer("limit")
    limit = max(1, min(DEFAULT_LIMIT if limit is None else limit, LIMIT_MAX))
    skip = max(0, query.integer("offset") or 0)
    filters = Filters(
        queue=query.text("queue"),
        partition=query.text("partition"),
        consumer_group=query.text("consumerGroup"),
        failed_from=query.instant("from"),
        failed_to=query.instant("to"),
    )
    total, letters = await dlq.page(
        wire.database(request), wire.tenant(request), filters, skip=skip, batch_max=limit
    )
    return wire.answer(
        {
            "messages": [_rendered(letter) for letter in letters],
            "total": total,
            "pagination": {"limit": limit, "offset": skip},
        }
    )


def _rendered(letter: DeadLetter) -> dict[str, object]:
    failed_at = wire.iso_microseconds(letter.failed_at)
    payload = msgspec.Raw(letter.payload)
    return {
        "id": letter.id,
        "queue": letter.queue,
        "partition": letter.partition,
        "partitionId": str(letter.partition_id),
        "createdAt": failed_at,
        "consumerGroup": letter.consumer_group,
        "offset": letter.message_offset,
        "messageId": letter.message_id,
        "transactionId": letter.transaction_id,
        "data": payload,
        "payload": payload,
        "errorMessage": letter.error,
        "retryCount": letter.retry_count,
        "failedAt": failed_at,
    }


ROUTES = [list_dead_letters]
