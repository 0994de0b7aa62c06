"""How late an idle broker fires: `python -m bench.timer_delay`.

One timer after the other, each due in 200 ms. Taken is the time from when it is due until its
message has been appended, and until a pop that waits for it has it.
"""

import base64
import json
import statistics
import time
from datetime import datetime
from urllib.parse import urlencode

import click

from .client import Response, exchange, request
from .stage import Broker, stage

NAME = "timer_delay"
QUEUE = "reminders"
DELAY_MS = 200
PAYLOAD = base64.b64encode(b'{"due":true}').decode()
POP = "/api/v1/pop/queue/reminders?" + urlencode(
    {"wait": "true", "timeout": 10_000, "autoAck": "true"}
)


def instant(text: str) -> float:
    """Return the seconds since 1970 that a time on the wire means."""
    return datetime.fromisoformat(text).timestamp()


def fire(broker: Broker, number: int) -> tuple[float, float]:
    """Schedule a timer and wait for it; return the ms it was late as appended, and as delivered."""
    operation = {
        "op": "schedule",
        "queue": QUEUE,
        "timerKey": f"timer-{number}",
        "txn": f"timer-{number}",
        "delayMs": DELAY_MS,
        "payload": PAYLOAD,
    }
    body = json.dumps({"operations": [operation]}).encode()
    [scheduled] = _answer(exchange(broker.address, request("POST", "/api/v1/timers", body)))[
        "results"
    ]
    due = instant(scheduled["deliverAt"])
    popped = exchange(broker.address, request("GET", POP))
    delivered = time.time()
    [message] = _answer(popped)["messages"]
    return 1000 * (instant(message["createdAt"]) - due), 1000 * (delivered - due)


def _answer(response: Response) -> dict[str, list[dict[str, str]]]:
    if response.status != 200:
        raise click.ClickException(f"{response.status}: {response.body.decode()}")
    answer: dict[str, list[dict[str, str]]] = json.loads(response.body)
    return answer


@click.command("timer-delay", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--timers", type=int, default=200, help="How many timers fire.")
@click.option("--url", help="A PostgreSQL whose role may create databases, instead of our own.")
def main(timers: int, url: str | None) -> None:
    """Measure how late timers fire on an idle broker."""
    with stage(url) as server:
        broker = Broker(server.migrate(NAME), {})
        try:
            # The first makes the queue and its group.
            fire(broker, 0)
            delays = [fire(broker, number) for number in range(1, timers + 1)]
        finally:
            broker.stop()
        server.drop(NAME)
    click.echo(f"{timers} timers of {DELAY_MS} ms, one after the other; ms after they were due")
    click.echo(f"{'':<12}{'median':>8}{'p99':>8}{'worst':>8}")
    for name, values in zip(("appended", "delivered"), zip(*delays, strict=True), strict=True):
        shown = (statistics.median(values), statistics.quantiles(values, n=100)[98], max(values))
        click.echo(f"{name:<12}" + "".join(f"{value:>8.1f}" for value in shown))


if __name__ == "__main__":
    main()
