"""The limits of the wire that hold on every route, and the checks of them (data-plane 12)."""

from queen_pg.errors import BadRequest, NameTooLong

INTEGER_MAX = 2**31 - 1

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""The largest payload of one message: a person must be able to look at it."""

NAMES_BYTES_MAX = 447
TENANT_BYTES = 36
"""A tenant's name counts towards the budget of the names; the default one has 36 bytes."""

TRANSACTION_ID_BYTES_MAX = 65_535

# A character has four bytes at most.
_NAMES_CHARACTERS = (NAMES_BYTES_MAX - TENANT_BYTES) // 4
_TRANSACTION_ID_CHARACTERS = TRANSACTION_ID_BYTES_MAX // 4


def check_text(field: str, text: str) -> str:
    """Return the text; raise BadRequest when it holds what the database cannot store."""
    if "\0" in text:
        raise BadRequest(f"{field} must not contain NUL")
    return text


def check_transaction_id(field: str, transaction_id: str) -> str:
    """Return the transaction id; raise BadRequest when it cannot be one."""
    if len(transaction_id) > _TRANSACTION_ID_CHARACTERS and (
        len(transaction_id.encode()) > TRANSACTION_ID_BYTES_MAX
    ):
        raise BadRequest(f"{field} is over {TRANSACTION_ID_BYTES_MAX} bytes")
    return check_text(field, transaction_id)


def are_plain(queue: str, partition: str, transaction_id: str | None) -> bool:
    """Whether none of the checks of a message's names can refuse these, which nearly all are."""
    return (
        len(queue) + len(partition) <= _NAMES_CHARACTERS
        and "\0" not in queue
        and "\0" not in partition
        and (
            transaction_id is None
            or (len(transaction_id) <= _TRANSACTION_ID_CHARACTERS and "\0" not in transaction_id)
        )
    )


def check_names(queue: str, *others: str) -> None:
    """Raise NameTooLong when a queue's name and the longest other name are over their budget."""
    longest = max((len(name.encode()) for name in others), default=0)
    over = TENANT_BYTES + len(queue.encode()) + longest - NAMES_BYTES_MAX
    if over > 0:
        raise NameTooLong(
            f"the names are {over} bytes too long: a queue's name and the longer one of partition"
            f" and consumer group share {NAMES_BYTES_MAX - TENANT_BYTES} bytes"
        )
