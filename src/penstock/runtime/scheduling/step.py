"""The context a step of a graph is given.

A graph hands one to every step it runs, so making one has to cost next to nothing: what calls need is copied, the
step's own input and upstream are set, and whatever else is asked for is looked up in the context the graph runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.runtime.context import ExecutionContext


class StepContext(ExecutionContext):
    """The context of a graph's run, with the input and the upstream results of one step."""

    __slots__ = ("_of",)

    _of: ExecutionContext

    @property
    def _origin(self) -> ExecutionContext:
        return self._of._origin

    def __getattr__(self, name: str) -> Any:
        # Only what was not copied comes here; `_of` itself is always set.
        return getattr(self._of, name)


blank = object.__new__


def step_context(place: ExecutionContext, input: Any, upstream: Mapping[str, Any]) -> StepContext:
    """A context at `place` for one step."""
    made = blank(StepContext)
    made._of = place
    made._run = place._run
    made._account = place._account
    made._token = place._token
    made._base = place._base
    made._source = place._source
    made.input = input
    made.upstream = upstream
    return made
