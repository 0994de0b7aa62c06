"""Quotas: how much of KV, and how many timers, a tenant may keep (step 2.12).

Usage is measured every few seconds, outside of any step, so a quota is as exact as that: what is
written in between is not seen. It never stands in the way of reads, deletes and cancels.
"""

import asyncio

import msgspec

from queen_pg.config import Settings
from queen_pg.database import DEFAULT_DEADLINE_SECONDS, Database
from queen_pg.errors import Declined


class Usage(msgspec.Struct, frozen=True):
    """What a tenant keeps."""

    kv_rows: int = 0
    kv_bytes: int = 0
    timer_count: int = 0


class Quotas:
    """The quotas of one log's tenants; one of 0 sets no limit."""

    def __init__(self, settings: Settings) -> None:
        self._kv = {
            "kv_rows": (settings.kv_max_rows, "keys"),
            "kv_bytes": (settings.kv_max_bytes, "bytes of keys and values"),
        }
        self._timers = {"timer_count": (settings.timers_max, "pending timers")}
        self._usage: dict[int, Usage] = {}

    @property
    def counts(self) -> bool:
        """Whether there is any quota, and so a reason to measure."""
        return _any(self._kv) or _any(self._timers)

    async def measure(self, db: Database) -> float:
        """Learn what every tenant keeps; return the seconds that it took."""
        clock = asyncio.get_running_loop().time
        started = clock()
        rows = await db.read(
            "_usage",
            deadline=started + DEFAULT_DEADLINE_SECONDS,
            kv=_any(self._kv),
            timers=_any(self._timers),
        )
        self._usage = {
            row["tenant"]: Usage(row["kv_rows"], row["kv_bytes"], row["timer_count"])
            for row in rows
        }
        return clock() - started

    def check_kv(self, tenant: int) -> None:
        """Raise Declined (403) when a tenant keeps as much in KV as it may."""
        self._check(tenant, "kv_quota_exceeded", self._kv)

    def check_timers(self, tenant: int) -> None:
        """Raise Declined (403) when a tenant has as many timers as it may."""
        self._check(tenant, "timers_quota_exceeded", self._timers)

    def _check(self, tenant: int, code: str, limits: dict[str, tuple[int, str]]) -> None:
        usage = self._usage.get(tenant, Usage())
        for name, (most, things) in limits.items():
            if 0 < most <= getattr(usage, name):
                raise Declined(
                    code,
                    code,
                    f"the quota of {most} {things} is used up; deletes and cancels still work",
                    status=403,
                )


def _any(limits: dict[str, tuple[int, str]]) -> bool:
    return any(most for most, _ in limits.values())
