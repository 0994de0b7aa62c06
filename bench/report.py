"""What came of a run, as tables to read in a terminal."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .run import Sample, median
from .targets import Figures, judge

Endured = Mapping[str, Mapping[str, Any]]
"""What an endurance run gave, by who ran."""

# Of smaller ones nothing can be learnt.
LARGE_BYTES = 100_000

LIMITS = """\
What the figures do not show: server, broker and load share one machine and its loopback, so nothing
here says what a network costs or how the broker fares with cores of its own; the data fits in
memory; the peers' load processes are part of the peers' own libraries, and cost what those cost;
peers promise less order, or other things, than a queue of ordered partitions does."""


def machine() -> dict[str, Any]:
    """Return what is known of the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_mb": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def table(title: str, unit: str, samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return one workload's figures: medians over the rounds, with the spread of the rates."""
    lines = [
        title,
        f"  {'':<48}{unit:>16}{'spread':>16}{'p50 ms':>9}{'p99 ms':>9}{'commits':>9}"
        f"{'WAL B':>9}{'µs db':>8}{'broker':>8}{'load':>8}{'retried':>9}",
    ]
    for name, rows in samples.items():
        if not rows:
            lines.append(f"  {name:<48}{'failed':>16}")
            continue
        rates = sorted(row.rate for row in rows)
        lines.append(
            f"  {name:<48}{median(rows, 'rate'):>16,.0f}{spread(rates):>16}"
            f"{scaled(rows, 'p50', 1e3):>9}{scaled(rows, 'p99', 1e3):>9}"
            f"{scaled(rows, 'commits', 1, 3):>9}{scaled(rows, 'wal', 1, 0):>9}"
            f"{scaled(rows, 'server_cpu', 1e6):>8}"
            f"{scaled(rows, 'broker_cpu', 1e6):>8}{scaled(rows, 'load_cpu', 1e6):>8}"
            f"{scaled(rows, 'retried', 100, 2):>8}{'' if rows[0].retried is None else '%'}"
        )
        errors = {text: count for row in rows for text, count in row.errors.items()}
        lines += [f"    {count} × {text}" for text, count in errors.items()]
    return "\n".join(lines)


def endured(title: str, results: Endured) -> str:
    """Return what an endurance run gave, interval by interval, and the tables at its end."""
    lines = [
        f"{title}\n"
        f"  {'':<34}{'interval':>10}{'messages/s':>12}{'p50 ms':>9}{'p99 ms':>9}"
        f"{'dead rows':>12}{'MB':>8}"
    ]
    for who, result in results.items():
        for number, (sample, tables) in enumerate(
            zip(result["samples"], result["tables"], strict=True), 1
        ):
            dead = sum(each["dead"] for each in tables)
            size = sum(each["bytes"] for each in tables) / 1e6
            p50, p99 = ((sample[key] or 0) * 1e3 for key in ("p50", "p99"))
            lines.append(
                f"  {lasted(who, result):<34}{number:>10}{sample['rate']:>12,.0f}{p50:>9.1f}"
                f"{p99:>9.1f}{dead:>12,}{size:>8.1f}"
            )
    lines.append(
        f"  {'table':<34}{'MB':>8}{'live':>10}{'dead':>9}{'updates':>10}{'HOT':>7}{'vacuums':>9}"
    )
    for who, result in results.items():
        for each in large(result["tables"][-1]):
            hot = f"{each['hot'] / each['updated']:.0%}" if each["updated"] else ""
            name = f"{who}: {each['name']}"
            lines.append(
                f"  {name:<48}{each['bytes'] / 1e6:>8.1f}{each['live']:>10,}{each['dead']:>9,}"
                f"{each['updated']:>10,}{hot:>7}{each['vacuums']:>9}"
            )
    return "\n".join(lines)


def lasted(who: str, result: Mapping[str, Any]) -> str:
    """Return who ran for long, at which rate and for how long."""
    return f"{who}, {result['rate']} for {result['seconds']:.0f} s"


def large(tables: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tables that are worth a line."""
    return [each for each in tables if each["bytes"] >= LARGE_BYTES]


def verdicts(figures: Figures) -> str:
    """Return which targets were met, of those that were measured."""
    lines = [f"{'target':<66}{'wanted':>8}{'figure':>9}"]
    lines += [
        f"{each.title:<66}{each.wanted:>8}{each.figure:>9.3g}  {'met' if each.met else 'missed'}"
        for each in judge(figures)
        if each.figure is not None
    ]
    return "\n".join(lines)


def spread(rates: Sequence[float]) -> str:
    """Return the lowest and the highest of sorted rates."""
    return f"{rates[0]:,.0f}–{rates[-1]:,.0f}"


def scaled(rows: Sequence[Sample], name: str, factor: float, digits: int = 1) -> str:
    """Return a figure's median in another unit, or nothing where it was not measured."""
    value = median(rows, name)
    return "" if value is None else f"{value * factor:.{digits}f}"
