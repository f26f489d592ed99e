"""The interface of a model API: a request to JSON, a response from JSON, a stream from its events.

Plain data in and out: no sockets, no clients, no prices. Responses are read as dictionaries and not as the clients' own
classes, because servers omit fields, and because building an object for every event takes most of a stream's time.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from penstock.agents.messages import Media, ToolCall
from penstock.agents.model import ModelRequest, ModelResponse, ModelSettings
from penstock.agents.schema import read_json
from penstock.errors import InvalidValue

Fields = Mapping[str, Any]


class UnsupportedRequest(InvalidValue):
    """A request contains something that the API cannot express; nothing was sent."""

    penstock_free = True
    """The call is known to have cost nothing."""


class StreamReader(Protocol):
    """Reads one stream, event by event."""

    @property
    def is_ended(self) -> bool:
        """Whether no more events follow, so that the caller need not wait for the server to close the stream."""

    def feed(self, event: Fields) -> Iterable[str | ToolCall]:
        """Yield the text and the complete tool calls that `event` adds. Raises StreamError if it reports an error."""

    def whole(self) -> ModelResponse | None:
        """Return the complete response; None until its end marker has arrived."""


class Format(Protocol):
    """One API."""

    @property
    def applies(self) -> frozenset[str]:
        """Names of the fields of `ModelSettings` that the API has."""

    def body(self, model: str, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        """Return the JSON body of the request."""

    def read(self, answer: Fields) -> ModelResponse | None:
        """Read a response that was not streamed; None if its end marker is missing."""

    def reader(self) -> StreamReader:
        """Return a reader for one stream."""


COMMON = frozenset(
    {"max_output_tokens", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "output_schema", "extra"}
)
"""Names of the fields of `ModelSettings` that every API has."""


def given(settings: ModelSettings, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that are not None, under the API's own names."""
    values = {theirs: getattr(settings, ours) for ours, theirs in names.items()}
    return {name: value for name, value in values.items() if value is not None}


class StreamError(Exception):
    """The provider reported a failure in the middle of a response."""


def arguments_from(text: str) -> Mapping[str, Any] | str:
    """Parse the arguments of a tool call; return the text unchanged if it is not a JSON object."""
    if not text.strip():
        return {}
    value, _ = read_json(text)
    return value if isinstance(value, dict) else text


def data_url(media: Media) -> str:
    """Return the URL of a medium, or a data URL with its bytes if it has none."""
    return media.url if media.url is not None else f"data:{media.media_type};base64,{encoded(media)}"


def encoded(media: Media) -> str:
    """Return the bytes of a medium, encoded as base64."""
    return base64.b64encode(media.data or b"").decode("ascii")


def cannot_say(media: Media, api: str, known: str) -> UnsupportedRequest:
    """Return the error for a medium that the API does not accept."""
    given = f"{media.media_type} by {'address' if media.data is None else 'its bytes'}"
    return UnsupportedRequest("media", given, f"something that {api} takes: {known}")


def is_strict(schema: Any) -> bool:
    """Whether every object in a JSON Schema requires all its properties and allows no others (OpenAI's strict)."""
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
    """Return the objects in a list; empty if it is not a list, since servers send null for an empty one."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text_of(value: Any) -> str:
    """Return a string unchanged, and an empty string for anything else."""
    return value if isinstance(value, str) else ""


def error_in(event: Fields) -> StreamError | None:
    """Return the failure that an event reports, if any."""
    error = event.get("error")
    if not error:
        return None
    if isinstance(error, dict):
        return StreamError(": ".join(text for key in ("type", "message") if (text := text_of(error.get(key)))))
    return StreamError(str(error)[:500])
