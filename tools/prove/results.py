"""What was measured, cell by cell, as it is kept between two runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tools.prove.probes import Facts


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell that was run."""

    fingerprint: str
    """Of the program that ran."""
    date: str
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        fields = dict(self.measured)
        for name in ("requests", "hung_up", "reports"):
            fields[name] = tuple(fields.get(name, ()))
        return Facts(**fields)


Results: TypeAlias = dict[tuple[str, str], Cell]


def read_results(path: Path) -> Results:
    """Read all cells; none if there is no file."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {(one, other): Cell(**cell) for name, cell in found.items() for one, _, other in [name.partition(":")]}


def write_results(path: Path, results: Results) -> None:
    """Write all cells, sorted, a line each."""
    lines = [
        f"{json.dumps(f'{one}:{other}')}: {json.dumps(asdict(cell), ensure_ascii=False)}"
        for (one, other), cell in sorted(results.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
