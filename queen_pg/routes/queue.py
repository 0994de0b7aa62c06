"""Queues: `POST /api/v1/configure` and `DELETE /api/v1/resources/queues/{queue}` (data-plane 9)."""

from typing import Any

import msgspec
from litestar import delete, post
from litestar.response.base import ASGIResponse

from queen_pg import limits
from queen_pg.broker import queue as broker
from queen_pg.errors import BadRequest
from queen_pg.routes import wire

LABELS = ("namespace", "task")
OPTIONS = (
    "leaseTime",
    "retryLimit",
    "deadLetterQueue",
    "dlqAfterMaxRetries",
    "delayedProcessing",
    "windowBuffer",
    "dedupWindowSeconds",
    "retentionEnabled",
    "retentionSeconds",
    "completedRetentionSeconds",
    "maxWaitTimeSeconds",
    "encryptionEnabled",
    "priority",
    "maxSize",
    "retryDelay",
    "ttl",
    "minPopWaitTime",
    "retentionSinkHold",
    "retentionSinkHoldMaxSeconds",
)

_body = msgspec.json.Decoder(dict[str, Any])


@post("/api/v1/configure")
async def configure(request: wire.AnyRequest) -> ASGIResponse:
    """Create a queue or change its options; the answer has all of them as they then are."""
    body = wire.parse(_body, await wire.read_body(request))
    name = body.get("queue")
    if not isinstance(name, str):
        raise BadRequest("queue is required, as a string")
    limits.check_text("queue", name)
    limits.check_names(name)
    mode = body.get("mode")
    if mode not in (None, "merge", "replace"):
        raise BadRequest(f"mode must be merge or replace, not {mode!r}")
    queue = await broker.configure(
        wire.database(request),
        wire.tenant(request),
        name,
        _options(body),
        wire.deadline(),
        replace=mode == "replace",
    )
    return wire.answer(
        {
            "configured": True,
            "queueId": queue.uid,
            "partitionId": None,
            "queue": name,
            "namespace": queue.namespace,
            "task": queue.task,
            "storage": "segments",
            "options": queue.options,
        }
    )


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """Return the options sent, in `options` or in the body itself (data-plane 9.1)."""
    nested = body.get("options")
    sent = nested if isinstance(nested, dict) else body
    options = {name: sent[name] for name in OPTIONS if name in sent}
    for label in LABELS:
        outer = body.get(label)
        if isinstance(nested, dict) and label in nested:
            options[label] = nested[label]
        elif isinstance(outer, str) and outer:
            options[label] = outer
    for name, value in options.items():
        if isinstance(value, str):
            limits.check_text(name, value)
        elif isinstance(value, dict | list):
            # No option takes one, whatever is in it.
            options[name] = []
    return options


@delete("/api/v1/resources/queues/{names:path}", status_code=200)
async def delete_queue(request: wire.AnyRequest) -> ASGIResponse:
    """Delete a queue with its partitions, messages, consumer groups and dead letters."""
    name = wire.names(request, "/api/v1/resources/queues/{queue}")["queue"]
    existed = await broker.delete(
        wire.database(request), wire.tenant(request), name, wire.deadline()
    )
    wire.waiters(request).deleted(wire.tenant(request), name)
    answer: dict[str, bool | str] = {"deleted": existed, "existed": existed, "queue": name}
    if not existed:
        answer["message"] = "there is no such queue"
    return wire.answer(answer)


ROUTES = [configure, delete_queue]
