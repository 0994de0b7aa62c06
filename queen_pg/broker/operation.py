"""How the operations of KV, timers and locks are read: field by field, values as they were sent."""

import json
import re
from decimal import Decimal, InvalidOperation

import msgspec

Fields = dict[str, msgspec.Raw]
"""An operation: each field's JSON text."""

TENANT_FIELDS = ("tenant", "tenantId", "_tenant")
"""The tenant comes from the request's context; an operation that names one is refused."""

_INTEGER = re.compile(r"-?[0-9]+(\.0+)?\Z")
_DIGITS_MAX = 30
_HUGE: int = 10**_DIGITS_MAX
_TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', re.DOTALL)
_object = msgspec.json.Decoder(Fields)


def fields(document: msgspec.Raw) -> Fields | None:
    """Return an operation's fields, or None when it is not an object."""
    try:
        return _object.decode(document)
    except msgspec.DecodeError:
        return None


def present(operation: Fields, name: str) -> msgspec.Raw | None:
    """Return a field's JSON text, or None when it is absent or null."""
    value = operation.get(name)
    return None if value is None or bytes(value) == b"null" else value


def string(value: msgspec.Raw | None) -> str | None:
    """Return a JSON string's text, or None for anything else."""
    if value is None or not bytes(value).startswith(b'"'):
        return None
    return msgspec.json.decode(value, type=str)


def scalar(value: msgspec.Raw | None) -> str | None:
    """Return a string's text, or a number's or boolean's JSON text; None for anything else."""
    if value is None or bytes(value)[:1] in (b"[", b"{", b"n"):
        return None
    text = string(value)
    return bytes(value).decode() if text is None else text


def boolean(value: msgspec.Raw | None) -> bool | None:
    """Return a JSON boolean, or None for anything else."""
    return {b"true": True, b"false": False}.get(b"" if value is None else bytes(value))


def number(value: msgspec.Raw | None) -> str | None:
    """Return a JSON number's text, or None for anything else."""
    text = b"" if value is None else bytes(value)
    return text.decode() if text[:1].isdigit() or text[:1] == b"-" else None


def integer(value: msgspec.Raw | None, *, exact: bool = False) -> int | None:
    """Return a JSON number that is whole, or None for anything else.

    60.0 and 6e1 are whole unless `exact`, which wants digits only. No number on this wire matters
    beyond 30 digits: what has more becomes 10 to the 30th.
    """
    text = number(value)
    if text is None:
        return None
    if match := _INTEGER.match(text):
        if exact and match.group(1):
            return None
        digits = text.partition(".")[0]
        if len(digits) > _DIGITS_MAX:
            return -_HUGE if digits.startswith("-") else _HUGE
        return int(digits)
    try:
        whole = Decimal(text)
    except InvalidOperation:  # an exponent beyond reason
        return None
    if exact or whole.adjusted() > _DIGITS_MAX or whole != whole.to_integral_value():
        return None
    return int(whole)


def compact_bytes(value: msgspec.Raw) -> int:
    """Return the size of a JSON document without spaces, and without escapes that nobody needs."""
    return len(_TOKEN.sub(_compact, bytes(value)))


def _compact(token: re.Match[bytes]) -> bytes:
    text = token.group(1)
    if text is None:
        return b""
    return json.dumps(json.loads(text), ensure_ascii=False).encode() if b"\\" in text else text
