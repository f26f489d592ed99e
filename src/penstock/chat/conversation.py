"""A conversation as a tree of messages: the messages, the tree, their limits, and the errors for missing objects.

A message is immutable, and validated on construction: bounded in size, and representable as JSON.

Messages are never changed or deleted. Editing a message or requesting another answer adds a sibling, and the
conversation continues from there; the other siblings stay, with all messages below them. Each message records which of
its replies is in view: following these from the beginning gives the active path. A new message is in view immediately;
`switch` returns to another branch, at the message that was last in view there.

Pure: the caller supplies ids and times, nothing is stored or run. A tree is not thread-safe. The limits apply to new
messages and to parsed trees, except that a tree from a store may exceed MAX_MESSAGES: stored chats stay readable.

The error for another owner's chat, message or attachment is the same as for one that does not exist.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

from penstock.agents.messages import ROLES, Role
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.graph import Problem, shown
from penstock.tracing.jsonable import LEAVES

MAX_CHARACTERS = 1_000_000
"""Maximum length of a message's content, and of its data as JSON."""
MAX_DATA_DEPTH = 64
MAX_ID = 200
MAX_FLAT = 16
MAX_FLAT_TEXT = 10_000
MAX_AT_MS = 2**53 - 1
"""The largest time that every JSON reader represents exactly."""
MAX_MESSAGES = 100_000
MAX_DEPTH = 10_100
"""Maximum length of a path: a history of 10,000 messages, instructions before it, its answer, and some turns."""
MAX_PROBLEMS = 1_000
SHOWN_PROBLEMS = 10
MAX_ATTACHMENTS = 20
"""Maximum number of attachments of a message."""
MAX_ATTACHMENT_BYTES = 20 * 1024 * 1024
MAX_NAME = 255
"""Maximum length of an attachment's name or media type, in characters."""
MAX_TITLE = 1_000
MAX_USER_TOOLS = 200


class ConversationInvalid(PenstockError):
    """A conversation cannot be parsed; `problems` lists the reasons, up to MAX_PROBLEMS."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)[:MAX_PROBLEMS]
        lines = [f"[{problem.code}] {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            lines.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more")
        super().__init__(f"the conversation has {len(self.problems)} problem(s):\n  " + "\n  ".join(lines))

    @classmethod
    def raise_any(cls, problems: Iterable[Problem]) -> None:
        """Raise if there are any problems."""
        found = list(problems)
        if found:
            raise cls(found)


class ChatLimitReached(InvalidValue):
    """A limit of the chat is exceeded: the size or number of `what` is `given`, the maximum is `most`."""

    def __init__(self, what: str, given: int, most: int, advice: str) -> None:
        super().__init__(what, given, f"at most {most:,}: {advice}")
        self.what = what
        self.given = given
        self.most = most


class ChatNotFound(PenstockError):
    """The caller has no chat with that id."""

    def __init__(self, chat_id: str) -> None:
        self.chat_id = chat_id
        super().__init__(f"there is no chat {chat_id!r}; list yours, or create one")


class MessageNotFound(PenstockError):
    """The chat has no message with that id."""

    def __init__(self, chat_id: str, message_id: str) -> None:
        self.chat_id = chat_id
        self.message_id = message_id
        super().__init__(f"there is no message {message_id!r} in chat {chat_id!r}; its tree has those there are")


class AttachmentNotFound(PenstockError):
    """The caller has no attachment with that id."""

    def __init__(self, attachment_id: str) -> None:
        self.attachment_id = attachment_id
        super().__init__(f"nothing is attached under {attachment_id!r}; attach it first, then name its id")


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


def must_fit(what: str, given: int, most: int, advice: str) -> None:
    """Raise ChatLimitReached if `given` exceeds `most`."""
    if given > most:
        raise ChatLimitReached(what, given, most, advice)


def must_be_text(field: str, text: object, most: int, advice: str) -> None:
    """Raise InvalidValue unless `text` is encodable text, ChatLimitReached with the advice if it is too long."""
    if not isinstance(text, str) or not can_be_written(text):
        raise InvalidValue(field, text, "text without unpaired surrogates")
    must_fit(field, len(text), most, advice)


def must_be_named(field: str, name: object) -> None:
    """Raise InvalidValue unless `name` can be the name of an owner or the id of an existing object."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID or "\0" in name or not can_be_written(name):
        raise InvalidValue(field, name, f"text of 1 to {MAX_ID} characters")


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


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a message among its siblings: the `number`-th, from 1, of `count`, and the ids of its neighbours."""

    number: int
    count: int
    previous_id: str | None
    next_id: str | None

    @classmethod
    def among(cls, siblings: Sequence[str], message_id: str) -> Place:
        """Return the position of a message in the ids of its siblings, oldest first."""
        at = siblings.index(message_id)
        previous = siblings[at - 1] if at else None
        following = siblings[at + 1] if at + 1 < len(siblings) else None
        return cls(at + 1, len(siblings), previous, following)

    def __str__(self) -> str:
        return f"‹{self.number}/{self.count}›"


class MessageTree:
    """All messages of a conversation, and which of them are in view. Append-only.

    A method that raises changes nothing.
    """

    __slots__ = ("_chosen", "_depths", "_known_replies", "_leaf", "_messages")

    def __init__(self) -> None:
        self._messages: dict[str, ChatMessage] = {}
        """By id, in the order they were added."""
        self._known_replies: dict[str | None, list[str]] | None = None
        """Cached result of `_replies`, built on first use: a turn appends at the end and reads no siblings."""
        self._depths: dict[str, int] = {}
        self._chosen: dict[str | None, str] = {}
        """The id of the reply in view, by parent id."""
        self._leaf: str | None = None
        """The end of the active path."""

    @classmethod
    def of(cls, messages: Iterable[ChatMessage], chosen: Iterable[str] = (), *, is_kept: bool = False) -> MessageTree:
        """Build the tree of these messages: parents in any order, siblings oldest first, `chosen` as from `chosen()`.

        ConversationInvalid lists messages with a missing parent, cycles, and duplicate ids. More than MAX_MESSAGES
        are refused, unless they are stored already (`is_kept`): a stored chat must stay readable.
        """
        listed, picked = list(messages), list(chosen)
        if not is_kept:
            _check_number(listed)
        tree = cls()
        tree._depths = _depths_of(listed)
        tree._messages = known = {message.id: message for message in listed}
        in_view = {known[one].parent_id: one for one in picked if one in known}
        if len(in_view) < len(picked):  # an unknown id, or two siblings
            raise ConversationInvalid(_misplaced(picked, known))
        tree._chosen = {message.parent_id: message.id for message in listed} | in_view  # default: the last sibling
        tree._leaf = tree._end_below(None)
        return tree

    # Adding.

    def append(
        self,
        id: str,
        role: Role,
        content: str,
        *,
        at_ms: int,
        data: Mapping[str, Any] | None = None,
        parent_id: str | None = None,
    ) -> ChatMessage:
        """Add a message at the end of the active path, or below `parent_id`, and bring it into view."""
        parent = self._leaf if parent_id is None else self[parent_id].id
        return self._add(id, parent, role, content, at_ms, data)

    def beside(
        self,
        message_id: str,
        id: str,
        role: Role,
        content: str,
        *,
        at_ms: int,
        data: Mapping[str, Any] | None = None,
    ) -> ChatMessage:
        """Add a sibling of `message_id`, which may have any role, and bring it into view."""
        return self._add(id, self[message_id].parent_id, role, content, at_ms, data)

    def edit(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """Add an edited version of the user message `message_id`: a sibling of it, with no replies yet."""
        return self._add(id, self._of_role("user", message_id).parent_id, "user", content, at_ms, data)

    def retry(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """Add another answer as a sibling of the answer `message_id`."""
        return self._add(id, self._of_role("assistant", message_id).parent_id, "assistant", content, at_ms, data)

    def continue_from(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """Add a continuation of the answer `message_id`: an assistant message below it; the answer is unchanged."""
        return self._add(id, self._of_role("assistant", message_id).id, "assistant", content, at_ms, data)

    # Reading.

    def active_path(self) -> tuple[ChatMessage, ...]:
        """Return the messages in view, from the first to the last."""
        return () if self._leaf is None else self.path_to(self._leaf)

    def path_to(self, message_id: str) -> tuple[ChatMessage, ...]:
        """Return the path from the first message to `message_id`, inclusive, in view or not."""
        message, known = self[message_id], self._messages
        path = [message]
        while (above := message.parent_id) is not None:
            message = known[above]
            path.append(message)
        return tuple(reversed(path))

    def before(self, message_id: str) -> tuple[ChatMessage, ...]:
        """Return the messages before `message_id` on its path: the history for an answer in its place."""
        return self.path_to(message_id)[:-1]

    def replies(self, message_id: str | None) -> tuple[ChatMessage, ...]:
        """Return the replies to a message, oldest first; for None, the first messages of the conversation."""
        key = None if message_id is None else self[message_id].id
        return tuple(self._messages[reply] for reply in self._replies().get(key, ()))

    def siblings(self, message_id: str) -> tuple[ChatMessage, ...]:
        """Return the message and its siblings, oldest first."""
        return self.replies(self[message_id].parent_id)

    def place_of(self, message_id: str) -> Place:
        """Return the position of the message among its siblings, as a user interface shows it: ‹2/3›."""
        return Place.among(self._replies()[self[message_id].parent_id], message_id)

    def chosen(self) -> tuple[str, ...]:
        """Return the ids in view that have newer siblings; these and the messages are the complete state to store."""
        replies = self._replies()
        return tuple(reply for parent, reply in self._chosen.items() if reply != replies[parent][-1])

    @property
    def leaf(self) -> ChatMessage | None:
        """The last message in view."""
        return None if self._leaf is None else self._messages[self._leaf]

    @property
    def is_full(self) -> bool:
        """Whether the tree has reached MAX_MESSAGES."""
        return len(self._messages) >= MAX_MESSAGES

    def __getitem__(self, message_id: str) -> ChatMessage:
        try:
            return self._messages[message_id]
        except (KeyError, TypeError):
            raise InvalidValue("message_id", message_id, "the id of a message of this conversation") from None

    def __contains__(self, message_id: object) -> bool:
        return isinstance(message_id, str) and message_id in self._messages

    def __iter__(self) -> Iterator[ChatMessage]:
        """Iterate over all messages, in the order they were added."""
        return iter(self._messages.values())

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<MessageTree of {len(self)} messages, the last in view {self._leaf!r}>"

    # Switching.

    def switch(self, message_id: str) -> None:
        """Bring a message into view, together with the replies that were last in view below it."""
        self._bring_into_view(self[message_id])
        self._leaf = self._end_below(message_id)

    # Internals.

    def _of_role(self, role: Role, message_id: str) -> ChatMessage:
        message = self[message_id]
        if message.role != role:
            raise InvalidValue("message_id", message_id, f"a message of role {role}; this one is of {message.role}")
        return message

    def _add(
        self, id: str, parent: str | None, role: Role, content: str, at_ms: int, data: Mapping[str, Any] | None
    ) -> ChatMessage:
        message = ChatMessage(id, parent, role, content, at_ms, {} if data is None else data)
        depth = 1 if parent is None else self._depths[parent] + 1
        if message.id in self._messages:
            raise InvalidValue("id", id, "an id that no message of this conversation has")
        if self.is_full or depth > MAX_DEPTH:
            raise InvalidValue("conversation", self, f"of {MAX_MESSAGES} messages, {MAX_DEPTH} in a row, at most")
        self._messages[id] = message
        if self._known_replies is not None:
            self._known_replies.setdefault(parent, []).append(id)
        self._depths[id] = depth
        if parent == self._leaf:  # its ancestors are in view already, so appending takes constant time
            self._chosen[parent] = id
        else:
            self._bring_into_view(message)
        self._leaf = id
        return message

    def _replies(self) -> dict[str | None, list[str]]:
        """Return the reply ids by parent id, in the order they were added; None has the first messages."""
        if self._known_replies is None:
            self._known_replies = _replies_in(self._messages.values())
        return self._known_replies

    def _bring_into_view(self, message: ChatMessage) -> None:
        for one in self.path_to(message.id):
            self._chosen[one.parent_id] = one.id

    def _end_below(self, message_id: str | None) -> str | None:
        while (reply := self._chosen.get(message_id)) is not None:
            message_id = reply
        return message_id


def _check_number(messages: Sequence[ChatMessage]) -> None:
    if len(messages) > MAX_MESSAGES:
        detail = f"{len(messages)} messages are more than the {MAX_MESSAGES} a conversation may have"
        raise ConversationInvalid([Problem("too_large", "$.messages", detail)])


def _depths_of(messages: Sequence[ChatMessage]) -> dict[str, int]:
    """Return the depth of each message; raise ConversationInvalid unless they form a tree within MAX_DEPTH."""
    in_order = _depths_in_order(messages)
    if in_order is not None:
        return in_order
    index = {message.id: at for at, message in reversed(list(enumerate(messages)))}
    ConversationInvalid.raise_any([*_twice(messages, index), *_orphans(messages, index)])
    depths = _walked(messages)
    ConversationInvalid.raise_any(_cycles(messages, index, depths))
    ConversationInvalid.raise_any(
        Problem("too_deep", f"$.messages[{index[id]}]", f"{MAX_DEPTH} messages in a row are the most")
        for id, depth in depths.items()
        if depth == MAX_DEPTH + 1
    )
    return depths


def _depths_in_order(messages: Sequence[ChatMessage]) -> dict[str, int] | None:
    """Return the depths if each message comes after its parent, as in a stored chat; None otherwise or if invalid."""
    depths: dict[str | None, int] = {None: 0}
    try:
        for message in messages:
            depths[message.id] = depths[message.parent_id] + 1
    except KeyError:
        return None
    if len(depths) <= len(messages) or max(depths.values()) > MAX_DEPTH:  # a duplicate id, or too deep
        return None
    del depths[None]
    return cast(dict[str, int], depths)


def _walked(messages: Sequence[ChatMessage]) -> dict[str, int]:
    """Return the depth of every message that is reachable from the first messages."""
    replies = _replies_in(messages)
    depths = dict.fromkeys(replies.get(None, ()), 1)
    todo = list(depths)
    for id in todo:
        below = replies.get(id, ())
        depths.update(dict.fromkeys(below, depths[id] + 1))
        todo.extend(below)
    return depths


def _replies_in(messages: Iterable[ChatMessage]) -> dict[str | None, list[str]]:
    replies: dict[str | None, list[str]] = {}
    for message in messages:
        replies.setdefault(message.parent_id, []).append(message.id)
    return replies


def _twice(messages: Sequence[ChatMessage], index: Mapping[str, int]) -> Iterator[Problem]:
    for at, message in enumerate(messages):
        if index[message.id] != at:
            detail = f"the id {shown(message.id)} is that of messages[{index[message.id]}]"
            yield Problem("duplicate_id", f"$.messages[{at}].id", detail)


def _orphans(messages: Sequence[ChatMessage], index: Mapping[str, int]) -> Iterator[Problem]:
    for at, message in enumerate(messages):
        if message.parent_id is not None and message.parent_id not in index:
            detail = f"there is no message {shown(message.parent_id)}"
            yield Problem("unknown_parent", f"$.messages[{at}].parent_id", detail)


def _cycles(messages: Sequence[ChatMessage], index: Mapping[str, int], reached: Collection[str]) -> Iterator[Problem]:
    """Yield one problem per cycle: unreached messages all have a parent, and it is unreached too."""
    seen = set(reached)
    for message in messages:
        walk: dict[str, None] = {}
        id = message.id
        while id not in seen:
            seen.add(id)
            walk[id] = None
            parent = messages[index[id]].parent_id
            assert parent is not None, "whatever begins the conversation was reached"
            id = parent
        if id in walk:
            circle = list(walk)[list(walk).index(id) :]
            names = " → ".join(shown(one) for one in [*circle[:8], *(["…"] if len(circle) > 8 else []), id])
            yield Problem("cycle", f"$.messages[{index[id]}].parent_id", f"the message follows itself: {names}")


def _misplaced(chosen: Sequence[str], messages: Mapping[str, ChatMessage]) -> Iterator[Problem]:
    taken: dict[str | None, str] = {}
    for at, id in enumerate(chosen):
        if id not in messages:
            yield Problem("unknown_message", f"$.chosen[{at}]", f"there is no message {shown(id)}")
        elif (parent := messages[id].parent_id) in taken:
            yield Problem("chosen_twice", f"$.chosen[{at}]", f"{shown(taken[parent])} is chosen in the same place")
        else:
            taken[parent] = id


YIELD_EVERY = 250
"""Number of items processed between yields: a few milliseconds of work."""


async def yield_every(number: int) -> None:
    """Yield to the event loop before every YIELD_EVERY-th item of a long list; `number` is the item's index.

    Long work on the event loop delays all other tasks. A short list is processed without yielding.
    """
    if number and not number % YIELD_EVERY:
        await asyncio.sleep(0)
