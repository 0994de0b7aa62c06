"""One state machine per order.

An order's events are pushed to its own partition, so they arrive in order, and one worker at a time
has them. Its state is a KV entry. Each event is one step: the worker reads the state, decides, and
commits the ack, the new state and what follows from it together. Workers keep nothing in between:
there may be any number of them, and any of them may die at any moment.

    QUEEN_URL=http://127.0.0.1:6632 python examples/order_state_machine.py
"""

import asyncio
import os
import sys
from uuid import uuid4

from queen import Queen

URL = os.environ.get("QUEEN_URL", "http://127.0.0.1:6632")
RUN = uuid4().hex[:8]  # names of this run alone, so that it can be run again
EVENTS, MAILS, STATES = f"orders-{RUN}", f"mails-{RUN}", f"orders-{RUN}"

TRANSITIONS = {
    (None, "placed"): "waiting for payment",
    ("waiting for payment", "paid"): "packing",
    ("waiting for payment", "cancelled"): "cancelled",
    ("packing", "shipped"): "done",
}


async def worker(queen: Queen) -> None:
    while messages := await queen.queue(EVENTS).batch(5).wait(True).timeout_millis(2000).pop():
        for message in messages:
            await step(queen, message)


async def step(queen: Queen, message: dict) -> None:
    order, event = message["data"]["order"], message["data"]["event"]
    entry = await queen.kv.get(STATES, order)
    state = entry["value"] if entry else None
    new_state = TRANSITIONS.get((state, event))
    if new_state is None:
        # Not possible in this state: a dead letter for somebody to look at.
        await queen.ack(message, "dlq", {"error": f"{event} while {state}"})
        return
    # The ack names this worker's lease. Without it nothing is written: the state needs no lock.
    await (
        queen.transaction()
        .ack(message)
        .kv.put(STATES, order, new_state, forever=True)
        .queue(MAILS)
        .partition(order)
        .push([{"data": {"order": order, "text": f"Your order: {new_state}"}}])
        .commit()
    )


async def main() -> None:
    lives = {
        **{f"order-{n}": ["placed", "paid", "shipped"] for n in range(10)},
        **{f"order-{n}": ["placed", "cancelled", "shipped"] for n in range(10, 15)},
    }
    async with Queen(URL) as queen:
        await queen.queue(EVENTS).create()
        for order, events in lives.items():
            items = [{"data": {"order": order, "event": event}} for event in events]
            await queen.queue(EVENTS).partition(order).push(items)

        await asyncio.gather(*(worker(queen) for _ in range(3)))

        states = {order: (await queen.kv.get(STATES, order))["value"] for order in lives}
        mails = await queen.queue(MAILS).batch(100).partitions(64).wait(True).pop()
        refused = await queen.queue(EVENTS).dlq().limit(100).get()

    done = sum(state == "done" for state in states.values())
    cancelled = sum(state == "cancelled" for state in states.values())
    counts = (done, cancelled, len(mails), refused["total"])
    if counts != (10, 5, 40, 5):
        sys.exit(f"FAIL: done, cancelled, mails and refused events are {counts}")
    print("PASS")


if __name__ == "__main__":
    asyncio.run(main())
