"""A conversation is a tree: what edit, retry, continue and switch do to it, and that nothing is ever lost."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from penstock.agents.messages import ROLES, Role
from penstock.chat import ChatMessage, MessageTree, conversation, conversation_to_json, parse_conversation
from penstock.errors import InvalidValue
from tests.soak import scaled


def two_turns() -> MessageTree:
    """q1 → a1 → q2 → a2."""
    tree = MessageTree()
    for at, (id, role) in enumerate([("q1", "user"), ("a1", "assistant"), ("q2", "user"), ("a2", "assistant")]):
        tree.append(id, role, f"text of {id}", at_ms=at)
    return tree


def in_view(tree: MessageTree) -> list[str]:
    return [one.id for one in tree.active_path()]


def test_messages_follow_each_other_as_they_are_added() -> None:
    tree = two_turns()
    assert in_view(tree) == ["q1", "a1", "q2", "a2"]
    assert tree["q2"] == ChatMessage("q2", "a1", "user", "text of q2", 2)
    assert tree.leaf is tree["a2"]


def test_an_empty_conversation_has_nothing_in_view() -> None:
    tree = MessageTree()
    assert (tree.active_path(), tree.leaf, len(tree), tree.replies(None)) == ((), None, 0, ())


@pytest.mark.requirement("K-15")
def test_an_edit_is_a_sibling_and_the_first_message_stays() -> None:
    tree = two_turns()
    before = list(tree)
    tree.edit("q1", "q1b", "better words", at_ms=10)
    assert in_view(tree) == ["q1b"]
    assert [one.id for one in tree.siblings("q1")] == ["q1", "q1b"]
    assert list(tree)[:-1] == before
    assert [one.id for one in tree.path_to("a2")] == ["q1", "a1", "q2", "a2"]


@pytest.mark.requirement("K-15")
def test_a_retry_is_a_sibling_and_the_first_answer_stays() -> None:
    tree = two_turns()
    before = list(tree)
    tree.retry("a1", "a1b", "another answer", at_ms=10)
    assert in_view(tree) == ["q1", "a1b"]
    assert [one.id for one in tree.siblings("a1b")] == ["a1", "a1b"]
    assert list(tree)[:-1] == before
    assert [one.id for one in tree.before("a1b")] == ["q1"]


@pytest.mark.parametrize(
    ("beside", "seen"), [("q1", ["new"]), ("a1", ["q1", "new"]), ("a2", ["q1", "a1", "q2", "new"])]
)
def test_a_message_may_be_added_beside_any_other_whatever_its_role(beside: str, seen: list[str]) -> None:
    tree = two_turns()
    before = list(tree)
    tree.beside(beside, "new", "user", "instead", at_ms=10)
    assert in_view(tree) == seen
    assert [one.id for one in tree.siblings("new")] == [beside, "new"]
    assert list(tree)[:-1] == before
    with pytest.raises(InvalidValue, match="message_id"):
        tree.beside("unknown", "newer", "user", "instead", at_ms=11)


def test_a_continuation_stands_below_the_answer_it_continues() -> None:
    tree = two_turns()
    more = tree.continue_from("a2", "a3", "and more", at_ms=10)
    assert (more.parent_id, more.role) == ("a2", "assistant")
    assert in_view(tree) == ["q1", "a1", "q2", "a2", "a3"]
    tree.continue_from("a1", "a1+", "and more", at_ms=11)
    assert in_view(tree) == ["q1", "a1", "a1+"]
    assert str(tree.place_of("q2")) == "‹1/2›"


def test_switching_brings_back_a_branch_down_to_where_it_was_left() -> None:
    tree = two_turns()
    tree.retry("a2", "a2b", "another", at_ms=10)
    tree.switch("a2")
    tree.edit("q1", "q1b", "better words", at_ms=11)
    tree.switch("q1")
    assert in_view(tree) == ["q1", "a1", "q2", "a2"]
    tree.switch("a2b")
    assert in_view(tree) == ["q1", "a1", "q2", "a2b"]
    tree.switch("q1b")
    assert in_view(tree) == ["q1b"]


def test_switching_to_a_message_in_view_changes_nothing() -> None:
    tree = two_turns()
    tree.switch("q1")
    assert in_view(tree) == ["q1", "a1", "q2", "a2"]


def test_what_is_added_to_a_branch_out_of_view_brings_it_into_view() -> None:
    tree = two_turns()
    tree.edit("q1", "q1b", "better words", at_ms=10)
    tree.append("q3", "user", "go on", at_ms=11, parent_id="a2")
    assert in_view(tree) == ["q1", "a1", "q2", "a2", "q3"]
    tree.switch("q1b")
    tree.retry("a1", "a1b", "another", at_ms=12)
    assert in_view(tree) == ["q1", "a1b"]


def test_a_place_says_which_of_how_many_and_who_is_beside() -> None:
    tree = two_turns()
    tree.retry("a2", "a2b", "", at_ms=10)
    tree.retry("a2", "a2c", "", at_ms=11)
    assert str(tree.place_of("a2b")) == "‹2/3›"
    assert (tree.place_of("a2b").previous_id, tree.place_of("a2b").next_id) == ("a2", "a2c")
    assert (tree.place_of("a2").previous_id, tree.place_of("a2c").next_id) == (None, None)
    assert str(tree.place_of("q1")) == "‹1/1›"


REFUSED: dict[str, Callable[[MessageTree], Any]] = {
    "an id that is there": lambda tree: tree.append("q1", "user", "x", at_ms=1),
    "an edit of an answer": lambda tree: tree.edit("a1", "n", "x", at_ms=1),
    "a retry of a question": lambda tree: tree.retry("q1", "n", "x", at_ms=1),
    "more of a question": lambda tree: tree.continue_from("q1", "n", "x", at_ms=1),
    "an edit of nothing": lambda tree: tree.edit("nowhere", "n", "x", at_ms=1),
    "below nothing": lambda tree: tree.append("n", "user", "x", at_ms=1, parent_id="nowhere"),
    "a switch to nothing": lambda tree: tree.switch("nowhere"),
    "an id that is no text": lambda tree: tree.switch([]),  # type: ignore[arg-type]
    "no id": lambda tree: tree.append("", "user", "x", at_ms=1),
    "a long id": lambda tree: tree.append("n" * 201, "user", "x", at_ms=1),
    "an unknown role": lambda tree: tree.append("n", "boss", "x", at_ms=1),  # type: ignore[arg-type]
    "content that is no text": lambda tree: tree.append("n", "user", b"x", at_ms=1),  # type: ignore[arg-type]
    "half of a surrogate pair": lambda tree: tree.append("n", "user", "\ud800", at_ms=1),
    "too much": lambda tree: tree.append("n", "user", "x" * (conversation.MAX_CHARACTERS + 1), at_ms=1),
    "a time before 1970": lambda tree: tree.append("n", "user", "x", at_ms=-1),
    "a time that is true": lambda tree: tree.append("n", "user", "x", at_ms=True),
    "a time in pieces": lambda tree: tree.append("n", "user", "x", at_ms=1.5),  # type: ignore[arg-type]
    "data that is no object": lambda tree: tree.append("n", "user", "x", at_ms=1, data=[1]),  # type: ignore[arg-type]
    "data that is no JSON": lambda tree: tree.append("n", "user", "x", at_ms=1, data={"a": {1, 2}}),
    "data that is no number": lambda tree: tree.append("n", "user", "x", at_ms=1, data={"a": float("nan")}),
    "data with half a pair": lambda tree: tree.append("n", "user", "x", at_ms=1, data={"a": "\ud800"}),
    "data that contains itself": lambda tree: tree.append("n", "user", "x", at_ms=1, data=containing_itself()),
}


def containing_itself() -> dict[str, Any]:
    data: dict[str, Any] = {}
    data["again"] = data
    return data


def many_times_over() -> dict[str, Any]:
    value: Any = "x"
    for _ in range(60):
        value = [value, value]
    return {"value": value}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_changes_nothing(ask: Callable[[MessageTree], Any]) -> None:
    tree = two_turns()
    tree.retry("a2", "a2b", "", at_ms=10)
    tree.switch("a2")
    before = copy.deepcopy(conversation_to_json(tree))
    with pytest.raises(InvalidValue):
        ask(tree)
    assert conversation_to_json(tree) == before
    assert in_view(tree) == ["q1", "a1", "q2", "a2"]


@pytest.mark.parametrize("data", [many_times_over(), {"a": [{"k" * 100_000: 1}] * 100_000}], ids=["values", "keys"])
def test_data_that_is_small_only_to_hand_in_is_refused_before_it_is_written_out(
    data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_out(*_: Any, **__: Any) -> str:
        raise AssertionError("this would fill the memory")

    monkeypatch.setattr(conversation, "json", SimpleNamespace(dumps=written_out))
    with pytest.raises(InvalidValue, match="JSON all through"):
        MessageTree().append("n", "user", "x", at_ms=1, data=data)


def test_a_conversation_is_bounded_in_length_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_DEPTH", 4)
    monkeypatch.setattr(conversation, "MAX_MESSAGES", 6)
    tree = two_turns()
    with pytest.raises(InvalidValue, match="4 in a row"):
        tree.append("q3", "user", "x", at_ms=1)
    tree.retry("a2", "a2b", "", at_ms=1)
    tree.retry("a2", "a2c", "", at_ms=1)
    with pytest.raises(InvalidValue, match="of 6 messages"):
        tree.retry("a2", "a2d", "", at_ms=1)
    assert len(parse_conversation(conversation_to_json(tree))) == 6


def test_a_message_does_not_change_with_the_data_it_was_given() -> None:
    given = {"run": {"id": "r1"}}
    kept = MessageTree().append("q", "user", "x", at_ms=1, data=given)
    given["run"]["id"] = "r2"
    assert kept.data == {"run": {"id": "r1"}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        kept.content = "changed"  # type: ignore[misc]


def test_a_long_conversation_is_read_back_without_running_out_of_stack() -> None:
    tree = MessageTree()
    for at in range(5_000):
        tree.append(f"m{at}", "user", "", at_ms=at)
    again = parse_conversation(conversation_to_json(tree))
    assert again.active_path() == tree.active_path()
    again.switch("m0")
    assert len(again.active_path()) == 5_000


class Model:
    """The naive model: a list of messages, and the message of every switch or addition."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str | None, Role]] = []
        self.touched: list[str] = []

    def parent(self, id: str) -> str | None:
        return next(parent for one, parent, _ in self.messages if one == id)

    def role(self, id: str) -> Role:
        return next(role for one, _, role in self.messages if one == id)

    def add(self, id: str, parent: str | None, role: Role) -> None:
        self.messages.append((id, parent, role))
        self.touched.append(id)

    def replies(self, id: str | None) -> list[str]:
        return [one for one, parent, _ in self.messages if parent == id]

    def line(self, id: str | None) -> list[str]:
        return [] if id is None else [*self.line(self.parent(id)), id]

    def path(self) -> list[str]:
        """From the beginning, always on to the reply that was touched last, in itself or below."""
        path: list[str] = []
        while replies := self.replies(path[-1] if path else None):
            path.append(next(one for touched in reversed(self.touched) for one in self.line(touched) if one in replies))
        return path


class Conversing(RuleBasedStateMachine):
    """Everything one can do to a conversation, in any order, against the naive account; written and read at times."""

    messages = Bundle("messages")

    @initialize(target=messages, roles=st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=4))
    def begin(self, roles: list[Role]) -> Any:
        self.tree, self.model, self.kept = MessageTree(), Model(), list[ChatMessage]()
        return multiple(*[self.append(role) for role in roles])

    def added(self, message: ChatMessage, parent: str | None, role: Role) -> str:
        self.model.add(message.id, parent, role)
        self.kept.append(message)
        assert self.tree.leaf is message
        return message.id

    def new(self) -> dict[str, Any]:
        number = len(self.kept)
        return {"id": f"m{number}", "content": f"text {number}", "at_ms": number, "data": {"n": [number]}}

    def append(self, role: Role) -> str:
        path = self.model.path()
        return self.added(self.tree.append(role=role, **self.new()), path[-1] if path else None, role)

    @rule(target=messages, role=st.sampled_from(ROLES))
    def say(self, role: Role) -> str:
        return self.append(role)

    @rule(target=messages, parent=messages, role=st.sampled_from(ROLES))
    def say_below(self, parent: str, role: Role) -> str:
        return self.added(self.tree.append(role=role, parent_id=parent, **self.new()), parent, role)

    @rule(target=messages, id=messages)
    def edit(self, id: str) -> Any:
        return self.reply_to(id, "user", self.tree.edit, self.model.parent(id))

    @rule(target=messages, id=messages)
    def retry(self, id: str) -> Any:
        return self.reply_to(id, "assistant", self.tree.retry, self.model.parent(id))

    @rule(target=messages, id=messages)
    def go_on(self, id: str) -> Any:
        return self.reply_to(id, "assistant", self.tree.continue_from, id)

    def reply_to(self, id: str, role: Role, add: Callable[..., ChatMessage], parent: str | None) -> Any:
        if self.model.role(id) == role:
            return self.added(add(id, **self.new()), parent, role)
        with pytest.raises(InvalidValue):
            add(id, **self.new())
        return multiple()

    @rule(id=messages)
    def switch(self, id: str) -> None:
        self.tree.switch(id)
        self.model.touched.append(id)

    @rule()
    def write_and_read(self) -> None:
        written = conversation_to_json(self.tree)
        self.tree = parse_conversation(written)
        assert conversation_to_json(self.tree) == written

    @rule(data=st.data())
    def read_rows_in_any_order_of_families(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations(list(self.tree)))
        by_age = {parent: iter(self.model.replies(parent)) for parent in {one.parent_id for one in rows}}
        self.check(MessageTree.of([self.tree[next(by_age[one.parent_id])] for one in rows], self.tree.chosen()))

    @invariant()
    def it_is_as_expected(self) -> None:
        if hasattr(self, "tree"):
            self.check(self.tree)
            assert list(self.tree) == self.kept, "nothing is deleted, changed or moved"

    def check(self, tree: MessageTree) -> None:
        assert in_view(tree) == self.model.path()
        assert {(one.id, one.parent_id, one.role) for one in tree} == set(self.model.messages)
        for id, parent, _ in self.model.messages:
            beside = self.model.replies(parent)
            assert [one.id for one in tree.siblings(id)] == beside
            assert str(tree.place_of(id)) == f"‹{beside.index(id) + 1}/{len(beside)}›"
            assert [one.id for one in tree.path_to(id)] == self.model.line(id)


Conversing.TestCase.settings = settings(max_examples=scaled(30, soak=2_000))
TestConversing = pytest.mark.reliability(pytest.mark.requirement("K-15")(Conversing.TestCase))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"state": "complete", "run_id": "r-1", "cost_usd": 0.25, "attachments": []},
        {"none": None, "true": True, "number": -(2**53), "zero": -0.0, "text": ""},
        {"large": 2**80, "unicode": "ü🌊", "key ü": 1},
        {"nested": {"list": [1, {"a": ()}]}, "attachments": [{"id": "a"}]},
        {str(number): number for number in range(100)},
    ],
)
def test_the_data_of_a_message_is_a_copy_that_json_gives_back(data: dict[str, Any]) -> None:
    kept = ChatMessage("m", None, "user", "hello", 1, data).data
    before = json.loads(json.dumps(data))
    assert json.dumps(kept) == json.dumps(before)
    data["later"] = 1
    for value in data.values():
        if isinstance(value, list):
            value.append("later")
    assert kept == before


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"state": "complete", "run_id": "r-1", "cost_usd": 0.25, "none": None, "true": True},
        {"attachments": [], "object": {}, "text": ""},
        {"attachments": [{"id": "a"}], "nested": {"list": [1, {"a": []}]}},
    ],
)
def test_a_message_that_is_copied_is_the_same_and_shares_nothing_that_can_be_changed(data: dict[str, Any]) -> None:
    message = ChatMessage("m", "above", "user", "hello", 1, data)
    copied: Any = message.copied()
    assert type(copied) is ChatMessage
    assert copied == message
    assert list(copied.data) == list(data)
    with pytest.raises(dataclasses.FrozenInstanceError):
        copied.content = "something else"
    for value in [copied.data, *copied.data.values()]:
        if isinstance(value, list):
            value.append("later")
        elif isinstance(value, dict):
            value["later"] = 1
    assert message == ChatMessage("m", "above", "user", "hello", 1, data)


class Named(str):
    """Text of a kind of its own."""


def test_names_in_the_data_are_text_as_json_has_it() -> None:
    given: list[dict[Any, Any]] = [{Named("state"): "complete"}, {"state": Named("complete")}, {1: "number"}]
    kept = [ChatMessage("m", None, "user", "hello", 1, one).data for one in given]
    assert kept == [{"state": "complete"}, {"state": "complete"}, {"1": "number"}]
    assert {type(one) for data in kept for item in data.items() for one in item} == {str}
    with pytest.raises(InvalidValue, match="data"):
        ChatMessage("m", None, "user", "hello", 1, {"\ud800": 1})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "\ud800", b"", object(), "x" * 1_000_001])
def test_what_is_no_json_is_refused_wherever_in_the_data_it_stands(wrong: Any) -> None:
    for data in ({"a": wrong}, {"a": [wrong]}, {"a": 1, "b": {"c": wrong}}):
        with pytest.raises(InvalidValue, match="data"):
            ChatMessage("m", None, "user", "hello", 1, data)
