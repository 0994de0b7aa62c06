"""The wire by hand: short calls for tests, and looks behind it through SQL."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx

QUEUE_MODE = "__QUEUE_MODE__"
EVERYTHING = {"batch": 1000, "partitions": 64}


class Wire:
    """Calls to one broker. Answers are the JSON documents; `http` is for what must look closer."""

    def __init__(self, http: httpx.AsyncClient, sql: asyncpg.Connection) -> None:
        self.http = http
        self.sql = sql

    async def post(self, path: str, body: Any = None, status: int | None = None) -> Any:
        """Post a JSON body and return the answer, which must have the status or be a success."""
        return _checked(await self.http.post(path, json=body), status)

    async def get(self, path: str, status: int | None = None, **params: Any) -> Any:
        """Get an answer, None for a 204."""
        return _checked(await self.http.get(path, params=_params(params) or None), status)

    async def push(
        self, queue: str, *payloads: Any, partition: str | None = None, ids: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Push payloads to one partition, with transaction ids if any are given."""
        items: list[dict[str, Any]] = [
            {"queue": queue, "payload": payload, "partition": partition} for payload in payloads
        ]
        for item, transaction_id in zip(items, ids, strict=bool(ids)):
            item["transactionId"] = transaction_id
        answer: list[dict[str, Any]] = await self.post("/api/v1/push", {"items": items}, 201)
        return answer

    async def pop(
        self, queue: str | None, partition: str | None = None, **params: Any
    ) -> dict[str, Any] | None:
        """Pop from a queue, a partition, or by labels where queue is None; None for a 204."""
        path = "/api/v1/pop"
        if queue is not None:
            path += f"/queue/{quote(queue, safe='')}"
        if partition is not None:
            path += f"/partition/{quote(partition, safe='')}"
        answer: dict[str, Any] | None = await self.get(path, **params)
        return answer

    async def take(self, queue: str, partition: str | None = None, **params: Any) -> list[Any]:
        """Pop everything there is and return the messages; a named group reads from the start."""
        if "consumerGroup" in params:
            params = {"subscriptionMode": "all", **params}
        answer = await self.pop(queue, partition, **{**EVERYTHING, **params})
        return [] if answer is None else answer["messages"]

    async def ack(
        self,
        messages: Any,
        status: str = "completed",
        *,
        group: str | None = None,
        statuses: Sequence[str] = (),
        **fields: Any,
    ) -> list[dict[str, Any]]:
        """Ack messages in one call, each with its own lease, in one status or in several."""
        messages = messages if isinstance(messages, list) else [messages]
        each = statuses or [status] * len(messages)
        acknowledgments = [
            {
                "transactionId": message["transactionId"],
                "partitionId": message["partitionId"],
                "leaseId": message["leaseId"],
                "status": one,
                **fields,
            }
            for message, one in zip(messages, each, strict=True)
        ]
        body = {"consumerGroup": group, "acknowledgments": acknowledgments}
        answer: list[dict[str, Any]] = await self.post("/api/v1/ack/batch", body, 200)
        return answer

    async def configure(self, queue: str, **options: Any) -> dict[str, Any]:
        """Create a queue, or change some of its options."""
        body = {"queue": queue, "options": options}
        answer: dict[str, Any] = await self.post("/api/v1/configure", body, 200)
        return answer

    async def transaction(self, *operations: Any, status: int = 200, **riders: Any) -> Any:
        """Send a transaction."""
        body = {"operations": list(operations), **riders}
        return await self.post("/api/v1/transaction", body, status)

    async def dead_letters(self, queue: str, **filters: Any) -> list[Any]:
        """Return a queue's dead letters, oldest first."""
        answer = await self.get("/api/v1/dlq", queue=queue, **filters)
        return list(reversed(answer["messages"]))

    async def cursor(self, message: dict[str, Any]) -> asyncpg.Record:
        """Return the cursor of a message's consumer group on its partition."""
        return await self.sql.fetchrow(
            "select c.* from queen.cursors c join queen.consumer_groups g on g.id = c.group_id"
            " where c.partition_id = $1 and g.name = $2",
            int(message["partitionId"]),
            message["consumerGroup"],
        )

    async def expire(self, message: dict[str, Any]) -> None:
        """Let the lease of a message run out, as if its time had passed."""
        async with self.sql.transaction():
            await self.sql.execute(
                "update queen.cursors set lease_expires_at = queen.now() - interval '1 second'"
                " where lease_id = $1",
                message["leaseId"],
            )
            await self.sql.execute(
                "update queen.ready set ready_at = queen.now() where lease_id = $1",
                message["leaseId"],
            )

    async def age(self, queue: str, seconds: float) -> None:
        """Make everything pushed to a queue older."""
        await self.sql.execute(
            "update queen.messages m set created_at = m.created_at - make_interval(secs => $2)"
            " from queen.partitions p join queen.queues q on q.id = p.queue_id"
            " where q.name = $1 and m.partition_id = p.id",
            queue,
            seconds,
        )
        await self.sql.execute(
            "update queen.partitions p set last_append_at = p.last_append_at"
            " - make_interval(secs => $2)"
            " from queen.queues q where q.id = p.queue_id and q.name = $1",
            queue,
            seconds,
        )
        await self.sql.execute(
            "update queen.ready r set ready_at = least(ready_at, queen.now())"
            " from queen.partitions p join queen.queues q on q.id = p.queue_id"
            " where q.name = $1 and r.partition_id = p.id and r.ready_at < 'infinity'",
            queue,
        )

    async def removed(self, queue: str) -> None:
        """Wait until retention has taken everything away that is in a queue."""
        for _ in range(300):
            left = await self.sql.fetchval(
                "select count(*) from queen.partitions p join queen.queues q on q.id = p.queue_id"
                " where q.name = $1 and p.log_start_offset < p.next_offset",
                queue,
            )
            if left == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"retention left something in {queue}")

    async def count(self, table: str) -> int:
        """Return how many rows a table has."""
        number: int = await self.sql.fetchval(f"select count(*) from queen.{table}")
        return number

    async def fingerprint(self) -> dict[str, str]:
        """Return a digest of every table's row versions, to show that a call wrote nothing.

        Not of `ready`: its rows are hints, which the broker corrects whenever it passes. Nor of
        keys and timers whose time is near.
        """
        lasting = {
            "kv": "where expires_at is null or expires_at > now() + interval '5 minutes'",
            "timers": "where fire_at > now() + interval '5 minutes'",
        }
        tables = await self.sql.fetch(
            "select relname from pg_class where relnamespace = 'queen'::regnamespace"
            " and relkind = 'r' and relname <> 'ready' order by 1"
        )
        return {
            table: await self.sql.fetchval(
                f"select md5(coalesce(string_agg(concat(ctid, xmin), ' ' order by ctid), ''))"
                f" from queen.{table} {lasting.get(table, '')}"
            )
            for (table,) in tables
        }


def data(answer: dict[str, Any] | Sequence[Any] | None) -> list[Any]:
    """Return the payloads of a pop's answer, or of messages, in their order."""
    if answer is None:
        return []
    messages = answer["messages"] if isinstance(answer, dict) else answer
    return [message["data"] for message in messages]


def _params(params: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in params.items()
        if value is not None
    }


def _checked(response: httpx.Response, status: int | None) -> Any:
    if status is None:
        assert response.is_success, f"{response.status_code}: {response.text}"
    else:
        assert response.status_code == status, f"{response.status_code}: {response.text}"
    if response.status_code == 204:
        assert response.content == b""
        assert "content-length" not in response.headers
        return None
    assert response.headers["content-type"] == "application/json"
    return response.json()
