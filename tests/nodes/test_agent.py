"""The agent and llm-completion nodes: pipelines, composition, budgets, streams."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing
from typing import Any

import pytest

from penstock.agents.agent import Agent
from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, TruncatedResponse
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.containment.limits import Budget, BudgetExceededError
from penstock.errors import CancelledError, InvalidValue
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import DataValue, PartialValue
from penstock.nodes.llm_completion import LlmCompletion
from penstock.nodes.parts.services import ModelUnknown, NotOffered
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan
from penstock.runtime.graphs.node_execution import ExecutorMisbehaved, NodeEvent, emit_flow, run_flow
from penstock.stops import TerminationReason
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems, registry


def script(*replies: Any) -> Json:
    return {"script": list(replies)}


def call(tool: str, **arguments: Any) -> Json:
    return {"tool": tool, "arguments": arguments}


def alone(type: str = "agent", **data: Any) -> Json:
    return graph([node("in", "input"), node("a", type, **data)], ["in > a"])


@pytest.mark.requirement("K-12")
async def test_pipeline_and_composition_live_in_one_graph() -> None:
    """A's output is B's input; a sub-agent that is linked into A's tools is called by A, and runs nowhere else."""
    prompts: dict[str, list[str]] = {"A": [], "B": [], "helper": []}

    def model(name: str, *replies: Any) -> ScriptedModel:
        coming = iter(replies)

        def reply(request: ModelRequest) -> Any:
            prompts[name].append(request.messages[-1].text)
            return next(coming)

        return ScriptedModel(reply, name=name)

    models = {
        "A": model("A", ToolCall("1", "helper", {"task": "How high?"}), "It is 221 m high."),
        "B": model("B", "In short: 221 m."),
        "helper": model("helper", "221 m"),
    }
    both = graph(
        [node("in", "input"), *(node(name, "agent", model=name) for name in ("A", "B", "helper"))],
        ["in > A", "A > B"],
        ["helper.tool > A.tools"],
    )
    with ExecutionContext(input="Tell me of Hoover Dam.") as run:
        events, result = await events_of(both, run=run, services={"models": models})
    assert result.outputs["output"].value == "In short: 221 m."
    assert prompts == {
        "A": ["Tell me of Hoover Dam.", "221 m"],
        "helper": ["How high?"],
        "B": ["It is 221 m high."],
    }
    assert [one.node_id for one in events if one.event_type == "started"] == ["in", "A", "B"]
    assert [child.name for child in run.children] == ["A", "B"]
    assert [child.name for child in run.children[0].children] == ["helper"]


@pytest.mark.requirement("K-12")
async def test_an_agent_may_be_a_stage_and_a_tool_at_once() -> None:
    shared = ScriptedModel(lambda request: f"<{request.messages[-1].text}>")
    calls_it = ScriptedModel([ToolCall("1", "shared", {"task": "x"}), "done"])
    nodes = [node("in", "input"), node("shared", "agent", model="shared"), node("b", "agent", model="calls_it")]
    both = graph(nodes, ["in > shared", "shared > b"], ["shared.tool > b.tools"])
    services = {"models": {"shared": shared, "calls_it": calls_it}}
    assert await output_of(both, "in", services=services) == "done"
    assert shared.calls == 2


async def test_a_script_is_a_model_that_is_written_in_the_graph() -> None:
    assert await output_of(alone(model=script("hi")), "hello") == "hi"


async def test_several_tools_are_called_in_one_turn() -> None:
    nodes = [node("a", "agent", model=script([call("one"), call("two")], "both"), tools=["one", "two"])]
    seen: list[str] = []
    tools = {name: _tool(name, seen) for name in ("one", "two")}
    assert await output_of(graph(nodes), "go", services={"tools": tools}) == "both"
    assert sorted(seen) == ["one", "two"]


def _tool(name: str, seen: list[str]) -> Any:
    async def run() -> str:
        seen.append(name)
        return name

    run.__name__ = name
    return run


@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_any_input_is_sent_to_the_model_as_text(type: str) -> None:
    echo = ScriptedModel(lambda request: request.messages[-1].text)
    services = {"models": {"echo": echo}}
    assert await output_of(alone(type, model="echo"), {"a": [1]}, services=services) == '{"a": [1]}'
    assert await output_of(graph([node("a", type, model="echo")]), "the run's", services=services) == "the run's"


async def test_an_answer_follows_its_schema() -> None:
    schema = {"type": "object", "properties": {"metres": {"type": "integer"}}, "required": ["metres"]}
    reads = alone(model=script("about 221", '{"metres": 221}'), output=schema)
    _, result = await events_of(reads, "How high?")
    assert (result.outputs["output"].type, result.outputs["output"].value) == ("object", {"metres": 221})


async def test_instructions_and_settings_reach_the_model() -> None:
    model = ScriptedModel(["a", "b"])
    settings = {"instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 7}
    for type in ("agent", "llm-completion"):
        await output_of(alone(type, model="m", **settings), "x", services={"models": {"m": model}})
        assert model.last_request is not None
        assert model.last_request.instructions == "Be brief."
        assert model.last_request.settings.temperature == 0.5
        assert model.last_request.max_output_tokens == 7


@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_a_streamed_answer_is_emitted_in_pieces(type: str) -> None:
    model = ScriptedModel(["It is 221 m high."], piece_characters=9)
    events, result = await events_of(alone(type, model="m", stream=True), "x", services={"models": {"m": model}})
    assert [one.data["text"] for one in events if one.event_type == "delta"] == ["It is 221", " m high."]
    assert result.outputs["output"].value == "It is 221 m high."


async def test_a_stream_that_breaks_off_is_the_nodes_error() -> None:
    model = ScriptedModel(["It is 221 m high."], piece_characters=9, breaks_off_after=1)
    with pytest.raises(TruncatedResponse):
        await output_of(alone(model="m", stream=True), "x", services={"models": {"m": model}})


async def test_an_invalid_piece_fails_the_node() -> None:
    class Odd(Model):
        async def request_stream(self, request: ModelRequest) -> Any:
            yield "one "
            yield b"two "

    with pytest.raises(InvalidValue, match=r"a piece of 'odd' must be text, ToolCall, .*, not b'two '"):
        await output_of(alone(model="m", stream=True), "x", services={"models": {"m": Odd("odd")}})


class Loud(LlmCompletion):
    """A custom executor that wraps one of the package."""

    async def execute(self, data: Any, inputs: Any, context: FlowContext) -> Any:  # type: ignore[override]
        async for one in super().execute(data, inputs, context):
            yield NodeEvent.progress("delta", one.data["text"].upper()) if isinstance(one, NodeEvent) else one


async def test_a_streamed_answer_is_a_stream_for_an_executor_around_it() -> None:
    model = ScriptedModel(["It is 221 m high."], piece_characters=9)
    document = alone("loud", model="m", stream=True)
    events, result = await events_of(document, "x", services={"models": {"m": model}}, more={"loud": Loud()})
    assert [one.data for one in events if one.event_type == "delta"] == ["IT IS 221", " M HIGH."]
    assert result.outputs["output"].value == "It is 221 m high."


async def test_a_streamed_answer_whose_reader_leaves_asks_no_longer() -> None:
    model = ScriptedModel(["word " * 10_000], piece_characters=5)
    with ExecutionContext(input="x") as run:
        context = FlowContext("a", services={"models": {"m": model}}, execution=run)
        async with aclosing(aiter(LlmCompletion().execute({"model": "m", "stream": True}, {}, context))) as pieces:
            assert (await anext(pieces)).data["text"] == "word "
        assert len(asyncio.all_tasks()) == 1
        assert [one.name for one in run.graph.open_calls()] == ["main"]


async def test_a_streamed_answer_of_a_blocking_executor_is_refused() -> None:
    class Blocking(LlmCompletion):
        blocking = True

    services = {"models": {"m": ScriptedModel(["x"])}}
    with pytest.raises(ExecutorMisbehaved, match="is blocking and returned something async"):
        await output_of(alone("b", model="m", stream=True), "x", services=services, more={"b": Blocking()})


async def test_deltas_of_an_agent_on_another_thread_are_emitted_on_the_thread_of_the_run() -> None:
    heard: list[tuple[str, bool]] = []
    home = threading.get_ident()

    class Hearing:
        is_behind = False

        def emit(self, event: NodeEvent) -> None:
            if event.event_type == "delta" and "text" in event.data:
                heard.append((event.data["text"], threading.get_ident() == home))

        async def make_room(self) -> None: ...

    def ask(task: str) -> str:
        """Ask another agent, in sync code."""
        assert threading.get_ident() != home
        return str(asyncio.run(Agent(ScriptedModel(["a b c"], piece_characters=2)).run(task)).output)

    lead = ScriptedModel([ToolCall("1", "ask", {"task": "x"}), "done"])
    services = {"models": {"m": lead}, "tools": {"ask": Tool(ask)}}
    plan = GraphPlan(parse_graph(alone(model="m", stream=True, tools=["ask"])), registry())
    with ExecutionContext(input="x") as run:
        await emit_flow(plan, FlowContext(services=services, execution=run), Hearing())
    assert heard == [("a ", True), ("b ", True), ("c", True), ("done", True)]


async def test_a_failing_reader_of_events_fails_the_node() -> None:
    class Deaf:
        is_behind = False

        def emit(self, event: NodeEvent) -> None:
            if event.event_type == "delta":
                raise OSError("the reader fails at this")

        async def make_room(self) -> None: ...

    plan = GraphPlan(parse_graph(alone(model="m", stream=True)), registry())
    with ExecutionContext(input="x") as run, pytest.raises(OSError, match="the reader fails at"):
        services = {"models": {"m": ScriptedModel(["x"])}}
        await emit_flow(plan, FlowContext(services=services, execution=run), Deaf())


async def test_a_reader_who_leaves_in_the_middle_of_an_answer_stops_the_model() -> None:
    model = ScriptedModel(["word " * 10_000], piece_characters=5)
    with ExecutionContext(input="x") as run:
        context = FlowContext(services={"models": {"m": model}}, execution=run)
        async with aclosing(run_flow(alone(model="m", stream=True), context, registry())) as everything:
            async for event in everything:
                if isinstance(event, NodeEvent) and event.event_type == "delta":
                    break
        assert run.children[0].termination_reason == TerminationReason.CONTEXT_CANCELED


# limits

PRICES = PriceBook(registered={"scripted": Price(1, 10)}, use_genai_prices=False)


@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_a_node_has_a_budget_of_its_own(type: str) -> None:
    model = ScriptedModel(["x"], usage=Usage(10, 10))
    document = alone(type, model="m", budget={"max_cost_usd": 0.0})
    with ExecutionContext(input="x", prices=PRICES, budget=Budget(max_cost_dollars=1)) as run:
        with pytest.raises(BudgetExceededError, match="'a'"):
            await output_of(document, run=run, services={"models": {"m": model}})
        assert (model.calls, run.usage.cost_dollars) == (0, 0)


@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_a_budget_that_pays_for_less_cuts_the_answer_and_says_so(type: str) -> None:
    model = ScriptedModel(_cut)
    document = alone(type, model="m", budget={"max_cost_usd": 0.001})
    with ExecutionContext(input="x", prices=PRICES) as run:
        with pytest.raises(BudgetExceededError, match=r"of the \$0.001 of 'a': it paid for 9\d of the 4096 tokens"):
            await output_of(document, run=run, services={"models": {"m": model}})
        assert 0 < run.stats.total_cost <= 0.001


def _cut(request: ModelRequest) -> Any:
    from penstock.agents.model import ModelResponse

    return ModelResponse("cut", usage=Usage(10, request.max_output_tokens), finish_reason="length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_an_answer_truncated_at_its_own_limit_is_passed_on_as_partial(type: str, stream: bool) -> None:
    nodes = [node("in", "input"), node("a", type, model="m", stream=stream, max_output_tokens=5), node("out", "output")]
    document = graph(nodes, ["in > a", "a > out"])
    events, result = await events_of(document, "x", services={"models": {"m": ScriptedModel(_cut)}})
    assert result.outputs["output"] == PartialValue("text", "cut", "length")
    assert [one.data["output"] for one in events if (one.node_id, one.event_type) == ("a", "completed")] == [
        PartialValue("text", "cut", "length")
    ]
    _, whole = await events_of(document, "x", services={"models": {"m": ScriptedModel(["whole"])}})
    assert type_of(whole.outputs["output"]) is DataValue


def type_of(value: object) -> Any:
    return value.__class__


async def test_an_agent_that_never_ends_stops_at_its_iterations_or_its_steps() -> None:
    endless = ScriptedModel(lambda request: ToolCall("1", "again", {}))
    services: Json = {"models": {"m": endless}, "tools": {"again": _tool("again", [])}}
    with pytest.raises(Exception, match="not done after 3 iterations"):
        await output_of(alone(model="m", tools=["again"], max_iterations=3), "x", services=services)
    with pytest.raises(BudgetExceededError, match="5 of the 5 steps of 'a' used"):
        await output_of(alone(model="m", tools=["again"], budget={"max_steps": 5}), "x", services=services)


async def test_a_sub_agents_budget_is_its_own_affair_and_the_runs_is_not() -> None:
    helper = ScriptedModel(lambda request: "helped")
    above = ScriptedModel([ToolCall("1", "helper", {"task": "x"}), "went on"])
    nodes = [node("a", "agent", model="above"), node("helper", "agent", model="helper", budget={"max_steps": 0})]
    document = graph(nodes, [], ["helper.tool > a.tools"])
    services = {"models": {"above": above, "helper": helper}}
    assert await output_of(document, "go", services=services) == "went on"
    assert helper.calls == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_a_cancel_reaches_a_model_request(type: str, stream: bool) -> None:
    begun, cancelled = asyncio.Event(), []

    async def stuck(request: ModelRequest) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    model = ScriptedModel(stuck)
    with ExecutionContext(input="x") as run:
        running = asyncio.ensure_future(
            events_of(alone(type, model="m", stream=stream), run=run, services={"models": {"m": model}})
        )
        await begun.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert cancelled == [True]


# models and tools by name


async def test_the_error_for_an_unknown_model_names_it() -> None:
    with pytest.raises(ModelUnknown, match="there is no model 'nope': services\\['models'\\] has big, small, and"):
        await output_of(alone(model="nope"), "x", services={"models": {"small": 1, "big": 2}})
    with pytest.raises(ModelUnknown, match="this one is a str, not a Model"):
        await output_of(alone(model="m"), "x", services={"models": {"m": "no model"}})


async def test_a_graph_cannot_say_at_which_address_a_model_is() -> None:
    name = "openai-compatible:http://127.0.0.1:9/v1:m"
    with pytest.raises(ModelUnknown, match="may not contain the address"):
        await output_of(alone(model=name), "x")
    assert await output_of(alone(model=name), "x", services={"models": {name: ScriptedModel(["offered"])}}) == "offered"


async def test_the_error_for_an_unknown_tool_names_it() -> None:
    with pytest.raises(NotOffered, match="there is no tool 'dig'; there are: none"):
        await output_of(alone(model=script("x"), tools=["dig"]), "x")


async def test_two_tools_of_one_name_are_refused() -> None:
    nodes = [node("a", "agent", model=script("x"), tools=["dig"]), node("t", "tool", tool="dig")]
    with pytest.raises(InvalidValue, match="tools of different names"):
        await output_of(graph(nodes, [], ["t.tool > a.tools"]), services={"tools": {"dig": _tool("dig", [])}})


@pytest.mark.parametrize(
    ("links", "circle"),
    [
        (["b.tool > a.tools", "c.tool > b.tools", "b.tool > c.tools"], "b.tool → c.tool → b.tool"),
        (["a.tool > a.tools"], "a.tool → a.tool"),
        (["s.tools > a.tools", "b.tool > s.tools", "s.tools > b.tools"], "s.tools → b.tool → s.tools"),
        (["b.tool > t.members", "c.tool > b.tools", "b.tool > c.tools"], "b.tool → c.tool → b.tool"),
        (["b.tool > m.each", "b.tool > b.tools"], "b.tool → b.tool"),
    ],
)
def test_agents_that_are_tools_of_each_other_are_a_circle_that_is_named_before_the_run(
    links: list[str], circle: str
) -> None:
    nodes = [node(name, "agent", model=script("x")) for name in ("a", "b", "c")]
    nodes += [node("s", "toolset"), node("t", "team", model=script("x")), node("i", "input"), node("m", "map")]
    used = {part.partition(".")[0] for one in links for part in one.split(" > ")} | {"i"}
    flow = ["i > m"] if "m" in used else []
    ((path, problem),) = problems(graph([one for one in nodes if one["id"] in used], flow, links))
    assert (path, problem) == ("$.edges", f"the links need each other: {circle}")


async def test_a_team_may_have_the_agent_that_asks_it_as_a_member() -> None:
    asks = script(call("t", task="ask yourself"), "done")
    team = node("t", "team", mode="coordinate", model=script("no member is needed"))
    nodes = [node("in", "input"), node("a", "agent", model=asks), team]
    assert await output_of(graph(nodes, ["in > a"], ["t.tool > a.tools", "a.tool > t.members"]), "x") == "done"


async def test_a_node_id_that_no_model_would_take_becomes_a_name_it_takes() -> None:
    above = script(call("the_helper", task="x"), "done")
    nodes = [node("a", "agent", model=above), node("the helper!", "agent", model=script("ok"))]
    assert await output_of(graph(nodes, [], ["the helper!.tool > a.tools"]), "x") == "done"


def test_wrong_data_is_found_before_the_run() -> None:
    wrong = graph(
        [
            node("a", "agent", model=3, max_iterations=0, budget={"max_cost_usd": "1"}, tools="dig"),
            node("b", "agent"),
            node("c", "agent", model=script({"tool": "x"}), temperature=True),
            node("d", "llm-completion", model="m", tools=[], stream="yes"),
        ]
    )
    assert sorted({path for path, _ in problems(wrong)}) == [
        "$.nodes[0].data.budget.max_cost_usd",
        "$.nodes[0].data.max_iterations",
        "$.nodes[0].data.model",
        "$.nodes[0].data.tools",
        "$.nodes[1].data.model",
        "$.nodes[2].data.model.script[0].arguments",
        "$.nodes[2].data.temperature",
        "$.nodes[3].data.stream",
        "$.nodes[3].data.tools",
    ]


def test_wrong_wiring_is_found_before_the_run() -> None:
    nodes = [node("a", "agent", model="m"), node("b", "agent", model="m"), node("t", "text", text="x")]
    wrong = graph(nodes, ["a.tool > b", "t > a.tools", "a > b.prompt"], ["t > b.tools", "a > b.tools"])
    assert [detail for _, detail in problems(wrong)] == [
        "handle 'tool' of 'a' is for link, the edge is a flow",
        "handle 'tools' of 'a' is for link, the edge is a flow",
        "'b' has no handle 'prompt'; it has: input, tools",
        "handle 'output' of 't' is for flow, the edge is a link",
        "handle 'output' of 'a' is for flow, the edge is a link",
        "'t' cannot be linked to: its executor has no materialize()",
    ]


def test_the_data_of_every_type_has_a_json_schema() -> None:
    from penstock.nodes import NODE_TYPES, json_schemas

    schemas = json_schemas()
    assert schemas.keys() == NODE_TYPES.keys()
    for schema in schemas.values():
        assert (schema["type"], schema["additionalProperties"]) == ("object", False)
        json.dumps(schema)
