"""The chat-start node, and the prompts of agents in a chat: history, payload, tools, attachments."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.messages import Media, Message
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool, Tools
from penstock.chat.scope import services_for
from penstock.errors import InvalidValue
from penstock.kernel.document import parse_graph
from penstock.nodes.parts import chat
from penstock.nodes.parts.services import NotOffered
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems

MESSAGES: list[Json] = [
    {"role": "user", "content": "Which dam is the highest?"},
    {"role": "assistant", "content": "Jinping-I."},
    {"role": "user", "content": "And the second?"},
]


class Seen:
    """Models by name that record their prompts."""

    def __init__(self, *names: str) -> None:
        self.messages: dict[str, list[tuple[str, str]]] = {}
        self.content: dict[str, list[Any]] = {}
        self.tools: dict[str, list[str]] = {}
        self.models = {name: ScriptedModel(self._answer(name), name=name) for name in names}

    def _answer(self, name: str) -> Any:
        def answer(request: ModelRequest) -> str:
            self.messages[name] = [(one.role, one.text) for one in request.messages]
            self.content[name] = [one.content for one in request.messages]
            self.tools[name] = [spec.name for spec in request.tools]
            return f"{name} answered"

        return answer


async def chatted(document: Json, messages: list[Json], seen: Seen, **services: Any) -> Any:
    in_chat = {**services_for(parse_graph(document)), "chat_input": {"messages": messages}, "models": seen.models}
    return await output_of(document, services={**in_chat, **services})


def as_pairs(*messages: Json) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in messages]


@pytest.mark.requirement("K-11")
async def test_the_first_agent_receives_the_history_and_the_next_one_only_the_first_answer() -> None:
    nodes = [node("start", "chat-start"), node("A", "agent", model="A"), node("B", "agent", model="B")]
    between = node("p", "prompt-template", template="Check: {{ a }}")
    seen = Seen("A", "B")
    document = graph([*nodes, between], ["start > A", "A > p.a", "p > B"])
    assert await chatted(document, MESSAGES, seen) == "B answered"
    assert seen.messages == {"A": as_pairs(*MESSAGES), "B": [("user", "Check: A answered")]}


@pytest.mark.requirement("K-11")
async def test_an_agent_downstream_of_other_nodes_gets_the_history_and_their_output() -> None:
    nodes = [node("start", "chat-start"), node("p", "prompt-template", template="In French: {{ q }}")]
    document = graph([*nodes, node("A", "agent", model="A")], ["start > p.q", "p > A"])
    seen = Seen("A")
    await chatted(document, MESSAGES, seen)
    assert seen.messages["A"] == [*as_pairs(*MESSAGES), ("user", "In French: And the second?")]


async def test_a_node_that_passes_the_user_message_on_changes_nothing() -> None:
    nodes = [node("start", "chat-start"), node("when", "conditional", when="true"), node("A", "agent", model="A")]
    for ways in (["start > when", "when.true > A"], ["start.messages > when", "when.true > A"]):
        seen = Seen("A")
        await chatted(graph(nodes, ways), MESSAGES, seen)
        assert seen.messages["A"] == as_pairs(*MESSAGES)


async def test_an_agent_whose_own_message_is_the_last_is_prompted_to_continue() -> None:
    document = graph([node("start", "chat-start"), node("A", "agent", model="A")], ["start > A"])
    seen = Seen("A")
    broken_off = {"role": "assistant", "content": "It is the Nur"}
    await chatted(document, [*MESSAGES, broken_off], seen)
    assert seen.messages["A"] == [*as_pairs(*MESSAGES, broken_off), ("user", chat.GO_ON)]


def tool_named(name: str, description: str = "") -> Tool:
    async def run() -> str:
        return name

    return Tool(run, name=name, description=description)


@pytest.mark.requirement("K-11")
@pytest.mark.parametrize("include", [True, False])
async def test_user_tools_reach_entry_agents_through_other_nodes_if_the_start_includes_them(
    include: bool,
) -> None:
    start = node("start", "chat-start", includeUserTools=include)
    way = [node("when", "conditional", when="true"), node("p", "prompt-template", template="{{ q }}")]
    agents = [node("A", "agent", model="A"), node("B", "agent", model="B")]
    document = graph([start, *way, *agents], ["start > when", "when.true > p.q", "p > A", "A > B"])
    seen = Seen("A", "B")
    await chatted(
        document, MESSAGES, seen, user_tools=[tool_named("mail"), "diary"], tools={"diary": tool_named("diary")}
    )
    assert seen.tools == {"A": ["mail", "diary"] if include else [], "B": []}


async def test_of_two_tools_of_one_name_the_agents_own_counts() -> None:
    start = node("start", "chat-start", includeUserTools=True)
    document = graph([start, node("A", "agent", model="A", tools=["mail"])], ["start > A"])
    offered: list[Any] = []
    model = ScriptedModel(lambda request: offered.extend(request.tools) or "ok")
    chain = Tools([tool_named("mail", "the user's"), tool_named("notes")])
    services = {"user_tools": [chain, tool_named("notes")], "tools": {"mail": tool_named("mail", "the agent's")}}
    await chatted(document, MESSAGES, Seen(), models={"A": model}, **services)
    assert [(one.name, one.description) for one in offered] == [("mail", "the agent's"), ("notes", "")]


async def test_the_error_for_an_unknown_user_tool_names_it() -> None:
    start = node("start", "chat-start", includeUserTools=True)
    document = graph([start, node("A", "agent", model="A")], ["start > A"])
    with pytest.raises(NotOffered, match="'mail'"):
        await chatted(document, MESSAGES, Seen("A"), user_tools=["mail"])


async def test_attachments_are_sent_only_to_the_agent_that_gets_the_history() -> None:
    kept = {"p": b"\x89PNG", "t": "höchste".encode(), "z": b"PK"}
    loaded: list[str] = []

    async def load(id: str) -> bytes | None:
        loaded.append(id)
        return kept.get(id)

    def ref(id: str, name: str, media_type: str, size: int = 3) -> Json:
        return {"id": id, "name": name, "media_type": media_type, "size": size}

    refs = [
        ref("p", "dam.png", "image/png"),
        ref("t", "list.txt", "text/plain"),
        ref("z", "all.zip", "application/zip"),
    ]
    messages = [{"role": "user", "content": "See these", "attachments": [*refs, ref("gone", "old.png", "image/png")]}]
    nodes = [node("start", "chat-start"), node("A", "agent", model="A"), node("B", "agent", model="B")]
    seen = Seen("A", "B")
    await chatted(graph(nodes, ["start > A", "A > B"]), messages, seen, attachments=load)
    ((text, picture, letter, packed, gone),) = seen.content["A"]
    assert (text, picture) == ("See these", Media("image/png", data=b"\x89PNG"))
    assert "list.txt" in letter
    assert "höchste" in letter
    assert "all.zip (application/zip, 3 bytes)" in packed
    assert "old.png" in gone
    assert loaded == ["p", "t", "gone"]
    assert seen.content["B"] == ["A answered"]


async def test_the_newest_attachments_are_shown_and_older_ones_named_if_all_would_be_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "MAX_ATTACHED_BYTES", 5)
    monkeypatch.setattr(chat, "MAX_ATTACHED_TEXT", 2)

    async def load(id: str) -> bytes:
        return id.encode()

    def saying(id: str, media_type: str) -> Json:
        attached = {"id": id, "name": id, "media_type": media_type, "size": len(id)}
        return {"role": "user", "content": "", "attachments": [attached]}

    seen = Seen("A")
    messages = [saying("older", "image/png"), saying("newer", "text/plain")]
    document = graph([node("start", "chat-start"), node("A", "agent", model="A")], ["start > A"])
    await chatted(document, messages, seen, attachments=load)
    (older,), (newer,) = seen.content["A"]
    assert "cannot be shown" in older
    assert newer == "\n[newer is attached:]\nne\n[the first 2 of 5 characters]"


def test_bytes_are_not_shown_of_a_message() -> None:
    assert "secret" not in repr(Message.user(["x", Media("image/png", data=b"secret")]))


async def test_it_outputs_the_latest_text_and_the_messages_if_an_edge_uses_them() -> None:
    nodes = [node("start", "chat-start"), node("m", "merge", mode="list")]
    services = {"chat_input": {"messages": MESSAGES}}
    both = graph(nodes, ["start > m", "start.messages > m"])
    assert await output_of(both, services=services) == ["And the second?", MESSAGES]
    events, _ = await events_of(graph(nodes, ["start > m"]), services=services)
    (completed,) = [one for one in events if one.event_type == "completed" and one.node_id == "start"]
    assert "Jinping" not in repr(completed.data)


@pytest.mark.parametrize(
    ("given", "newest"),
    [
        ("hello", "hello"),
        ({"messages": MESSAGES}, "And the second?"),
        ({"messages": []}, ""),
        ({"q": 1}, '{"q": 1}'),
        (None, ""),
    ],
)
async def test_outside_of_a_chat_it_takes_the_input_of_the_run(given: Any, newest: str) -> None:
    document = graph([node("start", "chat-start"), node("out", "output")], ["start > out"])
    assert await output_of(document, given) == newest


@pytest.mark.parametrize("wrong", ["x", [1], [{"role": "boss", "content": ""}], [{"role": "user", "content": None}]])
async def test_messages_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="messages"):
        await output_of(graph([node("start", "chat-start")]), {"messages": wrong})


def test_its_one_setting_is_true_or_false() -> None:
    ((path, _),) = problems(graph([node("start", "chat-start", includeUserTools="yes")]))
    assert path == "$.nodes[0].data.includeUserTools"
