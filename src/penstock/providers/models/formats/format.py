"""What an API is to a model: a request as JSON, an answer from JSON, a stream from its events.

Plain data in and out: no sockets, no clients, no prices. Answers are read as dictionaries and not as the clients' own
classes, because servers leave fields out, and because making an object of every event takes most of a stream's time.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from penstock.agents.messages import Media, ToolCall
from penstock.agents.model import ModelRequest, ModelResponse
from penstock.agents.schema import read_json
from penstock.errors import InvalidValue
from penstock.runtime.billing.usage import Usage, read_usage

LONGEST_TOKEN = 128
"""No vocabulary has a token of more characters: a usage that would need one cannot be true."""

Fields = Mapping[str, Any]


class CannotAsk(InvalidValue):
    """A request says something that the API has no words for; nothing was sent."""

    penstock_free = True
    """The call is known to have cost nothing."""


class StreamReader(Protocol):
    """Reads one stream, event by event."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come, so that nobody waits for a server that leaves the stream open."""

    def feed(self, event: Fields) -> Iterable[str | ToolCall]:
        """The text and the complete tool calls that become known with `event`. Raises StreamError if it says so."""

    def whole(self) -> ModelResponse | None:
        """The answer; None as long as the mark of its end has not come."""


class Format(Protocol):
    """One API."""

    def body(self, model: str, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        """The request, as it is sent."""

    def read(self, answer: Fields) -> ModelResponse | None:
        """A plain answer; None if the mark of its end is missing."""

    def reader(self) -> StreamReader:
        """For one stream."""


class StreamError(Exception):
    """The provider said, in the middle of an answer, that it failed."""


def usage_in(answer: Fields, text: str, calls: Iterable[ToolCall]) -> Usage | None:
    """What the answer says it used; None if it says nothing, or what cannot be true of a request with this answer.

    None is not "nothing": the call is charged its worst case.
    """
    usage = read_usage(answer)
    if usage is None or usage.input_tokens == 0:
        return None
    said = len(text) + sum(len(call.name) + _length(call.arguments) for call in calls)
    return usage if usage.output_tokens * LONGEST_TOKEN >= said else None


def _length(arguments: Mapping[str, Any] | str) -> int:
    return len(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def arguments_from(text: str) -> Mapping[str, Any] | str:
    """The arguments of a tool call; the text as it came if it is not a JSON object."""
    if not text.strip():
        return {}
    value, _ = read_json(text)
    return value if isinstance(value, dict) else text


def data_url(media: Media) -> str:
    """The address of a medium; one that is here has itself as its address."""
    return media.url if media.url is not None else f"data:{media.media_type};base64,{encoded(media)}"


def encoded(media: Media) -> str:
    """What it is, as text."""
    return base64.b64encode(media.data or b"").decode("ascii")


def cannot_say(media: Media, api: str, known: str) -> CannotAsk:
    """The error for a medium that the API does not take."""
    given = f"{media.media_type} by {'address' if media.data is None else 'its bytes'}"
    return CannotAsk("media", given, f"something that {api} takes: {known}")


def is_strict(schema: Any) -> bool:
    """Whether every object in a JSON Schema requires all it has and allows nothing else, which OpenAI enforces."""
    if isinstance(schema, list | tuple):
        return all(map(is_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or properties is not None:
        if schema.get("additionalProperties") is not False:
            return False
        if set(properties or ()) != set(schema.get("required") or ()):
            return False
    if isinstance(properties, Mapping) and not all(map(is_strict, properties.values())):
        return False
    definitions = schema.get("$defs")
    if isinstance(definitions, Mapping) and not all(map(is_strict, definitions.values())):
        return False
    return all(is_strict(schema.get(part)) for part in ("items", "prefixItems", "anyOf"))


def objects(value: Any) -> list[Fields]:
    """The objects in a list; nothing of what is none, since servers send null for an empty list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def text_of(value: Any) -> str:
    """A text, or an empty one for anything else."""
    return value if isinstance(value, str) else ""


def error_in(event: Fields) -> StreamError | None:
    """The failure that an event tells of."""
    said = event.get("error")
    if not said:
        return None
    if isinstance(said, dict):
        return StreamError(": ".join(text for key in ("type", "message") if (text := text_of(said.get(key)))))
    return StreamError(str(said)[:500])
