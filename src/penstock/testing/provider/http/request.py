"""What reached the wire, and how much of it there is.

One rule of counting, so that a test can say beforehand what a call will cost: four characters are a token, rounded up.
The input is the compact JSON of everything in the body that a model would read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

CHARACTERS_PER_TOKEN = 4
INPUT_FIELDS = ("messages", "system", "input", "instructions", "tools")
CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request as it came in, with nothing hidden: headers keep their secrets, so that a test can look for them."""

    number: int
    """1, 2, …: the order of arrival, whatever was asked for."""
    connection: int
    """1, 2, …: requests with the same number came over the same socket."""
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case; what was sent twice is joined with a comma."""
    at_ns: int
    """When it had been read whole, on the server's monotonic clock."""
    raw: bytes = field(default=b"", repr=False)
    body: Any = None
    """The JSON; None if there is none, or it cannot be read."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body, if it is an object; otherwise nothing."""
        return self.body if isinstance(self.body, dict) else MappingProxyType({})

    @property
    def model(self) -> str:
        """The model asked for, or an empty string."""
        model = self.fields.get("model")
        return model if isinstance(model, str) else ""

    @property
    def streams(self) -> bool:
        """Whether events are asked for."""
        return self.fields.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """The cap on the output, by whichever of its names; None if there is none."""
        caps = [self.fields[name] for name in CAPS if self.fields.get(name) is not None]
        return min(caps) if caps else None

    @property
    def input_tokens(self) -> int:
        """How many tokens the input has, by the rule of `count_input_tokens`."""
        return count_input_tokens(self.fields)

    @property
    def last_text(self) -> str:
        """What was said last, as far as it is text."""
        said = self.fields.get("messages") or self.fields.get("input")
        last = said[-1] if isinstance(said, list) and said else said
        return _text(last.get("content", last.get("output")) if isinstance(last, dict) else last)


def count_tokens(text: str) -> int:
    """Four characters are a token, and so is what is left over."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def count_input_tokens(body: Mapping[str, Any]) -> int:
    """The tokens of the compact JSON of messages, system, input, instructions and tools, as far as they are there."""
    return count_tokens("".join(compact(body[name]) for name in INPUT_FIELDS if body.get(name) is not None))


def compact(value: Any) -> str:
    """JSON without a space that is not in the data."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return " ".join(text for text in texts if isinstance(text, str))
    return ""
