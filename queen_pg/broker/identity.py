"""Identifiers that the broker mints outside the database: leases and calls."""

import secrets
import time
from uuid import UUID


def uuid_v7() -> UUID:
    """Return a UUID version 7 of this moment: 48 bits of milliseconds, then random bits."""
    milliseconds = time.time_ns() // 1_000_000
    value = milliseconds << 80 | secrets.randbits(80)
    value &= ~(0xF << 76 | 0x3 << 62)
    return UUID(int=value | 7 << 76 | 2 << 62)
