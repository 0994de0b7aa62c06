"""KV: `POST /api/v1/kv`, the routes by path, and the console's reads (step 2)."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import delete, get, post, put
from litestar.response.base import ASGIResponse

from queen_pg.broker import kv, switch
from queen_pg.broker import operation as op
from queen_pg.broker.kv import Limits, Lost
from queen_pg.errors import Declined
from queen_pg.routes import surface, wire

IN_THE_PATH = ("op", "ns", "namespace", "key")


class _Row(msgspec.Struct):
    found: bool
    version: int = 0


_row = msgspec.json.Decoder(_Row)


@surface.speaking("kv")
async def call(request: wire.AnyRequest) -> ASGIResponse:
    """Carry out KV operations in one commit; results come in the order of the operations."""
    operations = await surface.read_operations(request)
    outcome = await _run(request, operations)
    if isinstance(outcome, Lost):
        return wire.answer(_precondition(outcome))
    return surface.results(outcome, indexed=True)


@get("/api/v1/kv/{names:path}")
@surface.speaking("kv")
async def read_key(request: wire.AnyRequest) -> ASGIResponse:
    """Read one key; the ETag of one that is found is its version."""
    response = await _by_path(request, "get", {})
    row = _row.decode(response.body)
    if row.found:
        response.headers["etag"] = f'"{row.version}"'
    return response


@put("/api/v1/kv/{names:path}")
@surface.speaking("kv")
async def put_key(request: wire.AnyRequest) -> ASGIResponse:
    """Write one key: the body has its value, its lifetime and perhaps an expected version."""
    body = await surface.read_object(request)
    fields = ("value", "ttlSeconds", "forever", "expect", "required")
    return await _by_path(request, "put", body, fields)


@delete("/api/v1/kv/{names:path}", status_code=200)
@surface.speaking("kv")
async def delete_key(request: wire.AnyRequest) -> ASGIResponse:
    """Remove one key, perhaps only at an expected version."""
    body = await surface.read_object(request, optional=True)
    return await _by_path(request, "delete", body, ("expect", "required"))


@get("/api/v1/resources/kv/namespaces")
@surface.speaking("kv")
async def list_namespaces(request: wire.AnyRequest) -> ASGIResponse:
    """List the namespaces that hold rows, in byte order."""
    surface.refuse_query(request, "kv")
    await _require_kv(request)
    rows = await kv.namespaces(wire.database(request), wire.tenant(request))
    return wire.answer(
        {"namespaces": [{"namespace": namespace, "keys": keys} for namespace, keys in rows]}
    )


@post("/api/v1/resources/kv/list", status_code=200)
@surface.speaking("kv")
async def list_keys(request: wire.AnyRequest) -> ASGIResponse:
    """List a page of a namespace's rows, for people."""
    surface.refuse_query(request, "kv")
    body = await surface.read_object(request)
    async with switch.first(wire.database(request), "kv"):
        operation: dict[str, Any] = {
            "ns": kv.check_namespace(op.scalar(body.get("namespace")) or "")
        }
        if prefix := op.scalar(body.get("prefix")):
            operation["prefix"] = kv.check_key("prefix", prefix)
        operation |= kv.page_fields(body)
        if expired := op.present(body, "includeExpired"):
            if op.boolean(expired) is None:
                raise Declined("kv_bad_request", "kv_bad_request", "includeExpired is a boolean")
            operation["includeExpired"] = op.boolean(expired)
    await _require_kv(request)
    page = await kv.page(wire.database(request), wire.tenant(request), operation)
    return wire.answer(
        {
            "rows": msgspec.Raw(page.rows),
            "truncated": page.truncated,
            "nextAfter": page.next_after,
            "bytes": page.bytes,
        }
    )


async def _run(request: wire.AnyRequest, operations: Sequence[msgspec.Raw]) -> list[str] | Lost:
    """Refuse in the order of step 2.2: size, switch, quota, rate, validation; then carry out."""
    limits = Limits.of_call(wire.settings(request))
    tenant = wire.tenant(request)
    database = wire.database(request)
    kv.check_size(operations, limits)
    async with switch.first(database, "kv"):
        if kv.is_growth(operations):
            surface.quotas(request).check_kv(tenant)
        surface.rates(request).spend(tenant, "write" if kv.is_write(operations) else "read")
        validated = kv.validate(operations, limits)
    return await kv.run(database, tenant, validated, wire.deadline())


async def _by_path(
    request: wire.AnyRequest,
    name: str,
    body: dict[str, msgspec.Raw],
    fields: tuple[str, ...] = (),
) -> ASGIResponse:
    """Carry out the one operation that a path names, and answer with its bare element."""
    surface.refuse_query(request, "kv")
    names = wire.names(request, "/api/v1/kv/{ns}/{key...}")
    for field in IN_THE_PATH:
        if field in body:
            raise Declined("kv_bad_request", "kv_field_in_path", f"{field} is in the path")
    operation: dict[str, Any] = {field: body[field] for field in fields if field in body}
    document = msgspec.Raw(msgspec.json.encode({"op": name, **names} | operation))
    outcome = await _run(request, [document])
    if isinstance(outcome, Lost):
        return wire.answer(_precondition(outcome))
    return wire.answer(f'{{"index":0,{outcome[0][1:]}'.encode())


async def _require_kv(request: wire.AnyRequest) -> None:
    if not (await switch.read(wire.database(request))).kv:
        raise switch.kv_disabled()


def _precondition(lost: Lost) -> bytes:
    head = f'{{"ok":false,"reason":"kv_precondition","failedIndex":{lost.failed_index},'
    return (head + lost.verdict[1:]).encode()


ROUTES = [
    wire.bare("POST", "/api/v1/kv", call),
    read_key,
    put_key,
    delete_key,
    list_namespaces,
    list_keys,
]
