"""Real broker processes: started on a free port, asked for their health, stopped or killed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType

import httpx

READY_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05


class Broker:
    """A `queen-pg serve` process against a given database, or an embedded one if url is None."""

    def __init__(self, url: str | None, **environment: str) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("QUEEN_")},
            "PORT": str(self.port),
            **({} if url is None else {"QUEEN_PG_URL": url}),
            **environment,
        }
        descriptor, name = tempfile.mkstemp(prefix="queen-pg-broker-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        self._forget = weakref.finalize(self, self._log.unlink, missing_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Broker":
        try:
            self.start()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._forget()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        self.launch()
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise AssertionError(f"the broker ended at its start:\n{self.log()}")
            if "ready " in self.log() and self.healthy():
                return
            time.sleep(POLL_SECONDS)
        self.kill()
        raise AssertionError(f"the broker did not become healthy:\n{self.log()}")

    def launch(self) -> None:
        """Start the process without waiting for anything."""
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "queen_pg", "serve"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[2],
            )

    def healthy(self) -> bool:
        """Ask once for the broker's health."""
        try:
            return httpx.get(f"{self.base_url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """Ask the process to end (SIGTERM), wait for it, and return its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the broker did not end:\n{self.log()}") from None
        self.process = None
        return code

    def kill(self) -> None:
        """End the process at once (SIGKILL)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def discard(self) -> None:
        """End the process at once, and forget what it has written."""
        self.kill()
        self._forget()

    def log(self) -> str:
        """Return what the process has written so far."""
        return self._log.read_text(errors="replace")


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
