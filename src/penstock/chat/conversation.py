"""A conversation as a tree of messages.

What was said is never changed or deleted. Whoever edits a message or asks for another answer adds a sibling beside it,
and the conversation goes on from there; the others stay, with everything said below them. Each message remembers which
of its replies is the one in view: following that from the beginning is the active path. What is added comes into view
at once; `switch` brings back what was said elsewhere, down to where one had left it.

Pure: ids and times are given, nothing is stored, nothing runs. One tree is one thread's at a time. The bounds hold for
what is added as for what is read back, but that a store may hand in more messages than are taken: what is kept is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.agents.messages import Role
from penstock.chat.message import ChatMessage
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.graph import Problem, shown

MAX_MESSAGES = 100_000
MAX_DEPTH = 10_100
"""So many messages may follow each other: a history of 10,000, instructions before it, its answer, and some turns."""
MAX_PROBLEMS = 1_000
SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message stands among its siblings: the `number`-th, from 1, of `count`, and who is beside it."""

    number: int
    count: int
    previous_id: str | None
    next_id: str | None

    def __str__(self) -> str:
        return f"‹{self.number}/{self.count}›"


class ConversationInvalid(PenstockError):
    """A conversation that cannot be read back; `problems` has what is wrong with it, up to MAX_PROBLEMS."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)[:MAX_PROBLEMS]
        lines = [f"[{problem.code}] {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            lines.append(f"and {len(self.problems) - SHOWN_PROBLEMS} more")
        super().__init__(f"the conversation has {len(self.problems)} problem(s):\n  " + "\n  ".join(lines))

    @classmethod
    def raise_any(cls, problems: Iterable[Problem]) -> None:
        """Raise if there is something wrong."""
        found = list(problems)
        if found:
            raise cls(found)


class MessageTree:
    """Everything that was said in a conversation, and which of it is in view. Only grows.

    A method that refuses changes nothing.
    """

    __slots__ = ("_chosen", "_depths", "_known_replies", "_leaf", "_messages")

    def __init__(self) -> None:
        self._messages: dict[str, ChatMessage] = {}
        """By id, in the order they were added."""
        self._known_replies: dict[str | None, list[str]] | None = None
        """What `_replies` gave, once somebody has asked: a turn adds to the end, and looks at no siblings."""
        self._depths: dict[str, int] = {}
        self._chosen: dict[str | None, str] = {}
        """The reply in view, for every message that has one."""
        self._leaf: str | None = None
        """The end of the active path."""

    @classmethod
    def of(cls, messages: Iterable[ChatMessage], chosen: Iterable[str] = (), *, is_kept: bool = False) -> MessageTree:
        """The tree of these messages, parents in any place, siblings in order; `chosen` as `chosen()` gave it.

        ConversationInvalid lists messages whose parent is not there, that follow themselves, or that are there twice.
        More than MAX_MESSAGES are refused, unless they are kept already: whoever has them must be able to read them.
        """
        listed, picked = list(messages), list(chosen)
        if not is_kept:
            _check_number(listed)
        tree = cls()
        tree._depths = _depths_of(listed)
        tree._messages = known = {message.id: message for message in listed}
        in_view = {known[one].parent_id: one for one in picked if one in known}
        if len(in_view) < len(picked):  # one is not there, or two are in one place
            raise ConversationInvalid(_misplaced(picked, known))
        tree._chosen = {message.parent_id: message.id for message in listed} | in_view  # else the last of siblings
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
        """One more message at the end of the active path, or below `parent_id`; it is in view."""
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
        """One more message where `message_id` stands, whoever said that: a sibling of it, and it is in view."""
        return self._add(id, self[message_id].parent_id, role, content, at_ms, data)

    def edit(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """What the user says instead of `message_id`: a sibling of it, with nothing below it yet."""
        return self._add(id, self._said_by("user", message_id).parent_id, "user", content, at_ms, data)

    def retry(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """Another answer in place of `message_id`: a sibling of it."""
        return self._add(id, self._said_by("assistant", message_id).parent_id, "assistant", content, at_ms, data)

    def continue_from(
        self, message_id: str, id: str, content: str, *, at_ms: int, data: Mapping[str, Any] | None = None
    ) -> ChatMessage:
        """More of the answer `message_id`: an assistant's message below it, which stays as it was."""
        return self._add(id, self._said_by("assistant", message_id).id, "assistant", content, at_ms, data)

    # Looking.

    def active_path(self) -> tuple[ChatMessage, ...]:
        """The messages in view, from the first to the last."""
        return () if self._leaf is None else self.path_to(self._leaf)

    def path_to(self, message_id: str) -> tuple[ChatMessage, ...]:
        """The message and all it follows, from the first on, in view or not."""
        message, known = self[message_id], self._messages
        path = [message]
        while (above := message.parent_id) is not None:
            message = known[above]
            path.append(message)
        return tuple(reversed(path))

    def before(self, message_id: str) -> tuple[ChatMessage, ...]:
        """What had been said when `message_id` was: what an answer in place of it is an answer to."""
        return self.path_to(message_id)[:-1]

    def replies(self, message_id: str | None) -> tuple[ChatMessage, ...]:
        """What follows a message, oldest first; of None, what begins the conversation."""
        key = None if message_id is None else self[message_id].id
        return tuple(self._messages[reply] for reply in self._replies().get(key, ()))

    def siblings(self, message_id: str) -> tuple[ChatMessage, ...]:
        """The message and those that stand in its place, oldest first."""
        return self.replies(self[message_id].parent_id)

    def place_of(self, message_id: str) -> Place:
        """Where the message stands among its siblings, as an interface shows it: ‹2/3›."""
        beside = self._replies()[self[message_id].parent_id]
        at = beside.index(message_id)
        previous = beside[at - 1] if at else None
        following = beside[at + 1] if at + 1 < len(beside) else None
        return Place(at + 1, len(beside), previous, following)

    def chosen(self) -> tuple[str, ...]:
        """The messages that are in view before newer siblings; with the messages, all there is to keep."""
        replies = self._replies()
        return tuple(reply for parent, reply in self._chosen.items() if reply != replies[parent][-1])

    @property
    def leaf(self) -> ChatMessage | None:
        """The last message in view."""
        return None if self._leaf is None else self._messages[self._leaf]

    @property
    def is_full(self) -> bool:
        """Whether it takes no more messages."""
        return len(self._messages) >= MAX_MESSAGES

    def __getitem__(self, message_id: str) -> ChatMessage:
        try:
            return self._messages[message_id]
        except (KeyError, TypeError):
            raise InvalidValue("message_id", message_id, "the id of a message of this conversation") from None

    def __contains__(self, message_id: object) -> bool:
        return isinstance(message_id, str) and message_id in self._messages

    def __iter__(self) -> Iterator[ChatMessage]:
        """Every message, in the order they were added."""
        return iter(self._messages.values())

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<MessageTree of {len(self)} messages, the last in view {self._leaf!r}>"

    # Moving.

    def switch(self, message_id: str) -> None:
        """Bring a message into view, and below it what was in view there last."""
        self._bring_into_view(self[message_id])
        self._leaf = self._end_below(message_id)

    # Inside.

    def _said_by(self, role: Role, message_id: str) -> ChatMessage:
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
        if parent == self._leaf:  # all above it is in view already: a turn costs the same however long it has become
            self._chosen[parent] = id
        else:
            self._bring_into_view(message)
        self._leaf = id
        return message

    def _replies(self) -> dict[str | None, list[str]]:
        """What follows each message, in the order it was added; under None, what begins the conversation."""
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
    """How deep each message stands; ConversationInvalid if they form no tree, or too deep a one."""
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
    """The same of messages that each come after what they follow, as a chat is kept; None if some do not."""
    depths: dict[str | None, int] = {None: 0}
    try:
        for message in messages:
            depths[message.id] = depths[message.parent_id] + 1
    except KeyError:
        return None
    if len(depths) <= len(messages) or max(depths.values()) > MAX_DEPTH:  # one is there twice, or too deep
        return None
    del depths[None]
    return cast(dict[str, int], depths)


def _walked(messages: Sequence[ChatMessage]) -> dict[str, int]:
    """The depth of every message that the beginning leads to."""
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
    """One problem per circle: nothing leads there from the beginning, so each message has a parent there too."""
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
