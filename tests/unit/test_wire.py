"""The manners of the wire: how errors look, how queries and paths are read, how moments look."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from litestar import Request
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope

from queen_pg import errors, limits
from queen_pg.errors import Declined, QueenError, Unavailable
from queen_pg.routes import wire


def request(raw_path: str = "/", query: str = "") -> wire.AnyRequest:
    scope: Any = {
        "type": "http",
        "method": "GET",
        "path": raw_path,
        "raw_path": raw_path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": [],
    }
    typed: HTTPScope = scope
    made: wire.AnyRequest = Request(typed)
    return made


def shown(response: ASGIResponse) -> tuple[int, Any, str | None]:
    """Return an answer's status, its document, and how long to wait."""
    assert response.headers["content-type"] == "application/json"
    return response.status_code, json.loads(response.body), response.headers.get("retry-after")


ERRORS: list[tuple[QueenError, int, str, str | None]] = [
    (errors.BadBody("m"), 400, "bad_body", None),
    (errors.BadRequest("m"), 400, "bad_request", None),
    (errors.ReservedTenant("m"), 403, "reserved_tenant", None),
    (errors.NoSuchRoute("m"), 404, "no_such_route", None),
    (errors.NotFound("m"), 404, "not_found", None),
    (errors.PayloadTooLarge("m"), 413, "payload_too_large", None),
    (errors.NameTooLong("m"), 413, "name_too_long", None),
    (errors.Overloaded("m"), 429, "overloaded", "1"),
    (errors.Internal("m"), 500, "internal", None),
    (Unavailable("retry", "m"), 503, "retry", "1"),
    (Unavailable("timeout", "m"), 503, "timeout", "1"),
    (Unavailable("outcome_unknown", "m"), 503, "outcome_unknown", "1"),
    (errors.AnswerLost("m"), 503, "outcome_unknown", "1"),
    (Unavailable("no_leader", "m"), 503, "no_leader", "1"),
    (errors.StorageFull("m"), 507, "storage_full", None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), ERRORS)
def test_the_form_of_each_error(
    error: QueenError, status: int, code: str, retry_after: str | None
) -> None:
    """data-plane 1-5: the table of statuses and codes; Retry-After on 429 and 503."""
    assert shown(wire.failure(error, "/")) == (status, {"error": "m", "code": code}, retry_after)


def test_every_error_has_its_form_tested() -> None:
    """Each class of the tree but Declined, whose three words are another's."""
    classes = {type(error) for error, *_ in ERRORS}
    assert classes | {Declined, QueenError} == {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, QueenError)
    }


def test_a_declined_call_says_so_in_three_words() -> None:
    """step 0.1: the error is a code, never prose."""
    declined = Declined("kv_bad_request", "kv_bad_key", "prose", status=400, retry_after=3)
    expected = {"error": "kv_bad_request", "reason": "kv_bad_key", "detail": "prose"}
    assert shown(wire.failure(declined, "/")) == (400, expected, "3")


def test_detail_never_hides_what_clients_read() -> None:
    error = errors.BadRequest("m", detail={"code": "other", "error": "other", "field": "f"})
    expected = {"error": "m", "code": "bad_request", "field": "f"}
    assert shown(wire.failure(error, "/"))[1] == expected


@pytest.mark.parametrize("error", [ValueError("secret"), errors.Conflict("x", sqlstate="40001")])
def test_a_fault_of_ours_tells_only_its_incident(error: Exception) -> None:
    """data-plane 1-5: 500 `internal`."""
    status, document, _ = shown(wire.failure(error, "/"))
    assert (status, document["code"]) == (500, "internal")
    assert "incident" in document["error"]
    assert "secret" not in document["error"]


def test_what_the_framework_refuses() -> None:
    """data-plane 1-1, 1-5: its errors get the wire's bodies."""
    status, document, _ = shown(wire.failure(NotFoundException(), "/api/v1/nope"))
    assert (status, document["code"], document["path"]) == (404, "no_such_route", "/api/v1/nope")
    response = wire.failure(MethodNotAllowedException(headers={"allow": "GET"}), "/")
    assert shown(response)[1]["code"] == "method_not_allowed"
    assert response.headers["allow"] == "GET"
    assert shown(wire.failure(HTTPException(status_code=400, detail="d"), "/"))[1] == {
        "error": "d",
        "code": "bad_request",
    }


def test_a_call_has_thirty_seconds() -> None:
    """data-plane 1-6."""
    assert wire.CALL_SECONDS == 30


@pytest.mark.parametrize(
    ("path", "template", "names"),
    [
        ("/a/x/b/y", "/a/{one}/b/{two}", {"one": "x", "two": "y"}),
        ("/a/x%2Fb%2Fy/b/%25", "/a/{one}/b/{two}", {"one": "x/b/y", "two": "%"}),
        ("/a//b/", "/a/{one}/b/{two}", {"one": "", "two": ""}),
        ("/a/x/c/y", "/a/{one}/b/{two}", None),
        ("/a/x/b/y/z", "/a/{one}/b/{two}", None),
        ("/a/x/b", "/a/{one}/b/{two}", None),
        ("/a/x/y/z", "/a/{one}/{rest...}", {"one": "x", "rest": "y/z"}),
    ],
)
def test_a_path_is_split_before_it_is_decoded(
    path: str, template: str, names: dict[str, str] | None
) -> None:
    assert wire.match(request(path), template) == names


def test_a_query_is_decoded_and_typed() -> None:
    """data-plane 1-4."""
    query = wire.Query(request(query="a=1&a=2&text=x+y%2B%C3%A4&no=&yes=true&off=false&n=-7"))
    assert query.integer("a") == 2
    assert query.text("text") == "x y+ä"
    assert (query.text("no"), query.text("none")) == (None, None)
    assert [query.flag(name) for name in ("yes", "off", "none")] == [True, False, None]
    assert (query.integer("n"), query.integer("none")) == (-7, None)
    for name in ("text", "no"):
        with pytest.raises(errors.BadRequest, match=name):
            query.flag(name)
        with pytest.raises(errors.BadRequest, match=name):
            query.integer(name)


@pytest.mark.parametrize(
    ("text", "number"),
    [("9" * 18, limits.INTEGER_MAX), ("-" + "9" * 18, -limits.INTEGER_MAX), ("007", 7)],
)
def test_integers_are_clamped_to_32_bits(text: str, number: int) -> None:
    assert wire.Query(request(query=f"n={text}")).integer("n") == number


def test_moments_are_cut_off_not_rounded() -> None:
    """data-plane 0.2: UTC, `Z`, exactly three or six digits."""
    moment = datetime(2026, 3, 1, 9, 0, 0, 125_999, timezone(timedelta(hours=1)))
    assert wire.iso_milliseconds(moment) == "2026-03-01T08:00:00.125Z"
    assert wire.iso_microseconds(moment) == "2026-03-01T08:00:00.125999Z"
    assert wire.iso_milliseconds(datetime(1, 1, 1, tzinfo=UTC)) == "0001-01-01T00:00:00.000Z"
    assert wire.iso_microseconds(datetime(2026, 1, 1, tzinfo=UTC)).endswith("00.000000Z")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Failed", "failed"),
        ("RETRY", "retry"),
        ("dlq", "dlq"),
        ("completed", "completed"),
        ("nonsense", "completed"),
        ("", "completed"),
        (None, "completed"),
    ],
)
def test_the_statuses_of_an_ack(text: str | None, status: str) -> None:
    """data-plane 6.1."""
    assert wire.ack_status(text) == status
