"""A request as it was received, and how its tokens are counted.

One counting rule, so that a test can predict the cost of a call: four characters are a token, rounded up. The input is
the compact JSON of everything in the body that a model would read.
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
    """One request as received, without redaction: headers keep their secrets, so that a test can look for them."""

    number: int
    """1, 2, …: the order of arrival, whatever the path."""
    connection: int
    """1, 2, …: requests with the same number came over the same socket."""
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case; repeated headers are joined with a comma."""
    at_ns: int
    """When it had been read completely, on the server's monotonic clock."""
    raw: bytes = field(default=b"", repr=False)
    body: Any = None
    """The JSON; None if there is none, or it cannot be parsed."""
    query: str = ""
    """The part of the path after the question mark."""
    terms: Mapping[str, Any] | None = None
    """The request as the provider reads it: model, stream, maximum and input under OpenAI's names, whatever its API."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body, if it is an object; otherwise empty."""
        return self.body if isinstance(self.body, dict) else MappingProxyType({})

    @property
    def model(self) -> str:
        """The requested model, or an empty string."""
        model = self._read.get("model")
        return model if isinstance(model, str) else ""

    @property
    def streams(self) -> bool:
        """Whether the request asks for a stream of events."""
        return self._read.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """The limit on the output of each answer, under any of its names; None if there is none."""
        caps = [self._read[name] for name in CAPS if self._read.get(name) is not None]
        return min(caps) if caps else None

    @property
    def input_tokens(self) -> int:
        """Number of input tokens, by the rule of `count_input_tokens`; of speech and sound, characters and bytes."""
        counted = self._read.get("input_tokens")
        return counted if isinstance(counted, int) else count_input_tokens(self._read)

    @property
    def answers(self) -> int:
        """Number of answers that are generated and billed."""
        return int(self._read.get("answers", 1))

    @property
    def shown_answers(self) -> int:
        """Number of answers in the response."""
        return int(self._read.get("shown_answers", self.answers))

    @property
    def asks_for_usage(self) -> bool:
        """Whether the request asks for usage in the stream, for APIs where that is optional."""
        options = self._read.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    @property
    def last_text(self) -> str:
        """The last message, as far as it is text."""
        given = self._read.get("messages") or self._read.get("input")
        last = given[-1] if isinstance(given, list) and given else given
        if not isinstance(last, dict):
            return _text(last)
        return _text(last.get("content", last.get("output", last.get("parts"))))

    @property
    def _read(self) -> Mapping[str, Any]:
        return self.fields if self.terms is None else self.terms


def count_tokens(text: str) -> int:
    """Count tokens: four characters are one, and so is any remainder."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def count_input_tokens(body: Mapping[str, Any]) -> int:
    """Count the tokens of the compact JSON of messages, system, input, instructions and tools, if present."""
    return count_tokens("".join(compact(body[name]) for name in INPUT_FIELDS if body.get(name) is not None))


def compact(value: Any) -> str:
    """Encode JSON without whitespace outside of strings."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return " ".join(text for text in texts if isinstance(text, str))
    return ""
