"""The context of one step of a graph.

Every step gets its own, so creating one has to be cheap: the attributes that calls need are copied, the step's input
and the source of its upstream results are set, and every other attribute is looked up in the context of the graph.
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
        # Called only for attributes that were not copied; `_of` itself is always set.
        return getattr(self._of, name)


blank = object.__new__


def step_context(place: ExecutionContext, input: Any, upstream: Mapping[str, Any]) -> StepContext:
    """Return a context at `place` for one step."""
    context = blank(StepContext)
    context._of = place
    context._run = place._run
    context._account = place._account
    context._token = place._token
    context._base = place._base
    context._source = place._source
    context.input = input
    context._upstream = None
    context._upstream_source = upstream
    return context
