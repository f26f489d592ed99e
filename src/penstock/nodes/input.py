"""`input`: the input of the graph: the run's input, or the value that the enclosing node passes to a nested graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import STANDARD_CONVERSIONS, DataValue, Handle, typed
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Settings, ValueType


@dataclass(frozen=True, slots=True)
class InputData(Data):
    """The type of the input, and its default."""

    type: ValueType = "any"
    default: Any = None


class Input(Checked[InputData]):
    """The start of a graph: outputs its input."""

    settings = Settings(InputData)
    is_pure = True
    inputs = ()
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        """Return the input of the graph; ConversionFailed if it cannot be converted to the type."""
        read = self.settings.read(data)
        given = context.execution.input
        value = typed(read.default if given is None else given)
        return STANDARD_CONVERSIONS.convert(value, read.type, f"{context.node_id}.output")
