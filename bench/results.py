"""What runs leave behind as JSON, for tables and the drawing to be made from."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .run import Sample


@dataclass
class Results:
    """The figures of a run, and what it ran on."""

    about: dict[str, Any]
    titles: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    figures: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    endurance: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def add(
        self, name: str, title: str, unit: str, samples: Mapping[str, Sequence[Sample]]
    ) -> None:
        """Take in a workload."""
        self.titles[name], self.units[name] = title, unit
        self.figures[name] = {who: list(rows) for who, rows in samples.items()}

    def dump(self) -> str:
        """Return everything as JSON."""
        workloads = {
            name: {
                "title": title,
                "unit": self.units[name],
                "samples": {
                    who: [asdict(row) for row in rows] for who, rows in self.figures[name].items()
                },
            }
            for name, title in self.titles.items()
        }
        document = {**self.about, "workloads": workloads, "endurance": self.endurance}
        return json.dumps(document, indent=1)


def merged(texts: Iterable[str]) -> Results:
    """Read what a run left, or several that measured different workloads; the last of one counts.

    The candidates of a workload have always run side by side.
    """
    results = Results({})
    for text in texts:
        document = json.loads(text)
        workloads = document.pop("workloads")
        results.endurance |= document.pop("endurance")
        results.about = document
        for name, each in workloads.items():
            samples = {
                who: [Sample(**row) for row in rows] for who, rows in each["samples"].items()
            }
            results.add(name, each["title"], each["unit"], samples)
    return results
