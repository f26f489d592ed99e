"""`output`: the result of a graph, converted to its declared type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import STANDARD_CONVERSIONS, DataValue, Handle
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Settings, ValueType


@dataclass(frozen=True, slots=True)
class OutputData(Data):
    """The type of the output."""

    type: ValueType = "any"


class Output(Checked[OutputData]):
    """The end of a graph: its result; of several branches, the first that was taken."""

    settings = Settings(OutputData)
    is_pure = True
    inputs = (Handle("input", many="first", required=True),)
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        """Return the input; ConversionFailed if it cannot be converted to the type."""
        wanted = self.settings.read(data).type
        return STANDARD_CONVERSIONS.convert(inputs["input"], wanted, f"{context.node_id}.output")
