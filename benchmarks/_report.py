"""What was found, as tables to read and as JSON to keep."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """One answer: the question, how it was measured, and the rows; a cell that is a string is shown as it is."""

    question: str
    measured: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    versions: dict[str, str] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a contestant gave a wrong result or broke."""
        return any(isinstance(cell, str) and cell.startswith("FAILED") for row in self.rows for cell in row)


Ask = Callable[[bool], list[Table]]
"""A question: takes whether to be quick, returns tables."""


def main(*questions: Ask) -> None:
    """Ask the questions that the command line is about, print the answers, and exit 1 if a contestant failed."""
    parser = argparse.ArgumentParser(description="Penstock's benchmarks")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    tables: list[Table] = []
    for ask in questions:
        answers = ask(options.quick)
        for table in answers:
            print(rendered(table), end="\n\n", flush=True)
        tables += answers
    if options.json:
        options.json.write_text(json.dumps({**surroundings(), "tables": [asdict(each) for each in tables]}, indent=1))
    sys.exit(any(table.failed for table in tables))


def surroundings() -> dict[str, Any]:
    """Where and how the numbers were made."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = (module.name if module else "benchmarks").removesuffix(".__main__")
    return {
        "command": f"python -m {name}{' --quick' * ('--quick' in sys.argv)}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "penstock": importlib.metadata.version("penstock"),
    }


def rendered(table: Table) -> str:
    """The table as Markdown, with what a reader needs to make it again."""
    about = surroundings()
    versions = {"penstock": about["penstock"], **table.versions}
    lines = [
        f"## {table.question}",
        "",
        f"{table.measured}",
        "",
        *_grid(table.columns, [[_shown(cell) for cell in row] for row in table.rows]),
        "",
        f"{', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}; "
        f"Python {about['python']}, {about['system']}, {about['cpus']} CPUs; `{about['command']}`",
    ]
    return "\n".join(lines)


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return [line(columns), rule, *(line(row) for row in rows)]


def _shown(cell: Cell) -> str:
    """Three figures that count."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if cell >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if cell >= 10 else f"{cell:.2f}"
