"""Every error a caller can meet, and the few that the broker answers to itself.

    QueenError
    ├── BadBody          400  bad_body         the body is not the route's JSON shape
    ├── BadRequest       400  bad_request      a field is missing or invalid
    ├── ReservedTenant   403  reserved_tenant  no call may work for the tenant
    ├── NoSuchRoute      404  no_such_route
    ├── NotFound         404  not_found        the named thing does not exist
    ├── PayloadTooLarge  413  payload_too_large
    │   └── NameTooLong  413  name_too_long
    ├── Overloaded       429  overloaded       a named limit was reached; Retry-After
    ├── Declined         varies                KV, timers, locks: a code, a finer reason
    ├── Internal         500  internal         ours to fix; the log holds the incident
    ├── Unavailable      503  retry, timeout, outcome_unknown or no_leader; Retry-After
    │   └── AnswerLost   503  outcome_unknown  the connection broke under a change
    └── StorageFull      507  storage_full     writes that grow storage are refused

    Signal                                     never on the wire: a step that must be run again
    ├── Conflict                               a serialization failure, a deadlock, a key taken
    │   ├── DuplicateMessage                   the key taken is a message's transaction id
    │   └── Held                               a row is held by a transaction that goes on
    ├── Stale                                  a name or id resolved before BEGIN is gone
    └── Refused                                an optimistic run lost: judge carefully instead

The database names its errors by SQLSTATE; `database.py` translates, and nothing reads message
texts.
"""

from typing import Any, Literal

UnavailableCode = Literal["retry", "timeout", "outcome_unknown", "no_leader"]

RETRY_AFTER_SECONDS = 1


class QueenError(Exception):
    """An error with a wire form: a status, a code and one sentence."""

    code: str = "internal"
    status: int = 500
    retry_after: int | None = None

    def __init__(self, message: str, *, detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or {}


class BadBody(QueenError):
    """The body is not JSON of the route's shape."""

    code = "bad_body"
    status = 400


class BadRequest(QueenError):
    """A field is missing or invalid: the call can never succeed as written."""

    code = "bad_request"
    status = 400


class ReservedTenant(QueenError):
    """The tenant is one that no call may work for."""

    code = "reserved_tenant"
    status = 403


class NoSuchRoute(QueenError):
    """Nothing answers at this path."""

    code = "no_such_route"
    status = 404


class NotFound(QueenError):
    """The thing that the call names does not exist."""

    code = "not_found"
    status = 404


class PayloadTooLarge(QueenError):
    """The body, or one document in it, is over its limit."""

    code = "payload_too_large"
    status = 413


class NameTooLong(PayloadTooLarge):
    """The names of a message are over their common budget."""

    code = "name_too_long"


class Overloaded(QueenError):
    """A limit of this broker was reached; nothing was written."""

    code = "overloaded"
    status = 429
    retry_after = RETRY_AFTER_SECONDS


class Declined(QueenError):
    """KV, timers or locks refuse a call or one of its operations.

    These surfaces answer `{error, reason, detail}`: the code, a finer one, and prose (step 0.1).
    """

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        *,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.status = status
        self.retry_after = retry_after


class Internal(QueenError):
    """A fault of ours. The message names the incident, the log has the rest."""


class Unavailable(QueenError):
    """The call did not complete; a write may have happened; the same bytes may be sent again."""

    status = 503
    retry_after = RETRY_AFTER_SECONDS

    def __init__(
        self, code: UnavailableCode, message: str, *, detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message, detail=detail)
        self.code = code


class AnswerLost(Unavailable):
    """The connection broke under a change: whether that was committed is not known."""

    def __init__(self, message: str) -> None:
        super().__init__("outcome_unknown", message)


class StorageFull(QueenError):
    """The database has no room; reads, acks and deletes still work."""

    code = "storage_full"
    status = 507


class Signal(Exception):
    """A step was rolled back and must be run again; `sqlstate` says why."""

    def __init__(
        self, message: str, *, sqlstate: str, detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.detail = detail or {}


class Conflict(Signal):
    """Another transaction was in the way: the same call, run again, may succeed."""


class DuplicateMessage(Conflict):
    """A transaction id is already in its partition: run the call again, carefully."""


class Held(Conflict):
    """A row that the step needs is held by a transaction that goes on: somebody's own, perhaps."""


class Stale(Signal):
    """A name or id resolved before the transaction is gone: resolve again, then run again."""


class Refused(Signal):
    """An optimistic run met what it cannot judge: run the call again, carefully."""
