"""After a restore from a backup: a log of its own, in an epoch that nobody has seen.

What was answered after the backup is gone, and clients may still hold its ids and versions. A later
epoch keeps them from meaning something else: every sequence moves on, and versions of KV begin
anew above all that were ever handed out.
"""

from queen_pg.log import replica, statement
from queen_pg.log.node import Cluster, LogError

EPOCHS_AHEAD = 10
"""More than there are promotions between a backup and its restore."""


async def restored(cluster: Cluster, epoch: int | None) -> None:
    """Make the one node at hand the primary of a log without followers."""
    if len(cluster.nodes) != 1:
        raise LogError("name the restored server alone in QUEEN_PG_URL")
    [node] = cluster.nodes
    if node.sight.recovering:
        raise LogError(f"{node.name} is still recovering; promote it first (pg_promote)")
    if not node.facts.installed:
        raise LogError(f"{node.name} has no schema queen")
    number = node.epoch + EPOCHS_AHEAD if epoch is None else epoch
    if number <= node.epoch:
        raise LogError(f"the epoch must be later than {node.epoch}")
    if node.facts.standby_names:
        # It waits for followers of the log that it was copied from.
        await replica.enforce(node, 0, [])
    subscription = node.facts.subscription
    await node.batch(
        [
            *(statement.unsubscribe(subscription) if subscription is not None else []),
            statement.begin(number),
        ]
    )
    await replica.mark_read_only(node, on=False)
    if not cluster.dry:
        cluster.say(f"{node.name} leads epoch {number}, without followers")
