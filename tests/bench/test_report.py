"""What the bench makes of its figures: verdicts, JSON and back, the page, the drawing."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import page, report
from bench.drawing import drawing
from bench.results import Results, merged
from bench.run import Sample
from bench.targets import TARGETS, judge

ABOUT = {
    "machine": {"processor": "one", "cores": 2, "memory_mb": 1, "python": "3"},
    "settings": {"fsync": "on"},
    "date": "2026-01-02T03:04:05",
    "commit": "abc",
}


def sample(rate: float, **more: float | None) -> Sample:
    return Sample(rate=rate, **more)  # type: ignore[arg-type]


@pytest.fixture
def results() -> Results:
    """A run that measured three workloads, and the path beside an old reader."""
    found = Results(dict(ABOUT))
    found.add(
        "push-100-one",
        "Push of 100",
        "messages/s",
        {
            "us": [Sample(rate=50, errors={"push 503": 2}), sample(70), sample(60)],
            "floor, 1 connection": [sample(60)],
            "floor, 2 connections": [sample(80)],
            "pgmq": [],
        },
    )
    found.add(
        "latency",
        "A tenth <of> the peak",
        "a second",
        {
            "us": [sample(1, p50=0.004, p99=0.03)],
            "HTTP exchange": [sample(1, p50=0.0005)],
            "one-row commit": [sample(1, p50=0.0015)],
        },
    )
    found.add("races", "Races", "messages/s", {"us, 1 broker": [sample(1, retried=0.02)]})
    table = {
        "name": "ready", "bytes": 10**6, "live": 1, "dead": 2, "updated": 4, "hot": 1, "vacuums": 3,
    }  # fmt: skip
    small = table | {"name": "queues", "bytes": 8192}
    found.endurance["reader"] = {
        who: {
            "rate": 500,
            "seconds": seconds,
            "samples": [{"rate": 500.0, "p50": 0.001, "p99": None}],
            "tables": [[table, small]],
        }
        for who, seconds in (("us", 20), ("pgmq", 10))
    }
    return found


def test_targets_are_ratios_of_what_ran_side_by_side(results: Results) -> None:
    judged = {each.title: each for each in judge(results.figures)}
    assert len(judged) == len(TARGETS)
    measured = {
        title: (each.figure, each.met) for title, each in judged.items() if each.figure is not None
    }
    assert measured == {
        "Push of 100, one partition each: rows/s of the floor's best": (0.75, True),
        "End to end at a tenth of the peak: p50 of exchange + commit": (2, True),
        "End to end at a tenth of the peak: p99 of exchange + commit": (15, False),
        "Steps retried, one broker": (0.02, False),
    }
    assert "missed" in report.verdicts(results.figures)


def test_a_run_survives_its_json_and_pieces_are_put_together(results: Results) -> None:
    assert merged([results.dump()]) == results
    more = Results(dict(ABOUT))
    more.add("kv", "KV", "calls/s", {"us": [sample(3)]})
    both = merged([results.dump(), more.dump()])
    assert list(both.titles) == ["push-100-one", "latency", "races", "kv"]
    assert both.figures["latency"] == results.figures["latency"]


def test_the_page_is_written_between_its_marks(results: Results, tmp_path: Path) -> None:
    (tmp_path / "benchmarks.md").write_text(f"before {page.BEGIN} old {page.END} after")
    (tmp_path / "run.json").write_text(results.dump())
    command = [str(tmp_path / "run.json"), "--docs", str(tmp_path)]
    done = CliRunner().invoke(page.main, command)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert "old" not in text
    assert "| us | 60 | 50–70 | 1.00 |" in text
    assert "| 0.75 | met |" in text
    assert "| pgmq, 500 for 10 s | 1 | 500 | 1.0 | 0.0 | 4 | 1.0 |" in text
    assert "| us: `ready` | 1.0 | 1 | 2 | 4 | 25% | 3 |" in text
    assert "| pgmq: `ready` | 1.0 | 1 | 2 | 4 | 25% | 3 |" in text
    assert "`queues`" not in text
    assert CliRunner().invoke(page.main, command).exit_code == 0
    assert (tmp_path / "benchmarks.md").read_text() == text


def test_the_drawing_is_svg_with_a_bar_for_everybody_who_ran(results: Results) -> None:
    root = ET.fromstring(drawing(results.titles, results.figures))
    kinds = [bar.get("class") for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds == ["us", "floor", "floor", "us", "floor", "floor", "us"]


def test_the_tables_say_who_failed(results: Results) -> None:
    text = report.table("Push of 100", "messages/s", results.figures["push-100-one"])
    assert "failed" in text
    assert "us, 500 for 20 s" in report.endured("reader", results.endurance["reader"])
