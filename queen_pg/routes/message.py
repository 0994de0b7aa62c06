"""`GET /api/v1/messages/{partitionId}/{transactionId}`: one message, as people look at it."""

from collections.abc import Sequence

import msgspec
from litestar import get
from litestar.response.base import ASGIResponse

from queen_pg.broker import message as broker
from queen_pg.broker.ack import LARGEST_ID, QUEUE_MODE
from queen_pg.broker.message import Cursor, Message
from queen_pg.errors import NotFound
from queen_pg.routes import wire


@get("/api/v1/messages/{names:path}")
async def get_message(request: wire.AnyRequest) -> ASGIResponse:
    """Show a message, its queue, and where each consumer group stands with it."""
    names = wire.names(request, "/api/v1/messages/{partitionId}/{transactionId}")
    partition_id = wire.partition_id(names["partitionId"])
    found = None
    if partition_id is not None and partition_id <= LARGEST_ID:
        found = await broker.find(
            wire.database(request), wire.tenant(request), partition_id, names["transactionId"]
        )
    if found is None:
        raise NotFound("Message not found")
    return wire.answer(_rendered(names["partitionId"], *found))


def _rendered(partition_id: str, message: Message, cursors: Sequence[Cursor]) -> dict[str, object]:
    payload = msgspec.Raw(message.payload)
    groups = [cursor for cursor in cursors if cursor.consumer_group != QUEUE_MODE]
    return {
        "id": message.id,
        "transactionId": message.transaction_id,
        "data": payload,
        "payload": payload,
        "traceId": message.trace_id,
        "producerSub": message.producer_sub,
        "createdAt": wire.iso_microseconds(message.created_at),
        "offset": message.message_offset,
        "partitionId": partition_id,
        "partition": message.partition,
        "queue": message.queue,
        "queuePath": f"{message.queue}/{message.partition}",
        "namespace": message.namespace,
        "task": message.task,
        "status": _status(message, cursors),
        "errorMessage": message.error,
        "retryCount": message.retry_count,
        "isEncrypted": False,
        "queueConfig": message.options,
        "mode": {
            "hasQueueMode": len(groups) < len(cursors),
            "busGroupsCount": len(groups),
            "type": _mode(len(groups), len(cursors)),
        },
        "consumerGroups": [_group(message, cursor) for cursor in cursors],
    }


def _status(message: Message, cursors: Sequence[Cursor]) -> str:
    """Return the message's status; the groups count before queue mode does."""
    groups = [cursor for cursor in cursors if cursor.consumer_group != QUEUE_MODE] or cursors
    if message.dead_letter:
        return "dead_letter"
    if groups and all(cursor.committed_offset >= message.message_offset for cursor in groups):
        return "completed"
    return "processing" if any(cursor.leased for cursor in cursors) else "pending"


def _mode(groups: int, cursors: int) -> str:
    if groups == cursors:
        return "bus" if groups else "none"
    return "hybrid" if groups else "queue"


def _group(message: Message, cursor: Cursor) -> dict[str, object]:
    expiry = cursor.lease_expires_at if cursor.leased else None
    return {
        "name": cursor.consumer_group,
        "group": cursor.consumer_group,
        "committed": cursor.committed_offset,
        "consumed": cursor.committed_offset >= message.message_offset,
        "leaseExpiresAt": expiry and wire.iso_microseconds(expiry),
    }


ROUTES = [get_message]
