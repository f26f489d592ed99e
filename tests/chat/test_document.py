"""A conversation as JSON: what is written is read again, and what is none is refused with all its problems."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat import ChatMessage, ConversationInvalid, MessageTree, conversation, conversation_to_json, document
from penstock.chat.document import parse_conversation


def message(id: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": id, "parent_id": parent, "role": "user", "content": "x", "at_ms": 1, **more}


def written(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "messages": list(messages), **more}


def problems(of: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConversationInvalid) as refused:
        parse_conversation(of)
    return [(problem.code, problem.path) for problem in refused.value.problems]


def test_what_is_written_is_read_again_with_what_was_in_view() -> None:
    tree = MessageTree()
    tree.append("q", "user", "how deep?", at_ms=1)
    tree.append("a", "assistant", "221 m", at_ms=2, data={"run_id": "r1"})
    tree.retry("a", "b", "221 metres", at_ms=3)
    tree.switch("a")
    text = json.dumps(conversation_to_json(tree))
    for form in (text, text.encode(), json.loads(text)):
        again = parse_conversation(form)
        assert list(again) == list(tree)
        assert again.active_path() == tree.active_path()
    assert conversation_to_json(tree)["chosen"] == ["a"]


def test_what_was_written_does_not_change_with_the_conversation() -> None:
    tree = MessageTree()
    tree.append("q", "user", "x", at_ms=1, data={"a": [1]})
    first = conversation_to_json(tree)
    first["messages"][0]["data"]["a"].append(2)
    tree.append("a", "assistant", "y", at_ms=2)
    assert len(first["messages"]) == 1
    assert tree["q"].data == {"a": [1]}


def test_a_reply_may_stand_before_what_it_replies_to() -> None:
    tree = parse_conversation(written(message("b", "a"), message("a")))
    assert [one.id for one in tree.active_path()] == ["a", "b"]


def test_without_a_choice_the_newest_is_in_view() -> None:
    tree = parse_conversation(written(message("a"), message("b"), message("c", "a")))
    assert [one.id for one in tree.active_path()] == ["b"]


WRONG: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "no object": ([], [("wrong_type", "$")]),
    "no JSON": ("{", [("bad_json", "$")]),
    "no text": (b"\xff", [("bad_json", "$")]),
    "no document": (3, [("wrong_type", "$")]),
    "no number": ('{"version": NaN}', [("bad_json", "$")]),
    "a key twice": ('{"version": 1, "version": 1}', [("bad_json", "$")]),
    "nested without end": ("[" * 100_000, [("too_deep", "$")]),
    "an unknown version": ({**written(), "version": 2}, [("bad_version", "$.version")]),
    "a version that is true": ({**written(), "version": True}, [("bad_version", "$.version")]),
    "nothing": ({}, [("bad_version", "$.version"), ("wrong_type", "$.messages")]),
    "an unknown field": (written(title="x"), [("unknown_field", "$")]),
    "choices that are no list": (written(chosen={}), [("wrong_type", "$.chosen")]),
    "choices that are no ids": (written(message("a"), chosen=[[]]), [("wrong_type", "$.chosen")]),
    "a message that is none": (written(message("a"), 3), [("wrong_type", "$.messages[1]")]),
    "an unknown field of a message": (written(message("a", colour="red")), [("unknown_field", "$.messages[0]")]),
    "missing fields": (
        written({"id": "a", "role": "user"}),
        [("missing_field", "$.messages[0].content"), ("missing_field", "$.messages[0].at_ms")],
    ),
    "unknown roles": (
        written(message("a", role="boss"), message("b"), message("c", role=["user"])),
        [("bad_role", "$.messages[0].role"), ("bad_role", "$.messages[2].role")],
    ),
    "a bad id": (written(message("")), [("bad_id", "$.messages[0].id")]),
    "a bad parent": (written(message("a", 3)), [("bad_parent_id", "$.messages[0].parent_id")]),  # type: ignore[arg-type]
    "bad content": (written(message("a", content=None)), [("bad_content", "$.messages[0].content")]),
    "half of a surrogate pair": (json.dumps(written(message("\ud800"))), [("bad_id", "$.messages[0].id")]),
    "a bad time": (written(message("a", at_ms="now")), [("bad_at_ms", "$.messages[0].at_ms")]),
    "bad data": (written(message("a", data=[])), [("bad_data", "$.messages[0].data")]),
    "an id twice": (written(message("a"), message("b"), message("a", "b")), [("duplicate_id", "$.messages[2].id")]),
    "orphans": (
        written(message("a"), message("b", "x"), message("c", "b"), message("d", "y")),
        [("unknown_parent", "$.messages[1].parent_id"), ("unknown_parent", "$.messages[3].parent_id")],
    ),
    "its own parent": (written(message("a", "a")), [("cycle", "$.messages[0].parent_id")]),
    "two circles, and what hangs on one": (
        written(
            message("r"),
            message("t", "b"),
            message("a", "b"),
            message("b", "c"),
            message("c", "a"),
            message("d", "e"),
            message("e", "d"),
        ),
        [("cycle", "$.messages[3].parent_id"), ("cycle", "$.messages[5].parent_id")],
    ),
    "an unknown choice": (written(message("a"), chosen=["x"]), [("unknown_message", "$.chosen[0]")]),
    "two in one place": (written(message("a"), message("b"), chosen=["a", "b"]), [("chosen_twice", "$.chosen[1]")]),
    "one twice": (written(message("a"), chosen=["a", "a"]), [("chosen_twice", "$.chosen[1]")]),
}


@pytest.mark.parametrize(("of", "expected"), WRONG.values(), ids=WRONG)
def test_what_is_no_conversation_is_refused_with_its_problems(of: Any, expected: list[tuple[str, str]]) -> None:
    assert problems(of) == expected


def test_a_circle_is_named() -> None:
    with pytest.raises(ConversationInvalid, match="'a' → 'b' → 'a'"):
        parse_conversation(written(message("a", "b"), message("b", "a")))


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_DEPTH", 2)
    chain = [message("a"), message("b", "a"), message("c", "b"), message("d", "c")]
    assert problems(written(*chain)) == [("too_deep", "$.messages[2]")]
    monkeypatch.setattr(document, "MAX_MESSAGES", 3)
    assert problems(written(*chain)) == [("too_large", "$.messages")]
    monkeypatch.setattr(conversation, "MAX_MESSAGES", 1)
    with pytest.raises(ConversationInvalid, match="2 messages are more than the 1"):
        MessageTree.of(ChatMessage(id, None, "user", "x", 1) for id in "ab")
    assert len(MessageTree.of((ChatMessage(id, None, "user", "x", 1) for id in "ab"), is_kept=True)) == 2
    monkeypatch.setattr(document, "MAX_DOCUMENT_CHARACTERS", 10)
    assert problems("[" * 11) == [("too_large", "$")]


def test_problems_are_listed_up_to_a_bound() -> None:
    with pytest.raises(ConversationInvalid, match="and 990 more") as refused:
        parse_conversation(written(*[3] * 2_000))
    assert len(refused.value.problems) == conversation.MAX_PROBLEMS


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.sampled_from(["a", "b", "user", "\ud800", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "id", "role"]), inner, max_size=3)
    ),
    max_leaves=5,
)
ids = st.sampled_from("abcd") | json_values
messages = st.fixed_dictionaries(
    {
        "id": ids,
        "role": st.sampled_from(["user", "assistant"]),
        "content": st.just("x") | json_values,
        "at_ms": st.just(1),
    },
    optional={"parent_id": ids, "data": json_values},
)


@given(
    st.fixed_dictionaries(
        {"version": st.just(1), "messages": st.lists(messages, max_size=5)}, optional={"chosen": st.lists(ids)}
    )
    | json_values
)
def test_whatever_comes_back_is_a_conversation_or_refused(of: Any) -> None:
    try:
        tree = parse_conversation(of)
    except ConversationInvalid:
        return
    assert parse_conversation(json.dumps(conversation_to_json(tree))).active_path() == tree.active_path()
    assert all(tree.path_to(one.id)[0].parent_id is None for one in tree)
