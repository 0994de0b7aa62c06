"""A saga with a compensation timer: a seat is held for a second, and then sold or given back.

Holding the seat and setting the timer that gives it back are one commit, so no seat is held for
ever. Paying cancels the timer in the commit that sells the seat. The timer may have fired a moment
before: so who compensates looks at the state again, and writes it only if nobody has since.

    QUEEN_URL=http://127.0.0.1:6632 python examples/saga_with_timer.py
"""

import asyncio
import os
import sys
from uuid import uuid4

from queen import Queen

URL = os.environ.get("QUEEN_URL", "http://127.0.0.1:6632")
RUN = uuid4().hex[:8]  # names of this run alone, so that it can be run again
BOOKINGS, TIMEOUTS, SEATS = f"bookings-{RUN}", f"timeouts-{RUN}", f"seats-{RUN}"
HOLD_MS = 1000


async def on_booking(queen: Queen, message: dict) -> None:
    seat, event = message["data"]["seat"], message["data"]["event"]
    step = queen.transaction().ack(message)
    if event == "reserve":
        step.kv.put(SEATS, seat, "held", forever=True, expect=0, required=True)
        step.timer(TIMEOUTS).key(seat).payload({"seat": seat}).after_ms(HOLD_MS).schedule()
    else:
        held = await queen.kv.get(SEATS, seat)
        version = held["version"] if held and held["value"] == "held" else 0
        step.kv.put(SEATS, seat, "sold", forever=True, expect=version, required=True)
        step.timer(TIMEOUTS).key(seat).cancel()
    if not await step.commit():
        await queen.ack(message, "dlq", {"error": f"{seat} is not there to {event}"})


async def on_timeout(queen: Queen, message: dict) -> None:
    seat = message["data"]["seat"]
    held = await queen.kv.get(SEATS, seat)
    step = queen.transaction().ack(message)
    if held["value"] == "held":
        step.kv.put(SEATS, seat, "free", forever=True, expect=held["version"], required=True)
    if not await step.commit():
        await queen.ack(message, False)  # it was paid for this very moment: look again


async def worker(queen: Queen, queue: str, handle) -> None:
    wait_ms = 3 * HOLD_MS
    while messages := await queen.queue(queue).batch(1).wait(True).timeout_millis(wait_ms).pop():
        await handle(queen, messages[0])


async def main() -> None:
    seats = [f"seat-{number:02d}" for number in range(12)]
    paying = seats[::2]
    async with Queen(URL) as queen:
        for name in (BOOKINGS, TIMEOUTS):
            await queen.queue(name).create()

        async def customer(seat: str) -> None:
            booking = queen.queue(BOOKINGS).partition(seat)
            await booking.push([{"data": {"seat": seat, "event": "reserve"}}])
            if seat in paying:
                await booking.push([{"data": {"seat": seat, "event": "pay"}}])

        await asyncio.gather(
            *(customer(seat) for seat in seats),
            *(worker(queen, BOOKINGS, on_booking) for _ in range(2)),
            worker(queen, TIMEOUTS, on_timeout),
        )

        states = {seat: (await queen.kv.get(SEATS, seat))["value"] for seat in seats}
        late = await queen.queue(BOOKINGS).dlq().limit(100).get()
        pending = (await queen.timers.list(TIMEOUTS))["rows"]

    # Whoever paid in time has the seat; who came too late is told so, and all other seats are free.
    sold = {seat for seat, state in states.items() if state == "sold"}
    free = {seat for seat, state in states.items() if state == "free"}
    if sold | free != set(seats) or not sold <= set(paying) or pending:
        sys.exit(f"FAIL: {states}, and timers {pending}")
    if len(sold) + late["total"] != len(paying):
        sys.exit(f"FAIL: {len(sold)} sold, {late['total']} too late, of {len(paying)} who paid")
    print("PASS")


if __name__ == "__main__":
    asyncio.run(main())
