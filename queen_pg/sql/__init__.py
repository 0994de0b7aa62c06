"""The SQL texts: which files of functions there are, and in which order they are installed.

`MANIFEST` names every file of this folder once, a file after those whose functions its own are
checked against when they are created, and the file of rights last. `roles` is none of them: it is
for an administrator to run. The single SELECTs that Python itself asks are in `reads/`.
"""

import hashlib
from functools import cache
from importlib.resources import files

MANIFEST = (
    "clock",
    "guard",
    "epoch",
    "tenant",
    "placement",
    "argument",
    "notify",
    "identity",
    "switch",
    "text",
    "queue",
    "queue_api",
    "partition",
    "push",
    "push_api",
    "ready",
    "pop",
    "pop_api",
    "ack",
    "lease",
    "ack_api",
    "position",
    "seek",
    "dlq",
    "dlq_api",
    "message",
    "kv",
    "kv_read",
    "kv_api",
    "timer",
    "timer_fire",
    "quota",
    "document",
    "kv_document",
    "timer_document",
    "timer_api",
    "lock",
    "lock_api",
    "transaction",
    "transaction_api",
    "retention",
    "views",
    "comments",
    "grants",
)


@cache
def read(stem: str) -> str:
    """Return the text of a file, `push` for push.sql and `reads/state` for reads/state.sql."""
    return files(__name__).joinpath(f"{stem}.sql").read_text(encoding="utf-8")


def digest() -> str:
    """Return a fingerprint of the whole set of functions."""
    texts = "\0".join(read(stem) for stem in MANIFEST)
    return hashlib.sha256(texts.encode()).hexdigest()
