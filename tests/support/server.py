"""Find a PostgreSQL to test on.

In this order: the one that QUEEN_PG_TEST_URL (or QUEEN_PG_URL) names, whose role may create
databases; a throwaway cluster of the binaries in QUEEN_PG_TEST_BINDIR; a container, where
QUEEN_PG_TEST_CONTAINER is 1; and by default a throwaway cluster of the bundled binaries.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from queen_pg.embedded import EmbeddedServer

CONTAINER_IMAGE = "postgres:18"
# Memory, where there is enough of it: a clone is 300 files, which some disks make slowly.
MEMORY_FOLDER = Path("/dev/shm")
MEMORY_BYTES_MIN = 2 * 1024**3


class Server:
    """A PostgreSQL server under test, whose databases are named by `url(database)`."""

    def __init__(self, url: str, embedded: EmbeddedServer | None = None) -> None:
        self._url = url
        self.embedded = embedded

    def url(self, database: str) -> str:
        """Return the URL of a database, for the role that owns what the tests create."""
        return urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))

    @property
    def admin_url(self) -> str:
        """The URL by which databases are created."""
        return self.embedded.superuser_url if self.embedded else self._url

    @property
    def owner(self) -> str | None:
        """The role that shall own the databases, where it is not the creating one."""
        return "queen" if self.embedded else None


@contextlib.contextmanager
def find() -> Iterator[Server]:
    """Yield the server of this run, and stop it afterwards if it was started here."""
    url = os.environ.get("QUEEN_PG_TEST_URL") or os.environ.get("QUEEN_PG_URL")
    bin_folder = os.environ.get("QUEEN_PG_TEST_BINDIR")
    if url:
        yield Server(url)
    elif not bin_folder and os.environ.get("QUEEN_PG_TEST_CONTAINER") == "1":
        with _container() as url:
            yield Server(url)
    else:
        with throwaway(Path(bin_folder) if bin_folder else None) as embedded:
            yield Server(embedded.url, embedded)


@contextlib.contextmanager
def throwaway(bin_folder: Path | None = None) -> Iterator[EmbeddedServer]:
    """Yield a fresh cluster that forgets everything and saves nothing to disk in earnest."""
    with (
        temporary_folder() as folder,
        EmbeddedServer(folder / "data", bin_folder=bin_folder, durable=False) as embedded,
    ):
        yield embedded


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for clusters, which a system user can reach when root runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="queen-pg-test-", dir=fast_folder()))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fast_folder() -> Path | None:
    """Return a folder in memory, or None where there is not enough of it."""
    if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > MEMORY_BYTES_MIN:
        return MEMORY_FOLDER
    return None


@contextlib.contextmanager
def _container() -> Iterator[str]:
    from testcontainers.postgres import PostgresContainer

    settings = (
        "postgres -c wal_level=logical -c fsync=off -c max_pred_locks_per_transaction=2048"
        " -c max_pred_locks_per_page=200 -c max_pred_locks_per_relation=100000"
    )
    with PostgresContainer(CONTAINER_IMAGE, driver=None).with_command(settings) as container:
        yield container.get_connection_url()
