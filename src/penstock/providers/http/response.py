"""Read the usage and the completeness of a response while it is passed on to the client.

A plain response is one JSON object, and a stream is a sequence of them. Other responses (sound, unknown APIs) are
passed on, and only their bytes are counted. The client receives the provider's response byte for byte, except the one
event that reports the usage of a stream whose client did not request it: many programs assume that every chunk has a
choice. A response longer than was paid for raises ExcessOutput.

Which usage is trusted. Only the usage reported at the end counts: intermediate reports are not the bill. A usage
without input, or with less output than arrived, is wrong, and then the usage is unknown. Smaller errors cannot be
detected here.

Knows the shapes of the APIs, and nothing of clients, prices or limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.providers.http.forms import Api
from penstock.providers.http.progress import PROGRESS
from penstock.providers.reading.framing import (
    ArraySplitter,
    EventSplitter,
    FrameSplitter,
    LineSplitter,
    Part,
    Splitter,
    parse_json,
)
from penstock.providers.reading.meter import MAX_KEPT_BYTES, JsonBody, Meter
from penstock.runtime.billing.usage import Usage, read_usage

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
READABLE = ("application/json", "text/event-stream")
_BEDROCK_INPUT = "x-amzn-bedrock-input-token-count"
_BEDROCK_OUTPUT = "x-amzn-bedrock-output-token-count"


class Answer:
    """A response while it is being received."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.is_complete = False
        """Whether the provider's end marker has arrived."""
        self.usage: Usage | None = None
        """Total usage of the response, if it reported a plausible one."""
        self.fault: str | None = None
        """Error that the provider reported in the middle of the response."""

    def take(self, data: bytes) -> bytes:
        """Inspect received bytes, decompressed; return the bytes to pass on to the client."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Finish the response; return the remaining bytes to pass on to the client."""
        raise NotImplementedError

    def _plausible(self, usage: Usage | None) -> Usage | None:
        return usage if usage is not None and self.meter.is_plausible(usage) else None


class Opaque(Answer):
    """A response that is no JSON, or of an unknown API."""

    def take(self, data: bytes) -> bytes:
        self.meter.count_bytes(len(data))
        return data

    def end(self) -> bytes:
        self.is_complete = True
        return b""


class Plain(Answer):
    """A response of one JSON object."""

    def __init__(self, meter: Meter, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(meter)
        self._body = JsonBody(meter)
        self._headers = headers

    def take(self, data: bytes) -> bytes:
        return self._body.take(data)

    def end(self) -> bytes:
        content = self._body.content()
        body = None if content is None else parse_json(content)
        if isinstance(body, dict):
            self.meter.check_whole(body)
            self.usage = self._plausible(_usage_of(body)) or self._plausible(_usage_in(self._headers))
        self.is_complete = content is None or isinstance(body, dict)
        return b""


class Events(Answer):
    """A stream of objects."""

    def __init__(
        self,
        meter: Meter,
        api: Api,
        answers: int = 1,
        withholds_usage: bool = False,
        on_text: Callable[[str], None] | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        super().__init__(meter)
        self._progress = PROGRESS[api](answers, on_text)
        self._withholds_usage = withholds_usage
        self._splitter = splitter or EventSplitter()
        self._kept = bytearray()

    def take(self, data: bytes) -> bytes:
        self.meter.count_bytes(len(data))
        self._kept += data
        if len(self._kept) > MAX_KEPT_BYTES:
            unread, self._kept = bytes(self._kept), bytearray()
            return unread
        # Only complete events are passed on: whether to withhold one is known only then.
        passed = b"".join(part for part, event in self._whole_events() if self._passes(event))
        self.meter.check_unfinished(self._kept)
        return passed

    def end(self) -> bytes:
        rest, self._kept = bytes(self._kept), bytearray()
        return rest if rest and self._passes(self._splitter.last(rest)) else b""

    def _whole_events(self) -> Iterator[Part]:
        for part in self._splitter.split(self._kept):
            self.meter.finish_object()
            yield part

    def _passes(self, event: object) -> bool:
        """Inspect one event; return whether to pass it on to the client."""
        if not isinstance(event, dict):
            return True
        if event.get("error") or event.get("type") == "error":
            self.fault = str(event.get("error") or event.get("message"))[:500]
        self.meter.add_event(event)
        progress = self._progress
        progress.see(event)
        self.is_complete, self.fault = progress.is_complete, self.fault or progress.fault
        self.usage = self._plausible(progress.usage)
        return not (self._withholds_usage and isinstance(event.get("usage"), dict) and not event.get("choices"))


def answer_of(
    meter: Meter,
    api: Api,
    content_type: str,
    headers: Mapping[str, str] = NO_HEADERS,
    *,
    streams: bool = False,
    answers: int = 1,
    withholds_usage: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Return the reader of a response with this content type."""
    if api == "unknown" or (api in ("speech", "transcriptions") and not content_type.startswith(READABLE)):
        return Opaque(meter)
    splitter = None if api == "embeddings" else _splitter(api, content_type, streams)
    if splitter is None:
        return Plain(meter, headers)
    return Events(meter, api, answers, withholds_usage, on_text, splitter)


def _splitter(api: Api, content_type: str, streams: bool) -> Splitter | None:
    """Return the splitter of a stream; None for a plain response."""
    if content_type.startswith("text/event-stream"):
        return EventSplitter()
    if content_type.startswith("application/vnd.amazon.eventstream"):
        return FrameSplitter()
    if "ndjson" in content_type or (api == "ollama" and streams):
        return LineSplitter()
    return ArraySplitter() if api == "gemini" and streams else None


def _usage_of(body: dict[str, Any]) -> Usage | None:
    """Return the usage of a plain response; Ollama and Bedrock's embeddings report it at the top level."""
    return read_usage(body) or read_usage({"usage": body, "model": body.get("model")})


def _usage_in(headers: Mapping[str, str]) -> Usage | None:
    """Return Bedrock's own token count of an invocation, which is in its headers for every vendor."""
    taken, given = headers.get(_BEDROCK_INPUT, ""), headers.get(_BEDROCK_OUTPUT, "0")
    if not all(count.isascii() and count.isdigit() and len(count) < 13 for count in (taken, given)):
        return None
    return Usage(int(taken), int(given))
