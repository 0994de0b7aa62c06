"""`POST /api/v1/push`: messages in, as JSON or as the binary body `QPB1` (data-plane 2 and 3)."""

from collections import Counter
from collections.abc import Sequence

import msgspec
from litestar.response.base import ASGIResponse

from queen_pg import frames
from queen_pg.broker.append import appends
from queen_pg.broker.push import PushItem, PushResult
from queen_pg.errors import BadBody, PayloadTooLarge
from queen_pg.routes import wire


class _Item(msgspec.Struct, rename="camel"):
    queue: str
    payload: msgspec.Raw
    partition: str | None = None
    transaction_id: str | None = None
    trace_id: str | None = None


class _Body(msgspec.Struct):
    items: list[_Item]


class _Pushed(msgspec.Struct):
    """What became of one item. The mixed casing is the wire's."""

    index: int
    message_id: str | None
    transaction_id: str
    queue_name: str = msgspec.field(name="queueName")
    status: str
    offset: int | msgspec.UnsetType = msgspec.UNSET


_body = msgspec.json.Decoder(_Body)


async def push(request: wire.AnyRequest) -> ASGIResponse:
    """Append messages to their partitions."""
    body = await wire.read_body(request)
    if body.startswith(frames.PUSH_MAGIC):
        items, counts = _binary_items(body)
    else:
        items, counts = _json_items(body), False
    tenant = wire.tenant(request)
    results = await wire.conveyor(request).push(tenant, items, wire.deadline())
    wire.waiters(request).pushed_to(tenant, appends(items, results))
    return wire.answer(_counted(results) if counts else _rendered(items, results), 201)


def _json_items(body: bytes) -> list[PushItem]:
    return [
        wire.pushed_item(
            f"items[{place}].",
            queue=item.queue,
            partition=item.partition,
            payload=bytes(item.payload),
            transaction_id=item.transaction_id,
            trace_id=item.trace_id,
        )
        for place, item in enumerate(wire.parse(_body, body).items)
    ]


def _binary_items(body: bytes) -> tuple[list[PushItem], bool]:
    try:
        decoded = frames.decode_push(body)
    except frames.Malformed as error:
        raise BadBody(str(error)) from None
    except frames.Oversize as error:
        raise PayloadTooLarge(str(error)) from None
    items = [
        wire.pushed_item(
            f"items[{place}].",
            queue=item.queue,
            partition=item.partition,
            payload=item.payload,
            transaction_id=item.transaction_id or None,
            message_id=item.message_id,
        )
        for place, item in enumerate(decoded.items)
    ]
    return items, decoded.counts


def _rendered(items: Sequence[PushItem], results: Sequence[PushResult]) -> list[_Pushed]:
    return [
        _Pushed(
            index=index,
            message_id=result.message_id,
            transaction_id=result.transaction_id,
            queue_name=item.queue,
            status=result.status,
            offset=msgspec.UNSET if result.offset is None else result.offset,
        )
        for index, (item, result) in enumerate(zip(items, results, strict=True))
    ]


def _counted(results: Sequence[PushResult]) -> dict[str, int]:
    by_status = Counter(result.status for result in results)
    return {
        "count": len(results),
        "queued": by_status["queued"],
        "duplicate": by_status["duplicate"],
        "error": by_status["error"],
    }


ROUTES = [wire.bare("POST", "/api/v1/push", push)]
