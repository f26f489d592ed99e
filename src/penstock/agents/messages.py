"""The messages of agents and models.

Plain data. A message never changes once it is in a transcript, so that its weight is computed once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import InvalidValue

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")

MEDIA_WEIGHT = 4_000
"""Assumed weight of a picture or a sound, in bytes of text."""
MESSAGE_WEIGHT = 16
"""Weight of a message beside its text: its role and the markup around it."""

_SHORT = frozenset({bool, float, type(None)})
_encode = json.JSONEncoder(default=str).encode
"""Writes ASCII, which is never shorter than the same text in UTF-8."""


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, a sound or a file: by URL, or as bytes."""

    media_type: str
    url: str | None = None
    data: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.url is None) == (self.data is None):
            raise InvalidValue("url", self.url, "given, or data, but not both")


ContentPart = str | Media
"""A part of a message: text or media."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to call a tool."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """The arguments by name; text if the model's JSON could not be parsed."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as it is sent to the model."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    value: Any = None
    """The value that the tool returned; not sent to the model."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text of a streamed answer."""

    text: str
    source: str = ""
    """Path of the context that produced it: `main`, `main/researcher`."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A complete tool call of a streamed answer; calls beyond the maximum of one turn are not emitted."""

    call: ToolCall
    source: str = ""
    """Path of the context that produced it."""


Delta = TextDelta | ToolCallDelta


class Message:
    """One message of a conversation: its role, its content and its tool calls."""

    __slots__ = ("content", "name", "role", "tool_call_id", "tool_calls", "weight")

    def __init__(
        self,
        role: Role,
        content: str | Sequence[ContentPart] = "",
        tool_calls: Sequence[ToolCall] = (),
        tool_call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        if role not in ROLES:
            raise InvalidValue("role", role, f"one of {', '.join(ROLES)}")
        self.role: Role = role
        self.content: str | tuple[ContentPart, ...]
        if type(content) is str and content.isascii():
            self.content, weight = content, MESSAGE_WEIGHT + len(content)
        else:
            self.content = content if isinstance(content, str) else _parts(content)
            weight = MESSAGE_WEIGHT + _weight_of_content(self.content)
        self.tool_calls: tuple[ToolCall, ...] = tuple(tool_calls)
        self.tool_call_id = tool_call_id
        """Id of the call that this is the result of, for role tool."""
        self.name = name
        for call in self.tool_calls:
            weight += MESSAGE_WEIGHT + len(call.name) + _weight_of(call.arguments)
        self.weight = weight
        """Bytes of text, with `MEDIA_WEIGHT` for media; tokens are estimated from it."""

    @classmethod
    def system(cls, content: str) -> Message:
        """Instructions for the agent."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str | Sequence[ContentPart]) -> Message:
        """A message of the user."""
        return cls("user", content)

    @classmethod
    def assistant(cls, content: str = "", tool_calls: Sequence[ToolCall] = ()) -> Message:
        """An answer of a model."""
        return cls("assistant", content, tool_calls)

    @classmethod
    def tool(cls, result: ToolResult) -> Message:
        """The result of a tool call."""
        return cls("tool", result.content, (), result.call_id, result.name)

    @property
    def text(self) -> str:
        """The text alone."""
        return self.content if isinstance(self.content, str) else "".join(p for p in self.content if isinstance(p, str))

    def to_dict(self) -> dict[str, Any]:
        """The message as JSON data; media by type and URL."""
        message: dict[str, Any] = {"role": self.role, "content": _content(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def __repr__(self) -> str:
        calls = f", tool_calls={list(self.tool_calls)}" if self.tool_calls else ""
        return f"Message({self.role!r}, {self.content!r}{calls})"


class Transcript:
    """Messages in order, with their total weight. Only grows, so that a turn costs only what it adds."""

    __slots__ = ("_messages", "weight")

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages = list(messages)
        self.weight = sum([message.weight for message in self._messages])

    def append(self, message: Message) -> None:
        """Add a message."""
        self._messages.append(message)
        self.weight += message.weight

    def extend(self, messages: Iterable[Message]) -> None:
        """Add several messages."""
        for message in messages:
            self._messages.append(message)
            self.weight += message.weight

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, at: int) -> Message:
        return self._messages[at]

    def since(self, first: int) -> list[Message]:
        """The messages from index `first` on."""
        return self._messages[first:]

    def copy(self) -> Transcript:
        """An independent transcript of the same messages."""
        return Transcript(self._messages)

    def __repr__(self) -> str:
        # Different states of one conversation must differ: the detection of repeated calls compares this.
        last = f", the last {self._messages[-1]!r}" if self._messages else ""
        return f"<Transcript of {len(self._messages)} messages, {self.weight} bytes{last}>"


def _parts(content: Sequence[ContentPart]) -> tuple[ContentPart, ...]:
    parts = tuple(content)
    for part in parts:
        if not isinstance(part, str | Media):
            raise InvalidValue("content", part, "text, or a list of text and Media")
    return parts


def _weight_of_content(content: str | tuple[ContentPart, ...]) -> int:
    if isinstance(content, str):
        return bytes_of(content)
    return sum(bytes_of(part) if isinstance(part, str) else MEDIA_WEIGHT for part in content)


def _weight_of(arguments: Mapping[str, Any] | str) -> int:
    if isinstance(arguments, str):
        return bytes_of(arguments)
    weight = 0
    for name, value in arguments.items():
        # Most arguments are short texts and numbers; encoding them as JSON would take longer than everything else.
        if type(value) is str:
            weight += bytes_of(value) + len(name) + 8
        elif type(value) in _SHORT or (type(value) is int and value.bit_length() <= 64):
            weight += len(name) + 32
        else:
            return len(arguments_json(arguments))
    return weight


def bytes_of(text: str) -> int:
    """Length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def arguments_json(arguments: Mapping[str, Any] | str) -> str:
    """The arguments of a tool call as JSON; text unchanged."""
    if isinstance(arguments, str):
        return arguments
    return _encode(arguments if isinstance(arguments, dict) else dict(arguments))


def _content(content: str | tuple[ContentPart, ...]) -> Any:
    if isinstance(content, str):
        return content
    return [part if isinstance(part, str) else {"media_type": part.media_type, "url": part.url} for part in content]
