"""`output`: what a graph comes to, of the type that is promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import Handle
from penstock.kernel.values import STANDARD_CONVERSIONS, DataValue
from penstock.nodes.parts.settings import Checked, Data, Settings
from penstock.nodes.parts.values import ValueType
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class OutputData(Data):
    """What type it has to be of."""

    type: ValueType = "any"


class Output(Checked[OutputData]):
    """Where a graph ends; of several branches, the first that was taken."""

    settings = Settings(OutputData)
    is_pure = True
    inputs = (Handle("input", many="first", required=True),)
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        """What came; ConversionFailed if it is of another type."""
        wanted = self.settings.read(data).type
        return STANDARD_CONVERSIONS.convert(inputs["input"], wanted, f"{context.node_id}.output")
