"""`conditional`: pass the input on to one of two outputs, by a condition on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle
from penstock.nodes.parts import condition
from penstock.nodes.parts.condition import Condition
from penstock.runtime.graphs.settings import Checked, Data, Finding, Settings, Text

NAMES = ("input",)
"""Names that a condition may use."""


@dataclass(frozen=True, slots=True)
class ConditionalData(Data):
    """The condition, in CEL, on `input`."""

    when: Text


class Conditional(Checked[ConditionalData]):
    """Passes its input on, to `true` or to `false`; nodes that depend on the other output are skipped."""

    settings = Settings(ConditionalData)
    is_pure = True
    inputs = (Handle("input", required=True),)
    outputs = (Handle("true"), Handle("false"))

    def look(self, data: ConditionalData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Check that the condition is valid."""
        if wrong := condition.findings(data.when, NAMES):
            yield ".when", wrong

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> ExecutionResult:
        """Return the input on the handle named by the condition's result."""
        given = inputs["input"]
        holds = Condition(self.settings.read(data).when, NAMES).holds({"input": given.value})
        return ExecutionResult({"true" if holds else "false": given})
