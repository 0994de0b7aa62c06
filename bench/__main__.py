"""The command: `python -m bench`, `make bench`, `queen-pg bench`."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from . import endurance, report
from .bench import FLOOR, FULL, OURS, QUICK, Bench
from .drawing import drawing
from .peer import Installed
from .results import Results
from .run import rounds
from .stage import Broker, stage
from .window import clock
from .workloads import all_of

SOAK_RATE = 500
ENDURANCE = {"reader": endurance.reader, "soak": endurance.soak}


@click.command("bench", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="All sizes and long runs: hours, not tens of minutes.")
@click.option(
    "--url",
    help="A PostgreSQL whose role may create databases; else our own.",
)
@click.option("--only", metavar="NAMES", help="Workloads to run, with commas between; see --list.")
@click.option("--list", "listing", is_flag=True, help="List the workloads and stop.")
@click.option("--peers/--no-peers", default=True, help="Whether peers are installed and run.")
@click.option(
    "--peers-folder",
    type=click.Path(path_type=Path),
    default=Path.home() / ".cache" / "queen-pg-bench",
    help="Where the peers are installed.",
)
@click.option("--rounds", "times", type=int, help="How often each candidate runs.")
@click.option("--seconds", type=float, help="How long each run is measured.")
@click.option("--reader", type=float, help="How many seconds `reader` runs for us.")
@click.option("--soak", type=float, help="How many seconds `soak` runs for us.")
@click.option("--beside", type=float, help="How many seconds both run for the floor and the peers.")
@click.option("--workers", type=int, default=1, help="Worker processes of our broker.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bench-results"),
    help="The folder for results.json, results.txt and results.svg.",
)
def main(
    full: bool,
    url: str | None,
    only: str | None,
    listing: bool,
    peers: bool,
    peers_folder: Path,
    times: int | None,
    seconds: float | None,
    reader: float | None,
    soak: float | None,
    beside: float | None,
    workers: int,
    out: Path,
) -> None:
    """Measure pushes, pops, acks and transactions over HTTP, beside plain SQL and other queues.

    Everything happens in databases of the run's own, named queen_bench_…, which are dropped at its
    end. It loads the server as hard as it can: do not point it at one that serves others.
    """
    profile = FULL if full else QUICK
    profile = replace(
        profile,
        rounds=times or profile.rounds,
        seconds=seconds or profile.seconds,
        reader_seconds=reader or profile.reader_seconds,
        soak_seconds=soak or profile.soak_seconds,
        beside_seconds=beside or profile.beside_seconds,
    )
    workloads = all_of(profile)
    chosen = only.split(",") if only else [*(each.name for each in workloads), *ENDURANCE]
    if listing:
        for each in workloads:
            click.echo(f"{each.name:<16}{each.title}")
        click.echo(
            "reader          the path beside an old snapshot\nsoak            the path for long"
        )
        return

    installed = Installed(peers_folder) if peers else None
    lines: list[str] = []

    def say(text: str) -> None:
        click.echo(text)
        lines.append(text)

    with stage(url) as server:
        results = Results(
            {
                "machine": report.machine(),
                "settings": server.settings(),
                "command": sys.argv[1:],
                "profile": profile.name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": _commit(),
            }
        )
        say(
            f"{results.about['machine']}\n{results.about['settings']}\n"
            f"profile {profile.name}: {profile.rounds} rounds of {profile.seconds:.0f} s"
        )
        for name, problem in (installed.problems if installed else {}).items():
            say(f"{name}: {problem}")
        broker = Broker(server.migrate(OURS), {"QUEEN_WORKERS": str(workers)})
        try:
            server.migrate(FLOOR)
            bench = Bench(server, broker, profile, installed)
            for peer in bench.peers:
                bench.fresh(peer)
            for each in workloads:
                if each.name in chosen:
                    started = clock()
                    samples = rounds(each.candidates(bench), profile.rounds)
                    results.add(each.name, each.title, each.unit, samples)
                    took = f"{each.name}, {clock() - started:.0f} s"
                    say("\n" + report.table(f"{each.title} ({took})", each.unit, samples))
                    _keep(out, results, lines)
            for name, run in ENDURANCE.items():
                if name in chosen:
                    started = clock()
                    results.endurance[name] = run(bench, SOAK_RATE)
                    took = f"{name}, {clock() - started:.0f} s"
                    say("\n" + report.endured(took, results.endurance[name]))
                    _keep(out, results, lines)
        finally:
            broker.stop()
    say("\n" + report.verdicts(results.figures))
    say("\n" + report.LIMITS)
    _keep(out, results, lines)


def _keep(out: Path, results: Results, lines: list[str]) -> None:
    """Write what there is so far: a run of hours may not come to its end."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(results.dump())
    (out / "results.txt").write_text("\n".join(lines) + "\n")
    (out / "results.svg").write_text(drawing(results.titles, results.figures))


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main(prog_name="queen-pg bench")
