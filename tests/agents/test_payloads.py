"""What agents' models and tools were given and returned, in the events of a run that records it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock import (
    Agent,
    Budget,
    ExecutionContext,
    InvalidValue,
    ModelCallTrace,
    RunSettings,
    ToolCallTrace,
    contain,
    tool,
)
from penstock.agents import ScriptedModel
from penstock.agents.messages import Message
from penstock.agents.tools import Tools
from penstock.export import trace_data, trace_html, trace_tree
from penstock.runtime.durable.journal import Journal
from penstock.tracing import payloads
from tests.agents.scripts import use
from tests.runtime.durable.journalled import JsonJournals

pytestmark = pytest.mark.requirement("T-12")

KEY = "sk-proj-Q2hhcmxlcw8fJzAxMjM0NTY3ODk"


def recording(mode: Any = "redacted", **options: Any) -> ExecutionContext:
    return ExecutionContext(settings=RunSettings(record_payloads=mode, **options))


def tool_calls(run: ExecutionContext) -> list[ToolCallTrace]:
    return [event for event in run.history() if isinstance(event, ToolCallTrace)]


def model_calls(run: ExecutionContext) -> list[ModelCallTrace]:
    return [event for event in run.history() if isinstance(event, ModelCallTrace)]


@tool
def search(query: str, api_key: str = "") -> dict[str, Any]:
    """Search the web."""
    return {"hits": [query], "headers": {"Authorization": f"Bearer {api_key}"}}


@tool
async def slow_search(query: str) -> list[str]:
    """Search the web slowly."""
    await asyncio.sleep(0)
    return [query]


@tool
def broken(query: str) -> str:
    """Fail."""
    raise ValueError("out of order")


async def test_nothing_is_recorded_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a payload was read")

    monkeypatch.setattr(payloads.Payloads, "capture", refuse)
    with ExecutionContext() as run:
        await Agent(ScriptedModel([use("search", query="dams"), "done"]), tools=[search]).run("go", run)
        run.record_event(ToolCallTrace(tool_name="own", input={"a": 1}, output=2))
    assert RunSettings().record_payloads == "off"
    assert all((event.input, event.output) == (None, None) for event in [*tool_calls(run), *model_calls(run)])


async def test_arguments_results_and_messages_are_recorded() -> None:
    with recording("full") as run:
        model = ScriptedModel([use("search", query="dams", api_key=KEY), "done"])
        await Agent(model, "Be brief.", tools=[search]).run("go", run)
    (searched,) = tool_calls(run)
    assert (searched.tool_name, searched.input) == ("search", {"query": "dams", "api_key": KEY})
    assert searched.output == {"hits": ["dams"], "headers": {"Authorization": f"Bearer {KEY}"}}
    first, second = model_calls(run)
    assert first.input == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
    call = {"id": "c1", "name": "search", "arguments": {"query": "dams", "api_key": KEY}}
    assert first.output == {"role": "assistant", "content": "", "tool_calls": [call], "finish_reason": "tool_calls"}
    assert [message["role"] for message in second.input] == ["system", "user", "assistant", "tool"]
    assert second.output["content"] == "done"


async def test_redacted_run_records_no_secret_anywhere() -> None:
    with recording() as run:
        model = ScriptedModel([use("search", query="dams", api_key=KEY), f"found {KEY}"])
        await Agent(model, tools=[search]).run(f"my key is {KEY}", run)
    recorded = json.dumps([(event.input, event.output) for event in [*tool_calls(run), *model_calls(run)]])
    assert KEY[8:] not in recorded
    assert tool_calls(run)[0].input == {"query": "dams", "api_key": "[redacted]"}


async def test_async_tool_is_recorded() -> None:
    with recording() as run:
        await Tools([slow_search]).execute(run, use("slow_search", query="dams"))
    (searched,) = tool_calls(run)
    assert (searched.input, searched.output) == ({"query": "dams"}, ["dams"])


async def test_tool_that_raises_is_recorded_with_its_arguments() -> None:
    with recording() as run:
        await Tools([broken]).execute(run, use("broken", query="dams"))
    (failed,) = tool_calls(run)
    assert (failed.status, failed.error) == ("fail", "ValueError")
    assert (failed.input, failed.output) == ({"query": "dams"}, None)


async def test_call_refused_before_it_ran_is_recorded_with_its_arguments() -> None:
    with recording() as run:
        await Tools([search]).execute(run, use("search", wrong="dams", password="hunter2hunter2"))
    (refused,) = tool_calls(run)
    assert (refused.tool_name, refused.error) == ("search", "InvalidArguments")
    assert refused.input == {"wrong": "dams", "password": "[redacted]"}


async def test_sub_agents_and_tools_with_a_budget_record_as_their_run_does() -> None:
    inner = Agent(ScriptedModel([use("paid", query="dams"), "inner"]), tools=[paid], name="inner")
    with recording() as run:
        await Agent(ScriptedModel([use("inner", task="look"), "outer"]), tools=[inner]).run("go", run)
    assert {event.source: event.output for event in tool_calls(run)} == {
        "main/agent/inner/tool:paid": "dams",
        "main/agent": "inner",
    }
    assert len(model_calls(run)) == 4
    assert all(event.input and event.output for event in model_calls(run))


@tool(budget=Budget(max_steps=3))
async def paid(query: str) -> str:
    """A tool with a budget of its own."""
    return query


async def test_value_that_cannot_be_serialized_does_not_reach_the_call() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    hostile = Hostile()
    with recording("full") as run:
        assert run.tool(lambda given: given, hostile, name="echo") is hostile
        assert await run.allm(lambda given: hostile, 1, name="ask") is hostile
    assert "RuntimeError" in tool_calls(run)[0].input
    assert "RuntimeError" in tool_calls(run)[0].output
    assert model_calls(run)[0].input == 1


def test_arguments_are_recorded_as_they_were_before_the_call() -> None:
    def empty(rows: list[int], more: int) -> None:
        rows.clear()

    with recording("full") as run:
        run.tool(empty, [1, 2], 3, name="empty")
    assert tool_calls(run)[0].input == [[1, 2], 3]


async def test_every_attempt_of_a_retried_call_has_its_input() -> None:
    answers = iter([ValueError("first"), "second"])

    def flaky(query: str) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with recording() as run:
        run.tool(flaky, "dams", name="flaky", retries=1)
    assert [(event.input, event.output) for event in tool_calls(run)] == [("dams", None), ("dams", "second")]


def test_payloads_are_bounded_by_the_run_setting() -> None:
    with recording("full", max_payload_bytes=256) as run:
        run.tool(lambda text: text, "x" * 1_000, name="echo")
    (echoed,) = tool_calls(run)
    assert echoed.input == echoed.output == {"truncated": True, "original_bytes": 1_002, "content": "x" * 256}


def test_payloads_of_folded_calls_are_dropped() -> None:
    with recording("full", max_kept_calls=8) as run:
        for number in range(50):
            run.tool(lambda given: given, number, name="echo")
        kept = [call for call in run.graph.calls()[1] if call.payload is not None]
        assert 0 < len(kept) <= 8
        assert all(event.input is None for event in tool_calls(run)[:-8])


@pytest.mark.parametrize("mode", ["on", True, None, "FULL"])
def test_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(InvalidValue, match="'off', 'redacted' or 'full'"):
        RunSettings(record_payloads=mode)


@pytest.mark.parametrize("size", [0, 255, 1_048_577, 1.5, True, "16384"])
def test_size_out_of_bounds_is_refused(size: Any) -> None:
    with pytest.raises(InvalidValue, match="a whole number of bytes from 256 to 1048576"):
        RunSettings(max_payload_bytes=size)


def test_contain_takes_the_setting() -> None:
    with contain(record_payloads="full") as run:
        run.tool(len, "four", name="count")
    assert (tool_calls(run)[0].input, tool_calls(run)[0].output) == ("four", 4)


def test_own_trace_of_a_tool_call_carries_its_payload() -> None:
    event = ToolCallTrace(tool_name="search", input={"q": "dams", "token": KEY}, output=["hit"], duration_ms=5.0)
    assert (event.name, event.tool_name, event.call_kind) == ("search", "search", "tool")
    with recording() as run:
        run.record_event(event)
        run.record_event(ModelCallTrace(name="ask", model="claude-3", input=[{"role": "user", "content": "go"}]))
    (recorded,) = tool_calls(run)
    assert (recorded.input, recorded.output) == ({"q": "dams", "token": "[redacted]"}, ["hit"])
    assert model_calls(run)[0].input == [{"role": "user", "content": "go"}]


async def test_resumed_run_records_the_payloads_of_replayed_calls() -> None:
    store = JsonJournals()

    async def once() -> ExecutionContext:
        agent = Agent(ScriptedModel([use("search", query="dams"), "done"]), tools=[search])
        journal = await Journal.open(store, "r")
        with ExecutionContext(journal=journal, settings=RunSettings(record_payloads="full")) as run:
            await agent.run("go", run)
        return run

    first, again = await once(), await once()
    assert "replayed" in json.dumps(trace_data(again)["calls"])
    assert [event.output for event in tool_calls(again)] == [event.output for event in tool_calls(first)]
    assert [event.input for event in model_calls(again)] == [event.input for event in model_calls(first)]
    assert [event.input for event in tool_calls(again)] == [event.input for event in tool_calls(first)]
    assert [event.output for event in model_calls(again)] == [event.output for event in model_calls(first)]


async def test_exports_carry_recorded_payloads_without_secrets() -> None:
    with recording("full") as run:
        model = ScriptedModel([use("search", query="d" * 3_000, api_key=KEY), "done"])
        await Agent(model, tools=[search]).run("go", run)
    ended = [event for event in trace_data(run)["events"] if event["kind"] == "call_ended"]
    (searched,) = [event for event in ended if event["call_kind"] == "tool"]
    assert searched["input"] == {"query": "d" * 3_000, "api_key": "[redacted]"}
    assert searched["output"]["headers"] == {"Authorization": "[redacted]"}
    assert 'input: [{"role": "user", "content": "go"}]' in trace_tree(run)
    assert "dddd" in trace_html(run)
    for exported in (trace_tree(run), trace_html(run), json.dumps(trace_data(run))):
        assert KEY[8:] not in exported


def test_message_of_a_failed_model_call_is_recorded() -> None:
    model = ScriptedModel([ValueError("down")])
    with recording() as run, pytest.raises(ValueError):
        asyncio.run(model.generate(run, [Message.user("go")]))
    (failed,) = model_calls(run)
    assert (failed.input, failed.output, failed.status) == ([{"role": "user", "content": "go"}], None, "fail")
