"""`POST /api/v1/ack` and `/api/v1/ack/batch`: what became of delivered messages (data-plane 6).

Both routes take both forms, one ack or a list of them, and answer a list.
"""

import msgspec
from litestar.response.base import ASGIResponse

from queen_pg import limits
from queen_pg.broker.ack import QUEUE_MODE, AckItem, AckResult, released
from queen_pg.routes import wire

NOT_A_PARTITION = AckResult(
    success=False,
    error="ack refused: partitionId is not the decimal id of a partition",
    lease_released=False,
    dlq=False,
    noop=False,
)


class _Ack(msgspec.Struct, rename="camel"):
    transaction_id: str
    partition_id: str
    status: str | None = None
    error: str | None = None
    lease_id: str | None = None


class _Body(msgspec.Struct, rename="camel"):
    consumer_group: str | None = None
    acknowledgments: list[_Ack] | None = None


_body = msgspec.json.Decoder(_Body)
_single = msgspec.json.Decoder(_Ack)


async def ack(request: wire.AnyRequest) -> ASGIResponse:
    """Settle, hand back or give up delivered messages."""
    text = await wire.read_body(request)
    body = wire.parse(_body, text)
    acks = body.acknowledgments or [wire.parse(_single, text)]
    group = limits.check_text("consumerGroup", body.consumer_group or QUEUE_MODE)
    limits.check_names("", group)
    prefix = "acknowledgments[{}]." if body.acknowledgments else ""
    items = [_item(prefix.format(place), each) for place, each in enumerate(acks)]

    known = [item for item in items if item is not None]
    acked = await wire.conveyor(request).ack(wire.tenant(request), group, known, wire.deadline())
    waiters = wire.waiters(request)
    waiters.freed(acked.woken)
    waiters.settled(released(known, acked.results))
    results = iter(acked.results)
    return wire.answer(
        [
            _rendered(index, each, NOT_A_PARTITION if item is None else next(results))
            for index, (each, item) in enumerate(zip(acks, items, strict=True))
        ]
    )


def _item(field: str, each: _Ack) -> AckItem | None:
    """Return an ack for the broker, or None when its partition id cannot be one."""
    limits.check_transaction_id(f"{field}transactionId", each.transaction_id)
    limits.check_text(f"{field}error", each.error or "")
    limits.check_text(f"{field}leaseId", each.lease_id or "")
    partition_id = wire.partition_id(each.partition_id)
    if partition_id is None:
        return None
    return AckItem(
        partition_id=partition_id,
        transaction_id=each.transaction_id,
        status=wire.ack_status(each.status),
        error=each.error,
        lease_id=each.lease_id or None,
    )


def _rendered(index: int, each: _Ack, result: AckResult) -> dict[str, object]:
    return {
        "index": index,
        "transactionId": each.transaction_id,
        "success": result.success,
        "error": result.error,
        "leaseReleased": result.lease_released,
        "dlq": result.dlq,
        "noop": result.noop,
    }


ROUTES = [
    wire.bare("POST", "/api/v1/ack", ack),
    wire.bare("POST", "/api/v1/ack/batch", ack),
]
