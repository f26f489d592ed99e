"""`merge`: join the values of several edges into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import PenstockError
from penstock.kernel.executor import STANDARD_CONVERSIONS, DataValue, Handle, type_of, typed
from penstock.kernel.graph import shown
from penstock.runtime.graphs.settings import Checked, Data, Settings, Text


class MergeFailed(PenstockError):
    """The values cannot be merged."""


@dataclass(frozen=True, slots=True)
class MergeData(Data):
    """How to merge: a list of all values, the first value, one text, or one object with all keys."""

    mode: Literal["list", "first", "text", "object"] = "list"
    separator: Text = "\n\n"
    """Separator between the texts."""


class Merge(Checked[MergeData]):
    """Waits for every branch that is taken, and joins their values in the order of the edges."""

    settings = Settings(MergeData)
    is_pure = True
    inputs = (Handle("input", many="list", required=True),)
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> DataValue:
        """Return the merged value."""
        read = self.settings.read(data)
        values: list[Any] = inputs["input"].value
        if read.mode == "first":
            return typed(values[0])
        if read.mode == "text":
            return DataValue("text", read.separator.join(_text(value) for value in values))
        if read.mode == "object":
            return DataValue("object", _object(values))
        return DataValue("list", values)


def _text(value: Any) -> str:
    text: str = STANDARD_CONVERSIONS.convert(DataValue(type_of(value), value), "text", "merge").value
    if not isinstance(text, str):
        raise MergeFailed(f"{shown(value)} cannot be converted to text")
    return text


def _object(values: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for value in values:
        if not isinstance(value, Mapping):
            raise MergeFailed(f"only objects can be merged by key, and {shown(value)} is not an object")
        for key, item in value.items():
            if key in merged and merged[key] != item:
                raise MergeFailed(f"two objects have the key {shown(key)}, with different values")
            merged[key] = item
    return merged
