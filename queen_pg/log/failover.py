"""The watcher: promotes by itself when the primary has been gone for a stated time.

It acts when it cannot reach the primary, and more than half of the followers say that they cannot
either: each is made to try a connection of its own. It does what `replica promote` does, so it
promotes nothing where an answered step could be lost, unless that was accepted beforehand. What it
cannot do is listed in docs/replication.md.
"""

import asyncio
import time

import asyncpg

from queen_pg.config import Settings
from queen_pg.log import promote, standby, statement
from queen_pg.log.node import Cluster, LogError, Node, Say

LOOK_SECONDS = 1.0
PROBE_SECONDS = 3.0
QUERY_CANCELED = "57014"


class Watcher:
    """Watches the primary of one log."""

    def __init__(
        self, settings: Settings, say: Say, *, after_seconds: float, accept_loss: bool
    ) -> None:
        self._settings = settings
        self._say = say
        self._after = after_seconds
        self._accept_loss = accept_loss
        self._seen = time.monotonic()
        self._primary = ""
        self._trouble = ""
        self._mover = standby.Mover(settings.pg_admin_url or settings.pg_url or "")

    async def run(self) -> None:
        """Watch for ever."""
        try:
            while True:
                try:
                    await self.look()
                except LogError as error:
                    self._tell(str(error))
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._mover.close()

    async def look(self) -> None:
        """Look once, and promote if it is time; raise LogError when that cannot be done."""
        async with Cluster(self._settings, _quiet, dry=False) as cluster:
            if cluster.primary is not None:
                await self._found(cluster, cluster.primary)
                return
            gone = time.monotonic() - self._seen
            if gone < self._after:
                self._tell(f"the primary cannot be reached; waiting {self._after:.0f} s")
                return
            await self._decide(cluster, gone)

    async def _found(self, cluster: Cluster, primary: Node) -> None:
        self._seen = time.monotonic()
        if self._trouble or self._primary != primary.name:
            self._say(f"{primary.name} leads epoch {primary.epoch}")
        self._trouble, self._primary = "", primary.name
        if cluster.followers:
            await self._mover.run()

    async def _decide(self, cluster: Cluster, gone: float) -> None:
        if not cluster.quorum and not self._accept_loss:
            raise LogError(
                "replication is asynchronous, so a promotion may lose answered steps; watch with"
                " --accept-loss, or promote by hand"
            )
        # Everybody but the primary is a follower.
        followers = len(cluster.members) - 1
        votes = await asyncio.gather(*(cannot_reach(node) for node in cluster.followers))
        if 2 * sum(votes) <= followers:
            raise LogError(
                f"the primary is out of reach from here, but only {sum(votes)} of {followers}"
                " followers say so too: nothing is promoted"
            )
        self._say(f"the primary has been gone for {gone:.1f} s; promoting")
        cluster.say = self._say
        await promote.promote(cluster, None, accept_loss=self._accept_loss)
        self._seen = time.monotonic()

    def _tell(self, trouble: str) -> None:
        """Say what is wrong once, until something else is."""
        if trouble != self._trouble:
            self._say(trouble)
        self._trouble = trouble


async def cannot_reach(follower: Node) -> bool:
    """Have a follower connect to its primary; return whether it could not."""
    subscription = follower.facts.subscription
    if subscription is None or not follower.facts.enabled:
        return False
    try:
        async with asyncio.timeout(2 * PROBE_SECONDS):
            # A refresh connects and asks what is published; usually that changes nothing.
            await follower.attempt(statement.refresh(subscription, copy=True), PROBE_SECONDS)
    except asyncpg.PostgresError as error:
        sqlstate: str = error.sqlstate
        return sqlstate.startswith("08") or sqlstate == QUERY_CANCELED
    except (OSError, TimeoutError, asyncpg.InterfaceError):
        # The follower itself is away.
        return False
    return False


def _quiet(_: str) -> None:
    """What a look has to say about nodes out of reach would be said every second."""
