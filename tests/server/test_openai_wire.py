"""The translation alone: hand-made events in, OpenAI's objects out, each read by the official types."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from penstock.errors import InvalidValue
from penstock.hosting.ports import HostedEvent
from penstock.server.openai.refusals import failure_of, refusal_of
from penstock.server.openai.wire.answer import (
    AnswerBuilder,
    Ended,
    Piece,
    QuestionsChanged,
    TextAdded,
    ToolCalled,
    Withdrawn,
    answering_nodes,
    fold,
)
from penstock.server.openai.wire.chunks import PLACE, Completion, run_facts
from penstock.server.openai.wire.request import (
    DATA_URL,
    ChatCompletionBody,
    ResponseBody,
    Turn,
    check_supported,
    completion_turns,
    response_turns,
    text_to_add,
)
from penstock.server.openai.wire.response import EchoedRequest, ResponseBuilder, response_id, run_id_of
from penstock.server.schemas import MEDIA_TYPE
from penstock.server.sse import encoded, framed
from penstock.stops import StopReason

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SPENT = {"cost_usd": 0.25, "tokens_in": 7, "tokens_out": 3}
AGENT = frozenset({"agent"})


def events(*fold_events: tuple[str, dict[str, Any]]) -> list[HostedEvent]:
    return [HostedEvent(seq, seq, type, data) for seq, (type, data) in enumerate(fold_events, 1)]


def says(text: str, node: str = "agent", source: str = "main") -> tuple[str, dict[str, Any]]:
    return "text.delta", {"node_id": node, "source": source, "text": text}


def uses(name: str, arguments: Any, source: str = "main") -> tuple[str, dict[str, Any]]:
    call = {"id": f"call_{name}", "name": name, "arguments": arguments}
    return "tool.call", {"node_id": "agent", "source": source, "call": call}


def completes(output: Any) -> tuple[str, dict[str, Any]]:
    return "run.completed", {"output": output, **SPENT}


HALTED = ("run.halted", {"stop_reason": "budget_exceeded", "message": "$1 of $1 spent", **SPENT})
FAILED = ("run.failed", {"error": "ValueError", "message": "no such page", **SPENT})
CANCELLED = ("run.cancelled", {"reason": "enough", "cause": "user", **SPENT})


def fold_events(*what: tuple[str, dict[str, Any]]) -> tuple[list[Piece], AnswerBuilder]:
    return fold(events(*what), AGENT)


def texts(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces if isinstance(piece, TextAdded)]


def followed(pieces: list[Piece]) -> list[str]:
    """The statements that are left to a client who heeds what is withdrawn."""
    items: list[str | None] = []
    for piece in pieces:
        if isinstance(piece, Withdrawn):
            del items[len(items) - piece.items :]
        elif isinstance(piece, ToolCalled):
            items.append(None)
        elif isinstance(piece, TextAdded):
            items.append(piece.text if piece.begins else f"{items.pop()}{piece.text}")
    return [item for item in items if item is not None]


def as_text(under_way: ResponseBuilder) -> list[str]:
    """The items of a response: what messages say, and which tools were used."""
    return [item["name"] if "name" in item else item["content"][0]["text"] for item in under_way.to_dict()["output"]]


# What of a run is the answer


def document(nodes: dict[str, str], *edges: tuple[str, str], links: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    flows = [{"source": a, "target": b, "data": {"channel": "flow"}} for a, b in edges]
    tied = [{"source": a, "target": b, "data": {"channel": "link"}} for a, b in links]
    return {"nodes": [{"id": id, "type": type} for id, type in nodes.items()], "edges": [*flows, *tied]}


@pytest.mark.parametrize(
    ("graph", "speak"),
    [
        (document({"a": "agent"}), {"a"}),
        (document({"a": "agent", "b": "agent"}, ("a", "b")), {"b"}),
        (document({"a": "agent", "o": "output"}, ("a", "o")), {"a", "o"}),
        (document({"a": "agent", "m": "merge", "o": "output"}, ("a", "m"), ("m", "o")), {"m", "o"}),
        (document({"a": "agent", "b": "agent", "o": "output"}, ("a", "o"), ("b", "o")), {"a", "b", "o"}),
        (document({"a": "agent", "t": "tool"}, links=(("t", "a"),)), {"a", "t"}),
        (document({"o": "output", "p": "output"}, ("o", "p"), ("p", "o")), set()),
        ({}, set()),
        ({"nodes": None, "edges": [3]}, set()),
    ],
    ids=["alone", "last of two", "before output", "behind merge", "either branch", "link", "circle", "empty", "bad"],
)
def test_the_nodes_whose_output_is_the_graphs_can_answer(graph: dict[str, Any], speak: set[str]) -> None:
    assert answering_nodes(graph) == speak


def test_only_the_answering_node_counts() -> None:
    pieces, answer = fold_events(says("draft", node="writer"), says("Hel"), says("lo"), completes("Hello"))
    assert texts(pieces) == ["Hel", "lo"]
    assert answer.text == "Hello"


def test_the_first_node_to_emit_output_is_the_answering_node() -> None:
    both = frozenset({"a", "b"})
    pieces, answer = fold(events(says("A", "a"), says("B", "b"), says("a", "a"), completes("Aa")), both)
    assert (texts(pieces), answer.text) == (["A", "a"], "Aa")


def test_agents_used_as_tools_do_not_count() -> None:
    pieces, _ = fold_events(
        uses("researcher", {"q": 1}),
        says("I looked", source="main/researcher"),
        uses("search", {}, source="main/researcher"),
        says("Found."),
        completes("Found."),
    )
    assert [type(piece) for piece in pieces] == [ToolCalled, TextAdded, Ended]
    assert texts(pieces) == ["Found."]


def test_a_graph_that_does_not_stream_answers_in_one_piece() -> None:
    assert texts(fold_events(completes("All at once"))[0]) == ["All at once"]


def test_output_that_was_not_streamed_is_emitted_at_the_end() -> None:
    assert texts(fold_events(says("All "), completes("All at once"))[0]) == ["All ", "at once"]


def test_a_restarted_answer_is_emitted_as_a_new_statement() -> None:
    pieces, answer = fold_events(says("I thi"), completes("Yes."))
    assert pieces[:-1] == [TextAdded("I thi", True), Withdrawn(1), TextAdded("Yes.", True)]
    assert answer.text == "Yes."
    assert as_text(response_of(pieces)[0]) == ["Yes."]


def test_text_that_ends_with_the_output_is_not_emitted_again() -> None:
    twice = fold_events(says("Hel"), says("Hello"), completes("Hello"))[0]
    assert texts(twice) == ["Hel", "Hello"]
    assert as_text(response_of(twice)[0]) == ["Hello"]  # the stream has emitted more, and the response is right
    assert texts(fold_events(says("Hello"), completes(None))[0]) == ["Hello"]


def test_statements_around_a_tool_call_are_separate() -> None:
    pieces, answer = fold_events(
        says("Let me see."), uses("look", {"at": "ü"}), says("It is 5."), completes("It is 5.")
    )
    assert pieces[1] == ToolCalled("call_look", "look", '{"at": "ü"}')
    assert answer.text == "Let me see.\n\nIt is 5."


@pytest.mark.parametrize(
    ("arguments", "text"), [("{not json", "{not json"), (None, "{}"), ({}, "{}"), ({"a": [1]}, '{"a": [1]}')]
)
def test_arguments_of_tools_are_text(arguments: Any, text: str) -> None:
    assert fold_events(uses("t", arguments))[0] == [ToolCalled("call_t", "t", text)]


def test_a_resumed_run_has_not_ended() -> None:
    pieces, answer = fold_events(says("So far"), HALTED, ("run.granted", {}), ("run.resumed", {"epoch": 2}))
    assert (texts(pieces), answer.ended) == (["So far"], None)
    pieces, answer = fold_events(says("So far"), HALTED, ("run.resumed", {"epoch": 2}), completes("So far, so good."))
    assert texts(pieces) == ["So far", ", so good."]
    assert isinstance(pieces[-1], Ended)
    assert pieces[-1].status == "completed"


# What a run that goes on elsewhere tells again

RESUMED = ("run.resumed", {"epoch": 2})
LOOK = uses("look", {"at": 1})
LOOKED = ToolCalled("call_look", "look", '{"at": 1}')


@pytest.mark.parametrize(
    ("first", "then", "heard"),
    [
        (
            [says("One, "), says("two")],
            [says("One, two, "), says("three."), completes("One, two, three.")],
            [", three."],
        ),
        ([says("One, two")], [says("One"), says(", two, three."), completes("One, two, three.")], [", three."]),
        ([says("All")], [says("A"), says("ll"), says("."), completes("All.")], ["."]),
        ([says("All.")], [says("All."), completes("All.")], []),
        ([says("All.")], [completes("All.")], []),
        ([], [says("All."), completes("All.")], ["All."]),
        ([says("See:"), LOOK, says("It")], [says("See:"), LOOK, says("It is 5."), completes("It is 5.")], [" is 5."]),
        ([says("See:"), LOOK], [says("See:"), LOOK, says("It is 5."), completes("It is 5.")], ["It is 5."]),
        ([LOOK], [LOOK, says("5"), completes("5")], ["5"]),
        ([says("See:")], [says("See:"), LOOK, says("5"), completes("5")], [LOOKED, "5"]),
        ([says("🙂 a")], [says(""), says("🙂"), says(" ab"), completes("🙂 ab")], ["b"]),
    ],
)
def test_repeated_output_is_not_emitted_twice(first: Any, then: Any, heard: list[Any]) -> None:
    before, _ = fold_events(*first)
    pieces, answer = fold_events(*first, RESUMED, *then)
    after = pieces[len(before) : -1]
    assert "".join(texts(after)) == "".join(one for one in heard if isinstance(one, str))
    assert [piece for piece in after if isinstance(piece, ToolCalled)] == [
        one for one in heard if isinstance(one, ToolCalled)
    ]
    assert not any(isinstance(piece, Withdrawn) for piece in after)
    assert answer.ended is not None
    assert as_text(response_of(pieces)[0])[-1] == answer.ended.text


@pytest.mark.parametrize(
    ("first", "then", "stands"),
    [
        ([says("One, two")], [says("One, "), says("2"), completes("One, 2")], ["One, 2"]),
        ([says("One, two")], [says("Uno"), completes("Uno")], ["Uno"]),
        ([says("One, two, three")], [says("One, two"), completes("One, two")], ["One, two"]),
        ([says("One")], [completes("Two")], ["Two"]),
        ([says("See:"), LOOK, says("It")], [says("See:"), LOOK, says("5."), completes("5.")], ["See:", "look", "5."]),
        ([says("See:"), LOOK, says("It")], [says("See: 5"), completes("See: 5")], ["See: 5"]),
        ([says("See:"), LOOK, says("It")], [says("See:"), completes("See:")], ["See:"]),
        ([says("See:"), LOOK, says("It")], [says("See:"), uses("ask", {}), completes("5")], ["See:", "ask", "5"]),
        ([says("See:")], [says("Se"), LOOK, completes("5")], ["Se", "look", "5"]),
        ([LOOK, says("It")], [says("5"), completes("5")], ["5"]),
        ([LOOK, uses("ask", {})], [LOOK, says("5"), completes("5")], ["look", "5"]),
    ],
)
def test_different_output_replaces_the_earlier_output(first: Any, then: Any, stands: list[str]) -> None:
    pieces, answer = fold_events(*first, RESUMED, *then)
    under_way, stream = response_of(pieces)
    assert as_text(under_way) == stands
    assert stream[-1]["response"]["output"] == under_way.to_dict()["output"]
    assert answer.text == "\n\n".join(one for one in stands if one not in ("look", "ask"))
    Response.model_validate(under_way.to_dict())


def test_an_answer_interrupted_repeatedly_is_emitted_once() -> None:
    first = [
        says("1, 2, "),
        RESUMED,
        says("1, "),
        RESUMED,
        says("1, 2, 3, "),
        ("run.parked", {}),
        RESUMED,
        says("1, 2"),
    ]
    pieces, answer = fold_events(*first)
    assert (texts(pieces), answer.text, answer.ended) == (["1, 2, ", "3, "], "1, 2, 3, ", None)
    assert texts(fold_events(*first, says(", 3, 4"), completes("1, 2, 3, 4"))[0]) == ["1, 2, ", "3, ", "4"]
    assert fold_events(*first, HALTED)[1].text == "1, 2, 3, "


def attempt(script: list[str | ToolCalled], size: int) -> list[tuple[str, dict[str, Any]]]:
    """The events of a script, its texts in pieces of so many characters."""
    fold_events: list[tuple[str, dict[str, Any]]] = []
    for item in script:
        if isinstance(item, ToolCalled):
            fold_events.append(LOOK)
        else:
            fold_events += [says(item[at : at + size]) for at in range(0, len(item), size)]
    return fold_events


@given(
    st.lists(st.sampled_from(["hello ", "abcabc", "a", LOOKED]), max_size=5),
    st.lists(st.tuples(st.integers(0, 25), st.integers(1, 6)), max_size=3),
)
def test_an_answer_interrupted_anywhere_is_emitted_once(
    begun: list[str | ToolCalled], left_after: list[tuple[int, int]]
) -> None:
    """It says the same each time, in pieces of other lengths."""
    script = [*begun, LOOKED, "That is all."]
    before = [event for number, size in left_after for event in (*attempt(script, size)[:number], RESUMED)]
    pieces, _ = fold_events(*before, *attempt(script, 3), completes("That is all."))
    assert not any(isinstance(piece, Withdrawn) for piece in pieces)
    assert "".join(texts(pieces)) == "".join(item for item in script if isinstance(item, str))
    assert pieces.count(LOOKED) == script.count(LOOKED)


def test_a_stream_reports_withdrawn_output() -> None:
    pieces, _ = fold_events(says("I thi"), RESUMED, says("Yes."), completes("Yes."))
    chunks = streamed(pieces)
    assert [chunk["penstock"]["withdrawn"] for chunk in chunks if "withdrawn" in chunk.get("penstock", {})] == [1]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "I thi\n\nYes."
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    _, stream = response_of(pieces)
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert [(item["status"], item["content"][0]["text"]) for item in done] == [
        ("incomplete", "I thi"),
        ("completed", "Yes."),
    ]
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in stream:
        state.handle_event(STREAM_EVENT.validate_python(event))
    assert state._completed_response is not None
    assert state._completed_response.output_text == "Yes."


def test_a_failing_stream_keeps_its_position() -> None:
    """Later events are numbered after those that were sent, wherever the stream reported that the run is parked."""
    so_far = [says("1, "), says("2, ")]
    _, parked = response_of(fold_events(*so_far, ("run.parked", {}))[0])
    _, whole = response_of(fold_events(*so_far, ("run.parked", {}), RESUMED, says("1, 2, 3"), completes("1, 2, 3"))[0])
    *seen, error = parked
    assert (error["type"], error["sequence_number"]) == ("error", seen[-1]["sequence_number"])
    assert whole[: len(seen)] == seen
    rest = [event for event in whole if event["sequence_number"] > error["sequence_number"]]
    assert [event["delta"] for event in rest if "delta" in event] == ["3"]


def test_events_without_output_add_nothing() -> None:
    silent = [("run.queued", {}), ("run.started", {"epoch": 1}), ("node.started", {"node_id": "agent"}), says("")]
    assert fold_events(*silent) == ([], AnswerBuilder(AGENT, _node="agent", _source="main"))


def test_a_hundred_thousand_pieces_are_joined_once() -> None:
    pieces, answer = fold_events(*[says("abcdefghij")] * 100_000, completes("abcdefghij" * 100_000))
    assert len(pieces) == 100_001
    assert len(answer.text) == 1_000_000


def test_a_hundred_thousand_repeated_pieces_are_not_joined_each_time() -> None:
    pieces, answer = fold_events(*[says("abcdefghij")] * 100_000, RESUMED, *[says("abcdefghij")] * 100_000, says("k"))
    assert (len(pieces), pieces[-1], len(answer.text)) == (100_001, TextAdded("k"), 1_000_001)


# Chat completions


def completion(**options: Any) -> Completion:
    return Completion("r1", "graph", 1_700_000_000, **options)


def streamed(pieces: list[Piece], **options: Any) -> list[dict[str, Any]]:
    one = completion(**options)
    return [one.opening(), *(chunk for piece in pieces for chunk in one.chunks(piece))]


def test_a_stream_is_a_role_then_text_then_a_finish() -> None:
    chunks = [ChatCompletionChunk.model_validate(c) for c in streamed(fold_events(says("Hel"), completes("Hello"))[0])]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas] == ["", "Hel", "lo", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-r1"}


@pytest.mark.parametrize("text", ["word ", "", 'a "quoted"\\ line\r\n\n\0', "\u2028😀", "\ud800", PLACE])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_piece_of_text_is_framed_as_its_chunk_is(text: str, include_usage: bool) -> None:
    def pieces() -> Iterator[TextAdded]:
        for begins in (True, False, True):
            yield TextAdded(text, begins)

    first, second = (Completion("r", f"graph {PLACE}", 1, include_usage=include_usage) for _ in range(2))
    for piece in pieces():
        (chunk,) = first.chunks(piece)
        quick = second.framed_text(piece, framed, encoded)
        assert json.loads(quick.removeprefix(b"data: ")) == chunk
        if text != "\ud800":  # encoded alone, it leaves the rest as it is
            assert quick == framed(chunk)


def test_usage_comes_last_and_only_if_requested() -> None:
    pieces, _ = fold_events(completes("x"))
    assert all("usage" not in chunk for chunk in streamed(pieces))
    *before, last = [ChatCompletionChunk.model_validate(c) for c in streamed(pieces, include_usage=True)]
    assert all(chunk.usage is None for chunk in before)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (7, 3, 10)
    assert (last.usage.model_extra or {})["cost"] == 0.25


def test_a_tool_call_is_in_the_penstock_field() -> None:
    chunk = streamed(fold_events(uses("look", {"at": 1}), completes(""))[0])[1]
    assert chunk["choices"][0]["delta"] == {}
    assert chunk["penstock"]["tool_call"] == {"id": "call_look", "name": "look", "arguments": '{"at": 1}'}


def asks(id: str, node_id: str = "ask") -> tuple[str, dict[str, Any]]:
    about = {"tool": "look", "arguments": {"at": 1}}
    approval = {"id": id, "run_id": "r1", "node_id": node_id, "question": "Really?", "value": about, "state": "waiting"}
    return "approval.requested", {"approval": approval}


def answers(id: str) -> tuple[str, dict[str, Any]]:
    return "approval.answered", {"approval_id": id, "state": "approved", "by": "ann"}


QUESTION_AP = {
    "id": "ap-1",
    "node_id": "ask",
    "question": "Really?",
    "value": {"tool": "look", "arguments": {"at": 1}},
    "answer": [f"POST /api/approvals/ap-1/{verdict}" for verdict in ("approve", "edit", "reject")],
}


def test_a_cancelled_run_has_the_reason_that_its_record_has() -> None:
    pieces, answer = fold_events(says("So"), CANCELLED)
    assert answer.ended is not None
    assert (answer.ended.reason, answer.ended.message) == (str(StopReason.ABORTED), "enough")
    under_way, _ = response_of(pieces)
    assert under_way.to_dict()["penstock"]["stop_reason"] == "aborted"


@pytest.mark.parametrize("ending", [completes("So"), HALTED, FAILED, CANCELLED])
def test_unresolved_holds_are_reported_if_there_are_any(
    ending: tuple[str, dict[str, Any]],
) -> None:
    for data, expected in (({}, None), ({"unresolved_usd": 0.5}, 0.5)):
        pieces, answer = fold_events(says("So"), (ending[0], {**ending[1], **data}))
        assert answer.ended is not None
        under_way, _ = response_of(pieces)
        facts = [
            under_way.to_dict()["penstock"],
            run_facts("r1", answer.ended),
            completion().whole(answer.text, answer.ended)["penstock"],
        ]
        assert [one.get("unresolved_usd") for one in facts] == [expected] * 3


def test_questions_of_a_run_are_in_the_penstock_field() -> None:
    pieces, _ = fold_events(asks("ap-1"), ("run.waiting", {}), answers("ap-1"), completes("x"))
    _, first, then, *_ = streamed(pieces)
    ChatCompletionChunk.model_validate(first)
    assert first["choices"][0]["delta"] == {}
    assert first["penstock"] == {"run_id": "r1", "approvals": [QUESTION_AP]}
    assert then["penstock"] == {"run_id": "r1", "approvals": []}


def test_a_response_lists_its_open_questions_while_it_waits() -> None:
    under_way, stream = response_of(fold_events(asks("ap-1"))[0])
    assert STREAM_EVENT.validate_python(stream[-1]).type == "response.in_progress"
    assert stream[-1]["response"]["penstock"]["approvals"] == [QUESTION_AP]
    assert under_way.to_dict()["penstock"]["approvals"] == [QUESTION_AP]
    under_way, stream = response_of(fold_events(asks("ap-1"), answers("ap-1"), says("So."), completes("So."))[0])
    assert stream[3]["response"]["penstock"]["approvals"] == []
    assert "approvals" not in under_way.to_dict()["penstock"]
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))


@pytest.mark.parametrize(
    ("what", "waiting"),
    [
        ([asks("a"), asks("b")], [["a"], ["a", "b"]]),
        ([asks("a"), asks("b"), answers("a")], [["a"], ["a", "b"], ["b"]]),
        ([asks("a"), ("run.parked", {}), RESUMED, asks("a")], [["a"]]),
        ([asks("a"), ("node.completed", {"node_id": "ask"})], [["a"], []]),
        ([asks("a"), ("node.error", {"node_id": "ask"})], [["a"], []]),
        ([asks("a"), ("node.cancelled", {"node_id": "ask"})], [["a"], []]),
        ([asks("a"), ("node.error", {"node_id": "other"}), answers("c")], [["a"]]),
    ],
    ids=["two", "one of two answered", "repeated after a takeover", "went on", "failed", "cancelled", "others"],
)
def test_open_questions_are_emitted_when_they_change(what: Any, waiting: list[list[str]]) -> None:
    pieces, _ = fold_events(*what)
    assert [[one.id for one in piece.questions] for piece in pieces if isinstance(piece, QuestionsChanged)] == waiting


@pytest.mark.parametrize(("cut", "detail"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_unfinished_answer_of_the_model_says_so(cut: str, detail: str) -> None:
    what = completes("1, 2, ")
    pieces, answer = fold_events(says("1, 2, "), (what[0], {**what[1], "finish_reason": cut}))
    assert streamed(pieces)[-1]["choices"][0]["finish_reason"] == cut
    assert answer.ended is not None
    whole = ChatCompletion.model_validate(completion().whole(answer.text, answer.ended))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("1, 2, ", cut)
    under_way, stream = response_of(pieces)
    assert STREAM_EVENT.validate_python(stream[-1]).type == "response.incomplete"
    body = under_way.to_dict()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": detail})
    assert (body["completed_at"], body["output"][-1]["status"]) == (None, "incomplete")
    assert body["penstock"]["status"] == "completed"


def test_an_error_has_the_usage_of_the_run() -> None:
    ended = fold_events(says("So"), FAILED)[1].ended
    assert ended is not None
    refused = failure_of(ended, "r1", has_text=True)
    assert refused is not None
    assert refused.to_dict()["error"]["penstock"] == {
        "run_id": "r1",
        "status": "failed",
        "cost_usd": 0.25,
        "stop_reason": "ValueError",
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "cost": 0.25},
    }


def test_an_unknown_price_is_explained_to_clients_and_not_to_programmers() -> None:
    words = "no price is known for model 'gpt-9'; register one, or pass a cost hint"
    pieces, answer = fold_events(("run.halted", {"stop_reason": "price_unknown", "message": words}))
    assert answer.ended is not None
    refused = failure_of(answer.ended, "r1", has_text=False)
    assert refused is not None
    assert (refused.status, refused.code, refused.param) == (503, "price_unknown", "model")
    for message in (refused.message, response_of(pieces)[0].to_dict()["error"]["message"]):
        assert "no price is known for model 'gpt-9'" in message
        assert "the operator of the server has to register it" in message
        assert "cost hint" not in message


@pytest.mark.parametrize(
    ("cost", "is_retried"),
    [
        ({"cost_usd": 0}, True),
        ({"cost_usd": 0.25}, False),
        ({"cost_usd": 0, "unknown_costs": 1}, False),
        ({"cost_usd": 0, "unresolved_usd": 0.1}, False),
        ({}, False),
    ],
)
def test_a_limit_reached_by_held_amounts_advises_a_retry_which_clients_make_if_the_run_was_free(
    cost: dict[str, Any], is_retried: bool
) -> None:
    halted = {"stop_reason": "budget_exceeded", "message": "held", "whose": "owner", "momentary": True, **cost}
    ended = fold_events(("run.halted", halted))[1].ended
    assert ended is not None
    refused = failure_of(ended, "r1", has_text=False)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "budget_exceeded")
    assert refused.to_dict()["error"]["type"] == "rate_limit_error"
    headers = refused.response().headers
    assert (headers["retry-after"], headers.get("x-should-retry")) == ("2", None if is_retried else "false")
    assert "retry in a moment" in refused.message
    assert "another day" not in refused.message


def test_a_completion_has_its_cost_and_its_ignored_fields() -> None:
    _, answer = fold_events(says("First."), uses("t", {}), says("Then."), completes("Then."))
    assert answer.ended is not None
    body = completion(ignored=["temperature"]).whole(answer.text, answer.ended)
    read = ChatCompletion.model_validate(body)
    assert read.choices[0].message.content == "Then."
    assert body["penstock"] == {
        "run_id": "r1",
        "ignored": ["temperature"],
        "status": "completed",
        "cost_usd": 0.25,
        "stop_reason": None,
    }


def test_an_answer_truncated_by_a_limit_finishes_with_length() -> None:
    pieces, answer = fold_events(says("So far"), HALTED)
    assert streamed(pieces)[-1]["choices"][0]["finish_reason"] == "length"
    assert answer.ended is not None
    whole = completion().whole(answer.text, answer.ended)
    assert whole["choices"][0]["message"]["content"] == "So far"
    assert whole["penstock"]["stop_reason"] == "budget_exceeded"
    assert whole["penstock"]["message"] == "$1 of $1 spent"


@pytest.mark.parametrize(
    ("end", "has_text", "status", "code"),
    [
        (completes(""), False, None, None),
        (HALTED, True, None, None),
        (HALTED, False, 402, "budget_exceeded"),
        (("run.halted", {"stop_reason": "provider_error"}), True, 503, "provider_error"),
        (FAILED, True, 500, "ValueError"),
        (("run.failed", {"error": "ModelUnknown", "message": "there is no model"}), False, 400, "ModelUnknown"),
        (CANCELLED, True, 409, "cancelled"),
        (("run.parked", {}), True, 503, "parked"),
    ],
)
def test_a_run_without_an_answer_is_an_error_that_clients_do_not_retry(
    end: tuple[str, dict[str, Any]], has_text: bool, status: int | None, code: str | None
) -> None:
    ended = fold_events(end)[1].ended
    assert ended is not None
    refused = failure_of(ended, "r1", has_text=has_text)
    if status is None:
        assert refused is None
        return
    assert refused is not None
    assert (refused.status, refused.code) == (status, code)
    assert refused.response().headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.response().headers
    assert refused.to_dict()["error"]["run_id"] == "r1"
    assert "r1" in refused.message


# Responses


def response_of(pieces: list[Piece]) -> tuple[ResponseBuilder, list[dict[str, Any]]]:
    under_way = ResponseBuilder("r1", 1_700_000_000, EchoedRequest("graph", metadata={"a": "b"}))
    return under_way, [*under_way.opening(), *(event for piece in pieces for event in under_way.events(piece))]


def test_the_events_of_a_response_are_those_of_the_official_types() -> None:
    pieces, _ = fold_events(
        says("Let me "), says("see."), uses("look", {"at": 1}), says("It is 5."), completes("It is 5.")
    )
    _, stream = response_of(pieces)
    for event in stream:
        read = STREAM_EVENT.validate_python(event)
        assert read.type == event["type"]
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    message = ["response.output_item.added", "response.content_part.added"]
    written = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    delta = "response.output_text.delta"
    assert [event["type"] for event in stream] == [
        "response.created",
        "response.in_progress",
        *message,
        delta,
        delta,
        *written,
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        *message,
        delta,
        *written,
        "response.completed",
    ]


def test_the_official_stream_helper_builds_the_same_response() -> None:
    question = (asks("ap-1"), answers("ap-1"))
    pieces, _ = fold_events(
        says("Let me see."), uses("look", {"at": 1}), *question, says("It is"), completes("It is 5.")
    )
    _, stream = response_of(pieces)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in stream:
        state.handle_event(STREAM_EVENT.validate_python(event))
    final = state._completed_response
    assert final is not None
    assert final.output_text == "Let me see.It is 5."
    assert [item.type for item in final.output] == ["message", "function_call", "message"]
    assert len({item.id for item in final.output}) == 3


@pytest.mark.parametrize(
    ("end", "status", "event"),
    [
        (completes("x"), "completed", "response.completed"),
        (HALTED, "incomplete", "response.incomplete"),
        (("run.halted", {"stop_reason": "circuit_open"}), "failed", "response.failed"),
        (FAILED, "failed", "response.failed"),
        (CANCELLED, "cancelled", "response.failed"),
        (("run.parked", {}), "in_progress", "error"),
    ],
)
def test_every_end_of_a_run_is_a_status(end: tuple[str, dict[str, Any]], status: str, event: str) -> None:
    under_way, stream = response_of(fold_events(says("So"), end)[0])
    assert stream[-1]["type"] == event
    STREAM_EVENT.validate_python(stream[-1])
    read = Response.model_validate(under_way.to_dict())
    assert read.status == status
    assert (read.error is not None) == (status == "failed")
    assert (read.incomplete_details is not None) == (status == "incomplete")
    if end is not None and status == "incomplete":
        assert under_way.output[-1]["status"] == "incomplete"


def test_a_response_without_output_has_no_items() -> None:
    under_way, stream = response_of(fold_events(completes(""))[0])
    assert [event["type"] for event in stream] == ["response.created", "response.in_progress", "response.completed"]
    assert under_way.to_dict()["output"] == []
    assert under_way.to_dict()["usage"]["total_tokens"] == 10


def test_a_response_in_progress_has_its_text_so_far() -> None:
    under_way, _ = response_of(fold_events(says("So "), says("far"))[0])
    read = Response.model_validate(under_way.to_dict())
    assert (read.status, read.output_text, read.usage) == ("in_progress", "So far", None)


def test_the_id_of_a_response_names_its_run() -> None:
    assert run_id_of(response_id("0190_a:b")) == ("0190_a:b", 0)
    assert run_id_of(response_id("r1~3")) == ("r1", 3)
    assert [run_id_of(id) for id in ("resp_", "r1", "chatcmpl_r1", "", "resp_r1~", "resp_r1~x")] == [None] * 6


# Requests


def chat(messages: list[Any], **more: Any) -> ChatCompletionBody:
    return ChatCompletionBody.model_validate({"model": "g", "messages": messages, **more})


def respond(input: Any, **more: Any) -> ResponseBody:
    return ResponseBody.model_validate({"model": "g", "input": input, **more})


def test_every_role_is_understood() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    turns = completion_turns(
        chat(
            [
                {"role": "system", "content": "Be short."},
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "user", "content": "Why? 🙂"},
            ]
        )
    )
    assert turns == [
        Turn("system", "Be short."),
        Turn("system", "Be\nkind."),
        Turn("user", "1 + 1?"),
        Turn("assistant", '[called add with {"a":1}]'),
        Turn("assistant", "[c1 gave: 2]"),
        Turn("assistant", "No."),
        Turn("user", "Why? 🙂"),
    ]


def test_tool_calls_in_every_format_keep_name_and_arguments() -> None:
    custom = {"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
    plain = {"id": "c3", "type": "function", "function": {"name": "now", "arguments": ""}}
    turns = completion_turns(
        chat(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [custom, plain]},
                {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": '{"a":1}'}},
                {"role": "function", "name": "old", "content": "1"},
                {"role": "assistant", "content": None, "refusal": "I will not."},
                {"role": "user", "content": "y"},
            ]
        )
    )
    assert [turn.text for turn in turns[1:5]] == [
        "[called shell with ls -l]\n[called now with {}]",
        '[called old with {"a":1}]',
        "[old gave: 1]",
        "I will not.",
    ]


def test_tool_results_become_text_and_keep_pictures() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,eA=="}
    sent_items = [{"type": "input_text", "text": "It is"}, {"type": "input_text", "text": "bright."}]
    turns = response_turns(
        respond(
            [
                {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls -l"},
                {"type": "custom_tool_call_output", "call_id": "c1", "output": [*sent_items, picture]},
                {"type": "function_call_output", "call_id": "c2", "output": sent_items},
                {"type": "mcp_call", "id": "m", "name": "look", "arguments": "{}", "server_label": "s", "output": "☀"},
                {"role": "user", "content": "And?"},
            ]
        )
    )
    assert [turn.text for turn in turns[:-1]] == [
        "[called shell with ls -l]",
        "[a tool gave: It is\nbright.]",
        "[a tool gave: It is\nbright.]",
        "[called look with {}]\n[look gave: ☀]",
    ]
    assert [file.content for file in turns[1].files] == [b"x"]
    assert [turn.is_tool_result for turn in turns] == [False, True, True, False, False]


def test_items_of_a_response_are_understood() -> None:
    turns = response_turns(
        respond(
            [
                {"role": "user", "content": "Hi"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
                {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
            ],
            instructions="Be short.",
        )
    )
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "assistant", "assistant", "user"]
    assert turns[3:5] == [Turn("assistant", "[called f with {}]"), Turn("assistant", "[a tool gave: 3]")]
    assert response_turns(respond("Hi")) == [Turn("user", "Hi")]


PNG = base64.b64encode(b"\x89PNG").decode()


@pytest.mark.parametrize(
    ("part", "media_type", "content"),
    [
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, "image/png", b"\x89PNG"),
        ({"type": "input_image", "image_url": f"data:IMAGE/PNG;base64,{PNG}"}, "image/png", b"\x89PNG"),
        ({"type": "image_url", "image_url": {"url": "data:text/plain;charset=utf-8,a%20b"}}, "text/plain", b"a b"),
        ({"type": "file", "file": {"file_data": "data:text/plain,x", "filename": "a.txt"}}, "text/plain", b"x"),
        ({"type": "input_file", "file_data": "data:text/plain;base64,eA==", "filename": "a"}, "text/plain", b"x"),
    ],
)
def test_files_come_as_data(part: dict[str, Any], media_type: str, content: bytes) -> None:
    (turn,) = completion_turns(chat([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]))
    assert turn.text == "see"
    assert [(file.media_type, file.content) for file in turn.files] == [(media_type, content)]


@pytest.mark.parametrize(
    ("sent", "name"), [("../../etc/passwd", "passwd"), (r"C:\notes\a.txt", "a.txt"), ("dir/", "file-1"), ("a b", "a b")]
)
def test_a_file_is_known_by_its_name_and_not_by_its_path(sent: str, name: str) -> None:
    part = {"type": "file", "file": {"file_data": "data:text/plain,x", "filename": sent}}
    (turn,) = completion_turns(chat([{"role": "user", "content": [part]}]))
    assert [file.name for file in turn.files] == [name]


@pytest.mark.parametrize(
    ("content", "where", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}], "image_url", "not fetched"),
        ([{"type": "image_url"}], "image_url", "data: URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}], "image_url", "base64"),
        ([{"type": "file", "file": {"file_id": "file-1"}}], "file.file_data", "data: URL"),
        ([{"type": "file"}], "file_data", "data: URL"),
        ([{"type": "input_file", "file_id": "file-1"}], "file_data", "data: URL"),
        ([{"type": "image_url", "image_url": {"url": "data:../..;base64,eA=="}}], "image_url", "data: URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/pngé;base64,eA=="}}], "image_url", "data: URL"),
        ([{"type": "input_file", "file_data": "data:image/.png,x"}], "file_data", "data: URL"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "type", "text, an image or a file"),
    ],
)
def test_unsupported_content_is_refused_with_its_path(content: Any, where: str, says: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        completion_turns(chat([{"role": "user", "content": "a"}, {"role": "user", "content": content}]))
    assert refused.value.field == f"messages.1.content.0.{where}"
    assert says in str(refused.value)


def test_media_types_are_checked_alike_in_every_api() -> None:
    for kind in (
        "image/png",
        "application/vnd.a+json",
        "IMAGE/PNG",
        "a/b",
        "image/pngé",
        "../..",
        "a/b/c",
        "-/b",
        "a/",
    ):
        url = f"data:{kind};base64,eA=="
        is_taken = DATA_URL.fullmatch(url) is not None
        assert is_taken == (re.fullmatch(MEDIA_TYPE, kind.lower()) is not None), kind


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_a_conversation_ends_with_its_user(role: str) -> None:
    with pytest.raises(InvalidValue, match="ends with a user message"):
        completion_turns(chat([{"role": role, "content": "x"}]))


def test_a_stored_conversation_is_continued_only_by_user_messages() -> None:
    assert text_to_add([Turn("user", "a"), Turn("user", "b")], "input") == ("a\n\nb", ())
    with pytest.raises(InvalidValue, match="the server has the rest"):
        text_to_add([Turn("system", "new rules"), Turn("user", "b")], "input")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat([{"role": "user", "content": "x"}], n=2), "n"),
        (chat([{"role": "user", "content": "x"}], n=0), "n"),
    ],
)
def test_unsupported_options_that_change_the_answer_are_refused(body: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_supported(body)
    refusal = refusal_of(refused.value)
    assert refusal is not None
    assert (refusal.status, refusal.param) == (400, param)


def test_fields_without_effect_are_listed() -> None:
    body = chat(
        [{"role": "user", "content": "x"}],
        n=1,
        temperature=0.2,
        max_tokens=5,
        seed=1,
        stop=["x"],
        top_p=None,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        metadata={"a": "b"},
    )
    check_supported(body)
    assert body.ignored() == []
    body = chat([{"role": "user", "content": "x"}], store=True, prompt_cache_key="k", prediction={"type": "content"})
    check_supported(body)
    assert body.ignored() == ["prediction", "prompt_cache_key", "store"]


def test_nested_fields_without_effect_are_listed_by_path() -> None:
    named = [{"role": "user", "name": "Ann", "content": "x"}, {"role": "tool", "name": "look", "content": "3"}]
    answered = {"role": "assistant", "content": "x", "audio": {"id": "a1"}, "annotations": [], "refusal": None}
    body = chat([*named, answered, *named[:1]], stream_options={"include_obfuscation": False})
    assert body.ignored() == ["messages.*.audio", "messages.*.name", "stream_options.include_obfuscation"]
    request_body = respond("x", text={"a": 1, "format": {"type": "text", "b": 2}}, reasoning={"summary": "auto"})
    assert request_body.ignored() == ["reasoning.summary", "text.a", "text.format.b"]
    assert chat(named[:1], response_format={"type": "text", "a": 1}).ignored() == [
        "messages.*.name", "response_format.a"
    ]  # fmt: skip


def test_message_fields_without_effect_are_listed_by_path() -> None:
    url = "data:image/png;base64,eA=="
    parts = [
        {"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}, "annotations": []},
        {"type": "image_url", "image_url": {"url": url, "detail": "high", "zoom": 2}},
        {"type": "file", "file": {"file_data": url, "filename": "a", "file_id": "f"}},
    ]
    call = {"id": "c1", "type": "function", "index": 3, "function": {"name": "f", "arguments": "{}", "strict": True}}
    called = {"role": "assistant", "tool_calls": [call, call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    body = chat([called, result, {"role": "user", "content": parts}, {"role": "user", "content": parts}])
    assert body.ignored() == [
        "messages.*.content.*.cache_control",
        "messages.*.content.*.file.file_id",
        "messages.*.content.*.image_url.detail",
        "messages.*.content.*.image_url.zoom",
        "messages.*.tool_calls.*.function.strict",
        "messages.*.tool_calls.*.index",
    ]


def test_input_fields_without_effect_are_listed_by_path() -> None:
    url = "data:image/png;base64,eA=="
    text = {"type": "output_text", "text": "x", "annotations": [{"type": "file_path"}], "logprobs": []}
    sent_items = {"type": "message", "id": "msg_1", "status": "completed", "phase": "final", "role": "assistant"}
    body = respond(
        [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {**sent_items, "content": [text]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3", "namespace": "n"},
            {"role": "user", "name": "Ann", "content": [{"type": "input_image", "image_url": url, "detail": "high"}]},
        ]
    )
    assert body.ignored() == [
        "input.*.content.*.annotations",
        "input.*.content.*.detail",
        "input.*.id",
        "input.*.name",
        "input.*.namespace",
        "input.*.phase",
        "input.*.status",
        "input.0",
    ]


def test_the_user_field_has_an_effect_only_at_the_start_of_a_conversation() -> None:
    sent_items = [{"role": "user", "content": "x"}]
    assert chat(sent_items, user="ann").ignored() == []
    assert chat(sent_items, user="ann").ignored(uses_history=False) == ["user"]
    assert respond("x", user="ann").ignored() == []
    assert respond("x", user="ann", previous_response_id="resp_1").ignored() == ["user"]


NULLED = [
    "stream",
    "stream_options",
    "penstock",
    "temperature",
    "n",
    "stop",
    "metadata",
    "tools",
    "user",
    "store",
    "text",
]


@pytest.mark.parametrize("kind", [chat, respond])
def test_null_fields_count_as_absent(kind: Any) -> None:
    sent_items = [{"role": "user", "content": "x", "name": None, "audio": None, "tool_calls": None}]
    given_body = kind(sent_items, **dict.fromkeys([*NULLED, "background", "previous_response_id", "instructions"]))
    assert given_body == kind([{"role": "user", "content": "x"}])
    assert given_body.ignored() == []
    inside = kind(sent_items, stream_options={"include_usage": None}, penstock={"run_id": None, "on_disconnect": None})
    assert inside.penstock == kind(sent_items).penstock


@pytest.mark.parametrize("name", ["model", "messages"])
def test_required_fields_cannot_be_null(name: str) -> None:
    with pytest.raises(ValidationError, match="required"):
        ChatCompletionBody.model_validate({"model": "g", "messages": [{"role": "user", "content": "x"}], name: None})


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": 3},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"max_tokens": "5"},
        {"max_completion_tokens": 5.5},
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": "1"},
        {"n": "1"},
        {"n": True},
        {"n": 1.5},
        {"messages": []},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"model": ""},
        {"metadata": {"a": 1}},
        {"metadata": {str(n): "" for n in range(17)}},
        {"penstock": {"limit": {}}},
        {"penstock": {"run_id": "../x"}},
        {"penstock": {"on_disconnect": "explode"}},
    ],
)
def test_a_body_that_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatCompletionBody.model_validate({"model": "g", "messages": [{"role": "user", "content": "x"}], **wrong})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["role", "content", "type", "text", "image_url", "url", "tool_calls", "function", "name", "arguments", "file"]
)
PLAUSIBLE = st.recursive(
    JSON | st.sampled_from(["user", "assistant", "tool", "text", "image_url", "file", "data:a/b;base64,eA=="]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(NAMES, inside, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "n", "stream", "tools", "penstock", "seed"]), PLAUSIBLE),
    st.lists(st.fixed_dictionaries({"role": st.just("user") | PLAUSIBLE, "content": PLAUSIBLE}), max_size=3),
)
def test_any_body_is_accepted_or_refused(body: dict[str, Any], messages: list[Any]) -> None:
    given_body = {"model": "g", "messages": messages, **body}
    try:
        read = ChatCompletionBody.model_validate(given_body)
        check_supported(read)
        turns = completion_turns(read)
    except (ValidationError, InvalidValue):
        return
    assert turns[-1].role == "user"
    assert isinstance(read.ignored(), list)


@given(PLAUSIBLE | st.lists(PLAUSIBLE, max_size=3))
def test_any_input_is_accepted_or_refused(input: Any) -> None:
    try:
        read = ResponseBody.model_validate({"model": "g", "input": input})
        turns = response_turns(read)
    except (ValidationError, InvalidValue):
        return
    assert turns[-1].role == "user"
    assert isinstance(read.ignored(), list)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "text.delta",
                "tool.call",
                "run.completed",
                "run.halted",
                "run.parked",
                "run.resumed",
                "approval.requested",
                "x",
            ]
        ),
        st.fixed_dictionaries(
            {
                "node_id": st.sampled_from(["agent", "other"]),
                "source": st.sampled_from(["main", "main/a"]),
                "text": st.text(max_size=4),
                "call": JSON,
                "approval": st.fixed_dictionaries({"id": st.sampled_from(["a", "b"])}) | JSON,
                "output": st.text(max_size=6) | JSON.filter(lambda one: not isinstance(one, float)),
            }
        ),
    ),
    max_size=12,
)


@given(EVENTS)
def test_the_stream_and_the_response_always_agree(what: list[tuple[str, dict[str, Any]]]) -> None:
    pieces, answer = fold_events(*what)
    chunks = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed(pieces))
    assert "\n\n".join(followed(pieces)) == answer.text
    under_way, stream = response_of(pieces)
    numbers = [event["sequence_number"] for event in stream if event["type"] != "error"]
    assert numbers == list(range(len(numbers)))
    messages = [item["content"][0]["text"] for item in under_way.to_dict()["output"] if item["type"] == "message"]
    if answer.ended is None or answer.ended.status != "completed" or not answer.ended.text:
        assert "\n\n".join(messages) == answer.text
    else:
        assert messages[-1] == answer.ended.text
        assert answer.text.endswith(answer.ended.text)
    if not any(isinstance(piece, Withdrawn) for piece in pieces):
        assert chunks == answer.text
