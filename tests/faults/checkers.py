"""The checkers: each takes a history and returns its violations, in sentences; none means valid.

They know the model and nothing of the implementation.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tests.faults.history import History

Violations = list[str]


def log(history: History) -> Violations:
    """Offsets are gapless, all readers see one order, and nothing acknowledged is missing."""
    found: Violations = []
    stored = _stored(history)
    for partition, messages in stored.items():
        offsets = [offset for offset, _ in messages]
        if offsets != list(range(len(offsets))):
            found.append(f"{partition}: offsets {offsets[:20]} have gaps")
        ids = [message for _, message in messages]
        found += [f"{partition}: {each} is stored twice" for each in _repeated(ids)]
    places = {
        message: (partition, offset)
        for partition, messages in stored.items()
        for offset, message in messages
    }
    for push in history.of("push", "ok"):
        for item, result in zip(push.asked["items"], push.answer, strict=True):
            expected = (item["partition"], result["offset"])
            if places.get(item["id"]) != expected:
                found.append(
                    f"{item['id']} was acknowledged at {expected}, and is at "
                    f"{places.get(item['id'])}"
                )
    for read in history.of("read", "ok"):
        for partition, messages in stored.items():
            seen = read.answer.get(partition, [])
            if seen != [message for _, message in messages]:
                found.append(f"{partition}: reader {read.asked['reader']} saw another order")
    return found


def queue(history: History) -> Violations:
    """No acked message comes again, none is lost, leases exclude each other, order has no skips."""
    found: Violations = []
    acked: dict[str, float] = {}
    for ack in history.of("ack", "ok"):
        for message in ack.answer:
            acked.setdefault(message, ack.ended)
    first: dict[str, list[int]] = defaultdict(list)
    seen: set[str] = set()
    held: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    given_up = {ack.asked["lease"]: ack.started for ack in history.of("ack")}
    for pop in sorted(history.of("pop", "ok"), key=lambda each: each.ended):
        for message in pop.answer:
            name = message["id"]
            if acked.get(name, pop.started) < pop.started:
                found.append(f"{name} was acked, and delivered again")
            if name not in seen:
                seen.add(name)
                first[message["partition"]].append(message["offset"])
        if pop.answer:
            # Granted no earlier than it was asked for, and held until it is given up or runs out.
            until = pop.started + pop.asked["lease_seconds"]
            lease = pop.answer[0]["lease"]
            held[pop.answer[0]["partition"]].append(
                (pop.ended, min(until, given_up.get(lease, until)), lease)
            )
    for partition, offsets in first.items():
        if offsets != sorted(offsets):
            found.append(f"{partition}: first deliveries in the order {offsets[:20]}")
    for partition, leases in held.items():
        for (_, until, one), (answered, _, other) in pairwise(leases):
            if answered < until:
                found.append(f"{partition}: lease {other} was granted beside {one}")
    for push in history.of("push", "ok"):
        found += [
            f"{item['id']} was acknowledged and never delivered"
            for item in push.asked["items"]
            if item["id"] not in seen
        ]
    return found


def pipeline(history: History) -> Violations:
    """Every input's effects are there exactly once: its output, and its count."""
    found: Violations = []
    [state] = history.of("state", "ok")
    inputs = [item["id"] for push in history.of("push", "ok") for item in push.asked["items"]]
    for name in inputs:
        outputs = state.answer["outputs"].get(name, 0)
        count = state.answer["counts"].get(name, 0)
        if (outputs, count) != (1, 1):
            found.append(f"{name}: {outputs} outputs and a count of {count}")
    known = set(inputs) | {
        item["id"] for push in history.of("push", "unknown") for item in push.asked["items"]
    }
    found += [f"{name} came from nowhere" for name in state.answer["outputs"].keys() - known]
    return found


def register(history: History) -> Violations:
    """A key's versions rise in real time, name one value each, and a condition wins once."""
    found: Violations = []
    values: dict[tuple[str, int], Any] = {}
    won: dict[tuple[str, int], int] = defaultdict(int)
    for write in history.of("write", "ok"):
        if write.answer["applied"]:
            values[write.asked["key"], write.answer["version"]] = write.asked["value"]
            won[write.asked["key"], write.asked["expect"]] += 1
    found += [
        f"{key}: version {version} was replaced {times} times"
        for (key, version), times in won.items()
        if times > 1 and version > 0
    ]
    moments: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for operation in history.operations:
        if operation.outcome != "ok" or operation.kind not in ("read", "write"):
            continue
        if operation.kind == "write" and not operation.answer["applied"]:
            continue
        version = operation.answer["version"]
        moments[operation.asked["key"]].append((operation.started, operation.ended, version))
        known = values.get((operation.asked["key"], version))
        if operation.kind == "read" and version and known not in (None, operation.answer["value"]):
            found.append(f"{operation.asked['key']}: version {version} has two values")
    for key, times in moments.items():
        highest_before = 0
        by_end = sorted(times, key=lambda each: each[1])
        place = 0
        for started, _, version in sorted(times):
            while place < len(by_end) and by_end[place][1] < started:
                highest_before = max(highest_before, by_end[place][2])
                place += 1
            if version < highest_before:
                found.append(f"{key}: version {version} was seen after {highest_before}")
    return found


def counter(history: History) -> Violations:
    """A counter is what was added to it: no increment is lost, and none counted twice."""
    found: Violations = []
    [state] = history.of("state", "ok")
    for key, value in state.answer.items():
        asked = [each for each in history.of("incr") if each.asked["key"] == key]
        sure = sum(each.outcome == "ok" for each in asked)
        maybe = sum(each.outcome == "unknown" for each in asked)
        if not sure <= value <= sure + maybe:
            found.append(f"{key} is {value} after {sure} increments and {maybe} unknown ones")
        results = [each.answer for each in asked if each.outcome == "ok"]
        found += [f"{key}: two increments answered {each}" for each in _repeated(results)]
    return found


def claim(history: History) -> Violations:
    """Of those who race for a key one wins, and the others are told who."""
    found: Violations = []
    by_key: dict[str, list[Any]] = defaultdict(list)
    for each in history.of("claim"):
        by_key[each.asked["key"]].append(each)
    for key, claims in by_key.items():
        winners = [c.asked["by"] for c in claims if c.outcome == "ok" and c.answer["applied"]]
        told = {c.answer["value"] for c in claims if c.outcome == "ok" and not c.answer["applied"]}
        if len(winners) > 1 or len(told | set(winners)) > 1:
            found.append(f"{key}: won by {winners}, and the losers were told {sorted(told)}")
    return found


def multikey(history: History) -> Violations:
    """Transactions over several keys are serializable: their dependencies have no cycle.

    Each read versions and replaced some of them, so that versions order the writes of a key: a
    transaction follows those whose versions it read or replaced, and precedes those that replaced
    what it read.
    """
    committed = [each for each in history.of("transfer", "ok") if each.answer is not None]
    wrote: dict[tuple[str, int], int] = {}
    for number, each in enumerate(committed):
        for key, version in each.answer["wrote"].items():
            if (key, version) in wrote:
                return [f"{key}: version {version} was written twice"]
            wrote[key, version] = number
    versions: dict[str, list[int]] = defaultdict(list)
    for key, version in wrote:
        versions[key].append(version)
    for each in versions.values():
        each.sort()
    edges: dict[int, set[int]] = defaultdict(set)
    for number, each in enumerate(committed):
        for key, version in each.asked["read"].items():
            writer = wrote.get((key, version))
            if writer is not None and writer != number:
                edges[writer].add(number)
            after = next((v for v in versions[key] if v > version), None)
            if after is not None and wrote[key, after] != number:
                edges[number].add(wrote[key, after])
        for key, version in each.answer["wrote"].items():
            place = versions[key].index(version)
            if place:
                edges[wrote[key, versions[key][place - 1]]].add(number)
    for one, other in _by_time(committed):
        edges[one].add(other)
    cycle = _cycle(edges)
    found = [f"transactions {cycle} depend on each other in a circle"] if cycle else []
    for state in history.of("state", "ok"):
        if state.answer["sum"] != state.asked["sum"]:
            found.append(f"the balances add up to {state.answer['sum']}")
    return found


def dedup(history: History) -> Violations:
    """A retry gets the original's id and offset, and an id is stored once."""
    found: Violations = []
    answers: dict[str, set[tuple[str, int]]] = defaultdict(set)
    queued: dict[str, int] = defaultdict(int)
    for push in history.of("push", "ok"):
        for item, result in zip(push.asked["items"], push.answer, strict=True):
            answers[item["id"]].add((result["message_id"], result["offset"]))
            queued[item["id"]] += result["status"] == "queued"
    for name, places in answers.items():
        if len(places) > 1:
            found.append(f"{name} was answered as {sorted(places)}")
        if queued[name] > 1:
            found.append(f"{name} was queued {queued[name]} times")
    times: dict[str, int] = defaultdict(int)
    for messages in _stored(history).values():
        for _, name in messages:
            times[name] += 1
    found += [f"{name} is stored {times[name]} times" for name in answers if times[name] != 1]
    return found


def timers(history: History) -> Violations:
    """A timer fires at most once, never early, never after a cancel that succeeded."""
    found: Violations = []
    [state] = history.of("state", "ok")
    fired: dict[str, list[str]] = state.answer["fired"]
    for name, moments in fired.items():
        if len(moments) > 1:
            found.append(f"{name} fired {len(moments)} times")
    cancelled = {each.asked["id"] for each in history.of("cancel", "ok") if each.answer}
    doubtful = {each.asked["id"] for each in history.of("cancel", "unknown")}
    for schedule in history.of("schedule", "ok"):
        name = schedule.asked["id"]
        moments = fired.get(name, [])
        if name in cancelled and moments:
            found.append(f"{name} fired after it was cancelled")
        if name not in cancelled | doubtful and not moments:
            found.append(f"{name} never fired")
        if moments and moments[0] < schedule.answer["deliverAt"]:
            found.append(f"{name} fired at {moments[0]}, before {schedule.answer['deliverAt']}")
    return found


def dead_letters(history: History) -> Violations:
    """A dead letter keeps its payload and its error, is there once, and is replayed once."""
    found: Violations = []
    [state] = history.of("state", "ok")
    letters: dict[str, list[dict[str, Any]]] = state.answer["letters"]
    for nack in history.of("nack", "ok"):
        if not nack.answer:
            continue
        name = nack.asked["id"]
        kept = letters.get(name, [])
        if len(kept) != 1:
            found.append(f"{name} has {len(kept)} dead letters")
        elif (kept[0]["payload"], kept[0]["error"]) != (nack.asked["payload"], nack.asked["error"]):
            found.append(f"{name} was filed as {kept[0]}")
    for name, times in state.answer["replayed"].items():
        if times != 1:
            found.append(f"{name} was replayed {times} times")
    return found


def locks(history: History) -> Violations:
    """Tokens rise, and by their tokens there is one holder at a time."""
    found: Violations = []
    grants = sorted(history.of("acquire", "ok"), key=lambda each: each.ended)
    held = [each for each in grants if each.answer is not None]
    tokens = [each.answer for each in held]
    found += [f"token {each} was granted twice" for each in _repeated(tokens)]
    for one in held:
        for other in held:
            if one.ended < other.started and one.answer >= other.answer:
                found.append(f"token {other.answer} came after {one.answer}")
    guarded = sorted(
        (each.answer, each.asked["token"]) for each in history.of("guarded", "ok") if each.answer
    )
    for (_, one), (version, other) in pairwise(guarded):
        if other < one:
            found.append(f"the holder of {other} wrote version {version} after {one} did")
    return found


def retention(history: History) -> Violations:
    """What is removed is a prefix, offsets go on, and what remains is what was acknowledged."""
    found: Violations = []
    places = {}
    for push in history.of("push", "ok"):
        for item, result in zip(push.asked["items"], push.answer, strict=True):
            place = (item["partition"], result["offset"])
            if place in places:
                found.append(f"{place} was given to {places[place]} and to {item['id']}")
            places[place] = item["id"]
    for partition, messages in _stored(history).items():
        offsets = [offset for offset, _ in messages]
        if offsets and offsets != list(range(offsets[0], offsets[0] + len(offsets))):
            found.append(f"{partition}: what remains has gaps: {offsets[:20]}")
        for offset, name in messages:
            if places.get((partition, offset), name) != name:
                found.append(f"{partition} {offset} is {name}")
        ends = [offset for place, offset in places if place == partition]
        [state] = history.of("state", "ok")
        if ends and state.answer[partition] <= max(ends):
            found.append(f"{partition}: the next offset would be {state.answer[partition]}")
    return found


def _stored(history: History) -> dict[str, list[tuple[int, str]]]:
    [stored] = history.of("stored", "ok")
    return {
        partition: [(offset, name) for offset, name in messages]
        for partition, messages in stored.answer.items()
    }


def _repeated(values: Iterable[Any]) -> list[Any]:
    seen: set[Any] = set()
    return [value for value in values if value in seen or seen.add(value)]


def _by_time(operations: list[Any]) -> Iterable[tuple[int, int]]:
    """Return who ended before whom began: a serial order must respect it."""
    order = sorted(range(len(operations)), key=lambda number: operations[number].started)
    for place, one in enumerate(order):
        for other in order[place + 1 :]:
            if operations[one].ended < operations[other].started:
                yield one, other


def _cycle(edges: dict[int, set[int]]) -> list[int]:
    """Return the nodes of some cycle, or none: an iterative depth-first search."""
    state: dict[int, int] = {}
    for root in list(edges):
        if root in state:
            continue
        path = [root]
        stack = [iter(edges[root])]
        state[root] = 1
        while stack:
            following = next(stack[-1], None)
            if following is None:
                state[path.pop()] = 2
                stack.pop()
            elif state.get(following) == 1:
                return [*path[path.index(following) :], following]
            elif following not in state:
                state[following] = 1
                path.append(following)
                stack.append(iter(edges.get(following, ())))
    return []


CHECKERS = {
    "log": log,
    "queue": queue,
    "pipeline": pipeline,
    "register": register,
    "counter": counter,
    "claim": claim,
    "multikey": multikey,
    "dedup": dedup,
    "timers": timers,
    "dead_letters": dead_letters,
    "locks": locks,
    "retention": retention,
}
