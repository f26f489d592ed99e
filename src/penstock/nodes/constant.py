"""`constant`: a JSON value that is written in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import DataValue, Handle, typed
from penstock.runtime.graphs.settings import Checked, Data, Settings


@dataclass(frozen=True, slots=True)
class ConstantData(Data):
    """The value."""

    value: Any


class Constant(Checked[ConstantData]):
    """Outputs the same value every time."""

    settings = Settings(ConstantData)
    is_pure = True
    inputs = (Handle("input"),)
    """Triggers the node; its value is ignored."""
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> DataValue:
        """Return the value, with its type."""
        return typed(self.settings.read(data).value)
