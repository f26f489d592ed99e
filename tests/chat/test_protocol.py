"""What a run is given of a conversation, and what a conversation is given of a run."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chat.message import MAX_CHARACTERS, ChatMessage
from penstock.chat.protocol import (
    CUT,
    MAX_ERROR,
    answer_text,
    as_content,
    chat_services,
    history_of,
    newest_text,
    partial_text,
    written,
)
from penstock.errors import InvalidValue
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.kernel.document import parse_graph
from tests.nodes.graphs import graph, node


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("said", "said"),
        (None, ""),
        ({"output": "said"}, "said"),
        ({"output": None}, ""),
        ({"a.output": "one", "b.output": "two"}, "one\n\ntwo"),
        ({"metres": 221}, '{"metres": 221}'),
        ({"output": {"höhe": 221}}, '{"höhe": 221}'),
        ([1, "x"], '[1, "x"]'),
        ({}, "{}"),
        (0, "0"),
        (False, "false"),
        (float("nan"), "NaN"),
        ("half \ud800 a pair", "half ? a pair"),
    ],
)
def test_what_a_graph_came_to_is_an_answer(output: Any, text: str) -> None:
    assert answer_text(output) == text
    ChatMessage("a", None, "assistant", answer_text(output), 0)


def test_answer_that_is_too_long_is_truncated_and_marked() -> None:
    cut = as_content("x" * (MAX_CHARACTERS + 1))
    assert len(cut) == MAX_CHARACTERS
    assert cut.endswith(CUT)


def told(*events: tuple[str, str, str] | str) -> list[HostedEvent]:
    """Pieces as (node, source, text); a word alone is another event."""
    made: list[HostedEvent] = []
    for seq, one in enumerate(events, 1):
        if isinstance(one, str):
            made.append(HostedEvent(seq, 0, one))
        else:
            node_id, source, text = one
            made.append(HostedEvent(seq, 0, "text.delta", {"node_id": node_id, "source": source, "text": text}))
    return made


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], ""),
        (["run.started"], ""),
        (["run.started", ("A", "main/A", "Hel"), ("A", "main/A", "lo")], "Hello"),
        ([("A", "main/A", "first"), ("B", "main/B", "sec"), ("B", "main/B", "ond")], "second"),
        ([("A", "main/A", "Let me ask. "), ("A", "main/A/helper", "221"), ("A", "main/A", "It")], "Let me ask. It"),
        ([("T", "main/T/wide", "routed")], "routed"),
        (["run.started", ("A", "main/A", "Hel"), "run.resumed", ("A", "main/A", "Hello, ag")], "Hello, ag"),
        (["run.started", ("A", "main/A", "Hel"), "run.resumed"], "Hel"),
        ([("A", "main/A", "a"), ("B", "main/B", "b"), ("A", "main/A", "c")], "ac"),
        ([("A", "main/A", "said"), ("B", "main/B", "")], "said"),
    ],
)
def test_text_emitted_of_an_interrupted_answer(events: Any, text: str) -> None:
    assert partial_text(told(*events)) == text


def test_history_leaves_out_empty_messages_and_keeps_references() -> None:
    attached = [{"id": "x", "name": "n", "media_type": "image/png", "size": 1}]
    path = [
        ChatMessage("1", None, "user", "hi", 0),
        ChatMessage("2", "1", "assistant", "", 0, {"state": "failed"}),
        ChatMessage("3", "2", "user", "", 0, {"attachments": attached}),
        ChatMessage("4", "3", "assistant", "half", 0, {"state": "partial"}),
    ]
    history = history_of(path)
    assert history == [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "", "attachments": attached},
        {"role": "assistant", "content": "half"},
    ]
    assert newest_text(history) == ""
    assert newest_text(history[:1]) == "hi"
    assert newest_text([]) == ""


def test_a_chat_enters_at_chat_starts_else_at_inputs_else_nowhere() -> None:
    both = parse_graph(graph([node("s", "chat-start"), node("i", "input"), node("a", "agent", model="m")], ["s > a"]))
    assert chat_services(both)["execution"] == {"entry_node_ids": ["s"]}
    plain = parse_graph(graph([node("i", "input"), node("a", "agent", model="m")], ["i > a"]))
    services = chat_services(plain)
    assert services["execution"] == {"entry_node_ids": ["i"]}
    assert services["chat_scope"].is_entry_agent("a")
    with pytest.raises(InvalidValue, match="chat-start"):
        chat_services(parse_graph(graph([node("a", "agent", model="m")])))


def test_data_of_an_answer_has_the_outcome_of_its_run() -> None:
    run = RunRecord("r", "ann", "g", 1, status="halted", stop_reason="budget_exceeded", error="x" * 5_000)
    data = written(run)
    assert data["state"] == "halted"
    assert data["stop_reason"] == "budget_exceeded"
    assert len(data["error"]) == MAX_ERROR
    done = written(RunRecord("r", "ann", "g", 1, status="completed", cost_nanos=1_500_000, error="old"))
    assert done == {"state": "complete", "run_id": "r", "cost_usd": 0.0015, "attachments": []}
