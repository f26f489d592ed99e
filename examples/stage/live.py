"""The run of `ceiling.py` while it goes on, in the picture that `penstock run` draws too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stage.script import FAST, QUESTION, TOPICS, price_without_ceiling_usd

from penstock import ExecutionContext
from penstock.cli.render import local
from penstock.cli.render.screen import Line, Screen

SCREEN = Screen(sys.stdout)


@contextmanager
def watched(run: ExecutionContext) -> Iterator[None]:
    """Show `run` until it ends: moving on a terminal, line by line anywhere else."""
    SCREEN.show(*opening(run), [])
    with local.watched(run, SCREEN, moves=not FAST):
        yield
    SCREEN.show([])


def opening(run: ExecutionContext) -> list[Line]:
    """What is about to happen."""
    work, ceiling = f"${price_without_ceiling_usd():.2f}", f"${run.balance.limits.cost_nanos / 1e9:.2f}"
    stakes = f"{work} of work, {len(TOPICS)} researchers at once, a ceiling of {ceiling}"
    return [[("Penstock  ", "bold"), (stakes, "")], [(f"“{QUESTION}”", "dim")]]
