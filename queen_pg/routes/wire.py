"""The manners that all routes share: how a request is read, how an answer and an error look.

A route reads its body through `read_body` and `parse`, its names through `names`, its query through
`Query`, and answers with `answer`. Whatever it raises leaves through `failure`, the one place where
an error gets its form on the wire.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote_to_bytes
from uuid import UUID

import msgspec
from litestar import Litestar, Request, asgi
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.response import Response
from litestar.response.base import ASGIResponse
from litestar.types import (
    AsyncAnyCallable,
    ExceptionHandlersMap,
    HTTPScope,
    Method,
    Receive,
    Scope,
    Send,
)

from queen_pg import limits, telemetry
from queen_pg.broker.ack import AckStatus
from queen_pg.broker.placement import DEFAULT_TENANT
from queen_pg.broker.push import PushItem
from queen_pg.config import Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database
from queen_pg.errors import (
    BadBody,
    BadRequest,
    Declined,
    Internal,
    NoSuchRoute,
    PayloadTooLarge,
    QueenError,
    ReservedTenant,
)
from queen_pg.group import Place
from queen_pg.wakeup import Waiters

CALL_SECONDS = 30.0
"""How long a call that does not wait may take (data-plane 1-6)."""

TENANT_HEADER = b"x-queen-tenant"
RESERVED_TENANTS = {
    "00000000-0000-0000-0000-00000000fffe",
    "00000000-0000-0000-0000-00000000fffd",
}
PLACE = "queen_place"
"""Where a call's scope says which tenant it works for, if it names one."""

DEFAULT_PARTITION = "Default"

DRAIN_BYTES_MAX = 64 * 1024 * 1024
"""How much of a refused body is read and dropped, so that the sender gets to read the refusal."""

AnyRequest = Request[Any, Any, Any]
Handler = Callable[[AnyRequest], Awaitable[ASGIResponse]]
T = TypeVar("T")

_log = telemetry.logger(__name__)
_encode = msgspec.json.Encoder().encode
_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_TENANT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_PARTITION_ID = re.compile(r"[0-9]{1,20}\Z")
_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class BodyTooLarge(Exception):
    """The request's body is over the limit; answered in plain text, before any parsing."""


class Call:
    """A request without the framework's own reading of it: what the helpers below look at."""

    __slots__ = ("receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive

    @property
    def app(self) -> Litestar:
        """The application that was asked."""
        return self.scope["litestar_app"]


class Answer(ASGIResponse):
    """A response whose bytes are all there, made without the framework's own preparations."""

    __slots__ = ()

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] = {},
    ) -> None:
        self.body = body
        self.status_code = status
        self.headers = {"content-type": content_type, **headers}  # type: ignore[assignment]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send it."""
        headers = [(name.encode(), text.encode("latin-1")) for name, text in self.headers.items()]
        if self.status_code == 204:
            headers.clear()
        else:
            headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def bare(method: Method, path: str, handler: Handler, *, mount: bool = False) -> ASGIRouteHandler:
    """Make a route without the framework's own request handling, for the routes where it shows.

    With mount, the route answers for every path below its own.
    """

    @asgi(path, is_mount=mount, copy_scope=False)
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIResponse
        try:
            if cast(HTTPScope, scope)["method"] != method:
                response = _refused_method(method)
            else:
                response = await handler(cast(AnyRequest, Call(scope, receive)))
        except Exception as error:
            response = failure(error, _path(scope))
        await response(scope, receive, send)

    return route


class Direct:
    """The bare routes by their paths, for calls that need none of the framework's routing."""

    def __init__(self, routes: Iterable[object]) -> None:
        bare_routes = [route for route in routes if isinstance(route, ASGIRouteHandler)]
        self._exact: dict[str, AsyncAnyCallable] = {}
        self._below: list[tuple[str, AsyncAnyCallable]] = []
        for route in bare_routes:
            for path in route.paths:
                if route.is_mount:
                    self._below.append((f"{path}/", route.fn))
                self._exact[path] = route.fn

    def find(self, path: str) -> AsyncAnyCallable | None:
        """Return what answers at a path, or None where the framework is to find out."""
        found = self._exact.get(path)
        if found is None:
            for prefix, route in self._below:
                if path.startswith(prefix):
                    return route
        return found


# What a route needs from the application.


def settings(request: AnyRequest) -> Settings:
    """Return the broker's settings."""
    return cast(Settings, request.app.state.settings)


def place(request: AnyRequest) -> Place:
    """Return where the tenant lives that the request works for."""
    found: Place | None = request.scope.get(PLACE)  # type: ignore[assignment]
    return found or cast(Place, request.app.state.home)


def database(request: AnyRequest) -> Database:
    """Return the database that the broker doors take."""
    return place(request).group.database


def waiters(request: AnyRequest) -> Waiters:
    """Return those who wait for messages, and who is told of new ones."""
    return place(request).group.waiters


def conveyor(request: AnyRequest) -> Conveyor:
    """Return what carries pushes and acks."""
    return place(request).group.conveyor


def tenant(request: AnyRequest) -> int:
    """Return the id of the tenant that the request works for."""
    return place(request).tenant


def is_call(scope: Scope) -> bool:
    """Whether this is a call that works for a tenant."""
    return scope["type"] == ScopeType.HTTP and scope["path"].startswith("/api/")


def named_tenant(scope: Scope) -> str:
    """Return the tenant that a call names; raise BadRequest or ReservedTenant (admin 13)."""
    values = [value for name, value in scope["headers"] if name == TENANT_HEADER]
    text = values[-1].decode("latin-1").strip().lower() if values else ""
    if not text:
        return DEFAULT_TENANT
    if not _TENANT.match(text):
        raise BadRequest("invalid x-queen-tenant header (must be a UUID)")
    if text in RESERVED_TENANTS:
        raise ReservedTenant("this tenant is reserved")
    return text


def deadline(seconds: float = CALL_SECONDS) -> float:
    """Return the instant, on the event loop's clock, by which a call must have answered."""
    return asyncio.get_running_loop().time() + seconds


# Reading a request.


async def read_body(request: AnyRequest) -> bytes:
    """Return the whole body; raise BodyTooLarge when it is over the limit."""
    limit = settings(request).max_body_bytes
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await request.receive()
        if event["type"] != "http.request":
            raise BadBody("the request ended before its body did")
        size += len(event["body"])
        if size <= limit:
            chunks.append(event["body"])
        else:
            chunks.clear()
        if not event["more_body"] or size > limit + DRAIN_BYTES_MAX:
            break
    if size > limit:
        raise BodyTooLarge(f"the body is over {limit} bytes")
    return b"".join(chunks)


def parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body; raise BadBody, naming the field where one is to blame."""
    try:
        body.decode()  # what ends up in a Raw is not checked for it
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise BadBody("the body is not UTF-8") from None
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise BadBody(_lone_surrogate(body) or _AT_PATH.sub(r" - at `\1`", str(error))) from None


def _lone_surrogate(body: bytes) -> str | None:
    """Return a sentence naming the string that holds a lone surrogate, if one does."""
    try:
        field = _surrogate_field(json.loads(body), "")
    except (ValueError, RecursionError):
        return None
    return None if field is None else f"`{field}` holds a lone surrogate"


def _surrogate_field(value: object, field: str) -> str | None:
    if isinstance(value, str):
        return field if _SURROGATE.search(value) else None
    children: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        children = ((f"{field}.{key}".lstrip("."), child) for key, child in value.items())
    elif isinstance(value, list):
        children = ((f"{field}[{place}]", child) for place, child in enumerate(value))
    return next(filter(None, (_surrogate_field(child, name) for name, child in children)), None)


def names(request: AnyRequest, template: str) -> dict[str, str]:
    """Return the names in the request's path; raise NoSuchRoute when it is not the template's.

    The path is split before it is decoded, so a name may hold an escaped slash. A template looks
    like `/api/v1/pop/queue/{queue}`.
    """
    found = match(request, template)
    if found is None:
        raise no_such_route(_path(request.scope))
    return found


def match(request: AnyRequest, template: str) -> dict[str, str] | None:
    """Return the names in the request's path, or None when it has not the template's form.

    A last name in the template like `{key...}` takes the rest of the path, slashes and all.
    """
    wanted = _segments(template)
    tail = template.endswith("...}")
    given = request.scope["raw_path"].split(b"/", len(wanted) - 1 if tail else -1)
    if len(given) != len(wanted):
        return None
    for (name, text), segment in zip(wanted, given, strict=True):
        if not name and text != segment:
            return None
    return {
        name: _decode_segment(name, segment)
        for (name, _), segment in zip(wanted, given, strict=True)
        if name
    }


@lru_cache
def _segments(template: str) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (part[1:-1].removesuffix("..."), b"") if part.startswith("{") else ("", part.encode())
        for part in template.split("/")
    )


def _decode_segment(name: str, segment: bytes) -> str:
    try:
        return limits.check_text(name, unquote_to_bytes(segment).decode())
    except UnicodeDecodeError:
        raise BadRequest(f"{name} is not UTF-8") from None


def pushed_item(
    field: str,
    *,
    queue: str,
    partition: str | None,
    payload: bytes,
    transaction_id: str | None = None,
    message_id: UUID | None = None,
    trace_id: str | None = None,
) -> PushItem:
    """Return a message to push; raise, naming the field, when it cannot be stored."""
    partition = partition or DEFAULT_PARTITION
    if not limits.are_plain(queue, partition, transaction_id):
        limits.check_text(f"{field}queue", queue)
        limits.check_text(f"{field}partition", partition)
        limits.check_names(queue, partition)
        if transaction_id is not None:
            limits.check_transaction_id(f"{field}transactionId", transaction_id)
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise PayloadTooLarge(f"{field}payload is over {limits.MESSAGE_BYTES_MAX} bytes")
    return PushItem(
        queue=queue,
        partition=partition,
        payload=payload,
        transaction_id=transaction_id,
        message_id=message_id,
        trace_id=None if trace_id is None else _uuid_or_none(trace_id),
    )


def ack_status(text: str | None) -> AckStatus:
    """Return an ack's status; whatever is not one of the other three means completed."""
    match (text or "").casefold():
        case "failed":
            return "failed"
        case "retry":
            return "retry"
        case "dlq":
            return "dlq"
    return "completed"


def partition_id(text: str) -> int | None:
    """Return a partition's id, or None when the text is not a plain decimal."""
    return int(text) if _PARTITION_ID.match(text) else None


def _uuid_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _path(scope: Scope) -> str:
    """Return the path asked for; below a mounted route the framework keeps only its rest."""
    return unquote_to_bytes(scope["raw_path"]).decode(errors="replace")


class Query:
    """The query string. A parameter given twice has its last value; an unknown one is ignored."""

    __slots__ = ("_values",)

    def __init__(self, request: AnyRequest) -> None:
        text = request.scope["query_string"].decode("latin-1")
        self._values = dict(
            parse_qsl(text, keep_blank_values=True, errors="surrogateescape") if text else ()
        )

    def text(self, name: str) -> str | None:
        """Return a parameter, or None when it is absent or empty."""
        value = self._values.get(name)
        if not value:
            return None
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{name} is not UTF-8") from None
        return limits.check_text(name, value)

    def flag(self, name: str) -> bool | None:
        """Return a parameter that is exactly `true` or `false`, or None when it is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if value not in ("true", "false"):
            raise BadRequest(f"{name} must be true or false")
        return value == "true"

    def integer(self, name: str) -> int | None:
        """Return a parameter that is a plain decimal, or None when it is absent.

        Values beyond 32 bits become the nearest that fits: no limit on this wire lies there.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not _INTEGER.match(value):
            raise BadRequest(f"{name} must be an integer")
        return max(-limits.INTEGER_MAX, min(int(value), limits.INTEGER_MAX))

    def instant(self, name: str) -> datetime | None:
        """Return a parameter that is an ISO 8601 time, UTC if it does not say, or None."""
        value = self.text(name)
        if value is None:
            return None
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise BadRequest(f"{name} must be an ISO 8601 time") from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# Answering.


def no_content() -> ASGIResponse:
    """Answer that there is nothing: no body, and no length announced."""
    return Answer(b"", 204)


def answer(content: Any, status: int = 200) -> ASGIResponse:
    """Answer with JSON: bytes as they are, anything else encoded."""
    body = content if isinstance(content, bytes) else _encode(content)
    return Answer(body, status)


def iso_milliseconds(moment: datetime) -> str:
    """Return a moment as the data plane writes it: UTC, three digits, cut off, `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def iso_microseconds(moment: datetime) -> str:
    """Return a moment as dead letters and admin views write it: UTC, six digits, `Z`."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def no_such_route(path: str) -> NoSuchRoute:
    """Return the error for a path that nothing answers at."""
    return NoSuchRoute("not found", detail={"path": path})


def failure(error: Exception, path: str) -> ASGIResponse:
    """Return the answer that an error gets on the wire."""
    if isinstance(error, QueenError):
        return _failure(error)
    if isinstance(error, BodyTooLarge):
        return Answer(str(error).encode(), 413, "text/plain; charset=utf-8")
    if isinstance(error, HTTPException):
        return _framework_failure(error, path)
    incident = secrets.token_hex(6)
    telemetry.INCIDENTS.labels(sqlstate="").inc()
    _log.error("request.failed", incident=incident, path=path, exc_info=error)
    return _failure(Internal(f"internal error, incident {incident}"))


def _failure(error: QueenError) -> ASGIResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    body = {**error.detail, "error": error.message, "code": error.code}
    if isinstance(error, Declined):
        body = {"error": error.code, "reason": error.reason, "detail": error.message}
    return Answer(_encode(body), error.status, headers=headers)


def _framework_failure(error: HTTPException, path: str) -> ASGIResponse:
    if error.status_code == 404:
        return _failure(no_such_route(path))
    code = "method_not_allowed" if error.status_code == 405 else "bad_request"
    body = _encode({"error": error.detail, "code": code})
    return Answer(body, error.status_code, headers=error.headers or {})


def _refused_method(method: str) -> ASGIResponse:
    body = _encode({"error": "Method Not Allowed", "code": "method_not_allowed"})
    return Answer(body, 405, headers={"allow": method})


def _handle(request: AnyRequest, error: Exception) -> Response[bytes]:
    response = failure(error, _path(request.scope))
    return Response(
        response.body,
        status_code=response.status_code,
        media_type=response.headers["content-type"],
        headers={name: text for name, text in response.headers.items() if name == "retry-after"},
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {Exception: _handle}
"""For the application: errors that ordinary routes and the framework raise."""
