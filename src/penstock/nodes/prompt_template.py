"""`prompt-template`: a text with placeholders for the inputs, each under the name of its handle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.kernel.executor import DataValue, ExecutorRegistry, Handle
from penstock.nodes.parts.template import Template, TemplateInvalid
from penstock.runtime.graphs.settings import Checked, Data, Finding, Json, Settings, Text


@dataclass(frozen=True, slots=True)
class PromptTemplateData(Data):
    """The template, and default values."""

    template: Text
    values: Json = field(default_factory=dict)
    """Used if no value arrived on the handle of that name."""
    missing: Literal["error", "empty"] = "error"
    """What happens to a placeholder without a value: fail, or leave it empty."""


class PromptTemplate(Checked[PromptTemplateData]):
    """Renders a template. It has an input handle for every name that the template uses."""

    settings = Settings(PromptTemplateData)
    is_pure = True
    inputs = None
    outputs = (Handle("output", "text"),)

    def look(self, data: PromptTemplateData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Check that the template is valid."""
        try:
            Template(data.template)
        except TemplateInvalid as invalid:
            yield ".template", str(invalid)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> DataValue:
        """Return the rendered text."""
        read = self.settings.read(data)
        values = {**read.values, **{name: value.value for name, value in inputs.items()}}
        missing = "" if read.missing == "empty" else None
        return DataValue("text", Template(read.template).render(values, missing=missing))
