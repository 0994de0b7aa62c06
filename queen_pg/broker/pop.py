"""Pop: find where a consumer group may claim, claim it for the calls that ask, read the messages.

`serve` does this for several calls of one source at once, so that waiting consumers share their
transactions. `hand` leaves out to find: it proposes what this process has just appended. Only the
claim is a step; see sql/pop.sql.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any, Literal
from uuid import UUID

import asyncpg
import msgspec

from queen_pg.broker.ack import QUEUE_MODE
from queen_pg.broker.append import Append
from queen_pg.broker.claim import Claimer, Span, claim
from queen_pg.broker.delivery import Deliveries, Delivery
from queen_pg.broker.lease import give_back
from queen_pg.database import Database
from queen_pg.errors import Conflict, Held, QueenError, Stale

PARTITIONS_MAX = 64
BATCH_DEFAULT = 200
# The lease of a discovery pop that names none: not the queues' own (data-plane 4.1).
DISCOVERY_LEASE_SECONDS = 60
# How many partitions are seeded at a time for a new group.
SEED_BATCH = 1000
# How often at most one round looks for candidates, because of wrong hints or a long seeding.
LOOKS_MAX = 20
# Candidates lost to other claims are looked for again at once, so many times.
CLAIM_ROUNDS_MAX = 3

NEW_MODES = {"new", "new-only", "new_only", "newonly"}

SubscriptionMode = Literal["all", "new", "from"]


class PopRequest(msgspec.Struct, frozen=True):
    """A pop as the wire sends it; an absent parameter is None."""

    queue: str | None = None
    partition: str | None = None
    namespace: str = ""
    task: str = ""
    consumer_group: str | None = None
    batch: int | None = None
    partitions: int | None = None
    wait: bool = False
    timeout_ms: int = 30_000
    subscription_mode: str | None = None
    subscription_from: str | None = None
    lease_seconds: int | None = None
    commit_on_delivery: bool = False
    conflation: bool | None = None
    autopilot: bool = False


class Message(msgspec.Struct, frozen=True):
    """A delivered message; `payload` is its JSON document as it was pushed."""

    id: str
    offset: int
    transaction_id: str
    trace_id: UUID | None
    producer_sub: str | None
    created_at: datetime
    payload: str


class Claim(msgspec.Struct, frozen=True):
    """What a pop took from one partition."""

    partition_id: int
    partition: str
    delivery_attempt: int
    messages: list[Message]


class PopAnswer(msgspec.Struct, frozen=True):
    """What a pop answers; no claims is an empty pop. `autopilot` is (partitions, batch)."""

    consumer_group: str
    lease_id: UUID | None = None
    claims: list[Claim] = []
    conflation: bool = False
    conflation_conflict: bool = False
    autopilot: tuple[int, int] | None = None


class Subscription(msgspec.Struct, frozen=True):
    """Where a group starts that has none yet (data-plane 4.8-1)."""

    mode: SubscriptionMode
    since: datetime | None = None

    @classmethod
    def of(cls, request: PopRequest, default_mode: str) -> "Subscription":
        """Read a request's intent; queue mode always reads everything (data-plane 4.8-3)."""
        if (request.consumer_group or QUEUE_MODE) == QUEUE_MODE:
            return cls("all")
        since = (request.subscription_from or "").strip()
        if since:
            if since.casefold() == "now":
                return cls("new")
            instant = _instant(since)
            if instant is not None:
                return cls("from", instant)
        mode = (request.subscription_mode or default_mode).strip().casefold()
        return cls("new" if mode in NEW_MODES else "all")


class Source(msgspec.Struct, frozen=True):
    """What a pop reads from: a group on a queue, or on one partition of it."""

    tenant: int
    queue: str
    consumer_group: str
    partition: str | None = None


class Demand(msgspec.Struct):
    """What one call asks of a source: at most `batch` messages from `partitions` partitions.

    A null `partitions` is chosen by autopilot.
    """

    lease_id: UUID
    subscription: Subscription
    batch: int
    partitions: int | None
    lease_seconds: int | None = None
    commit_on_delivery: bool = False
    conflation: bool | None = None
    width: int = 1


Group = Mapping[str, Any]
"""A consumer group on a queue, as queen._subscription tells of it."""


class Served(msgspec.Struct):
    """A source's group as a round found it, and the claims of each demand, in order.

    Without a group there is no conflation policy yet. `drained` says that nothing was left behind:
    somebody got nothing, and neither a wrong hint nor a lost claim was to blame.
    """

    group: Group | None = None
    group_id: int | None = None
    conflation: bool | None = None
    seeding: bool = False
    drained: bool = False
    claims: list[list[Claim]] = []


_Candidate = Mapping[str, Any]
"""A span that may be claimed, as queen._candidates tells of it."""


class _Grant(msgspec.Struct):
    """A candidate given to a demand, by its place, and the last offset it gets."""

    demand: int
    candidate: _Candidate
    end_offset: int


async def serve(
    db: Database,
    source: Source,
    demands: Sequence[Demand],
    waiting: int,
    deadline: float,
    *,
    entering: bool = True,
    group: Group | None = None,
    recent_seconds: float | None = None,
    claimer: Claimer | None = None,
    deliveries: Deliveries | None = None,
) -> Served:
    """Claim for the demands, oldest first; a demand that gets nothing has no claims.

    `waiting` is how many pops of the group wait in all, by which autopilot divides what is there.
    A queue that does not exist is created, so that the group can register (data-plane 4.3-1),
    unless none of the calls is `entering`, on its first attempt; a partition never is.

    `group` is what an earlier call found (`Served.group`), `claimer` carries out the claims, and
    `deliveries` is told of them. `recent_seconds` is for who knows that nothing older is ready.
    """
    served = Served(claims=[[] for _ in demands])
    for _ in range(CLAIM_ROUNDS_MAX):
        places = [place for place, claims in enumerate(served.claims) if not claims]
        group = group or await enter(db, source, demands, deadline, entering=entering)
        served.group = group
        if group is None:
            _expect_birth(source, demands)
            break
        served.group_id = group["group_id"]
        served.conflation = group["conflation"]
        served.seeding = group["seeding"]
        try:
            if not places:
                break
            lost = await _round(
                db,
                source,
                group,
                demands,
                places,
                waiting,
                served,
                deadline,
                recent_seconds,
                claimer,
            )
            if not lost:
                break
        except Stale:
            # The queue or the group was deleted since we looked.
            group = None
            served.group_id = None
    if deliveries is not None:
        _note(deliveries, source, demands, served)
    return served


async def hand(
    db: Database,
    source: Source,
    group: Group,
    demands: Sequence[Demand],
    waiting: int,
    appends: Sequence[Append],
    deadline: float,
    *,
    claimer: Claimer | None = None,
    deliveries: Deliveries | None = None,
) -> Served:
    """Claim what has just been appended for the demands, oldest first, without a look.

    The group is as `serve` found it, registered and not conflating. Each append is proposed as what
    comes next in its partition, and the claim grants it only if that is so. Unless what is returned
    is `drained`, something is to be looked for, and without a group, after asking for that anew:
    something was lost, and perhaps it is gone, or its queue delays now.
    """
    served = Served(group_id=group["group_id"], conflation=group["conflation"])
    served.claims = [[] for _ in demands]
    candidates: list[_Candidate] = [
        {
            "partition_id": append.partition_id,
            "partition_name": append.partition,
            "cursor_exists": True,
            "committed_offset": append.first_offset - 1,
            "start_offset": append.first_offset,
            "end_offset": append.last_offset,
            "next_offset": append.last_offset + 1,
            "lease_time_seconds": None,
            "queue_id": group["queue_id"],
        }
        for append in appends
    ]
    grants = _share(candidates, demands, range(len(demands)), waiting, conflated=False)
    try:
        lost = await _take(db, group, demands, grants, served, deadline, claimer)
    except Stale:
        lost = True
    served.group = None if lost else group
    served.drained = not lost and len(grants) == len(appends) and _whole(grants, demands)
    if deliveries is not None:
        _note(deliveries, source, demands, served)
    return served


def _whole(grants: Sequence[_Grant], demands: Sequence[Demand]) -> bool:
    """Whether nothing is left of what was granted that nobody will be told of.

    What a lease leaves behind comes with its ack; what is committed on delivery has none.
    """
    return all(
        grant.end_offset + 1 >= grant.candidate["next_offset"]
        or not demands[grant.demand].commit_on_delivery
        for grant in grants
    )


def _note(
    deliveries: Deliveries, source: Source, demands: Sequence[Demand], served: Served
) -> None:
    """Remember what was delivered under leases, where each id names one message."""
    for demand, claims in zip(demands, served.claims, strict=True):
        for each in claims:
            offsets = {message.transaction_id: message.offset for message in each.messages}
            if (
                not demand.commit_on_delivery
                and served.group_id is not None
                and len(offsets) == len(each.messages)
            ):
                delivery = Delivery(
                    source.tenant, source.consumer_group, served.group_id, demand.lease_id, offsets
                )
                deliveries.note(each.partition_id, delivery)


async def enter(
    db: Database,
    source: Source,
    demands: Sequence[Demand],
    deadline: float,
    *,
    entering: bool = True,
) -> Group | None:
    """Find the group on the queue, and register it if one of the pops is to (data-plane 4.8).

    None when there is none and they are not `entering`, or when they ask for a partition that does
    not exist and would be the group's first.
    """
    subscribing = [demand for demand in demands if source.partition is None or demand.conflation]
    demand = (subscribing or demands)[0]

    async def attempt() -> Group | None:
        return await _enter(
            db, source, demand, deadline, subscribing=bool(subscribing), entering=entering
        )

    return await db.retry("register_group", deadline, attempt)


async def _enter(
    db: Database,
    source: Source,
    demand: Demand,
    deadline: float,
    *,
    subscribing: bool,
    entering: bool,
) -> Group | None:
    async def look() -> Group | None:
        rows = await db.read(
            "_subscription",
            deadline=deadline,
            tenant=source.tenant,
            queue=source.queue,
            consumer_group=source.consumer_group,
        )
        return rows[0] if rows else None

    group = await look()
    if group is not None and (
        group["registered"] or (group["group_id"] is not None and not subscribing)
    ):
        return group
    if not entering:
        return None
    if source.partition is not None:
        exists = group is not None and await db.read(
            "_resolve_partitions",
            deadline=deadline,
            tenant=source.tenant,
            group_queue=[source.queue],
            group_partition=[source.partition],
        )
        if not exists:
            return None
    await db.step(
        "_register_group",
        deadline=deadline,
        tenant=source.tenant,
        queue=source.queue,
        consumer_group=source.consumer_group,
        subscribing=subscribing,
        subscription_mode=demand.subscription.mode,
        subscription_from=demand.subscription.since,
        conflation=bool(demand.conflation) and source.consumer_group != QUEUE_MODE,
    )
    return await look()


async def _round(
    db: Database,
    source: Source,
    group: Group,
    demands: Sequence[Demand],
    places: Sequence[int],
    waiting: int,
    served: Served,
    deadline: float,
    recent_seconds: float | None,
    claimer: Claimer | None,
) -> bool:
    """Serve the demands at these places once; return whether another round may find more."""
    conflated: bool = group["conflation"]

    async def find() -> tuple[list[asyncpg.Record], bool]:
        chosen = [demands[place] for place in places]
        return await _find(db, source, group, chosen, conflated, deadline, recent_seconds)

    candidates, everything = await db.retry("find", deadline, find, on=(Conflict,))
    grants = _share(candidates, demands, places, waiting, conflated)
    lost = await _take(db, group, demands, grants, served, deadline, claimer)
    served.drained = everything and not lost and not all(served.claims) and _whole(grants, demands)
    return lost


async def _take(
    db: Database,
    group: Group,
    demands: Sequence[Demand],
    grants: Sequence[_Grant],
    served: Served,
    deadline: float,
    claimer: Claimer | None,
) -> bool:
    """Claim what is granted, and read it meanwhile; return whether some of it was lost."""
    if not grants:
        return False
    spans = [_span(group, demands[grant.demand], grant) for grant in grants]
    reading: Coroutine[Any, Any, list[list[Message]]] | asyncio.Task[list[list[Message]]]
    reading = _read(db, grants, group["conflation"], deadline)
    if claimer is not None:
        # The claim waits for its turn: time to read, for messages never change.
        reading = asyncio.create_task(reading)
    try:
        attempts = await (claimer or partial(claim, db))(spans, deadline)
    except Held:
        await _drop(reading)
        return True
    except BaseException:
        await _drop(reading)
        raise
    try:
        messages = await reading
    except QueenError:
        granted = [
            grant for grant, attempt in zip(grants, attempts, strict=True) if attempt is not None
        ]
        await _give_back(db, group, demands, granted, deadline)
        raise
    for grant, attempt, batch in zip(grants, attempts, messages, strict=True):
        if attempt is not None:
            served.claims[grant.demand].append(
                Claim(
                    partition_id=grant.candidate["partition_id"],
                    partition=grant.candidate["partition_name"],
                    delivery_attempt=attempt,
                    messages=batch,
                )
            )
    return None in attempts


async def _drop(reading: Coroutine[Any, Any, object] | asyncio.Task[object]) -> None:
    """End a reading that nobody waits for any more."""
    if isinstance(reading, asyncio.Task):
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, QueenError):
            await reading
    else:
        reading.close()


async def _give_back(
    db: Database,
    group: Group,
    demands: Sequence[Demand],
    grants: Sequence[_Grant],
    deadline: float,
) -> None:
    """Release what was claimed and could not be read, as far as the database can be reached."""
    for grant in grants:
        with contextlib.suppress(QueenError):
            await give_back(
                db,
                demands[grant.demand].lease_id,
                [grant.candidate["partition_id"]],
                group["group_id"],
                deadline,
            )


async def _find(
    db: Database,
    source: Source,
    group: Group,
    demands: Sequence[Demand],
    conflated: bool,
    deadline: float,
    recent_seconds: float | None,
) -> tuple[list[asyncpg.Record], bool]:
    """Return what may be claimed now; correct the hints that were wrong, seed what is new.

    And whether that is everything, unless the demands are full before.
    """
    seeding = group["seeding"] and source.partition is None
    for _ in range(LOOKS_MAX):
        if seeding:
            # Before the look: what is found there must not keep the rest from being seeded.
            [seeded] = await db.read(
                "_seed_ready", deadline=deadline, group_id=group["group_id"], batch_max=SEED_BATCH
            )
            seeding = seeded[0] > 0
        rows = await db.read(
            "_candidates",
            deadline=deadline,
            queue_id=group["queue_id"],
            group_id=group["group_id"],
            partition=source.partition,
            subscription_mode=demands[0].subscription.mode,
            subscription_from=demands[0].subscription.since,
            conflated=conflated,
            batch=[demand.batch for demand in demands],
            width=[demand.partitions or PARTITIONS_MAX for demand in demands],
            recent_seconds=recent_seconds,
        )
        found = [row for row in rows if row["end_offset"] is not None]
        if source.partition is not None:
            if not found:
                await _hold_place(db, source, group, demands, rows, deadline)
            return found, True
        wrong = [row for row in rows if row["end_offset"] is None]
        # The order in which steps lock them.
        wrong.sort(key=itemgetter("partition_id"))
        if wrong:
            await db.read(
                "_rearm",
                deadline=deadline,
                group_id=group["group_id"],
                partition_id=[row["partition_id"] for row in wrong],
                next_offset=[row["next_offset"] for row in wrong],
                hinted_at=[row["hinted_at"] for row in wrong],
                ready_at=[row["ready_at"] for row in wrong],
                lease_id=[row["lease_id"] for row in wrong],
            )
        # Right hints may stand behind the wrong ones.
        if found or not (wrong or seeding):
            return found, not (wrong or seeding)
    return [], False


async def _hold_place(
    db: Database,
    source: Source,
    group: Group,
    demands: Sequence[Demand],
    rows: Sequence[asyncpg.Record],
    deadline: float,
) -> None:
    """Write down where a group without a subscription begins in the partition it asks for.

    "New" is what comes after this pop, for the pops after it too (data-plane 4.8-2).
    """
    if not rows:
        _expect_birth(source, demands)
    elif (
        demands[0].subscription.mode != "all"
        and not group["registered"]
        and not rows[0]["cursor_exists"]
    ):
        await db.step(
            "_place_cursor",
            deadline=deadline,
            partition_id=rows[0]["partition_id"],
            group_id=group["group_id"],
            committed_offset=rows[0]["committed_offset"],
        )


def _expect_birth(source: Source, demands: Sequence[Demand]) -> None:
    """Read a partition that is born while a pop waits for it from its first message on."""
    if source.partition is not None:
        for demand in demands:
            if demand.subscription.mode == "new" and not demand.conflation:
                demand.subscription = Subscription("all")


def _share(
    candidates: Sequence[_Candidate],
    demands: Sequence[Demand],
    places: Sequence[int],
    waiting: int,
    conflated: bool,
) -> list[_Grant]:
    """Give the candidates to the demands, oldest demand first, within the budgets of each."""
    grants: list[_Grant] = []
    at = 0
    for place in places:
        demand = demands[place]
        # Data-plane 4.6-2: what is claimable now, divided among those who ask for it.
        demand.width = demand.partitions or min(
            max(-(-len(candidates) // max(waiting, 1)), 1), PARTITIONS_MAX
        )
        budget = demand.batch
        for _ in range(demand.width):
            if at == len(candidates) or budget <= 0:
                break
            candidate = candidates[at]
            at += 1
            end = candidate["end_offset"]
            if conflated:
                budget -= 1
            else:
                end = min(end, candidate["start_offset"] + budget - 1)
                budget -= end - candidate["start_offset"] + 1
            grants.append(_Grant(place, candidate, end))
    return grants


def _span(group: Group, demand: Demand, grant: _Grant) -> Span:
    candidate = grant.candidate
    return Span(
        partition_id=candidate["partition_id"],
        group_id=group["group_id"],
        cursor_exists=candidate["cursor_exists"],
        committed_offset=candidate["committed_offset"],
        start_offset=candidate["start_offset"],
        end_offset=grant.end_offset,
        next_offset=candidate["next_offset"],
        lease_id=demand.lease_id,
        lease_seconds=demand.lease_seconds or candidate["lease_time_seconds"],
        commit_on_delivery=demand.commit_on_delivery,
        conflated=group["conflation"],
        queue_id=candidate.get("queue_id"),
    )


async def _read(
    db: Database, grants: Sequence[_Grant], conflated: bool, deadline: float
) -> list[list[Message]]:
    """Read the messages of each grant; a conflating claim delivers only its newest."""
    messages: list[list[Message]] = [[] for _ in grants]
    if not grants:
        return messages
    for row in await db.read(
        "_read_messages",
        deadline=deadline,
        partition_id=[grant.candidate["partition_id"] for grant in grants],
        start_offset=[
            grant.end_offset if conflated else grant.candidate["start_offset"] for grant in grants
        ],
        end_offset=[grant.end_offset for grant in grants],
    ):
        messages[row["place"] - 1].append(
            Message(
                id=str(row["id"]),
                offset=row["message_offset"],
                transaction_id=row["transaction_id"],
                trace_id=row["trace_id"],
                producer_sub=row["producer_sub"],
                created_at=row["created_at"],
                payload=row["payload"],
            )
        )
    return messages


async def labelled(
    db: Database, tenant: int, namespace: str, task: str, deadline: float
) -> list[str]:
    """Return the queues whose labels equal the selectors that are not empty, in name order."""
    rows = await db.read(
        "_labelled_queues", deadline=deadline, tenant=tenant, namespace=namespace, task=task
    )
    return [row["queue"] for row in rows]


def _instant(text: str) -> datetime | None:
    """Read an ISO 8601 instant to the millisecond; a time without a zone is UTC."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return instant.replace(microsecond=instant.microsecond // 1000 * 1000)
