"""The commands `queen-pg replica …`: what an operator says to the nodes of the log."""

import asyncio
from collections.abc import Awaitable, Callable

import click
import msgspec

from queen_pg.config import Settings, SettingsError
from queen_pg.leader import UNREACHABLE, parse_address
from queen_pg.log import promote as promotion
from queen_pg.log import replica as followers
from queen_pg.log import status as statuses
from queen_pg.log.node import Cluster, LogError
from queen_pg.telemetry import configure_logging

DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the SQL, and change nothing.")


def _with_cluster(work: Callable[[Cluster], Awaitable[None]], *, dry: bool = False) -> None:
    """Reach all nodes and do the work; what an operator can mend becomes a line and exit code 1."""

    async def run() -> None:
        settings = Settings.from_env()
        configure_logging("warning", json=settings.log_json)
        if settings.pg_url is None:
            raise LogError("set QUEEN_PG_URL: the bundled server has no followers")
        async with Cluster(settings, click.echo, dry=dry) as cluster:
            await work(cluster)

    try:
        asyncio.run(run())
    except (LogError, SettingsError, *UNREACHABLE) as error:
        raise click.ClickException(str(error) or type(error).__name__) from error


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.group("replica")
def replica() -> None:
    """Followers of the log: other PostgreSQL servers that have every step too.

    QUEEN_PG_URL names the nodes; QUEEN_PG_ADMIN_URL, if set, a role with the rights to replicate.
    """


@replica.command("add")
@click.argument("address", metavar="HOST[:PORT]")
@click.option("--name", help="What to call the node; by default its address.")
@click.option("--primary", help="What to call the primary; by default its address.")
@click.option(
    "--source", metavar="HOST[:PORT]", help="The primary's address, as the others reach it."
)
@DRY_RUN
def add(
    address: str, name: str | None, primary: str | None, source: str | None, dry_run: bool
) -> None:
    """Make a server a follower, with a copy of everything."""
    naming = followers.Naming(name, primary, None if source is None else _address(source))
    where = _address(address)
    _with_cluster(lambda cluster: followers.add(cluster, where, naming), dry=dry_run)


@replica.command("status")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def status(as_json: bool) -> None:
    """Show who leads, how far the followers are, and what would be lost now."""

    async def show(cluster: Cluster) -> None:
        found = await statuses.status(cluster)
        if as_json:
            click.echo(msgspec.json.encode(found))
            return
        for line in statuses.lines(found):
            click.echo(line)

    _with_cluster(show)


@replica.command("quorum")
@click.argument("size", type=click.IntRange(0))
@DRY_RUN
def quorum(size: int, dry_run: bool) -> None:
    """Have steps answered when SIZE followers have them on disk too; 0: at once."""

    async def change(cluster: Cluster) -> None:
        await cluster.lock()
        await followers.set_quorum(cluster, size)

    _with_cluster(change, dry=dry_run)


@replica.command("promote")
@click.argument("name", required=False)
@click.option("--accept-loss", is_flag=True, help="Go on where answered steps may be lost by it.")
@DRY_RUN
def promote(name: str | None, accept_loss: bool, dry_run: bool) -> None:
    """Make a follower the primary; by default the one that has most, of a primary that is gone."""
    _with_cluster(
        lambda cluster: promotion.promote(cluster, name, accept_loss=accept_loss), dry=dry_run
    )


@replica.command("rejoin")
@click.argument("address", metavar="HOST[:PORT]")
@DRY_RUN
def rejoin(address: str, dry_run: bool) -> None:
    """Bring a former primary back as a follower, keeping what it has under another name."""
    where = _address(address)
    _with_cluster(lambda cluster: followers.rejoin(cluster, where), dry=dry_run)


@replica.command("remove")
@click.argument("name")
@DRY_RUN
def remove(name: str, dry_run: bool) -> None:
    """Let a follower go; its copy stays, and takes no writes."""
    _with_cluster(lambda cluster: followers.remove(cluster, name), dry=dry_run)
