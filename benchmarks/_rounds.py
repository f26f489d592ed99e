"""Contestants, one fresh process each, in shuffled rounds.

The machine drifts and has neighbours, so nothing is compared across runs: in every round every contestant is measured
once, in another order, and what counts is the minimum and the median over all rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import _peers
from benchmarks._worker import MARK

Measured = dict[str, Any]


class WrongResult(Exception):
    """A contestant did not do what it is timed for."""


class Failed(Exception):
    """A measurement ended with an error."""


class TookTooLong(Exception):
    """A measurement was ended because it passed its time limit."""


@dataclass(slots=True)
class Contestant:
    """What is measured: its name in tables and in code, and the peer whose environment it needs."""

    label: str
    name: str
    peer: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    results: list[Measured] = field(default_factory=list)
    trouble: str = ""
    """Why there is no number: not installed, too long, or failed."""

    def figures(self, name: str) -> list[float]:
        """What all results say under that name."""
        return [figure for result in self.results for figure in result[name]]


def expect(what: str, found: object, expected: object) -> None:
    """A wrong result fails the contestant; it is never timed in silence."""
    if found != expected:
        raise WrongResult(f"{what}: found {found!r}, expected {expected!r}")


def run_fresh(
    module: str, function: str, peer: str | None, arguments: Mapping[str, object], timeout_s: float = 300.0
) -> Measured:
    """What `module.function(**arguments)` says, run in a fresh process that has the peer."""
    command = [_peers.python_of(peer), "-m", "benchmarks._worker", module, function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, cwd=_peers.ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TookTooLong(f"more than {timeout_s:g} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise Failed(done.stderr[-2_000:] or f"exit status {done.returncode}, and not a word")
    measured: Measured = json.loads(lines[-1].removeprefix(MARK))
    return measured


def measure(
    contestant: Contestant, module: str, function: str, timeout_s: float = 300.0, /, **arguments: object
) -> Measured | None:
    """Add one measurement to the contestant; None, and the trouble is written down, if there is none."""
    try:
        result = run_fresh(module, function, contestant.peer, arguments, timeout_s)
    except _peers.NotInstalled:
        contestant.trouble = "not installed"
    except TookTooLong as error:
        contestant.trouble = str(error)
    except Failed as error:
        print(f"\n{contestant.label} FAILED\n{error}", file=sys.stderr, flush=True)
        contestant.trouble = "FAILED: " + str(error).strip().splitlines()[-1]
    else:
        contestant.results.append(result)
        return result
    return None


def play(contestants: Sequence[Contestant], rounds: int, once: Callable[[Contestant], object]) -> None:
    """Every contestant once per round, each round in another order; who is in trouble sits out."""
    order = list(contestants)
    shuffled = random.Random(1)
    for number in range(1, rounds + 1):
        shuffled.shuffle(order)
        for contestant in order:
            if not contestant.trouble:
                _show_progress(f"round {number}/{rounds}: {contestant.label}")
                once(contestant)
    _show_progress("")


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<80}\r", end="", file=sys.stderr, flush=True)


def least_and_median(figures: Sequence[float]) -> tuple[float, float]:
    """The two figures that are reported."""
    return min(figures), statistics.median(figures)


def versions(contestants: Iterable[Contestant]) -> dict[str, str]:
    """The peers that were measured; their environments hold exactly what is pinned."""
    measured = {each.peer for each in contestants if each.peer and each.results}
    return {peer: _peers.PEERS[peer].partition("==")[2] for peer in sorted(measured)}
