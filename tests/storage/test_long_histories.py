"""A history is kept in as many steps as it has messages, in whatever order they are given."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from penstock.chat.conversation import ChatMessage
from penstock.hosting.ports import Conflict
from penstock.storage.rules import new_messages


class Looked(dict[str, ChatMessage]):
    """Messages that count lookups."""

    looks = 0

    def __contains__(self, id: object) -> bool:
        self.looks += 1
        return super().__contains__(id)


def chain(count: int) -> list[ChatMessage]:
    return [ChatMessage(f"m{at}", f"m{at - 1}" if at else "root", "user", "x", 0) for at in range(count)]


def shuffled(messages: list[ChatMessage]) -> list[ChatMessage]:
    return random.Random(7).sample(messages, len(messages))


ORDERS: list[Callable[[list[ChatMessage]], list[ChatMessage]]] = [list, lambda all: all[::-1], shuffled]


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "backwards", "shuffled"])
def test_the_ancestors_of_each_message_are_visited_once(
    order: Callable[[list[ChatMessage]], list[ChatMessage]],
) -> None:
    known = Looked(root=ChatMessage("root", None, "user", "x", 0))
    messages = order(chain(2_000))
    assert new_messages(known, messages) == messages
    assert known.looks <= 2 * 2_000


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "backwards", "shuffled"])
def test_a_message_without_a_parent_is_found_among_many(
    order: Callable[[list[ChatMessage]], list[ChatMessage]],
) -> None:
    lost = [ChatMessage("lost", "nowhere", "user", "x", 0), ChatMessage("below", "lost", "user", "x", 0)]
    circle = [ChatMessage("1", "2", "user", "x", 0), ChatMessage("2", "1", "user", "x", 0)]
    known = {"root": ChatMessage("root", None, "user", "x", 0)}
    for wrong, named in ((lost, "nowhere"), (circle, "follows itself")):
        with pytest.raises(Conflict, match=named):
            new_messages(known, order([*chain(100), *wrong]))
