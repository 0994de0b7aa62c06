"""The commands `queen-pg replica`, `failover` and `log`: what an operator says to the log."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import asyncpg
import click
import msgspec

from queen_pg import leader
from queen_pg.config import Settings, SettingsError
from queen_pg.embedded import DATABASE, SUPERUSER, running
from queen_pg.leader import parse_address
from queen_pg.log import feed, restore, statement
from queen_pg.log import promote as promotion
from queen_pg.log import replica as followers
from queen_pg.log import slot as slot_module
from queen_pg.log import status as statuses
from queen_pg.log import tenant as tenants
from queen_pg.log.failover import Watcher
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

    _run(run())


def _with_leader(work: Callable[[asyncpg.Connection], Awaitable[None]]) -> None:
    """Do the work at the primary, with the role that may replicate."""

    async def run() -> None:
        settings = Settings.from_env()
        configure_logging("warning", json=settings.log_json)
        connection = await leader.connect(await _leading_url(settings))
        try:
            await work(connection)
        except asyncpg.InsufficientPrivilegeError as error:
            raise LogError(
                f"{error}; the role needs: alter role … replication, and to own the schema queen."
                " QUEEN_PG_ADMIN_URL may name another role"
            ) from error
        finally:
            connection.terminate()

    _run(run())


async def _leading_url(settings: Settings) -> str:
    url = settings.pg_admin_url or settings.pg_url
    if url is not None:
        return await leader.leading_url(url)
    endpoint = running(settings.data_folder)
    if endpoint is None:
        raise LogError("the bundled server is not running; start `queen-pg serve`")
    return endpoint.url(SUPERUSER, DATABASE)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (LogError, SettingsError, *leader.UNREACHABLE) as error:
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
@click.option("--name", help="What to call the node, where the log has forgotten it.")
@DRY_RUN
def rejoin(address: str, name: str | None, dry_run: bool) -> None:
    """Bring a former primary back as a follower, keeping what it has under another name."""
    where = _address(address)
    _with_cluster(lambda cluster: followers.rejoin(cluster, where, name), dry=dry_run)


@replica.command("remove")
@click.argument("name")
@DRY_RUN
def remove(name: str, dry_run: bool) -> None:
    """Let a follower go; its copy stays, and takes no writes."""
    _with_cluster(lambda cluster: followers.remove(cluster, name), dry=dry_run)


@click.command("restored")
@click.option(
    "--epoch", type=click.IntRange(1), help="The epoch to begin; by default 10 after the backup's."
)
@DRY_RUN
def restored(epoch: int | None, dry_run: bool) -> None:
    """Say that this database was restored from a backup: begin a new epoch, without followers."""
    _with_cluster(lambda cluster: restore.restored(cluster, epoch), dry=dry_run)


@click.command("failover")
@click.option(
    "--after",
    "after_seconds",
    type=click.FloatRange(min=1),
    default=10,
    show_default=True,
    help="Seconds that the primary must have been gone.",
)
@click.option(
    "--accept-loss", is_flag=True, help="Promote even where answered steps may be lost by it."
)
def failover(after_seconds: float, accept_loss: bool) -> None:
    """Watch the primary, and promote a follower when it has been gone for long enough.

    It acts when more than half of the followers cannot reach the primary either. Where Patroni or
    a managed service does this already, let it: see docs/replication.md.
    """
    settings = Settings.from_env()
    configure_logging("warning", json=settings.log_json)
    _run(Watcher(settings, click.echo, after_seconds=after_seconds, accept_loss=accept_loss).run())


@click.group("log")
def log() -> None:
    """The log as a feed, and the slots that keep it for readers."""


@log.command("tail")
@click.option("--slot", "name", default="queen_tail", show_default=True, help="Whose place to use.")
@click.option("--create", is_flag=True, help="Make the slot if it is not there, from now on.")
@click.option("--after", metavar="LSN", help="Begin after the entry with this LSN.")
@click.option("--follow/--no-follow", default=True, help="Wait for more at the end.")
def tail(name: str, create: bool, after: str | None, follow: bool) -> None:
    """Print each committed step as a line of JSON, in the order of the commits.

    The slot keeps the last 1000 entries that were printed (at most 16 MiB of the log), so that a
    reader that lost lines may ask for them again with --after. Without --after they come again.
    """
    try:
        place = None if after is None else statement.parse_lsn(after)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--after") from None

    async def print_entries(connection: asyncpg.Connection) -> None:
        if create:
            await feed.create(connection, name)
        seen = await leader.look(connection, "")
        entries = feed.Tail(connection, name, seen.epoch)
        await entries.begin(place)
        await entries.run(_print_line, follow=follow)

    _with_leader(print_entries)


def _print_line(line: str) -> None:
    # Flushed before the slot is confirmed.
    click.echo(line)
    sys.stdout.flush()


@log.command("slots")
def slots() -> None:
    """List the logical slots: who reads each, and how much of the log it keeps."""

    async def show(connection: asyncpg.Connection) -> None:
        for slot in await slot_module.slots(connection):
            reader = "being read" if slot.active else "read by nobody"
            lsn = "" if slot.lsn is None else statement.lsn_text(slot.lsn)
            warning = "; forgotten?" if slot.forgotten else ""
            click.echo(
                f"{slot.name:<24}{slot.purpose:<20}{reader}, confirmed {lsn},"
                f" keeps {slot.kept_bytes} bytes ({slot.wal_status}){warning}"
            )

    _with_leader(show)


@log.command("drop")
@click.argument("name")
def drop(name: str) -> None:
    """Drop a slot, so that the log is not kept for its reader any more."""
    _with_leader(lambda connection: slot_module.drop(connection, name))


@click.group("tenant")
def tenant() -> None:
    """Which group each tenant lives in."""


@tenant.command("list")
def tenant_list() -> None:
    """List the tenants that do not live in the home group."""

    async def show() -> None:
        for name, group in await tenants.places(Settings.from_env()):
            click.echo(f"{name}  {group}")

    _run(show())


@tenant.command("move")
@click.argument("name")
@click.argument("group")
def tenant_move(name: str, group: str) -> None:
    """Move everything that a tenant has to another group; brokers refuse its calls meanwhile."""
    _run(tenants.move(Settings.from_env(), name, group, click.echo))
