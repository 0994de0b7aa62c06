"""Quotas against what is in the database: step 2.12."""

from collections.abc import Callable

import asyncpg
import pytest

from queen_pg.broker.quota import Quotas
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Declined

KEEP = """
with other as (insert into queen.tenants (name) values ('other') returning id),
kept as (
    insert into queen.kv (tenant_id, namespace, key, version, value, created_at, updated_at)
    select other.id, 'n', n::text, n, '1', now(), now() from other, generate_series(1, 9) n
)
insert into queen.timers (tenant_id, queue, timer_key, partition, transaction_id, message_id,
                          payload, deliver_at, fire_at, created_at, updated_at)
select other.id, 'q', n::text, 'p', n::text, gen_random_uuid(), '1', 'infinity', 'infinity', now(),
       now()
from other, generate_series(1, 5) n
returning tenant_id
"""


async def keep(database: str) -> int:
    """Have a tenant keep nine keys, of some bytes, and five timers; return its id."""
    connection = await asyncpg.connect(database)
    try:
        tenant: int = await connection.fetchval(KEEP)
    finally:
        await connection.close()
    return tenant


def refused(check: Callable[[int], None], tenant: int) -> str | None:
    try:
        check(tenant)
    except Declined as refusal:
        return f"{refusal.status} {refusal.code}"
    return None


@pytest.mark.parametrize(
    ("settings", "kv", "timers"),
    [
        (Settings(), False, False),
        (Settings(kv_max_rows=10, kv_max_bytes=10_000, timers_max=6), False, False),
        (Settings(kv_max_rows=9), True, False),
        (Settings(kv_max_rows=8), True, False),
        (Settings(kv_max_bytes=20), True, False),
        (Settings(kv_max_rows=10, kv_max_bytes=20), True, False),
        (Settings(timers_max=5), False, True),
        (Settings(kv_max_rows=1, timers_max=1), True, True),
    ],
)
async def test_a_tenant_keeps_no_more_than_it_may(
    database: str, db: Database, settings: Settings, kv: bool, timers: bool
) -> None:
    tenant = await keep(database)
    quotas = Quotas(settings)
    assert refused(quotas.check_kv, tenant) is refused(quotas.check_timers, tenant) is None
    await quotas.measure(db)
    assert refused(quotas.check_kv, tenant) == ("403 kv_quota_exceeded" if kv else None)
    assert refused(quotas.check_timers, tenant) == ("403 timers_quota_exceeded" if timers else None)
    assert refused(quotas.check_kv, 1) is refused(quotas.check_timers, 1) is None


@pytest.mark.parametrize("name", ["kv_max_rows", "kv_max_bytes", "timers_max"])
def test_without_a_quota_nothing_is_counted(name: str) -> None:
    assert not Quotas(Settings()).counts
    assert Quotas(Settings(**{name: 1})).counts
