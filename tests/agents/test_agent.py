"""An agent: by itself, in a graph, as a tool of another; under its own budget and every one above."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    InvalidValue,
    Node,
    Usage,
)
from penstock.agents.agent import Agent
from penstock.agents.loop import Approval, HookAbort
from penstock.agents.messages import Message, TextDelta, ToolCall, ToolCallDelta
from penstock.agents.model import ModelRequest, ModelResponse
from penstock.agents.react import ReActLoop
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool, tool
from penstock.testing import explore
from tests.agents.scripts import PRICES, priced, use


@tool
async def find(q: str) -> str:
    """Look something up."""
    return f"{q}: 60 m"


async def test_an_agent_runs_by_itself() -> None:
    result = await Agent(ScriptedModel([use("find", q="dam"), "60 m"]), "Be brief.", [find]).run("How high?")
    assert (result.output, result.text, result.termination_reason) == ("60 m", "60 m", "success")
    assert [message.role for message in result.messages] == ["user", "assistant", "tool", "assistant"]
    assert result.usage.api_calls == 2
    assert result.context.termination_reason == "success"


async def test_a_conversation_goes_on() -> None:
    agent = Agent(ScriptedModel(lambda request: f"{len(request.messages)} messages"))
    first = await agent.run("one")
    again = await agent.run("two", history=first.messages)
    assert (first.output, again.output) == ("1 messages", "3 messages")


async def test_an_output_has_the_requested_type() -> None:
    @dataclass
    class Dam:
        metres: int

    result = await Agent(ScriptedModel(['{"metres": 60}']), output=Dam).run("How high?")
    assert result.output == Dam(60)


async def test_what_kept_an_agent_from_an_answer_is_raised_by_its_output() -> None:
    agent = Agent(ScriptedModel(lambda request: use("find", q="dam")), tools=[find], max_iterations=2)
    result = await agent.run("How high?")
    assert result.termination_reason == "max_iterations"
    with pytest.raises(Exception, match="not done after 2 iterations"):
        _ = result.output


@pytest.mark.requirement("T-1")
async def test_one_context_goes_through_model_tools_formats_hooks_and_loop() -> None:
    seen: dict[str, ExecutionContext] = {}

    class Format:
        instructions = "shout"

        def parse(self, text: str, context: ExecutionContext | None = None) -> str:
            assert context is not None
            seen["format"] = context
            return text.upper()

    class Watch:
        def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> None:
            seen["hook"] = context

    @tool
    async def peek(ctx: ExecutionContext) -> str:
        seen["tool"] = ctx
        return "ok"

    agent = Agent(ScriptedModel([use("peek"), "done"]), tools=[peek], output=Format(), hooks=[Watch()], name="watcher")
    with priced() as run:
        result = await agent.run("go", run)
    assert result.output == "DONE"
    assert set(map(id, seen.values())) == {id(result.context)}
    assert result.context.parent is run


async def test_an_agent_is_a_child_of_the_context_it_runs_in() -> None:
    with priced() as run:
        result = await Agent(ScriptedModel(["hm"], usage=Usage(100, 10)), name="thinker").run("go", run)
        await Agent(ScriptedModel(["hm"], usage=Usage(100, 10)), name="thinker").run("go", run)
    assert [child.name for child in run.children] == ["thinker", "thinker"]
    assert result.cost_usd == pytest.approx(200e-6)
    assert run.stats.cost_by_child == {"thinker": pytest.approx(200e-6), "thinker#2": pytest.approx(200e-6)}


async def test_the_budget_of_an_agent_and_that_of_its_run_both_hold() -> None:
    def greedy(request: ModelRequest) -> Any:
        return ModelResponse("", (use("find", q="x"),), Usage(1_000, 100), "tool_calls")

    agent = Agent(ScriptedModel(greedy), tools=[find], budget=Budget(max_cost_dollars=0.05), name="greedy")
    for outer, owner in ((1.0, "greedy"), (0.04, "main")):
        with priced(Budget(max_cost_dollars=outer)) as run:
            result = await agent.run("go", run)
            assert result.termination_reason == "limit_exceeded"
            assert isinstance(result.error, BudgetExceededError)
            assert result.error.owner == owner
            assert result.context.termination_reason == "limit_exceeded"
            assert run.balance.spent_usd <= min(outer, 0.05)


@pytest.mark.requirement("X-1")
def test_sixteen_agents_at_once_never_pass_the_ceiling_of_their_run() -> None:
    async def main(seed: int) -> None:
        ceiling = 50_000_000
        run = priced(Budget(max_cost_dollars=0.05))

        async def greedy(request: ModelRequest) -> Any:
            await asyncio.sleep(0.01)
            assert run.ledger.root.committed <= ceiling
            usage = Usage(20, request.max_output_tokens)
            return ModelResponse("", (use("find", q="x"),), usage, "tool_calls")

        agents = [Agent(ScriptedModel(greedy), tools=[find], budget=Budget(max_cost_dollars=0.03)) for _ in range(16)]
        with run:
            results = await asyncio.gather(*(agent.run("go", run) for agent in agents))
        assert {result.termination_reason for result in results} == {"limit_exceeded"}
        assert run.balance.spent_nanos <= ceiling
        assert run.balance.held_nanos == 0

    explore(main, schedules=15)


async def test_a_cancel_is_raised() -> None:
    run = priced()
    waiting = asyncio.create_task(Agent(ScriptedModel(["late"], latency_s=60)).run("go", run))
    await asyncio.sleep(0)
    run.abort("enough")
    with pytest.raises(CancelledError, match="enough"):
        await waiting
    assert run.children[0].termination_reason == "context_canceled"


async def test_the_cancel_of_a_task_leaves_nothing_open() -> None:
    run = priced()
    waiting = asyncio.create_task(Agent(ScriptedModel(["late"], latency_s=60)).run("go", run))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert run.children[0].termination_reason == "context_canceled"
    assert [call.name for call in run._run.graph.open_calls()] == ["main"]


@pytest.mark.requirement("T-1")
async def test_an_agent_is_a_node_of_a_graph() -> None:
    agent = Agent(ScriptedModel(lambda request: f"about {request.messages[0].text}"), name="writer")
    assert isinstance(agent, Node)
    graph = Graph("survey")
    graph.add_step(FunctionNode("topic", lambda ctx: {"topic": "dams"}), "topic")
    graph.add_step(agent, "write", depends_on=["topic"])
    run = priced()
    results = await graph.execute(run)
    assert results["write"] == 'about {"topic": "dams"}'
    assert run.stats.model_call_count == 1


async def test_a_graph_stops_at_the_limit_of_its_agent() -> None:
    agent = Agent(ScriptedModel(lambda request: use("find", q="x")), tools=[find], name="writer")
    graph = Graph("survey").add_step(agent, "write")
    run = ExecutionContext(ExecutionConfig(max_cost_usd=1, max_steps=6, max_retries_total=1), prices=PRICES)
    with pytest.raises(BudgetExceededError, match="steps"):
        await graph.execute(run.with_input("go"))


async def test_an_agent_is_a_tool_of_another_with_a_budget_of_its_own() -> None:
    inner = Agent(ScriptedModel([use("find", q="dam"), "60 m"]), tools=[find], name="researcher")
    outer = Agent(ScriptedModel([use("researcher", task="How high?"), "It is 60 m."]), tools=[inner])
    with priced() as run:
        result = await outer.run("How high?", run)
    assert result.output == "It is 60 m."
    assert result.messages[2].text == "60 m"
    (child,) = result.context.children
    assert child._source.path == "main/agent/researcher"
    assert [event.name for event in run.history() if event.kind == "call_ended" and event.call_kind == "tool"] == [  # type: ignore[attr-defined]
        "find",
        "researcher",
    ]


async def test_the_limit_of_an_agent_used_as_a_tool_is_returned_to_the_calling_agent() -> None:
    inner = Agent(ScriptedModel(lambda request: use("find", q="x")), tools=[find], budget=Budget(max_steps=3))
    helper = inner.as_tool("helper", "Helps.")
    outer = Agent(ScriptedModel([use("helper", task="go"), "It gave up."]), tools=[helper], name="outer")
    with priced(Budget(max_steps=100)) as run:
        result = await outer.run("go", run)
    assert result.output == "It gave up."
    assert "of the 3 steps of 'agent' used" in result.messages[2].text


async def test_an_agent_tool_that_is_not_done_is_returned_to_the_calling_agent() -> None:
    inner = Agent(ScriptedModel(lambda request: use("find", q="x")), tools=[find], max_iterations=2, name="inner")
    outer = Agent(ScriptedModel([use("inner", task="go"), "It gave up."]), tools=[inner])
    result = await outer.run("go")
    assert result.messages[2].text.startswith("MaxIterationsReached: not done after 2")


async def test_an_agent_tool_that_its_own_hook_ends_is_returned_to_the_calling_agent() -> None:
    class Never:
        def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> None:
            raise HookAbort("not today")

    inner = Agent(ScriptedModel([]), hooks=[Never()], name="inner")
    outer = Agent(ScriptedModel([use("inner", task="go"), "It gave up."]), tools=[inner])
    result = await outer.run("go")
    assert (result.output, result.messages[2].text) == ("It gave up.", "HookAbort: not today")


async def test_the_limit_of_the_run_stops_both_agents() -> None:
    inner = Agent(ScriptedModel(lambda request: use("find", q="x")), tools=[find], name="inner")
    outer = Agent(ScriptedModel(lambda request: use("inner", task="go")), tools=[inner], name="outer")
    with priced(Budget(max_steps=5)) as run:
        result = await outer.run("go", run)
    assert result.termination_reason == "limit_exceeded"
    assert result.context.children[0].termination_reason == "limit_exceeded"


@pytest.mark.requirement("T-10")
async def test_deltas_of_nested_agents_come_with_their_path() -> None:
    deltas: list[Any] = []
    inner = Agent(ScriptedModel(["60 m"]), name="inner")
    call = use("inner", task="go")
    outer = Agent(ScriptedModel([call, "high"]), tools=[inner], name="outer", on_delta=deltas.append)
    await outer.run("go")
    assert deltas == [
        ToolCallDelta(call, "outer"),
        TextDelta("60 m", "outer/inner"),
        TextDelta("high", "outer"),
    ]


async def test_who_approves_for_the_agent_approves_for_those_below_it() -> None:
    approvals: list[str] = []

    async def approve(context: ExecutionContext, call: ToolCall) -> Approval:
        approvals.append(f"{context._source.path} {call.name}")
        return Approval.allow()

    inner = Agent(ScriptedModel([use("find", q="x"), "ok"]), tools=[Tool(find.fn, needs_approval=True)], name="inner")
    outer = Agent(ScriptedModel([use("inner", task="go"), "ok"]), tools=[inner], name="outer", approve=approve)
    await outer.run("go")
    assert approvals == ["outer/inner find"]


async def test_an_agent_may_have_another_loop() -> None:
    model = ScriptedModel(["Final Answer: 60 m"])
    assert (await Agent(model, loop=ReActLoop(model)).run("How high?")).output == "60 m"


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidValue, match="model"):
        Agent("gpt")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="name"):
        Agent(ScriptedModel([]), name="two words").as_tool()


async def test_messages_of_an_answer_that_failed_are_kept() -> None:
    result = await Agent(ScriptedModel([use("find", q="x"), ValueError("no")]), tools=[find]).run("go")
    assert [message.role for message in result.messages] == ["user", "assistant", "tool"]
    assert isinstance(result.error, ValueError)
    assert Message.user("go") == result.messages[0]


def test_an_agent_takes_a_model_by_name() -> None:
    agent = Agent("openai-compatible:http://127.0.0.1:9/v1:fake-1")
    assert (agent.model.name, type(agent.model).__name__) == ("fake-1", "CompatibleModel")


@pytest.mark.parametrize("name", ["gpt-4o", "unknown:gpt-4o", "openai:", ""])
def test_a_name_that_no_provider_has_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="model"):
        Agent(name)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a Model, such as ScriptedModel"):
        Agent(4)  # type: ignore[arg-type]


def test_an_agent_runs_where_there_is_no_event_loop() -> None:
    with ExecutionContext(prices=PRICES) as run:
        assert Agent(ScriptedModel(["by itself"])).run_sync("hello").output == "by itself"
        assert Agent(ScriptedModel(["below"])).run_sync("hello", run).context.parent is run


async def test_on_an_event_loop_run_sync_names_its_async_twin() -> None:
    with pytest.raises(InvalidValue, match=r"await agent\.run"):
        Agent(ScriptedModel(["never"])).run_sync("hello")
