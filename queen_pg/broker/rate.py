"""How many calls of KV, locks and timers a tenant may make a second, in one process (step 2.12)."""

import math
import time
from collections.abc import Callable
from typing import Literal

from queen_pg.config import Settings
from queen_pg.errors import Declined

Kind = Literal["read", "write"]


class Rates:
    """A bucket of tokens for each tenant and kind of call; a rate of 0 sets no limit."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits: dict[Kind, tuple[int, int]] = {
            "read": (settings.kv_read_rate, settings.kv_read_burst),
            "write": (settings.kv_write_rate, settings.kv_write_burst),
        }
        self._clock = clock
        self._buckets: dict[tuple[int, Kind], tuple[float, float]] = {}

    def spend(self, tenant: int, kind: Kind) -> None:
        """Take a token for one call; raise Declined (429) when the bucket is empty."""
        rate, burst = self._limits[kind]
        if rate == 0:
            return
        now = self._clock()
        tokens, filled_at = self._buckets.get((tenant, kind), (burst, now))
        tokens = min(burst, tokens + (now - filled_at) * rate)
        if tokens < 1:
            self._buckets[tenant, kind] = (tokens, now)
            raise Declined(
                "rate_limited",
                f"kv_{kind}_rate",
                f"more than {rate} {kind}s a second",
                status=429,
                retry_after=max(1, math.ceil((1 - tokens) / rate)),
            )
        self._buckets[tenant, kind] = (tokens - 1, now)
