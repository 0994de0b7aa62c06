"""The manners that all routes share: how a request is read, how an answer and an error look.

A route reads its body through `read_body` and `parse`, its names through `names`, its query through
`Query`, and answers with `answer`. Whatever it raises leaves through `failure`, the one place where
an error gets its form on the wire.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from litestar import Request, asgi
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.response import Response
from litestar.response.base import ASGIResponse
from litestar.types import ExceptionHandlersMap, Method, Receive, Scope, Send

from queen_pg import telemetry
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import (
    BadBody,
    BadRequest,
    Internal,
    NameTooLong,
    NoSuchRoute,
    QueenError,
)

CALL_SECONDS = 30.0
"""How long a call that does not wait may take (data-plane 1-6)."""

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""The largest payload of one message: a person must be able to look at it."""

NAMES_BYTES_MAX = 447
TENANT_BYTES = 36
"""A tenant's name counts towards the budget of the names; the default one has 36 bytes."""

TRANSACTION_ID_BYTES_MAX = 65_535
DEFAULT_TENANT = 1
INTEGER_MAX = 2**31 - 1

DRAIN_BYTES_MAX = 64 * 1024 * 1024
"""How much of a refused body is read and dropped, so that the sender gets to read the refusal."""

AnyRequest = Request[Any, Any, Any]
Handler = Callable[[AnyRequest], Awaitable[ASGIResponse]]
T = TypeVar("T")

_log = telemetry.logger(__name__)
_encode = msgspec.json.Encoder().encode
_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]{1,18}\Z")
_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class BodyTooLarge(Exception):
    """The request's body is over the limit; answered in plain text, before any parsing."""


def bare(method: Method, path: str, handler: Handler, *, mount: bool = False) -> ASGIRouteHandler:
    """Make a route without the framework's own request handling, for the routes where it shows.

    With mount, the route answers for every path below its own.
    """

    @asgi(path, is_mount=mount, copy_scope=False)
    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIResponse
        try:
            request: AnyRequest = Request(scope, receive, send)
            if request.method != method:
                response = _refused_method(method)
            else:
                response = await handler(request)
        except Exception as error:
            response = failure(error, scope["path"])
        await response(scope, receive, send)

    return route


# What a route needs from the application.


def settings(request: AnyRequest) -> Settings:
    """Return the broker's settings."""
    return cast(Settings, request.app.state.settings)


def database(request: AnyRequest) -> Database:
    """Return the database that the broker doors take."""
    return cast(Database, request.app.state.database)


def tenant(request: AnyRequest) -> int:  # noqa: ARG001
    """Return the id of the tenant that the request acts for."""
    return DEFAULT_TENANT


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


def check_text(field: str, text: str) -> str:
    """Return the text; raise BadRequest when it holds what the database cannot store."""
    if "\0" in text:
        raise BadRequest(f"{field} must not contain NUL")
    return text


def check_transaction_id(field: str, transaction_id: str) -> str:
    """Return the transaction id; raise BadRequest when it cannot be one."""
    if len(transaction_id) > TRANSACTION_ID_BYTES_MAX // 4 and (
        len(transaction_id.encode()) > TRANSACTION_ID_BYTES_MAX
    ):
        raise BadRequest(f"{field} is over {TRANSACTION_ID_BYTES_MAX} bytes")
    return check_text(field, transaction_id)


def check_names(queue: str, *others: str) -> None:
    """Raise NameTooLong when a queue's name and the longest other name are over their budget."""
    longest = max((len(name.encode()) for name in others), default=0)
    over = TENANT_BYTES + len(queue.encode()) + longest - NAMES_BYTES_MAX
    if over > 0:
        raise NameTooLong(
            f"the names are {over} bytes too long: a queue's name and the longer one of partition"
            f" and consumer group share {NAMES_BYTES_MAX - TENANT_BYTES} bytes"
        )


def names(request: AnyRequest, template: str) -> dict[str, str]:
    """Return the names in the request's path; raise NoSuchRoute when it is not the template's.

    The path is split before it is decoded, so a name may hold an escaped slash. A template looks
    like `/api/v1/pop/queue/{queue}`.
    """
    found = match(request, template)
    if found is None:
        raise no_such_route(request.scope["path"])
    return found


def match(request: AnyRequest, template: str) -> dict[str, str] | None:
    """Return the names in the request's path, or None when it has not the template's form."""
    wanted = _segments(template)
    given = request.scope["raw_path"].split(b"/")
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
        (part[1:-1], b"") if part.startswith("{") else ("", part.encode())
        for part in template.split("/")
    )


def _decode_segment(name: str, segment: bytes) -> str:
    try:
        return check_text(name, unquote_to_bytes(segment).decode())
    except UnicodeDecodeError:
        raise BadRequest(f"{name} is not UTF-8") from None


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
        return check_text(name, value)

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
        return max(-INTEGER_MAX, min(int(value), INTEGER_MAX))


# Answering.


def answer(content: Any, status: int = 200) -> ASGIResponse:
    """Answer with JSON: bytes as they are, anything else encoded."""
    body = content if isinstance(content, bytes) else _encode(content)
    return ASGIResponse(body=body, status_code=status)


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
        return ASGIResponse(body=str(error), status_code=413, media_type="text/plain")
    if isinstance(error, HTTPException):
        return _framework_failure(error, path)
    incident = uuid.uuid4().hex
    telemetry.INCIDENTS.labels(sqlstate="").inc()
    _log.error("request.failed", incident=incident, path=path, exc_info=error)
    return _failure(Internal(f"internal error, incident {incident}"))


def _failure(error: QueenError) -> ASGIResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    body = {"error": error.message, "code": error.code, **error.detail}
    return ASGIResponse(body=_encode(body), status_code=error.status, headers=headers)


def _framework_failure(error: HTTPException, path: str) -> ASGIResponse:
    if error.status_code == 404:
        return _failure(no_such_route(path))
    code = "method_not_allowed" if error.status_code == 405 else "bad_request"
    return ASGIResponse(
        body=_encode({"error": error.detail, "code": code}),
        status_code=error.status_code,
        headers=error.headers,
    )


def _refused_method(method: str) -> ASGIResponse:
    body = _encode({"error": "Method Not Allowed", "code": "method_not_allowed"})
    return ASGIResponse(body=body, status_code=405, headers={"allow": method})


def _handle(request: AnyRequest, error: Exception) -> Response[bytes]:
    response = failure(error, request.scope["path"])
    return Response(
        response.body,
        status_code=response.status_code,
        media_type=response.headers["content-type"],
        headers={name: text for name, text in response.headers.items() if name == "retry-after"},
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {Exception: _handle}
"""For the application: errors that ordinary routes and the framework raise."""
