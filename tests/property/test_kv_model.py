"""KV against a dictionary: any calls, in any order, at any time (step 2.4 to 2.8)."""

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

START = datetime(2030, 1, 1, tzinfo=UTC)
NAMESPACES = ("n", "n2")
KEYS = ("a", "a%", "b")
CHANGING = ("put", "putIfAbsent", "delete", "incr", "check")

Operation = dict[str, Any]
Name = tuple[str, str]


class Row(NamedTuple):
    """What the model knows of a key."""

    version: int
    value: Any
    expires_at: datetime | None
    updated_at: datetime


NO_ROW = Row(0, None, None, START)


def written(moment: datetime) -> str:
    """A moment as KV writes it: a fraction only where there is one, without zeros (step 0.3)."""
    text, _, zone = moment.isoformat().partition("+")
    return f"{text.rstrip('0') if '.' in text else text}+{zone}"


def read_exactly(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


class Store:
    """The model: step 2.4 as it is written, over one dictionary."""

    def __init__(self) -> None:
        self.rows: dict[Name, Row] = {}
        self.now = START
        self.last: dict[Name, int] = {}
        self.drawn: set[int] = set()

    def live(self, name: Name) -> Row:
        row = self.rows.get(name, NO_ROW)
        dead = row.expires_at is not None and row.expires_at <= self.now
        return NO_ROW if dead else row

    def refusal(self, operation: Operation) -> str | None:
        kind = operation["op"]
        row = self.live(name_of(operation))
        if kind == "incr":
            current = row.value if row.version else 0
            if isinstance(current, bool) or not isinstance(current, int | Decimal):
                return "type"
            total = current + operation["delta"]
            low, high = operation.get("min", total), operation.get("max", total)
            return None if low <= total <= high else "limit"
        expect = 0 if kind == "putIfAbsent" else operation.get("expect")
        if expect is None:
            return "absent" if kind == "delete" and not row.version else None
        if expect == 0:
            return "exists" if row.version else None
        if not row.version:
            return "absent"
        return None if row.version == expect else "version"

    def verdict(self, operations: list[Operation]) -> tuple[int, dict[str, Any]] | None:
        """The first required operation that loses, in apply order."""
        for index, operation in in_order(operations):
            if operation["op"] in CHANGING and operation.get("required"):
                reason = self.refusal(operation)
                if reason is not None:
                    row = self.live(name_of(operation))
                    return index, {"kvReason": reason, "version": row.version, "value": row.value}
        return None

    def apply(self, operation: Operation, answered: dict[str, Any]) -> dict[str, Any]:
        """Carry an operation out and return its element; a new version is the answer's own."""
        kind = operation["op"]
        if kind == "get":
            return self._get(operation)
        if kind == "getMany":
            return self._many(operation)
        if kind == "getPrefix":
            return self._prefix(operation)
        name = name_of(operation)
        row = self.live(name)
        reason = self.refusal(operation)
        element: dict[str, Any] = {"op": kind, "applied": reason is None, "key": operation["key"]}
        if reason is not None:
            counts = kind != "incr" or (row.version and reason != "type")
            return {
                **element,
                "reason": reason,
                "value": row.value if counts else 0,
                "version": row.version,
            }
        if kind == "check":
            return {**element, "version": operation["expect"]}
        if kind == "delete":
            self.rows.pop(name, None)
            return {**element, "value": row.value, "version": row.version}
        version = self._draw(name, answered["version"])
        expires_at = row.expires_at
        if kind == "incr":
            value = (row.value if row.version else 0) + operation["delta"]
        else:
            value = read_exactly(operation["value"])
        if kind != "incr" or not row.version:
            ttl = operation.get("ttlSeconds")
            expires_at = None if ttl is None else self.now + timedelta(seconds=ttl)
        self.rows[name] = Row(version, value, expires_at, self.now)
        return {**element, "value": value, "version": version}

    def _draw(self, name: Name, version: int) -> int:
        """Versions are never handed out twice, and rise per key, whatever became of its rows."""
        assert version not in self.drawn
        assert version > self.last.get(name, 0)
        self.drawn.add(version)
        self.last[name] = version
        return version

    def _get(self, operation: Operation) -> dict[str, Any]:
        row = self.live(name_of(operation))
        found = {"op": "get", "found": row.version > 0, "key": operation["key"]}
        return found | (self._shown(row) if row.version else {})

    def _many(self, operation: Operation) -> dict[str, Any]:
        names = [(operation["ns"], key) for key in operation["keys"]]
        rows = {name[1]: self.live(name) for name in names}
        present = sorted((key for key, row in rows.items() if row.version), key=str.encode)
        return {
            "op": "getMany",
            "rows": [{"key": key, **self._shown(rows[key])} for key in present],
            "missing": [key for key in operation["keys"] if key not in present],
            "truncated": False,
        }

    def _prefix(self, operation: Operation) -> dict[str, Any]:
        keys = sorted(
            (
                key
                for namespace, key in self.rows
                if namespace == operation["ns"]
                and self.live((namespace, key)).version
                and key.startswith(operation["prefix"])
                and key.encode() > operation["after"].encode()
            ),
            key=str.encode,
        )
        page, rest = keys[: operation["limit"]], keys[operation["limit"] :]
        return {
            "op": "getPrefix",
            "rows": [
                {"key": key, **self._shown(self.live((operation["ns"], key)))} for key in page
            ],
            "truncated": bool(rest),
            "nextAfter": page[-1] if rest else None,
        }

    def _shown(self, row: Row) -> dict[str, Any]:
        return {
            "value": row.value,
            "version": row.version,
            "expiresAt": None if row.expires_at is None else written(row.expires_at),
            "updatedAt": written(row.updated_at),
        }


def name_of(operation: Operation) -> Name:
    return operation["ns"], operation["key"]


def in_order(operations: list[Operation]) -> list[tuple[int, Operation]]:
    """Step 2.6-1."""
    return sorted(
        enumerate(operations),
        key=lambda pair: (
            pair[1]["op"] in ("getMany", "getPrefix"),
            pair[1]["ns"].encode(),
            pair[1].get("key", "").encode(),
            pair[0],
        ),
    )


values = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["text", [1], {"a": None}])
).map(json.dumps)
amounts = st.one_of(st.integers(-3, 3), st.decimals(-2, 2, places=1))
lifetimes = st.one_of(st.just({}), st.integers(1, 4).map(lambda ttl: {"ttlSeconds": ttl}))
# Which version is expected: the key's last one, live or not, or another; told when it is sent.
expectations = st.sampled_from(["none", "last", "zero", "none", "last", "stale", "unknown"])


@st.composite
def changes(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(CHANGING))
    operation: Operation = {
        "op": kind,
        "ns": draw(st.sampled_from(NAMESPACES)),
        "key": draw(st.sampled_from(KEYS)),
        "required": draw(st.sampled_from([False, False, False, False, False, True])),
    }
    if kind in ("put", "putIfAbsent"):
        operation["value"] = draw(values)
    if kind == "incr":
        operation["delta"] = draw(amounts)
        operation |= draw(st.fixed_dictionaries({}, optional={"min": amounts, "max": amounts}))
    elif kind != "putIfAbsent":
        operation["expect"] = draw(expectations)
    if kind not in ("delete", "check"):
        operation |= draw(lifetimes)
    return operation


reads = st.one_of(
    st.fixed_dictionaries(
        {"op": st.just("get"), "ns": st.sampled_from(NAMESPACES), "key": st.sampled_from(KEYS)}
    ),
    st.fixed_dictionaries(
        {
            "op": st.just("getMany"),
            "ns": st.sampled_from(NAMESPACES),
            "keys": st.lists(st.sampled_from((*KEYS, "never")), unique=True),
        }
    ),
    st.fixed_dictionaries(
        {
            "op": st.just("getPrefix"),
            "ns": st.sampled_from(NAMESPACES),
            "prefix": st.sampled_from(("a", "a%", "b", "é")),
            "after": st.sampled_from(("", "a", "a%")),
            "limit": st.integers(1, 4),
        }
    ),
)


class KvMachine(RuleBasedStateMachine):
    """Calls a database and the model alike, in one transaction that is rolled back."""

    def __init__(self, connection: psycopg.Connection) -> None:
        super().__init__()
        self.connection = connection
        self.store = Store()
        self._set_clock()

    def teardown(self) -> None:
        self.connection.rollback()

    @rule(
        milliseconds=st.sampled_from([0, 0, 1, 250, 1000, 3000]),
        operations=st.lists(st.one_of(changes(), changes(), reads), min_size=2, max_size=8),
    )
    def call(self, milliseconds: int, operations: list[Operation]) -> None:
        self.store.now += timedelta(milliseconds=milliseconds)
        self._set_clock()
        operations = self._made_real(operations)
        verdict = self.store.verdict(operations)
        rows = self._answer(operations)
        if verdict is not None:
            [(index, kind, result)] = rows
            assert (index, kind, read_exactly(result)) == (verdict[0], "refused", verdict[1])
            return
        assert [(index, kind) for index, kind, _ in rows] == [
            (index, "done") for index in range(len(operations))
        ]
        answers = [read_exactly(result) for _, _, result in rows]
        for index, operation in in_order(operations):
            assert answers[index] == self.store.apply(operation, answers[index])

    @rule()
    def sweep(self) -> None:
        """Nobody can tell whether the sweep has been."""
        self.connection.execute("select queen._kv_sweep(0, '', '', 1000)")

    @invariant()
    def the_rows_are_those_of_the_model(self) -> None:
        stored = self.connection.execute(
            "select namespace, key, version, value::text, expires_at, updated_at from queen.kv"
            " where queen._kv_live(expires_at, queen.now())"
        ).fetchall()
        assert {
            (namespace, key): Row(version, read_exactly(value), expires_at, updated_at)
            for namespace, key, version, value, expires_at, updated_at in stored
        } == {name: row for name in self.store.rows if (row := self.store.live(name)).version}

    def _made_real(self, operations: list[Operation]) -> list[Operation]:
        """Turn expectations into versions, and leave a key's first write or check of the call."""
        real = []
        taken = set()
        for given in operations:
            operation = dict(given)
            if operation["op"] in CHANGING:
                if name_of(operation) in taken:
                    continue
                taken.add(name_of(operation))
                self._expect(operation)
            real.append(operation)
        return real

    def _expect(self, operation: Operation) -> None:
        expectation = operation.pop("expect", "none")
        versions = {
            "zero": 0,
            "last": self.store.last.get(name_of(operation), 0),
            "stale": max(1, self.store.last.get(name_of(operation), 1) - 1),
            "unknown": 2**63 - 1,
        }
        if expectation != "none" or operation["op"] == "check":
            operation["expect"] = versions.get(expectation, 0)

    def _answer(self, operations: list[Operation]) -> list[tuple[int, str, str]]:
        """Call as the broker does: optimistically, and carefully where that is refused."""
        try:
            with self.connection.transaction():
                return self._call(operations, careful=False)
        except psycopg.Error as error:
            if error.sqlstate != "QU901":
                raise
            return self._call(operations, careful=True)

    def _call(self, operations: list[Operation], *, careful: bool) -> list[tuple[int, str, str]]:
        document = json.dumps(operations, default=float)
        return self.connection.execute(
            "select operation_index, verdict, result::text from queen._kv(1, %s::jsonb, %s)"
            " order by 1",
            (document, careful),
        ).fetchall()

    def _set_clock(self) -> None:
        self.connection.execute(
            "select set_config('queen.fake_now', %s, false)", (self.store.now.isoformat(),)
        )


def test_kv_is_its_model(shared_database: str) -> None:
    with psycopg.connect(shared_database) as connection:
        run_state_machine_as_test(
            lambda: KvMachine(connection),
            settings=settings(
                max_examples=60,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
