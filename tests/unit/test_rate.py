"""The rates of KV, locks and timers: step 2.12."""

import pytest

from queen_pg.broker.rate import Kind, Rates
from queen_pg.config import Settings
from queen_pg.errors import Declined


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(rates: Rates, tenant: int, kind: Kind) -> Declined | None:
    try:
        rates.spend(tenant, kind)
    except Declined as refusal:
        return refusal
    return None


def spent(rates: Rates, tenant: int = 1, kind: Kind = "write") -> int:
    """Spend until nothing is left; return how much there was."""
    count = 0
    while (refusal := refused(rates, tenant, kind)) is None:
        count += 1
    assert (refusal.code, refusal.status, refusal.retry_after) == ("rate_limited", 429, 1)
    return count


def test_a_bucket_holds_its_burst_and_fills_with_its_rate() -> None:
    clock = Clock()
    rates = Rates(Settings(), clock)
    assert spent(rates) == 200
    clock.now += 0.25
    assert spent(rates) == 25
    clock.now += 3600
    assert spent(rates) == 200


def test_each_tenant_and_kind_has_its_own() -> None:
    rates = Rates(Settings(), Clock())
    assert [spent(rates), spent(rates, kind="read"), spent(rates, 2)] == [200, 400, 200]


def test_a_slow_rate_says_when_to_come_again() -> None:
    clock = Clock()
    rates = Rates(Settings(kv_write_rate=1, kv_write_burst=1), clock)
    rates.spend(1, "write")
    with pytest.raises(Declined) as raised:
        rates.spend(1, "write")
    assert raised.value.retry_after == 1
    clock.now += 1
    rates.spend(1, "write")


def test_a_rate_of_0_sets_no_limit() -> None:
    rates = Rates(Settings(kv_read_rate=0), Clock())
    for _ in range(10_000):
        rates.spend(1, "read")
