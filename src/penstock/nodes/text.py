"""`text`: a text that is written in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import DataValue, Handle
from penstock.runtime.graphs.settings import Checked, Data, Settings, Text


@dataclass(frozen=True, slots=True)
class TextData(Data):
    """The text."""

    text: Text


class TextNode(Checked[TextData]):
    """Outputs a fixed text."""

    settings = Settings(TextData)
    is_pure = True
    inputs = (Handle("input"),)
    """Triggers the node; its value is ignored."""
    outputs = (Handle("output", "text"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> DataValue:
        """Return the text."""
        return DataValue("text", self.settings.read(data).text)
