"""A floor may look down, never up, and never at its neighbours."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "queen_pg"

FLOORS = (
    {"client", "config", "errors", "frames", "telemetry"},
    {"limits", "sql"},
    {"joined", "leader", "plans", "turns"},
    {"database", "embedded", "lanes", "migrate"},
    {"broker"},
    {"waiting"},
    {"conveyor", "listener", "log", "scheduler", "wakeup"},
    {"group"},
    {"routes"},
    {"app", "doctor"},
    {"serve"},
    {"cli"},
    {"__main__"},
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

# Routes see of one another only the manners that they share. Broker modules may use one another's
# plain data, as long as that makes no circle.
SHARED = {"routes": {"surface", "wire"}}

# Where a library may be imported at all: what stands below must not know it.
LIBRARIES = {
    "alembic": {"migrate"},
    "asyncpg": {
        "leader",
        "plans",
        "turns",
        "log",
        "database",
        "doctor",
        "embedded",
        "migrate",
        "serve",
        "cli",
        "broker",
        "wakeup",
        "listener",
    },
    "click": {"cli", "log"},
    "uvicorn": {"serve", "joined"},
    "litestar": {"routes", "app"},
    "sqlalchemy": {"client", "migrate"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports; `from a import b` yields both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(file: Path) -> tuple[str, str]:
    """Return a file's room, and its own name within a room that is a folder."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[0], parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_look_down(file: Path) -> None:
    room, module = place(file)
    if room == "__init__":
        assert not [name for name in imports(file) if name.startswith("queen_pg")]
        return
    assert room in LEVELS, f"say on which floor {room} is"
    for name in imports(file):
        if not name.startswith("queen_pg."):
            continue
        other, *inner = name.split(".")[1:]
        if other == "__version__":
            continue
        assert other in LEVELS, name
        if other != room:
            assert LEVELS[other] < LEVELS[room], f"{room} looks up or aside at {name}"
        elif inner and module != "__init__" and room in SHARED:
            assert inner[0] in SHARED[room], f"{room}.{module} looks aside at {name}"


def test_broker_modules_make_no_circle() -> None:
    modules = {file.stem: file for file in (PACKAGE / "broker").glob("*.py")}
    seen = {
        stem: {
            name.split(".")[2]
            for name in imports(file)
            if name.startswith("queen_pg.broker.") and name.split(".")[2] in modules
        }
        for stem, file in modules.items()
    }
    assert list(TopologicalSorter(seen).static_order())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_libraries_stay_on_their_floors(file: Path) -> None:
    room, _ = place(file)
    for name in imports(file):
        library = name.partition(".")[0]
        if library in LIBRARIES:
            assert room in LIBRARIES[library], f"{room} imports {library}"


def test_migrations_know_the_sql_texts_only() -> None:
    for file in PACKAGE.with_name("migrations").rglob("*.py"):
        ours = {name for name in imports(file) if name.startswith("queen_pg")}
        assert ours <= {"queen_pg", "queen_pg.sql"}, file
