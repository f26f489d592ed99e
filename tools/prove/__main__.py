"""Run the probes on Penstock and its peers, and write the page docs/proof.html and the table of docs/comparison.md.

    python -m tools.prove [CONTESTANT[:PROBE] | :PROBE …]     # without a name: every cell
    python -m tools.prove --render                           # write the pages from the results that are there

Each contestant has an environment of its own below build/prove/, made on first use. A cell runs in a network namespace
that has nothing but a loopback interface, where the system allows one. Cells that are not named keep their results,
which are in tools/prove/results.json; the result of a program that has changed since is shown as an error.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tools.environments import ROOT, NotInstalled, environment, isolation, last_line, variables
from tools.prove.contestants import CONTESTANTS
from tools.prove.page import RESULTS, read_cells, write_pages
from tools.prove.probes import PROBES, Kind
from tools.prove.results import Cell, read_results, write_results
from tools.prove.sources import sources

BUILD = ROOT / "build" / "prove"
MAX_CELL_S = 240


def main(names: Sequence[str]) -> int:
    if list(names) != ["--render"]:
        try:
            wanted = list(chosen(names))
        except ValueError as error:
            print(error)
            return 2
        _run(wanted)
    write_pages(read_cells(read_results(RESULTS)))
    cells = read_cells(read_results(RESULTS))
    wrong = [cell for cell in cells.values() if cell.verdict.kind is Kind.ERROR]
    for cell in wrong:
        print(f"error: {cell.contestant}:{cell.probe}: {cell.verdict.text}")
    return int(bool(wrong))


def chosen(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the cells that are named, in the order of the table; ValueError for a name that nothing has."""
    wanted: set[tuple[str, str]] = set()
    for name in names or (":",):
        contestant, _, probe = name.partition(":")
        if contestant and contestant not in CONTESTANTS:
            raise ValueError(f"no contestant {contestant!r}: one of {', '.join(CONTESTANTS)}")
        if probe and probe not in PROBES:
            raise ValueError(f"no probe {probe!r}: one of {', '.join(PROBES)}")
        contestants, probes = [contestant] if contestant else CONTESTANTS, [probe] if probe else PROBES
        wanted |= {(one, other) for one in contestants for other in probes}
    return [(one, other) for one in CONTESTANTS for other in PROBES if (one, other) in wanted]


def _run(wanted: Sequence[tuple[str, str]]) -> None:
    prefix = isolation()
    for contestant, probe in wanted:
        found = sources(contestant)
        if probe in found.not_applicable:
            continue
        print(f"{contestant}:{probe} …", end=" ", flush=True)
        cell = run_cell(contestant, probe, prefix, found.fingerprint(probe))
        results = read_results(RESULTS)  # after the cell: another run may have added its own meanwhile
        results[contestant, probe] = cell
        write_results(RESULTS, results)
        verdict = read_cells(results)[contestant, probe].verdict
        print(f"{verdict.kind}: {verdict.text}", flush=True)


def run_cell(contestant: str, probe: str, prefix: Sequence[str], fingerprint: str, python: str = "") -> Cell:
    """Run one cell and return what was measured; what keeps it from running is its problem."""
    folder = BUILD / "cells" / contestant / probe
    shutil.rmtree(folder, ignore_errors=True)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    try:
        python = python or str(environment(BUILD / contestant, CONTESTANTS[contestant].packages))
    except NotInstalled as error:
        return Cell(fingerprint, date, {"problem": f"not installed: {error}"})
    command = [*prefix, sys.executable, "-m", "tools.prove.cell", contestant, probe, python, str(folder)]
    env = variables(folder / "home", OPENAI_BASE_URL="", UV_OFFLINE="1")
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=MAX_CELL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Cell(fingerprint, date, {"problem": f"the cell did not end within {MAX_CELL_S} s"})
    if ended.returncode != 0:
        return Cell(fingerprint, date, {"problem": f"the harness failed: {last_line(ended.stderr)}"})
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return Cell(fingerprint, date, facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
