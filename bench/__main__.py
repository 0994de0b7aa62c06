"""The command: `python -m bench`, `make bench`, `queen-pg bench`."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from bench import endurance, report
from bench.peer import Installed
from bench.run import Sample, rounds
from bench.stage import ROOT, Broker, stage
from bench.workloads import FLOOR, FULL, OURS, QUICK, Bench, all_of

SOAK_RATE = 500


@click.command("bench", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="All sizes and long runs (hours), not a few minutes.")
@click.option("--url", help="A PostgreSQL whose role may create databases, instead of our own.")
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
    workers: int,
    out: Path,
) -> None:
    """Measure pushes, pops, acks and transactions over HTTP, beside plain SQL and other queues."""
    profile = FULL if full else QUICK
    if times is not None or seconds is not None:
        profile = replace(
            profile, rounds=times or profile.rounds, seconds=seconds or profile.seconds
        )
    workloads = all_of(profile)
    chosen = only.split(",") if only else [*(each.name for each in workloads), "reader", "soak"]
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

    results: dict[str, tuple[str, dict[str, list[Sample]]]] = {}
    endured = {}
    with stage(url) as server:
        settings = server.settings()
        say(
            f"{report.machine()}\n{settings}\n"
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
                    samples = rounds(each.candidates(bench), profile.rounds)
                    results[each.name] = each.title, samples
                    say("\n" + report.table(f"{each.title} ({each.name})", each.unit, samples))
            for name, run in (("reader", endurance.reader), ("soak", endurance.soak)):
                if name in chosen:
                    endured[name] = run(bench, SOAK_RATE)
                    say("\n" + report.endured(name, endured[name]))
        finally:
            broker.stop()
    say("\n" + report.LIMITS)
    out.mkdir(parents=True, exist_ok=True)
    more = {
        "command": sys.argv[1:],
        "profile": profile.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }
    figures = {name: samples for name, (_, samples) in results.items()}
    (out / "results.json").write_text(report.document(settings, figures, endured, **more))
    (out / "results.txt").write_text("\n".join(lines) + "\n")
    (out / "results.svg").write_text(report.drawing(results))


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
