"""The path, push → pop → ack: its loads for us, for the floor and for the peers.

One message a push everywhere. Where the loads of a candidate run together, the first pushes and the
second consumes, which is the one that counts.
"""

from typing import Any

from .bench import PARTITIONS

CONSUMED = (1,)
WORKERS = 16
# Connections of the floor that insert, and that claim.
INSERTING, CLAIMING = 8, 4


def path_tasks(
    queue: str, rate: float | None, partitions: int = PARTITIONS
) -> list[dict[str, Any]]:
    """Return our loads: explicit acks."""
    return [
        path_task(queue, 64, partitions) | {"rate": rate},
        work_task(queue, WORKERS),
    ]


def path_task(queue: str, clients: int, partitions: int) -> dict[str, Any]:
    """Return a load that pushes one message at a time."""
    shape = {"batch": 1, "spread": False, "partitions": partitions}
    return {"kind": "push", "queue": queue, "clients": clients, **shape}


def work_task(queue: str, clients: int) -> dict[str, Any]:
    """Return a load that pops what is there, up to 100 messages of 32 partitions, and acks it."""
    return {"kind": "work", "queue": queue, "clients": clients, "batch": 100, "width": 32}


def floor_tasks(rate: float | None, partitions: int = PARTITIONS) -> list[dict[str, Any]]:
    """Return the floor's loads: an INSERT a message; batches claimed and deleted."""
    shape = {"batch": 1, "spread": False, "partitions": partitions}
    return [
        {"kind": "rows", "clients": INSERTING, "rate": rate, **shape},
        {"kind": "claims", "clients": CLAIMING, "batch": 100},
    ]


def peer_tasks(rate: float | None) -> list[dict[str, Any]]:
    """Return a peer's loads."""
    return [
        {"kind": "enqueue", "batch": 1, "clients": 16, "rate": rate},
        {"kind": "work", "batch": 100, "clients": WORKERS},
    ]
