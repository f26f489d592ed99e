"""`input`: what the graph was given, be it the run's input or what the node around a nested graph hands in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import Handle
from penstock.kernel.values import STANDARD_CONVERSIONS, DataValue
from penstock.nodes.parts.settings import Checked, Data, Settings
from penstock.nodes.parts.values import ValueType, typed
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class InputData(Data):
    """What type it has to be of, and what stands for it if nothing was given."""

    type: ValueType = "any"
    default: Any = None


class Input(Checked[InputData]):
    """Where a graph begins."""

    settings = Settings(InputData)
    is_pure = True
    inputs = ()
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        """The input of the graph; ConversionFailed if it is of another type."""
        read = self.settings.read(data)
        given = context.execution.input
        value = typed(read.default if given is None else given)
        return STANDARD_CONVERSIONS.convert(value, read.type, f"{context.node_id}.output")
