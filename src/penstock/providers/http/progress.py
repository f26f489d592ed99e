"""Read the events of a stream in each API: text, end, usage and errors.

The usage covers the whole answer, and is taken at its end only: intermediate reports are not the bill.

Knows the events of the APIs, and nothing of bytes, clients, prices or limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.providers.http.forms import Api
from penstock.runtime.billing.usage import Usage, read_usage


class Progress:
    """The state of one stream."""

    def __init__(self, answers: int = 1, on_text: Callable[[str], None] | None = None) -> None:
        self.is_complete = False
        """Whether the provider's end marker has arrived."""
        self.usage: Usage | None = None
        """Usage as it was reported at the end; it may be false."""
        self.fault: str | None = None
        """Error that the provider reported in the middle of the response."""
        self.unfinished = answers
        self._finished: set[int] = set()
        """Numbers of the answers that have finished."""
        self._on_text = on_text
        """Called with each non-empty piece of text as it arrives."""

    def see(self, event: dict[str, Any]) -> None:
        """Read the next event."""
        raise NotImplementedError

    def finish(self, index: object) -> None:
        """Count one answer as finished, once; one without a number is the first."""
        number = index if isinstance(index, int) else 0
        if number not in self._finished:
            self._finished.add(number)
            self.unfinished -= 1

    def emit(self, text: object) -> None:
        """Pass on a piece of the answer, if it is text."""
        if self._on_text is not None and isinstance(text, str) and text:
            self._on_text(text)


class Chunks(Progress):
    """Chat completions, and legacy completions: chunks with choices."""

    def see(self, event: dict[str, Any]) -> None:
        for choice in objects(event, "choices"):
            delta = choice.get("delta")
            self.emit(delta.get("content") if isinstance(delta, dict) else choice.get("text"))
            if choice.get("finish_reason"):
                self.finish(choice.get("index"))
        self.is_complete = self.unfinished <= 0
        if self.is_complete and isinstance(event.get("usage"), dict):
            self.usage = read_usage(event)


class ResponseEvents(Progress):
    """OpenAI's Responses."""

    def see(self, event: dict[str, Any]) -> None:
        kind, response = str(event.get("type")), event.get("response")
        if kind == "response.output_text.delta":
            self.emit(event.get("delta"))
        if kind in ("response.completed", "response.incomplete") and isinstance(response, dict):
            self.is_complete = True
            self.usage = read_usage(response)
        elif kind == "response.failed" and isinstance(response, dict):
            self.fault = str(response.get("error"))[:500]
            self.usage = read_usage(response)


class MessageEvents(Progress):
    """Anthropic's Messages, also as an invocation of Bedrock."""

    def __init__(self, answers: int = 1, on_text: Callable[[str], None] | None = None) -> None:
        super().__init__(answers, on_text)
        self._so_far: dict[str, Any] = {}
        """Usage reported so far: each report updates the one before."""
        self._model: str | None = None

    def see(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start" and isinstance(message := event.get("message"), dict):
            self._model = message.get("model")
            self._add_usage(message.get("usage"))
        elif kind == "content_block_delta" and isinstance(delta := event.get("delta"), dict):
            self.emit(delta.get("text"))
        elif kind == "message_delta":
            has_output = self._add_usage(event.get("usage"))
            delta = event.get("delta")
            if isinstance(delta, dict) and delta.get("stop_reason"):
                self.is_complete = True
                whole = {"usage": self._so_far, "model": self._model}
                self.usage = read_usage(whole) if has_output else None

    def _add_usage(self, usage: object) -> bool:
        """Merge a usage report; return whether it includes the output tokens."""
        if not isinstance(usage, dict):
            return False
        self._so_far |= {name: count for name, count in usage.items() if count is not None}
        return usage.get("output_tokens") is not None


class InvocationEvents(MessageEvents):
    """Events of a Bedrock invocation, in the vendor's own format; the last one has Bedrock's usage count."""

    def see(self, event: dict[str, Any]) -> None:
        super().see(event)
        for name in ("outputText", "generation", "completion"):
            self.emit(event.get(name))
        metrics = event.get("amazon-bedrock-invocationMetrics")
        if isinstance(metrics, dict):
            self.is_complete = True
            self.usage = self.usage or read_usage({"usage": metrics})


class ConverseEvents(Progress):
    """Bedrock's Converse: the usage comes after the end, with the metadata."""

    def see(self, event: dict[str, Any]) -> None:
        delta = field(event, "contentBlockDelta", "delta")
        self.emit(field(delta, "text"))
        if "messageStop" in event:
            self.is_complete = True
        if self.is_complete and isinstance(metadata := event.get("metadata"), dict):
            self.usage = read_usage(metadata)


class GeminiChunks(Progress):
    """Gemini: every chunk reports the usage up to it."""

    def see(self, event: dict[str, Any]) -> None:
        for candidate in objects(event, "candidates"):
            content = candidate.get("content")
            for part in objects(content, "parts"):
                self.emit(part.get("text"))
            if candidate.get("finishReason"):
                self.finish(candidate.get("index"))
        is_blocked = bool(field(event, "promptFeedback", "blockReason"))
        self.is_complete = self.is_complete or self.unfinished <= 0 or is_blocked
        if self.is_complete and isinstance(event.get("usageMetadata"), dict):
            self.usage = read_usage(event)


class OllamaLines(Progress):
    """Ollama's chat and generate."""

    def see(self, event: dict[str, Any]) -> None:
        self.emit(field(event, "message", "content") or event.get("response"))
        if event.get("done") is True:
            self.is_complete = True
            self.usage = read_usage({"usage": event, "model": event.get("model")})


class MediaEvents(Progress):
    """Streams of images, speech and transcripts: the last event of each has its usage."""

    def see(self, event: dict[str, Any]) -> None:
        kind = str(event.get("type"))
        if kind == "transcript.text.delta":
            self.emit(event.get("delta"))
        if kind.endswith((".done", ".completed")):  # of each picture, or of the whole
            self.unfinished -= 1
            self.is_complete = self.unfinished <= 0
            usage = read_usage(event)
            self.usage = usage if self.usage is None or usage is None else self.usage.plus(usage)


PROGRESS: Mapping[Api, type[Progress]] = MappingProxyType(
    {
        "chat": Chunks,
        "completions": Chunks,
        "responses": ResponseEvents,
        "messages": MessageEvents,
        "gemini": GeminiChunks,
        "converse": ConverseEvents,
        "invoke": InvocationEvents,
        "ollama": OllamaLines,
        "images": MediaEvents,
        "speech": MediaEvents,
        "transcriptions": MediaEvents,
    }
)
"""Stream reader of each API; APIs that are not listed have none."""


def objects(holder: object, name: str) -> list[dict[str, Any]]:
    """Return the objects in a list of that name."""
    held = holder.get(name) if isinstance(holder, dict) else None
    return [item for item in held if isinstance(item, dict)] if isinstance(held, list) else []


def field(holder: object, *names: str) -> Any:
    """Return a nested field; None if it is missing."""
    for name in names:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return holder
