"""The command `queen-pg`: serve, migrate, roles, doctor, config, url, psql, bench."""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import asyncpg
import click
import msgspec

from queen_pg import __version__, doctor, migrate, sql
from queen_pg.config import Settings, SettingsError
from queen_pg.embedded import (
    DATABASE,
    ROLE,
    EmbeddedError,
    EmbeddedServer,
    bundled_binaries,
    running,
)
from queen_pg.log import commands
from queen_pg.serve import ServeError, serve
from queen_pg.telemetry import configure_logging

P = ParamSpec("P")

COLOURS = {"good": "green", "poor": "yellow", "bad": "red"}

_FAILURES = (
    SettingsError,
    EmbeddedError,
    ServeError,
    migrate.NewerDatabase,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)


def _command(function: Callable[P, None]) -> Callable[P, None]:
    """Turn what an operator can mend into one line and exit code 1."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except _FAILURES as error:
            raise click.ClickException(str(error) or type(error).__name__) from error

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="queen-pg")
def main() -> None:
    """A message broker with Queen MQ's wire protocol, kept whole in PostgreSQL.

    Settings come from the environment; `queen-pg config` shows them all.
    """


main.add_command(commands.failover)
main.add_command(commands.log)
main.add_command(commands.replica)
main.add_command(commands.restored)
main.add_command(commands.tenant)


@main.command("serve")
@_command
def serve_command() -> None:
    """Run a broker until it is told to stop."""
    serve(Settings.from_env())


@main.command("migrate")
@click.option("--sql", "as_sql", is_flag=True, help="Print the script instead of running it.")
@click.option(
    "--since", metavar="REVISION", help="With --sql: leave out what is installed already."
)
@_command
def migrate_command(as_sql: bool, since: str | None) -> None:
    """Bring the database up to date."""
    if as_sql:
        click.echo(migrate.script(since))
        return
    settings = Settings.from_env()
    configure_logging("warning", json=settings.log_json)
    with _database_url(settings) as url:
        before = asyncio.run(migrate.upgrade(url))
    if before.current:
        click.echo(f"up to date at revision {before.head}")
    else:
        click.echo(f"migrated from revision {before.revision or 'none'} to {before.head}")


@main.command("roles")
def roles_command() -> None:
    """Print the script that makes the database's roles and gives them their rights."""
    click.echo(f"{sql.read('roles')}\n{sql.read('grants')}", nl=False)


@main.command("doctor")
@_command
def doctor_command() -> None:
    """Judge the database: version, settings, rights, clock. Exit code 1 if anything is bad."""
    settings = Settings.from_env()
    configure_logging("warning", json=settings.log_json)
    with _database_url(settings) as url:
        findings = asyncio.run(doctor.examine(msgspec.structs.replace(settings, pg_url=url)))
    for finding in findings:
        grade = click.style(finding.grade, fg=COLOURS[finding.grade])
        line = f"{grade}  {finding.subject:<32}{finding.value}"
        click.echo(f"{line:<60} {finding.advice}".rstrip())
    if any(finding.grade == "bad" for finding in findings):
        sys.exit(1)


@main.command("config")
@_command
def config_command() -> None:
    """Show every setting, with secrets hidden."""
    for name, value, description in Settings.from_env().shown():
        click.echo(f"# {description}\n{name}={value}\n")


@main.command("url")
@_command
def url_command() -> None:
    """Print the database's URL for programs to use, password included."""
    click.echo(_running_url(Settings.from_env(), loopback=True))


@main.command("psql", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_command
def psql_command(arguments: tuple[str, ...]) -> None:
    """Open psql on the database; arguments are psql's own."""
    url = _running_url(Settings.from_env(), loopback=False)
    program = shutil.which("psql") or str(bundled_binaries() / "psql")
    os.execv(program, [program, url, *arguments])


@main.command("bench", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_command
def bench_command(arguments: tuple[str, ...]) -> None:
    """Measure the broker, in databases of the run's own; see `queen-pg bench --help`."""
    # A wheel carries it inside this package, the source tree beside it.
    module = "queen_pg.bench" if (Path(__file__).parent / "bench").is_dir() else "bench"
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@contextlib.contextmanager
def _database_url(settings: Settings) -> Iterator[str]:
    """Yield the database's URL, running the embedded server for as long if it is not up."""
    if settings.pg_url is not None:
        yield settings.pg_url
    elif (endpoint := running(settings.data_folder)) is not None:
        yield endpoint.url(ROLE, DATABASE)
    else:
        with EmbeddedServer(settings.data_folder) as embedded:
            yield embedded.url


def _running_url(settings: Settings, *, loopback: bool) -> str:
    if settings.pg_url is not None:
        return settings.pg_url
    endpoint = running(settings.data_folder)
    if endpoint is None:
        raise EmbeddedError(
            f"the embedded server on {settings.data_folder} is not running; start `queen-pg serve`"
        )
    return endpoint.loopback_url() if loopback else endpoint.url(ROLE, DATABASE)
