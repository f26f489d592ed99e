"""The settings of node types: types of their values, and a base class of executors that check their data.

`runtime.graphs.settings` reads the data. Knows no node type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, Literal

from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.values import DataValue, PartialValue, type_of
from penstock.runtime.graphs.settings import EXACT as EXACT
from penstock.runtime.graphs.settings import BudgetData as BudgetData
from penstock.runtime.graphs.settings import D
from penstock.runtime.graphs.settings import Data as Data
from penstock.runtime.graphs.settings import DataInvalid as DataInvalid
from penstock.runtime.graphs.settings import Finding as Finding
from penstock.runtime.graphs.settings import Settings as Settings
from penstock.runtime.graphs.settings import Sized as Sized
from penstock.runtime.graphs.settings import Within as Within

ValueType = Literal["any", "text", "number", "boolean", "object", "list"]

MAX_TEXT = 100_000
MAX_NAME = 200

Name = Annotated[str, Sized(1, MAX_NAME)]
Text = Annotated[str, Sized(0, MAX_TEXT)]
Flag = Annotated[bool, EXACT]
Seconds = Annotated[float, Within(0.001, 86_400)]
Json = Annotated[dict[str, Any], EXACT]
"""A JSON object."""


class Checked(Generic[D]):
    """An executor whose data is read by `settings`, and checked before the graph runs."""

    settings: Settings[D]

    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[Finding]:
        """Return all problems of the data; `executors` are used to check nested graphs."""
        read, findings = self.settings._looked_at(data)
        return findings if read is None else list(self.look(read, executors))

    def look(self, data: D, executors: ExecutorRegistry) -> Iterable[Finding]:
        """Return the problems of data that has the right shape."""
        return ()

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the data."""
        return self.settings.schema()


def typed(value: Any, finish_reason: str | None = None) -> DataValue:
    """Return the value with its type; an incomplete one carries its finish reason."""
    if finish_reason is not None:
        return PartialValue(type_of(value), value, finish_reason)
    return DataValue(type_of(value), value)


def as_text(value: Any) -> str:
    """Return the value as text for a model: text unchanged, None as an empty string, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
