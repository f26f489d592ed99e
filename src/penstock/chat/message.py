"""One message of a conversation, as stored.

Immutable, and validated on construction: bounded in size, and representable as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from penstock.agents.messages import ROLES, Role
from penstock.errors import InvalidValue
from penstock.tracing.jsonable import LEAVES

MAX_CHARACTERS = 1_000_000
"""Maximum length of a message's content, and of its data as JSON."""
MAX_DATA_DEPTH = 64
MAX_ID = 200
MAX_FLAT = 16
MAX_FLAT_TEXT = 10_000
MAX_AT_MS = 2**53 - 1
"""The largest time that every JSON reader represents exactly."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message: its parent, role, content and time."""

    id: str
    parent_id: str | None
    """The message it follows; None for a first message of the conversation."""
    role: Role
    content: str
    at_ms: int
    """Milliseconds since 1970, supplied by the caller that adds the message."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON data stored with the message, such as its run id; a copy of the argument."""

    def __post_init__(self) -> None:
        _check_id("id", self.id)
        if self.parent_id is not None:
            _check_id("parent_id", self.parent_id)
        if self.role not in ROLES:
            raise InvalidValue("role", self.role, f"one of {', '.join(ROLES)}")
        if not _is_text(self.content, MAX_CHARACTERS):
            raise InvalidValue("content", self.content, f"text of at most {MAX_CHARACTERS} characters")
        if type(self.at_ms) is not int or not 0 <= self.at_ms <= MAX_AT_MS:
            raise InvalidValue("at_ms", self.at_ms, "a whole number of milliseconds since 1970")
        object.__setattr__(self, "data", _copied(self.data))

    def copied(self) -> ChatMessage:
        """Return the same message with its own copy of the data, without validating it again."""
        # Each turn reads the whole chat: setting the fields of an unfrozen object takes half as long.
        copy: Any = _Unfrozen()
        copy.id = self.id
        copy.parent_id = self.parent_id
        copy.role = self.role
        copy.content = self.content
        copy.at_ms = self.at_ms
        copy.data = data = dict(self.data)
        for key, one in data.items():
            if type(one) not in LEAVES:  # usually an empty list
                data[key] = json.loads(json.dumps(one)) if one else type(one)()
        copy.__class__ = ChatMessage
        made: ChatMessage = copy
        return made


class _Unfrozen:
    """A mutable object with the fields of a ChatMessage; assigning `__class__` makes it one."""

    __slots__ = ChatMessage.__slots__


def _check_id(name: str, id: object) -> None:
    if not _is_text(id, MAX_ID) or not id:
        raise InvalidValue(name, id, f"text of 1 to {MAX_ID} characters")


def _is_text(text: object, most: int) -> bool:
    """Whether it is encodable text of at most `most` characters."""
    return isinstance(text, str) and len(text) <= most and (text.isascii() or can_be_written(text))


def can_be_written(text: str) -> bool:
    """Whether every store accepts the text: half of a surrogate pair cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _copied(data: object) -> dict[str, Any]:
    if type(data) is dict and (flat := _flat(data)) is not None:
        return flat
    try:
        if isinstance(data, Mapping) and _is_small(data):
            text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=_as_plain)
            if _is_text(text, MAX_CHARACTERS):
                copy: dict[str, Any] = json.loads(text)
                return copy
    except (TypeError, ValueError):
        pass
    expected = f"an object, JSON all through, of at most {MAX_CHARACTERS} characters and {MAX_DATA_DEPTH} levels"
    raise InvalidValue("data", f"this {type(data).__name__}", expected)  # showing it may take as long as encoding it


def _flat(data: dict[Any, Any]) -> dict[str, Any] | None:
    """Return a copy of data that has only a few short plain values, as in nearly all messages; None for any other.

    Each turn reads the whole chat, and copying the data is most of the cost of a message.
    """
    if len(data) > MAX_FLAT:
        return None
    copy = data.copy()
    for key, value in copy.items():
        if type(key) is not str or not key.isascii() or len(key) > MAX_ID:
            return None
        kind = type(value)
        if kind is str:
            if len(value) > MAX_FLAT_TEXT or not value.isascii():
                return None
        elif kind is list and not value:
            copy[key] = []
        elif not _is_flat(value):
            return None
    return copy


def _is_flat(value: Any) -> bool:
    """Whether it is None, a boolean, or a number that every JSON reader represents exactly."""
    kind = type(value)
    if kind is float:
        return isfinite(value)
    if kind is int:
        return -MAX_AT_MS <= int(value) <= MAX_AT_MS
    return value is None or kind is bool


def _as_plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def _is_small(data: Mapping[str, Any]) -> bool:
    """Whether encoding stays within the limits: a value that contains itself, even many times, is not small."""
    left = MAX_CHARACTERS
    todo: list[tuple[int, object]] = [(1, data)]
    while todo:
        level, value = todo.pop()
        left -= len(value) if isinstance(value, str) else 1
        inside: Collection[object] = ()
        if isinstance(value, Mapping):
            inside = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            inside = value
        left -= len(inside)
        if left < 0 or level > MAX_DATA_DEPTH:
            return False
        todo.extend((level + 1, one) for one in inside)
    return True
