"""What is asked for in one turn of a chat, and whether it is what was asked for before under the same name.

Whoever names a run may ask for it again, and is given the same answer; if it was something else, that has to be
noticed. Of what is attached, messages have the names and the sizes: whether two are the same bytes, the service finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.messages import Role
from penstock.chat.conversation import MessageTree
from penstock.chat.message import ChatMessage
from penstock.chat.ports import Attachment
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import Conflict

Limits = RunLimits | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Spoken:
    """One message of what the caller says."""

    role: Role
    content: str
    attached: Sequence[Attachment] | None = ()
    """None for what was attached to the message that it is said in place of."""

    @property
    def data(self) -> dict[str, Any]:
        """What is kept with it: bytes are named, never copied."""
        return {"state": "complete", "attachments": [_reference(one) for one in self.attached or ()]}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for; the ids of its messages follow from that of its run."""

    run_id: str
    digest: str
    """Of the run's id."""
    at_ms: int
    limits: Limits
    user_tools: tuple[str, ...]
    is_named: bool
    """Whether the caller named the run, and may be asking for it again."""
    said: tuple[Spoken, ...] = ()
    """What the caller says, the newest last; nothing where an answer is wanted and nothing is said."""
    version: int | None = None
    """Of the graph; None is the newest."""
    about: Mapping[str, Any] | None = None
    """What else is to be kept with the run."""
    below: Callable[[MessageTree], str | None] | None = None
    """What the first of its messages follows; None where the caller has named no place."""

    @property
    def answer_id(self) -> str:
        return f"a-{self.digest}"

    def user_id(self, number: int = 0) -> str:
        return f"u-{self.digest}" if not number else f"u-{self.digest}-{number}"

    def found_in(self, tree: MessageTree) -> list[tuple[Spoken, ChatMessage]]:
        """What is said, each with the message that the tree has of it; Conflict if it has something else."""
        ids = [*map(self.user_id, range(1, max(len(self.said), 1))), self.user_id()]
        there = [tree[id] for id in ids if id in tree]
        is_same = [(one.role, one.content) for one in there] == [(one.role, one.content) for one in self.said]
        if not is_same or self.user_id(len(ids)) in tree or not self._is_in_place(tree, there):
            raise self.is_another()
        return [*zip(self.said, there, strict=True)]

    def _is_in_place(self, tree: MessageTree, there: Sequence[ChatMessage]) -> bool:
        first = there[0].id if there else self.answer_id
        return self.below is None or (first in tree and tree[first].parent_id == self.below(tree))

    def is_another(self) -> Conflict:
        """What is said to who asks for something else under the name of a run."""
        return answers_something_else(self.run_id)


def answers_something_else(run_id: str | None) -> Conflict:
    """What is said to who asks for something else under the name of a run."""
    return Conflict(f"run {run_id!r} answers something else; give this one an id of its own")


def said_for(answer_id: str) -> str:
    """The id of what is said in the turn of an answer, where something is."""
    return f"u-{answer_id.removeprefix('a-')}"


def without_ids(references: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is attached, but for the ids: the same bytes may be attached twice."""
    return [{key: value for key, value in one.items() if key != "id"} for one in references]


def _reference(attached: Attachment) -> dict[str, Any]:
    return {"id": attached.id, "name": attached.name, "media_type": attached.media_type, "size": attached.size}
