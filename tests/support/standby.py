"""Copies of a server's files: a physical standby, and a server restored from a backup."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.broker import free_port
from tests.support.nodes import PASSWORD, Server

READY_SECONDS = 30.0


class Copy:
    """A server that began as a base backup of another one."""

    def __init__(self, source: Server) -> None:
        self.port = free_port()
        self.cluster = source.embedded.folder / f"copy-{self.port}"
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for the owner of the schema."""
        return self._source.url.replace(f":{self._source.port}/", f":{self.port}/")

    @property
    def admin_url(self) -> str:
        """The URL for the superuser."""
        return self._source.admin_url.replace(f":{self._source.port}/", f":{self.port}/")

    def back_up(self, *options: str) -> None:
        """Copy the source's files while it runs."""
        self.cluster.mkdir(mode=0o700)
        account = self._account()
        if "user" in account:
            os.chown(self.cluster, account["user"], account["group"])
        self._run(
            "pg_basebackup", "--pgdata", str(self.cluster), "--checkpoint=fast",
            "--wal-method=stream", "--no-sync", "--host=127.0.0.1",
            f"--port={self._source.port}", "--username=postgres", *options,
        )  # fmt: skip

    def configure(self, text: str) -> None:
        """Add settings."""
        with (self.cluster / "postgresql.auto.conf").open("a") as file:
            file.write(text)

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        command = [
            str(self._binaries / "postgres"), "-D", str(self.cluster), "-p", str(self.port),
            "-c", f"unix_socket_directories={self.cluster}", "-c", f"port={self.port}",
        ]  # fmt: skip
        with (self.cluster / "log").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **self._account()
            )
        deadline = time.monotonic() + READY_SECONDS
        while True:
            assert self._process.poll() is None, (self.cluster / "log").read_text()[-2000:]
            with contextlib.suppress(FileNotFoundError):
                lines = (self.cluster / "postmaster.pid").read_text().splitlines()
                if lines[7:8] and lines[7].strip() in ("ready", "standby"):
                    return
            assert time.monotonic() < deadline, (self.cluster / "log").read_text()[-2000:]
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server and remove its files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        shutil.rmtree(self.cluster, ignore_errors=True)

    @property
    def _binaries(self) -> Path:
        return self._source.embedded._binary_folder()

    def _account(self) -> dict[str, Any]:
        """Files and processes belong to whom the source belongs to."""
        [owned] = self._source.embedded.folder.glob("postgres-*")
        as_whom = (
            {} if os.geteuid() else {"user": owned.stat().st_uid, "group": owned.stat().st_gid}
        )
        return {**as_whom, "cwd": "/", "env": {"PATH": os.defpath, "PGPASSWORD": PASSWORD}}

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / name), *arguments],
            check=True,
            capture_output=True,
            **self._account(),
        )
