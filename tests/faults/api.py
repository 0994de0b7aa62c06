"""The broker as a client of the campaign sees it: each call is recorded with its outcome."""

import asyncio
import contextlib
import random
from typing import Any
from urllib.parse import quote

import httpx

from tests.faults.history import History, Operation

CALL_SECONDS = 8.0


class Api:
    """Calls brokers over HTTP, a random one each time, and records what they answer."""

    def __init__(self, urls: list[str], history: History, rng: random.Random) -> None:
        self._urls = urls
        self._rng = rng
        self.history = history
        self._client = httpx.AsyncClient(timeout=CALL_SECONDS)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def push(self, queue: str, items: list[dict[str, Any]]) -> Operation:
        """Push items, each with an id, a partition and optionally a payload."""
        operation = self.history.begin("push", items=items)
        body = {
            "items": [
                {
                    "queue": queue,
                    "partition": item["partition"],
                    "transactionId": item["id"],
                    "payload": item.get("payload", item["id"]),
                }
                for item in items
            ]
        }
        return await self._call(operation, "POST", "/api/v1/push", body)

    async def pop(self, queue: str, group: str, *, lease_seconds: int, batch: int = 3) -> Operation:
        """Lease a batch of one partition; the answer is its messages."""
        operation = self.history.begin("pop", lease_seconds=lease_seconds)
        path = (
            f"/api/v1/pop/queue/{quote(queue)}?consumerGroup={group}&subscriptionMode=all"
            f"&batch={batch}&leaseSeconds={lease_seconds}"
        )
        await self._call(operation, "GET", path)
        if operation.outcome == "ok":
            messages = (operation.answer or {}).get("messages", [])
            operation.answer = [
                {
                    "id": message["transactionId"],
                    "partition": message["partition"],
                    "partition_id": message["partitionId"],
                    "offset": message["offset"],
                    "payload": message["data"],
                    "lease": message["leaseId"],
                }
                for message in messages
            ]
        return operation

    async def ack(
        self,
        group: str,
        messages: list[dict[str, Any]],
        status: str = "completed",
        error: str | None = None,
    ) -> list[dict[str, Any]] | None:
        """Ack messages of one lease; the operation's answer is those that were accepted."""
        operation = self.history.begin("ack", lease=messages[0]["lease"], status=status)
        body = {
            "consumerGroup": group,
            "acknowledgments": [
                {
                    "transactionId": message["id"],
                    "partitionId": message["partition_id"],
                    "leaseId": message["lease"],
                    "status": status,
                    "error": error,
                }
                for message in messages
            ],
        }
        await self._call(operation, "POST", "/api/v1/ack/batch", body)
        if operation.outcome != "ok":
            return None
        results: list[dict[str, Any]] = operation.answer
        operation.answer = [
            message["id"]
            for message, result in zip(messages, results, strict=True)
            if result["success"] and status == "completed"
        ]
        return results

    async def kv(self, kind: str, operation: dict[str, Any], **asked: Any) -> Operation:
        """Carry out one KV operation; the answer is its result element."""
        recorded = self.history.begin(kind, **asked)
        await self._call(recorded, "POST", "/api/v1/kv", {"operations": [operation]})
        if recorded.outcome == "ok":
            recorded.answer = recorded.answer["results"][0]
        return recorded

    async def send(self, kind: str, method: str, path: str, body: Any, **asked: Any) -> Operation:
        """Make any other call."""
        return await self._call(self.history.begin(kind, **asked), method, path, body)

    async def _call(
        self, operation: Operation, method: str, path: str, body: Any = None
    ) -> Operation:
        url = self._rng.choice(self._urls) + path
        try:
            answer = await self._client.request(method, url, json=body)
        except httpx.ConnectError:
            # Nothing was sent.
            self.history.end(operation, "fail")
            await asyncio.sleep(0.05)
        except httpx.HTTPError:
            self.history.end(operation, "unknown")
        else:
            if answer.status_code >= 500:
                self.history.end(operation, "unknown", answer.text)
            elif answer.status_code >= 400:
                self.history.end(operation, "fail", answer.text)
            else:
                with contextlib.suppress(ValueError):
                    operation.answer = answer.json() if answer.content else None
                self.history.end(operation, "ok", operation.answer)
        return operation
