"""The tables and the drawing of docs/benchmarks.md: `python -m bench.page RESULTS.json...`.

Everything between the page's two markers is written anew from the runs' JSON, and nothing else.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from .drawing import drawing
from .report import Endured, large, lasted, scaled, spread
from .results import Results, merged
from .run import Sample, median
from .targets import is_ours, judge

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def page(results: Results) -> str:
    """Return the page's part that is made from the figures."""
    parts = [_conditions(results.about), _targets(results)]
    parts += [_workload(results, name) for name in results.titles]
    parts += [_endured(name, result) for name, result in results.endurance.items()]
    return "\n\n".join(parts)


def _rows(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text, and the others numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _conditions(about: dict[str, Any]) -> str:
    machine, settings = about["machine"], about["settings"]
    rows = [
        ["machine", f"{machine['processor']}, {machine['cores']} cores, {machine['memory_mb']} MB"],
        ["Python", machine["python"]],
        *([f"`{name}`", value] for name, value in settings.items()),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"Measured on {about['date'][:10]} at commit `{about['commit']}`.\n\n"
        f"| condition | |\n| --- | --- |\n{table}"
    )


def _targets(results: Results) -> str:
    rows = [
        [
            each.title,
            each.wanted,
            "" if each.figure is None else f"{each.figure:.3g}",
            "not measured" if each.figure is None else "met" if each.met else "**missed**",
        ]
        for each in judge(results.figures)
    ]
    return "### Targets\n\n" + _rows(["", "wanted", "measured", ""], rows)


def _workload(results: Results, name: str) -> str:
    samples = results.figures[name]
    ours = max(
        (median(rows, "rate") or 0.0 for who, rows in samples.items() if is_ours(who) and rows),
        default=0.0,
    )
    head = [
        f"`{name}`", results.units[name], "spread", "of us", "p50 ms", "p99 ms", "commits",
        "WAL bytes", "µs server", "µs broker", "retried",
    ]  # fmt: skip
    rows = [_candidate(who, found, ours) for who, found in samples.items() if found]
    return f"### {results.titles[name]}\n\n{_rows(head, rows)}"


def _candidate(who: str, rows: Sequence[Sample], ours: float) -> list[str]:
    rate = median(rows, "rate") or 0.0
    retried = scaled(rows, "retried", 100, 2)
    return [
        who,
        f"{rate:,.0f}",
        spread(sorted(row.rate for row in rows)),
        f"{rate / ours:.2f}" if ours else "",
        scaled(rows, "p50", 1e3),
        scaled(rows, "p99", 1e3),
        scaled(rows, "commits", 1, 3),
        scaled(rows, "wal", 1, 0),
        scaled(rows, "server_cpu", 1e6),
        scaled(rows, "broker_cpu", 1e6),
        f"{retried} %" if retried else "",
    ]


def _endured(name: str, results: Endured) -> str:
    intervals = [
        [
            lasted(who, result),
            str(number),
            f"{sample['rate']:,.0f}",
            f"{(sample['p50'] or 0) * 1e3:.1f}",
            f"{(sample['p99'] or 0) * 1e3:.1f}",
            f"{sum(each['dead'] for each in tables):,}",
            f"{sum(each['bytes'] for each in tables) / 1e6:.1f}",
        ]
        for who, result in results.items()
        for number, (sample, tables) in enumerate(
            zip(result["samples"], result["tables"], strict=True), 1
        )
    ]
    at_end = [
        [
            f"{who}: `{each['name']}`",
            f"{each['bytes'] / 1e6:.1f}",
            f"{each['live']:,}",
            f"{each['dead']:,}",
            f"{each['updated']:,}",
            f"{each['hot'] / each['updated']:.0%}" if each["updated"] else "",
            str(each["vacuums"]),
        ]
        for who, result in results.items()
        for each in large(result["tables"][-1])
    ]
    head = [f"`{name}`", "interval", "messages/s", "p50 ms", "p99 ms", "dead rows", "MB"]
    tables = ["table at the end", "MB", "live", "dead", "updates", "HOT", "vacuums"]
    return (
        f"### {name.capitalize()}, at a steady rate\n\n"
        f"{_rows(head, intervals)}\n\n{_rows(tables, at_end)}"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--docs", type=click.Path(path_type=Path), default=Path("docs"))
def main(files: tuple[Path, ...], docs: Path) -> None:
    """Write the figures of docs/benchmarks.md and docs/benchmarks.svg."""
    results = merged(file.read_text() for file in files)
    file = docs / "benchmarks.md"
    before, _, rest = file.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    file.write_text(f"{before}{BEGIN}\n\n{page(results)}\n\n{END}{after}")
    (docs / "benchmarks.svg").write_text(drawing(results.titles, results.figures))


if __name__ == "__main__":
    main()
