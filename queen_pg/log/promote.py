"""Promotion: another node takes writes from here on.

With its primary at hand it is a hand-over, and nothing is lost: the primary is fenced, what runs
there ends, the follower catches up, and the old primary follows in turn. Without it, enough
followers must be at hand that one of them has every step that was answered, and that the old
primary can gather no quorum from those that are not: of N that count, N - quorum + 1. The
followers stop following first, the most advanced one leads, and the others go on from its log at
the step that each of them lacks (`standby`), or copy everything where that is not kept.

One transaction makes the new primary. Before it nothing has happened that `replica add` does not
mend; after it the command may be repeated until the rest is done.
"""

import time

from queen_pg.log import replica, standby, statement
from queen_pg.log.node import Cluster, LogError, Node, confirmed

HAND_OVER_SECONDS = 15.0

Places = dict[str, int | None]
"""Where in the new primary's log each other node goes on; 0 is where its slot is, None a copy."""


async def promote(cluster: Cluster, name: str | None, *, accept_loss: bool) -> None:
    """Promote a follower, the most advanced one by default; raise LogError when that is unsafe."""
    started = time.monotonic()
    await cluster.lock()
    primary = cluster.primary
    if primary is None and (fenced := _given_up(cluster)) is not None:
        _check_enough(cluster, accept_loss=accept_loss)
        candidate = _follower(cluster, name) if name else cluster.followers[0]
        await _hand_over(cluster, fenced, candidate, started)
    elif primary is None:
        await _take_over(cluster, name, started, accept_loss=accept_loss)
    elif late := _late(cluster, primary):
        await _finish(cluster, primary, late)
    elif name not in (None, primary.sight.name):
        await _hand_over(cluster, primary, _follower(cluster, name), started)
    elif await _settle(cluster, primary) or name is not None:
        cluster.say(f"{primary.name} is the primary of epoch {primary.epoch}")
    else:
        raise LogError(f"the primary {primary.name} is there; say which follower shall take over")


def _given_up(cluster: Cluster) -> Node | None:
    """Return the primary of a hand-over that was interrupted before anybody else led."""
    latest = max(node.epoch for node in cluster.nodes)
    for node in cluster.nodes:
        if node.sight.role == "fenced" and node.epoch == latest and node.sight.name is not None:
            return node if cluster.followers else None
    return None


def _next_epoch(cluster: Cluster) -> int:
    """Return an epoch after every one that a node at hand has heard of."""
    return 1 + max(max(node.epoch, node.sight.fenced_by or 0) for node in cluster.nodes)


def _follower(cluster: Cluster, name: str) -> Node:
    node = cluster.node(name)
    if node is None or node not in cluster.followers:
        raise LogError(f"{name} is not a follower that can be reached")
    return node


async def _hand_over(cluster: Cluster, primary: Node, candidate: Node, started: float) -> None:
    """Let a follower take over from a primary that is there."""
    epoch = _next_epoch(cluster)
    others = [node for node in cluster.followers if node is not candidate]
    await _resume(cluster)
    await primary.run(statement.fence(epoch))
    try:
        await replica.drain(primary)
        end = await primary.position()
        if not await _confirmed(primary, candidate, end):
            raise LogError(f"{candidate.name} does not catch up; see queen-pg replica status")
        places: Places = {}
        for node in others:
            await _stop(node)
            places[node.name] = await _place(candidate, node)
        await _stop(candidate)
        # Nothing is written now: the old primary goes on from here.
        await replica.fresh_slot(candidate, primary.name)
        places[primary.name] = 0
        await _lead(cluster, candidate, epoch, places)
    except BaseException:
        await primary.run(statement.reinstate())
        await _resume(cluster)
        raise
    _say_led(cluster, candidate, epoch, started)
    if primary.facts.standby_names:
        await replica.enforce(primary, 0, [])
    await _attach_all(cluster, candidate, epoch, [primary, *others], places)


async def _resume(cluster: Cluster) -> None:
    """Let followers go on that a hand-over stopped before it was given up."""
    for node in cluster.followers:
        await node.look()
        if node.facts.subscription is not None and not node.facts.enabled:
            await node.run(statement.enable(node.facts.subscription))


async def _confirmed(primary: Node, follower: Node, end: int) -> bool:
    return primary.dry or await confirmed(primary, follower.name, end, HAND_OVER_SECONDS)


async def _take_over(
    cluster: Cluster, name: str | None, started: float, *, accept_loss: bool
) -> None:
    """Promote without the primary."""
    if not cluster.followers:
        raise LogError("no follower can be reached")
    _check_enough(cluster, accept_loss=accept_loss)
    epoch = _next_epoch(cluster)
    for node in cluster.nodes:
        if node.sight.leads:
            await node.run(statement.fence(epoch))
    for node in cluster.followers:
        await _stop(node)
    progress = {node.name: await node.progress() for node in cluster.followers}
    best = max(cluster.followers, key=lambda node: progress[node.name])
    candidate = _follower(cluster, name) if name else best
    if progress[candidate.name] < progress[best.name] and not accept_loss:
        raise LogError(
            f"{best.name} has more than {candidate.name}; promote that one, or say --accept-loss"
        )
    for name in cluster.members.keys() - progress.keys():
        # From a hand-over that was given up: nobody has gone on from there.
        await replica.drop_slot_of(candidate, name)
    others = [node for node in cluster.followers if node is not candidate]
    places = {node.name: await _place(candidate, node) for node in others}
    await _lead(cluster, candidate, epoch, places)
    _say_led(cluster, candidate, epoch, started)
    await _attach_all(cluster, candidate, epoch, others, places)


def _late(cluster: Cluster, primary: Node) -> list[Node]:
    """Return the nodes that an interrupted promotion left without the primary it made.

    A former primary is among them only after a hand-over, when its slot keeps its place.
    """
    return [
        node
        for node in cluster.nodes
        if (node.sight.role == "follower" and node.epoch < primary.epoch)
        or (
            node.sight.role == "fenced"
            and node.sight.fenced_by == primary.epoch
            and statement.slot(node.name) in primary.facts.slots
        )
    ]


async def _finish(cluster: Cluster, primary: Node, late: list[Node]) -> None:
    """Do what an interrupted promotion left undone."""
    places: Places = {}
    for node in late:
        if node.sight.role == "fenced":
            places[node.name] = 0
            if node.facts.standby_names:
                await replica.enforce(node, 0, [])
        else:
            await _stop(node)
            places[node.name] = await _place(primary, node)
    await _attach_all(cluster, primary, primary.epoch, late, places)


def _check_enough(cluster: Cluster, *, accept_loss: bool) -> None:
    """Raise LogError when the followers at hand may lack a step that was answered."""
    if not cluster.quorum:
        cluster.say("replication was asynchronous: the last answered steps may be lost")
        return
    counting = {member.name for member in cluster.members.values() if member.synchronous}
    missing = sorted(counting - {node.name for node in cluster.followers})
    if len(missing) < cluster.quorum:
        return
    if not accept_loss:
        raise LogError(
            f"{', '.join(missing)} cannot be reached: no other follower may have the last answered"
            " steps, and the old primary may still gather a quorum. Mend it, or say --accept-loss"
        )
    cluster.say(f"{', '.join(missing)} cannot be reached: the last answered steps may be lost")


async def _stop(node: Node) -> None:
    """Stop following, and wait until the old primary can hear no confirmation any more."""
    if node.facts.subscription is None:
        raise LogError(f"{node.name} has no subscription; remove it and add it again")
    await node.run(statement.disable(node.facts.subscription))
    await replica.until_stopped(node)


async def _place(candidate: Node, node: Node) -> int | None:
    return await standby.position(candidate, node.name, await node.progress())


async def _lead(cluster: Cluster, candidate: Node, epoch: int, places: Places) -> None:
    """Make the candidate the primary; it waits for those that go on at once."""
    at_once = [name for name, place in places.items() if place is not None]
    size = min(cluster.quorum, len(at_once)) if candidate.facts.may_set_quorum else 0
    if size or candidate.facts.standby_names:
        await replica.enforce(candidate, size, at_once)
    parted = [name for name in cluster.members if name not in (candidate.name, *at_once)]
    await candidate.batch(
        [
            *statement.unsubscribe(candidate.facts.subscription or ""),
            statement.lead(epoch, candidate.name),
            statement.part_nodes(parted),
            statement.count_nodes(at_once if size else []),
            statement.set_quorum(size),
        ]
    )
    await replica.mark_read_only(candidate, on=False)
    if size < cluster.quorum:
        cluster.say(
            f"{size or 'no'} of {cluster.quorum} followers can confirm steps now: an answered step"
            " may be lost with the primary until others have their copy"
        )


def _say_led(cluster: Cluster, candidate: Node, epoch: int, started: float) -> None:
    if not cluster.dry:
        seconds = time.monotonic() - started
        cluster.say(
            f"{candidate.name} leads epoch {epoch}, {seconds:.2f} s after the command began"
        )


async def _attach_all(
    cluster: Cluster, primary: Node, epoch: int, nodes: list[Node], places: Places
) -> None:
    """Have the others follow the new primary, from their places or with a copy."""
    wanted = cluster.quorum
    following = {node.name for node in (*cluster.followers, *nodes)}
    for name in cluster.members.keys() - following:
        await replica.drop_slot_of(primary, name)
    for node in nodes:
        await _attach(cluster, primary, epoch, node, places[node.name])
    if cluster.dry:
        return
    await cluster.refresh()
    await _take_in(cluster, primary, nodes)
    size = min(wanted, len(replica.joined(cluster, primary)))
    if size != cluster.quorum or any(place is None for place in places.values()):
        await replica.set_quorum(cluster, size)
    await standby.arrange(cluster)
    for node in nodes:
        how = "goes on from its place" if places[node.name] is not None else "has a new copy"
        cluster.say(f"{node.name} follows {primary.name}: it {how}")
    for away in cluster.unreached:
        cluster.say(f"{away.name} is away; when it is back, say: queen-pg replica rejoin")


async def _take_in(cluster: Cluster, primary: Node, nodes: list[Node]) -> None:
    """Wait until nodes have everything, and note that they do."""
    for node in nodes:
        await replica.wait_for_copy(cluster, primary, node)
    if nodes:
        await replica.touch(cluster, primary, [node.name for node in nodes])
        await cluster.refresh()


async def _settle(cluster: Cluster, primary: Node) -> bool:
    """Do the rest of a promotion whose nodes all follow; return whether there was any."""
    late = [node for node in cluster.followers if not cluster.members[node.name].joined]
    await _take_in(cluster, primary, late)
    uncounted = any(
        not cluster.members[name].synchronous for name in replica.joined(cluster, primary)
    )
    if cluster.quorum and uncounted:
        await replica.set_quorum(cluster, cluster.quorum)
    await standby.arrange(cluster)
    return bool(late) or (cluster.quorum > 0 and uncounted)


async def _attach(
    cluster: Cluster, primary: Node, epoch: int, node: Node, place: int | None
) -> None:
    name = node.name
    if place is None:
        await replica.fresh_slot(primary, name)
    elif place:
        await standby.move(primary, name, place)
    subscription = node.facts.subscription
    await node.batch(
        [
            *(statement.unsubscribe(subscription) if subscription is not None else []),
            *([statement.empty(node.facts.tables)] if place is None else []),
            statement.follow(epoch, name),
            statement.subscribe(name, cluster.source(primary), copy=place is None),
        ]
    )
    await replica.mark_read_only(node)
