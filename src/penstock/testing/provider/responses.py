"""Answers in the shapes that real client libraries return: the JSON of `formats`, as data or with attribute access."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, TypeAlias

from penstock.testing.provider.formats import Format, chat, messages, responses
from penstock.testing.provider.generation import Generation

Shape: TypeAlias = Literal["openai", "anthropic", "responses", "dict-openai", "dict-anthropic"]

SHAPES: Mapping[str, tuple[Format, bool]] = MappingProxyType(
    {
        "openai": (chat.FORMAT, True),
        "responses": (responses.FORMAT, True),
        "anthropic": (messages.FORMAT, True),
        "dict-openai": (chat.FORMAT, False),
        "dict-anthropic": (messages.FORMAT, False),
    }
)
"""The API of each shape, and whether its answers are objects."""


def in_shape(shape: Shape, generation: Generation) -> Any:
    """Return `generation` as the client library of `shape` would return it."""
    format, is_object = SHAPES[shape]
    body = format.plain(generation)
    assert isinstance(body, dict), "the shapes are JSON"
    answer = {"usage": None, **body}  # objects of the libraries have a usage even if it is absent
    if shape == "responses":
        answer["output_text"] = generation.text  # the library computes it
    return _attributes(answer) if is_object else answer


def _attributes(data: Any) -> Any:
    if isinstance(data, dict):
        return SimpleNamespace(**{key: _attributes(value) for key, value in data.items()})
    if isinstance(data, list):
        return [_attributes(item) for item in data]
    return data
