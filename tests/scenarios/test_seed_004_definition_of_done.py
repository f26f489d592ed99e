"""The definition of done of seed 004, point by point, in real chats on a real host.

The editor's part of 6 is in `tests/ui/test_editor.py`.

1 one path · 2 a core that knows no domain · 3 pipelines · 4 the user's tools · 5 cancels · 6 channels · 7 the rest of
its checklist: the active part of a graph, circles of links, and events that agree with what is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import penstock.kernel
import penstock.runtime.graphs
import penstock.runtime.scheduling
from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.chat.conversation import ChatMessage
from penstock.chat.turn import ChatTurn
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import GraphInvalid
from penstock.nodes import NODE_TYPES
from penstock.nodes.text import TextNode
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.runtime.watching.registry import CancelResult
from penstock.storage.memory import MemoryStores
from tests.chat.chats import ALONE, ANN, Chats, Histories, Slow, chatting, hosted
from tests.nodes.graphs import Json, graph, node


async def send(chats: Chats, content: str, **options: Any) -> tuple[ChatTurn, ChatMessage]:
    turn = await chats.service.stream_chat(chats.chat_id, content, owner=ANN, **options)
    return turn, await turn.result()


async def nodes_of(turn: ChatTurn) -> list[str]:
    return [event.data["node_id"] async for event in turn.events() if event.type == "node.started"]


class RecordingModels:
    """Models by name, each with what it received: the texts and the names of the tools."""

    def __init__(self, *names: str, **replies: Any) -> None:
        self.texts: dict[str, list[list[str]]] = {}
        self.tools: dict[str, list[list[str]]] = {}
        self._replies = {name: iter(one) for name, one in replies.items()}
        self.models = {name: ScriptedModel(self._answer(name)) for name in (*names, *replies)}

    def _answer(self, name: str) -> Callable[[ModelRequest], Any]:
        def answer(request: ModelRequest) -> Any:
            received = self.texts.setdefault(name, [])
            received.append([one.text for one in request.messages])
            self.tools.setdefault(name, []).append([one.name for one in request.tools])
            return next(self._replies[name]) if name in self._replies else f"{name}{len(received)}"

        return answer


# 1. All chat execution paths use one graph runtime path.

Entry = Callable[[Chats, ChatTurn], Awaitable[ChatTurn]]

ENTRIES: dict[str, Entry] = {
    "stream_chat": lambda chats, _: chats.service.stream_chat(chats.chat_id, "two", owner=ANN),
    "stream_agent_chat": lambda chats, _: chats.service.stream_agent_chat("g", "two", owner=ANN),
    "continue_message": lambda chats, one: chats.service.continue_message(one.chat_id, one.message_id, owner=ANN),
    "retry_message": lambda chats, one: chats.service.retry_message(one.chat_id, one.message_id, owner=ANN),
    "edit_user_message": lambda chats, one: chats.service.edit_user_message(
        one.chat_id, str(one.user_message_id), "two", owner=ANN
    ),
}


@pytest.mark.requirement("K-10")
@pytest.mark.parametrize("entry", ENTRIES)
async def test_1_every_entry_point_is_a_run_of_the_graph(entry: str) -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        first, _ = await send(chats, "one")
        turn = await ENTRIES[entry](chats, first)
        answer = await turn.result()
        assert answer.content == "answer 2"
        assert await nodes_of(turn) == ["start", "A"]
        run = await chats.host.get(turn.run_id)
        assert run is not None
        assert (run.graph_id, run.graph_version, run.status, run.origin["kind"]) == ("g", 1, "completed", "chat")
        assert [request["run_id"] for request in chats.host.submitted] == [first.run_id, turn.run_id]


# 2. Runtime core remains domain-agnostic.

DOMAIN = set(NODE_TYPES) - {"input", "output", "text", "map", "merge", "loop", "tool"}
"""Types that are no common words: a core that names one of them knows what it is."""
CORES = (penstock.kernel, penstock.runtime.graphs, penstock.runtime.scheduling)


def test_2_the_core_names_no_node_type_and_imports_no_domain() -> None:
    sources = [path for core in CORES for path in Path(core.__path__[0]).glob("*.py")]
    assert len(sources) > 15
    for path in sources:
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Constant):
                assert part.value not in DOMAIN, f"{path}:{part.lineno}"
            if isinstance(part, ast.ImportFrom):
                assert not str(part.module).startswith(("penstock.agents", "penstock.nodes", "penstock.chat"))


async def test_2_any_type_is_as_good_as_any_other() -> None:
    """What a node does is what its executor does, whatever the type is called."""
    for type in ("agent", "chat-start", "no-such-type"):
        executors = {type: TextNode()}
        flow = run_flow(graph([node("a", type, text="given")]), ExecutionContext(), executors)
        events = [one async for one in flow]
        assert [one.event_type for one in events if isinstance(one, NodeEvent)] == ["started", "completed"]
        assert isinstance(events[-1], ExecutionResult)
        assert events[-1].outputs["output"].value == "given"


# 3. Multi-agent pipeline semantics are correct.


@pytest.mark.requirement("K-11")
@pytest.mark.requirement("K-12")
async def test_3_the_first_agent_gets_the_history_and_each_later_one_the_answer_before_it() -> None:
    """chat-start → A → prompt → B, with a helper that is linked to B: pipeline and composition in one graph."""
    agents = [node(name, "agent", model=name) for name in ("A", "B", "helper")]
    document = graph(
        [node("start", "chat-start"), node("p", "prompt-template", template="Check: {{ a }}"), *agents],
        ["start > A", "A > p.a", "p > B"],
        ["helper.tool > B.tools"],
    )
    recorded = RecordingModels("A", "helper", B=["B1", ToolCall("1", "helper", {"task": "sure?"}), "B2"])
    async with chatting(document, recorded.models) as chats:
        assert (await send(chats, "one"))[1].content == "B1"
        assert (await send(chats, "two"))[1].content == "B2"
    assert recorded.texts["A"] == [["one"], ["one", "B1", "two"]]
    assert recorded.texts["B"][:2] == [["Check: A1"], ["Check: A2"]]
    assert recorded.texts["helper"] == [["sure?"]]


# 4. includeUserTools policy is topology-robust.

BETWEEN = {
    "nothing": ([], ["start > A"]),
    "a text that is made of it": ([node("p", "prompt-template", template="{{ q }}")], ["start > p.q", "p > A"]),
    "a branch": ([node("c", "conditional", when="true")], ["start > c", "c.true > A"]),
    "a chain": (
        [node("c", "conditional", when="true"), node("m", "merge", mode="first"), node("i", "output")],
        ["start > c", "c.true > m", "m > i", "i > A"],
    ),
}


@pytest.mark.requirement("K-11")
@pytest.mark.parametrize("include", [True, False, None])
@pytest.mark.parametrize("between", BETWEEN)
async def test_4_user_tools_reach_the_first_agent_through_other_nodes_if_the_start_node_includes_them(
    between: str, include: bool | None
) -> None:
    nodes, ways = BETWEEN[between]
    start = node("start", "chat-start", **({} if include is None else {"includeUserTools": include}))
    agents = [node("A", "agent", model="A"), node("B", "agent", model="B")]
    recorded = RecordingModels("A", "B")
    async with chatting(
        graph([start, *nodes, *agents], [*ways, "A > B"]), recorded.models, tools={"mail": _mail}
    ) as chats:
        assert (await send(chats, "one", user_tools=["mail"]))[1].content == "B1"
    assert recorded.tools == {"A": [["mail"] if include else []], "B": [[]]}


async def _send() -> str:
    return "sent"


_mail = Tool(_send, name="mail")


# 5. Cancel semantics are race-safe.


@pytest.mark.requirement("K-13")
async def test_5_a_cancel_before_the_run_is_registered_is_applied_when_it_is() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        assert await chats.host.cancel("early", reason="changed my mind") is CancelResult.REMEMBERED
        _, answer = await send(chats, "one", run_id="early")
        assert (answer.data["state"], answer.data["error"]) == ("partial", "changed my mind")
    assert histories.requests == []


@pytest.mark.requirement("K-13")
async def test_5_repeated_cancels_and_cancels_after_the_end_are_reported_as_such() -> None:
    slow = Slow("Hel", "lo")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
        assert await chats.host.cancel(turn.run_id) is CancelResult.CANCELLED
        assert await chats.host.cancel(turn.run_id) in (CancelResult.ALREADY_CANCELLED, CancelResult.ENDED)
        assert (await turn.result()).content == "Hello"
        assert await chats.host.cancel(turn.run_id) is CancelResult.ENDED


@pytest.mark.requirement("K-13")
async def test_5_a_cancel_while_an_approval_is_waiting_withdraws_it() -> None:
    document = graph([node("start", "chat-start"), node("ok", "approval"), node("A", "agent", model="A")])
    document["edges"] = graph([], ["start > ok", "ok.approved > A"])["edges"]
    async with chatting(document, RecordingModels("A").models) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        async for event in turn.events():
            if event.type == "run.waiting":
                await turn.cancel("no more")
        assert (await turn.result()).data["state"] == "partial"
        (question,) = await chats.stores.approvals.list(run_id=turn.run_id)
        assert question.state == "withdrawn"


@pytest.mark.requirement("K-13")
async def test_5_a_cancel_survives_the_host_that_received_it() -> None:
    slow, stores = Slow("Hel", "lo"), MemoryStores()
    async with chatting(models={"A": slow}, stores=stores) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
    async with hosted(stores, {"A": slow}) as chats:
        await chats.host.cancel(turn.run_id, reason="after the restart")
        run = await chats.host.wait(turn.run_id)
        assert run.status == "cancelled"
        message = await stores.chats.message(turn.chat_id, turn.message_id)
        assert message is not None
        assert (message.content, message.data["state"]) == ("Hello", "partial")


# 6. Edge channel contract is strict and consistent.


@pytest.mark.parametrize("data", [None, {}, {"channel": None}, {"channel": ""}, {"channel": "Flow"}, {"channel": "x"}])
async def test_6_an_edge_without_a_channel_is_refused_wherever_it_comes_in(data: Any) -> None:
    document: Json = {**ALONE, "edges": [{**ALONE["edges"][0], "data": data}]}
    with pytest.raises(GraphInvalid) as invalid:
        parse_graph(document)
    assert all(problem.path.startswith("$.edges[0]") for problem in invalid.value.problems)
    async with chatting(document, {"A": Histories().model}) as chats:
        _, answer = await send(chats, "one")
        assert answer.data["state"] == "failed"
        assert "$.edges[0]" in answer.data["error"]


# 7. The rest of its checklist.


async def test_7_only_what_the_chat_leads_to_runs() -> None:
    """A node apart does not run, and a circle apart does not fail the chat."""
    apart = [node("apart", "agent", model="unknown"), node("x", "output"), node("y", "output")]
    document = graph([*ALONE["nodes"], *apart], ["start > A", "x > y", "y > x"])
    async with chatting(document, {"A": Histories().model}) as chats:
        turn, answer = await send(chats, "one")
        assert answer.content == "answer 1"
        assert await nodes_of(turn) == ["start", "A"]


async def test_7_a_cycle_of_links_is_named() -> None:
    nodes = [node("start", "chat-start"), node("A", "agent", model="A"), node("B", "agent", model="A")]
    document = graph(nodes, ["start > A"], ["A.tool > B.tools", "B.tool > A.tools"])
    async with chatting(document, {"A": Histories().model}) as chats:
        _, answer = await send(chats, "one")
        assert answer.data["state"] == "failed"
        assert "A" in answer.data["error"]
        assert "B" in answer.data["error"]


async def test_7_the_stored_answer_is_the_streamed_one() -> None:
    text = "Hoover Dam is 221 m high — ダム — and the answer comes in pieces."
    async with chatting(models={"A": ScriptedModel([text])}) as chats:
        turn, answer = await send(chats, "one")
        events = [event async for event in turn.events()]
        assert "".join(one.data["text"] for one in events if one.type == "text.delta") == answer.content == text
        assert events[-1].data["output"] == text
        lifecycle = [(one.type, one.data["node_id"]) for one in events if one.type.startswith("node.")]
        assert lifecycle == [
            ("node.started", "start"),
            ("node.completed", "start"),
            ("node.started", "A"),
            ("node.completed", "A"),
        ]


@pytest.mark.requirement("K-16")
def test_7_every_node_type_of_the_list_is_there() -> None:
    listed = (
        "chat-start agent team llm-completion prompt-template conditional merge map loop subgraph tool toolset "
        "mcp-server memory http-request approval"
    )
    registry = ExecutorRegistry.from_entry_points()
    for node_type in listed.split():
        assert node_type in NODE_TYPES
        assert registry[node_type].schema()["type"] == "object"
        assert registry.can(node_type, "execute") or registry.can(node_type, "materialize")
