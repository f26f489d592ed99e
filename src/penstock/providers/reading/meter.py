"""Count an answer while it arrives, and cut it off when it is longer than was paid for.

A provider may ignore the output limit of a request, and send for ever. Two counts bound how much of its answer is read:
the tokens of its text, estimated by `measure`, at most `MAX_RATIO` times the output that was paid for; and its bytes,
for everything else (framing, comments, whitespace, unknown fields). Everything is counted before it is stored: an
unfinished object is measured as far as it has arrived.

Knows nothing of HTTP libraries and of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.providers.reading.measure import (
    WEIGHT_PER_BYTE,
    WEIGHT_PER_TOKEN,
    added_by,
    can_repeat,
    tokens_of,
    weigh,
    whole_in,
)
from penstock.runtime.billing.usage import Usage

MAX_RATIO = 2
"""An answer is cut when it has more than this many times the tokens that were paid for.

The estimate of an honest answer may exceed its limit: see `measure`.
"""
ENVELOPE_BYTES = 65_536
"""Allowed for everything in an answer that does not depend on its length."""
ECHO_BYTES_PER_TOKEN = 8
"""Allowed for each token of the input: the Responses API repeats instructions and tools in an answer."""
PLAIN_BYTES_PER_TOKEN = 128
"""Allowed for each token of a plain answer: escaped text, and copies of it in other fields."""
STREAM_BYTES_PER_TOKEN = 2_048
"""Allowed for each token of a stream; most servers send an event of 200 to 700 bytes for each."""
LOGPROBS_BYTES_PER_TOKEN = 8_192
"""Allowed for each token of an answer with log probabilities, of up to 20 alternatives each."""
WIDE_BYTES = 64 * 1024 * 1024
"""Allowed for an answer with sound, pictures, or results of tools that the provider itself runs."""
TOKENS_PER_REPORTED = 4
"""A reported token stands for at most this many estimated ones; otherwise the report is false."""
REPORTED_SLACK = 8
"""Estimated tokens that any report may leave out: a long word may be a single token."""
_MIN_STEP_BYTES = 1_024
_STEPS = 16

_WIDE_FIELDS = frozenset(
    {"audio", "modalities", "web_search_options", "plugins", "include", "mcp_servers", "container"}
)
_OUR_TOOLS = (None, "function", "custom")
"""Types of tools that the client runs."""
_GOOGLES_TOOLS = frozenset(
    {
        *("googleSearch", "googleSearchRetrieval", "googleMaps", "urlContext", "codeExecution", "retrieval"),
        *("google_search", "google_search_retrieval", "google_maps", "url_context", "code_execution"),
    }
)
"""Fields of tools that Google runs."""
MAX_KEPT_BYTES = 16 * 1024 * 1024
"""A larger response or event is not parsed, and its usage is unknown."""


class ExcessOutput(PenstockError):
    """A provider sent more than was paid for; the answer was cut off, and at least the received part is charged."""

    def __init__(self, sent: str, paid_tokens: int, usage: Usage) -> None:
        self.paid_tokens = paid_tokens
        """Maximum output of the request."""
        self.usage = usage
        """Charged usage: the input, and the received or the paid output, whichever is more."""
        super().__init__(f"the provider sent {sent}, {paid_tokens:,} tokens were paid for; the answer was cut off")


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much of an answer is read."""

    input_tokens: int
    output_tokens: int
    """Output that was paid for, over all answers to the request."""
    max_bytes: int
    repeated_tokens: int = 0
    """Input that the answers may repeat."""
    has_text: bool = True
    """Whether the answer is text; of other answers only the bytes are counted."""

    @classmethod
    def of(
        cls,
        body: Mapping[str, Any],
        input_tokens: int,
        output_tokens: int,
        *,
        streams: bool | None = None,
        repeats: int = 0,
        is_wide: bool = False,
    ) -> Allowance:
        """Return the allowance for the answer to a request; `repeats` of its answers begin with the input."""
        streams = body.get("stream") is True if streams is None else streams
        per_token = STREAM_BYTES_PER_TOKEN if streams else PLAIN_BYTES_PER_TOKEN
        if body.get("logprobs") or body.get("top_logprobs"):
            per_token = LOGPROBS_BYTES_PER_TOKEN
        repeated = input_tokens * repeats
        max_bytes = ENVELOPE_BYTES + input_tokens * ECHO_BYTES_PER_TOKEN + (output_tokens + repeated) * per_token
        if is_wide or _is_wide(body):
            max_bytes = max(max_bytes, WIDE_BYTES)
        return cls(input_tokens, output_tokens, max_bytes, repeated)

    @classmethod
    def of_data(cls, input_tokens: int, max_bytes: int) -> Allowance:
        """Return the allowance for a non-text answer: vectors, pictures, sound."""
        return cls(input_tokens, 0, max_bytes, has_text=False)


def _is_wide(body: Mapping[str, Any]) -> bool:
    tools = body.get("tools")
    given = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if any(tool.get("type") not in _OUR_TOOLS or not _GOOGLES_TOOLS.isdisjoint(tool) for tool in given):
        return True
    config = body.get("generationConfig") or body.get("generation_config")
    has_modalities = isinstance(config, dict) and ("responseModalities" in config or "response_modalities" in config)
    return has_modalities or not _WIDE_FIELDS.isdisjoint(body)


class Meter:
    """Counts one answer; raises ExcessOutput when it is more than allowed."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        expected_tokens = allowance.output_tokens + allowance.repeated_tokens
        self._max_weight = expected_tokens * MAX_RATIO * WEIGHT_PER_TOKEN
        self._bytes = 0
        self._added = 0
        """Weight of the text that events have added."""
        self._whole = 0
        """Weight of the longest text in one object."""
        self._next_check = 0

    @property
    def tokens(self) -> int:
        """Estimated tokens of the text received so far, without the input that it may repeat."""
        return max(0, tokens_of(max(self._added, self._whole)) - self._allowance.repeated_tokens)

    @property
    def is_over(self) -> bool:
        """Whether more was received than was paid for."""
        return self.tokens > self._allowance.output_tokens

    def count_bytes(self, count: int) -> None:
        """Count received bytes, after decompression."""
        self._bytes += count
        if self._bytes > self._allowance.max_bytes:
            raise self._excess(f"more than {self._allowance.max_bytes:,} bytes")

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Count an event of a stream."""
        if not self._allowance.has_text:
            return
        for text in added_by(event):
            self._added += weigh(text)
        if can_repeat(event):
            self.check_whole(event)
        self._check_weight()

    def check_whole(self, body: Mapping[str, Any]) -> None:
        """Count a whole answer, or one that repeats the text of the events before it."""
        if not self._allowance.has_text:
            return
        self._whole = max(self._whole, sum(map(weigh, whole_in(body))))
        self._check_weight()

    def _check_weight(self) -> None:
        if self._added > self._max_weight or self._whole > self._max_weight:
            raise self._excess(f"{self.tokens:,} tokens")

    def check_unfinished(self, data: bytes | bytearray) -> None:
        """Count the text in the JSON object in `data`, of which only the beginning has arrived.

        It is parsed only when it may have grown over the limit since the last time.
        """
        if not self._allowance.has_text or len(data) < max(self._next_check, self._max_weight // WEIGHT_PER_BYTE):
            return
        body = _parsed_partially(data)
        weight = 0
        if isinstance(body, dict):
            weight = sum(map(weigh, added_by(body)))
            self.check_whole(body)
        if self._added + weight > self._max_weight:
            self._added += weight
            self._check_weight()
        room = (self._max_weight - max(self._added + weight, self._whole)) // WEIGHT_PER_BYTE
        self._next_check = len(data) + max(room, len(data) // _STEPS, _MIN_STEP_BYTES)

    def finish_object(self) -> None:
        """Note that the unfinished object is complete, and another may follow."""
        self._next_check = 0

    def is_plausible(self, usage: Usage) -> bool:
        """Whether a usage report may be true for the text that was received."""
        if usage.input_tokens == 0 or (usage.output_tokens == 0 and self.tokens > 0):
            return False
        return usage.output_tokens * TOKENS_PER_REPORTED + REPORTED_SLACK >= self.tokens

    def worst_case(self) -> Usage:
        """Return the usage of an answer that reports none: the paid output, or the received output if larger."""
        return Usage(self._allowance.input_tokens, max(self._allowance.output_tokens, self.tokens))

    def _excess(self, sent: str) -> ExcessOutput:
        return ExcessOutput(sent, self._allowance.output_tokens, self.worst_case())


class Counted:
    """A stream whose bytes are counted."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def take(self, data: bytes) -> bytes:
        self._meter.count_bytes(len(data))
        return data

    def end(self) -> bytes:
        return b""


class JsonBody:
    """A body of one JSON object, kept and counted while it arrives."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._kept: bytearray | None = bytearray()

    def take(self, data: bytes) -> bytes:
        self._meter.count_bytes(len(data))
        if self._kept is not None:
            self._kept += data
            if len(self._kept) > MAX_KEPT_BYTES:
                self._kept = None
            else:
                self._meter.check_unfinished(self._kept)
        return data

    def end(self) -> bytes:
        return b""

    def content(self) -> bytes | None:
        """Return the whole body; None if it is too large to be parsed."""
        return None if self._kept is None else bytes(self._kept)


def _parsed_partially(data: bytes | bytearray) -> Any:
    """Parse the beginning of a JSON object, with the beginning of its last text; None if it is no JSON."""
    from pydantic_core import from_json  # loaded for suspicious answers only

    begin = data.find(b"{")
    try:
        return from_json(bytes(data[begin:]), allow_partial="trailing-strings") if begin >= 0 else None
    except ValueError:
        return None
