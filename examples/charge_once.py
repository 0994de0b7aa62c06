"""Charge once: an event may come twice, and a worker may die after it has called the bank.

Inside the broker a step happens once: the marker of `once`, the receipt and the ack are one commit.
The bank is outside of any commit. It gets the payment's id as its idempotency key with every call,
and so answers a repeated call with the charge that it has made already.

    QUEEN_URL=http://127.0.0.1:6632 python examples/charge_once.py
"""

import asyncio
import contextlib
import os
import sys
from collections import Counter
from uuid import uuid4

from queen import Queen

URL = os.environ.get("QUEEN_URL", "http://127.0.0.1:6632")
RUN = uuid4().hex[:8]  # names of this run alone, so that it can be run again
PAYMENTS, RECEIPTS, CHARGED = f"payments-{RUN}", f"receipts-{RUN}", f"charged-{RUN}"


class Bank:
    """Somebody else's system, with idempotency keys as all of them have."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.charges: dict[str, int] = {}

    async def charge(self, key: str, amount: int) -> str:
        self.calls[key] += 1
        self.charges.setdefault(key, amount)
        return f"charge of {key}"


class Crash(Exception):
    """The worker dies here, in its first life."""


async def step(queen: Queen, bank: Bank, message: dict, *, dying: bool) -> None:
    payment, amount = message["data"]["payment"], message["data"]["amount"]
    charge = await bank.charge(payment, amount)
    if dying:
        raise Crash
    result = await (
        queen.transaction()
        .once(CHARGED, payment, ttl_seconds=86_400)
        .queue(RECEIPTS)
        .partition(payment)
        .push([{"data": {"payment": payment, "charge": charge}}])
        .ack(message)
        .commit()
    )
    if not result:
        # Somebody has been here before. Nothing was written, not even the ack: that is left to do.
        await queen.ack(message, True)


async def worker(queen: Queen, bank: Bank) -> None:
    crashes = 5
    while messages := await queen.queue(PAYMENTS).batch(1).wait(True).timeout_millis(2500).pop():
        crashes -= 1
        # The next life goes on: the payment comes back when its lease of a second has expired.
        with contextlib.suppress(Crash):
            await step(queen, bank, messages[0], dying=crashes >= 0)


async def main() -> None:
    payments = {f"payment-{number}": 10 * number for number in range(1, 21)}
    bank = Bank()
    async with Queen(URL) as queen:
        await queen.queue(PAYMENTS).config({"leaseTime": 1}).create()
        for payment, amount in payments.items():
            # The sender does not know whether its push arrived, and sends the event once more.
            items = [{"data": {"payment": payment, "amount": amount}}] * 2
            await queen.queue(PAYMENTS).partition(payment).push(items)

        await worker(queen, bank)

        receipts = await queen.queue(RECEIPTS).batch(100).partitions(64).wait(True).pop()

    if bank.charges != payments:
        sys.exit(f"FAIL: charged {bank.charges}")
    if Counter(receipt["data"]["payment"] for receipt in receipts) != Counter(list(payments)):
        sys.exit(f"FAIL: receipts {[receipt['data'] for receipt in receipts]}")
    if sum(bank.calls.values()) <= 2 * len(payments):
        sys.exit("FAIL: nothing was tried again")
    print("PASS")


if __name__ == "__main__":
    asyncio.run(main())
