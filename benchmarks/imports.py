"""What does `import penstock` cost?

Each statement in a fresh interpreter of the environment that has it; the first run, which may write bytecode, is not
counted.
"""

from __future__ import annotations

import os
import subprocess

from benchmarks import _peers
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, Failed, least_and_median, play, versions

PROBE = """\
import sys, time
modules, started = len(sys.modules), time.process_time()
{statement}
print(time.process_time() - started, time.process_time(), len(sys.modules) - modules)
"""


def contestants() -> list[Contestant]:
    """The statements; a bare interpreter is one of them."""
    return [
        Contestant("nothing (a bare interpreter)", "pass"),
        Contestant("import penstock", "import penstock"),
        Contestant("import penstock; penstock.ExecutionContext", "import penstock; penstock.ExecutionContext"),
        Contestant(
            "from veronica_core.containment import ExecutionContext",
            "from veronica_core.containment import ExecutionContext",
            "veronica-core",
        ),
    ]


def ask(quick: bool) -> list[Table]:
    """CPU time of the statement, and of the whole process up to its end."""
    rounds = 5 if quick else 15
    everybody = contestants()
    play(everybody, 1, _run)
    for each in everybody:
        each.results.clear()
    play(everybody, rounds, _run)
    return [
        Table(
            question="What does `import penstock` cost?",
            measured=f"CPU ms in {rounds} fresh interpreters each, in shuffled rounds.",
            columns=("statement", "min ms", "median ms", "whole process, min ms", "modules loaded"),
            rows=[_row(each) for each in everybody],
            versions=versions(everybody),
            raw={each.label: each.results for each in everybody},
        )
    ]


def _run(contestant: Contestant) -> None:
    try:
        contestant.results.append(_probe(contestant.name, _peers.python_of(contestant.peer)))
    except _peers.NotInstalled:
        contestant.trouble = "not installed"
    except Failed as error:
        contestant.trouble = f"FAILED: {error}"


def _probe(statement: str, python: str) -> dict[str, list[float]]:
    command = [python, "-c", PROBE.format(statement=statement)]
    # The environment may have bytecode switched off; importing without it would be another measurement.
    bytecode = {"PYTHONPYCACHEPREFIX": str(_peers.ENVIRONMENTS / "bytecode")}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | bytecode
    where = _peers.ENVIRONMENTS.parent
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    own, whole, modules = map(float, done.stdout.split())
    return {"own_ms": [own * 1_000], "whole_ms": [whole * 1_000], "modules": [modules]}


def _row(contestant: Contestant) -> tuple[Cell, ...]:
    if contestant.trouble:
        return contestant.label, contestant.trouble, None, None, None
    lowest, median = least_and_median(contestant.figures("own_ms"))
    modules = f"{contestant.figures('modules')[0]:.0f}"
    return contestant.label, lowest, median, min(contestant.figures("whole_ms")), modules


if __name__ == "__main__":
    main(ask)
