"""A database with the roles of a deployment, and login roles that are members of them."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio

from queen_pg import sql
from tests.support import server as servers
from tests.support.database import Databases
from tests.support.server import Server

PASSWORD = "only for tests"


class Governed:
    """A migrated database whose rights are in force."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self.name = name
        self.owner_url = server.url(name)

    @property
    def admin_url(self) -> str:
        """The URL for whoever may make roles."""
        return as_role(self.owner_url, urlsplit(self._server.admin_url).username or "postgres", "")

    def url(self, role: str) -> str:
        """The URL for a login role."""
        return as_role(self.owner_url, role, PASSWORD)

    @contextlib.asynccontextmanager
    async def login(self, role: str) -> AsyncIterator[asyncpg.Connection]:
        """Yield a connection of a login role."""
        connection = await asyncpg.connect(self.url(role))
        try:
            yield connection
        finally:
            await connection.close()


def as_role(url: str, role: str, password: str) -> str:
    """Return a URL with another role in it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    secret = f":{password.replace(' ', '%20')}" if password else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{role}{secret}@{host}{parts.path}{query}"


async def make_roles(admin_url: str) -> None:
    """Run the administrator's script."""
    connection = await asyncpg.connect(admin_url)
    try:
        await connection.execute(sql.read("roles"))
        await connection.execute(sql.read("grants"))
    except asyncpg.InsufficientPrivilegeError:
        pytest.skip("the server's role may not make roles")
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of these tests' own: roles are the whole server's, and say what migrations grant."""
    with servers.find() as found:
        yield found


@pytest_asyncio.fixture(scope="session")
async def databases(server: Server) -> AsyncIterator[Databases]:
    """The maker of databases on that server."""
    made = Databases(server)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="session")
async def logins(server: Server) -> AsyncIterator[dict[str, str]]:
    """Login roles, by the role that they are members of; `stranger` is a member of none."""
    connection = await asyncpg.connect(server.admin_url)
    try:
        await connection.execute(sql.read("roles"))
    except asyncpg.InsufficientPrivilegeError:
        await connection.close()
        pytest.skip("the server's role may not make roles")
    suffix = secrets.token_hex(3)
    made = {}
    for group in ("owner", "broker", "application", "reader", "stranger"):
        made[group] = f"test_{group}_{suffix}"
        member = "" if group == "stranger" else f" in role queen_{group}"
        await connection.execute(f"create role {made[group]} login password '{PASSWORD}'{member}")
    await connection.execute(f"alter role {made['owner']} set role = queen_owner")
    yield made
    for role in made.values():
        await connection.execute(f"drop owned by {role}; drop role {role}")
    await connection.close()


@pytest_asyncio.fixture
async def governed(
    server: Server, databases: Databases, logins: dict[str, str]
) -> AsyncIterator[Governed]:
    """A database of one test's own with the rights in force."""
    name = await databases.create()
    found = Governed(server, name)
    await make_roles(found.admin_url)
    yield found
    await databases.drop(name)
