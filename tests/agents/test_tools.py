"""Tools run contained; failures are returned to the model, and what stops the agent is raised."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ChainMetadata,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    InvalidValue,
    Reported,
    ShieldPipeline,
    ToolCallTrace,
    TraceEvent,
    Usage,
    current_call,
)
from penstock.agents.loop import Approval, Execution, running_execution
from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.tools import (
    MAX_CALLS_PER_TURN,
    MAX_RESULT_CHARACTERS,
    Tool,
    ToolChain,
    Tools,
    execute_all,
    render_value,
    tool,
)
from penstock.events import DivergenceDetector
from tests.agents.scripts import priced, use


@tool
async def find(q: str, limit: int = 3, kind: Literal["dam", "weir"] = "dam") -> str:
    """Look something up."""
    return f"{limit} {kind}s for {q}"


def tool_calls(context: ExecutionContext) -> list[ToolCallTrace]:
    return [event for event in context.history() if isinstance(event, ToolCallTrace)]


def test_a_signature_becomes_a_schema_without_the_context() -> None:
    async def dig(ctx: ExecutionContext, place: str, depths: list[float], *, deep: bool = False) -> None:
        """Dig."""

    spec = Tool(dig).spec
    assert (spec.name, spec.description) == ("dig", "Dig.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "depths": {"type": "array", "items": {"type": "number"}},
            "deep": {"type": "boolean", "default": False},
        },
        "required": ["place", "depths"],
        "additionalProperties": False,
    }


def test_parameters_may_have_names_that_mean_something_to_others() -> None:
    async def odd(schema: str, model_config: int, copy: bool, _hidden: str = "x") -> str:
        return f"{schema} {model_config} {copy} {_hidden}"

    assert set(Tool(odd).spec.parameters["properties"]) == {"schema", "model_config", "copy", "_hidden"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda: None, "name of a tool"),
        (3, "fn"),
        (Tool, "name"),
    ],
)
def test_what_is_no_tool_is_refused(given: Any, named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        Tool(given, name="no good") if given is Tool else Tool(given)


def test_a_function_that_takes_any_number_of_arguments_is_refused() -> None:
    async def many(*things: str) -> None: ...

    with pytest.raises(InvalidValue, match="things"):
        Tool(many)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidValue, match="different names"):
        Tools([find, find])


@pytest.mark.requirement("T-8")
async def test_a_tool_call_traces_itself() -> None:
    run = priced()
    assert await Tools([find]).execute(run, use("find", q="dams")) == ToolResult(
        "c1", "find", "3 dams for dams", value="3 dams for dams"
    )
    assert [(call.name, call.status) for call in tool_calls(run)] == [("find", "success")]
    assert run.stats.tool_calls_by_name == {"find": 1}
    assert isinstance(Tools([find]), ToolChain)


async def test_arguments_come_in_the_types_of_the_signature() -> None:
    result = await Tools([find]).execute(priced(), use("find", q="dams", limit="7"))
    assert result.content == "7 dams for dams"
    assert (await Tools([find]).execute(priced(), ToolCall("1", "find", '{"q": "x"}'))).content == "3 dams for x"


@pytest.mark.requirement("T-8")
@pytest.mark.parametrize(
    ("call", "message", "error"),
    [
        (use("find"), "q: Field required", "InvalidArguments"),
        (use("find", q="x", limit="many"), "limit: ", "InvalidArguments"),
        (use("find", q="x", kind="lake"), "kind: ", "InvalidArguments"),
        (use("find", q="x", colour="red"), "colour: ", "InvalidArguments"),
        (ToolCall("1", "find", '{"q": '), "not JSON", "InvalidArguments"),
        (ToolCall("1", "find", "[1]"), "a JSON object", "InvalidArguments"),
        (ToolCall("1", "find", "[" * 100_000), "not JSON", "InvalidArguments"),
        (use("lose"), "there is no tool 'lose'; there are: find", "UnknownTool"),
    ],
)
async def test_an_invalid_call_is_returned_to_the_model_and_recorded_as_failed(
    call: ToolCall, message: str, error: str
) -> None:
    run = priced()
    result = await Tools([find]).execute(run, call)
    assert result.is_error
    assert message in result.content
    (failed,) = tool_calls(run)
    assert (failed.status, failed.error) == ("fail", error)
    assert run.balance.retries == 0


async def test_a_name_that_the_model_invents_is_shortened() -> None:
    run = priced()
    await Tools([]).execute(run, use("x" * 10_000))
    assert len(tool_calls(run)[0].name) <= 64


@pytest.mark.requirement("T-8")
async def test_a_tool_that_raises_is_a_tool_error_and_is_traced_with_its_cost() -> None:
    class Broke(Exception):
        cost_usd = 0.25

    @tool
    async def pump() -> None:
        raise Broke("no water")

    run = priced()
    result = await Tools([pump]).execute(run, use("pump"))
    assert (result.content, result.is_error) == ("Broke: no water", True)
    (call,) = tool_calls(run)
    assert (call.status, call.error, call.cost) == ("fail", "Broke", 0.25)


async def test_a_tool_that_fails_without_retries_left_is_a_tool_error() -> None:
    @tool
    async def pump() -> None:
        raise ValueError("no water")

    run = ExecutionContext(ExecutionConfig(max_cost_usd=1, max_steps=10, max_retries_total=1))
    chain = Tools([pump])
    assert (await chain.execute(run, use("pump"))).content == "ValueError: no water"
    with pytest.raises(BudgetExceededError, match="retries"):
        await chain.execute(run, use("pump"))


async def test_a_sync_tool_runs_on_a_thread() -> None:
    here = threading.get_ident()

    @tool
    def where(ctx: ExecutionContext) -> bool:
        assert ctx.tool(lambda: 1, name="inner") == 1
        return threading.get_ident() != here

    run = priced()
    assert (await Tools([where]).execute(run, use("where"))).content == "true"
    assert [call.name for call in tool_calls(run)] == ["inner", "where"]


async def test_a_tool_knows_its_context_and_its_call() -> None:
    @tool
    async def nest(ctx: ExecutionContext) -> str:
        call = current_call()
        assert call is not None
        with ctx.spawn_child("inside") as child:
            return f"{call.record.name} in {child._source.path}"

    assert (await Tools([nest]).execute(priced(), use("nest"))).content == "nest in main/inside"


@pytest.mark.parametrize("is_sync", [False, True])
async def test_a_tool_that_takes_too_long_is_a_tool_error(is_sync: bool) -> None:
    release = threading.Event()

    def wait_sync() -> None:
        release.wait(30)

    async def wait() -> None:
        await asyncio.sleep(3_600)

    slow = Tool(wait_sync if is_sync else wait, name="slow", timeout_s=0.01)
    run = priced()
    result = await Tools([slow]).execute(run, use("slow"))
    release.set()
    assert result.is_error
    assert "0.01 s of 'slow'" in result.content
    assert tool_calls(run)[0].status == "halt"
    assert (await Tools([find]).execute(run, use("find", q="x"))).content == "3 dams for x"


async def test_the_late_bill_of_a_thread_that_was_left_behind_is_settled() -> None:
    release, done, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    def watch(events: Sequence[TraceEvent]) -> None:
        if any(event.kind == "call_settled" for event in events):
            loop.call_soon_threadsafe(done.set)

    def slow() -> Reported[str]:
        release.wait(30)
        return Reported.of("late", cost_usd=0.5)

    run = priced()
    result = await Tools([Tool(slow, timeout_s=0.01, cost_usd=0.1)]).execute(run, use("slow"))
    assert result.is_error
    assert run.balance.unresolved_usd == 0.1
    run.observe(watch)
    release.set()
    await done.wait()
    assert (run.balance.spent_usd, run.balance.unresolved_usd) == (0.5, 0)
    run.end()


async def test_a_cancel_frees_the_agent_from_a_sync_tool() -> None:
    release, started, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

    @tool
    def slow() -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait(30)

    run = priced()
    waiting = asyncio.create_task(Tools([slow]).execute(run, use("slow")))
    await started.wait()
    run.abort("enough")
    with pytest.raises(CancelledError, match="enough"):
        await waiting
    release.set()
    assert tool_calls(run)[0].abandoned


async def test_a_tool_may_be_cancelled_with_its_task() -> None:
    @tool
    async def slow() -> None:
        await asyncio.sleep(3_600)

    run = priced()
    waiting = asyncio.create_task(Tools([slow]).execute(run, use("slow")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tool_calls(run)[0].status == "halt"


def spender(budget: Budget | None, times: int = 5) -> Tool:
    async def spend(ctx: ExecutionContext) -> str:
        for _ in range(times):
            await ctx.atool(lambda: None, name="pay", cost_hint_usd=0.1)
        return "spent"

    return Tool(spend, budget=budget)


async def test_the_budget_of_a_tool_is_its_own_affair() -> None:
    run = priced(Budget(max_cost_dollars=10))
    result = await Tools([spender(Budget(max_cost_dollars=0.25))]).execute(run, use("spend"))
    assert result.is_error
    assert "of the $0.25 of 'tool:spend'" in result.content
    assert run.balance.spent_usd == pytest.approx(0.2)
    assert run.stop is None
    (child,) = run.children
    assert child.termination_reason == "limit_exceeded"


@pytest.mark.parametrize("budget", [None, Budget(max_cost_dollars=1)])
async def test_the_budget_of_the_agent_stops_the_agent(budget: Budget | None) -> None:
    run = priced(Budget(max_cost_dollars=0.25))
    with pytest.raises(BudgetExceededError) as stopped:
        await Tools([spender(budget)]).execute(run, use("spend"))
    assert stopped.value.owner == "main"


async def test_the_time_limit_of_the_caller_stops_the_agent() -> None:
    @tool
    async def slow() -> None:
        await asyncio.sleep(3_600)

    run = priced()
    step = run._under(run.cancellation.child("step", deadline_s=0.01))
    with pytest.raises(Halted, match="'step'"):
        await Tools([slow]).execute(step, use("slow"))


async def test_a_limit_inside_a_tool_is_a_tool_error() -> None:
    @tool
    async def elsewhere() -> None:
        with ExecutionContext(ExecutionConfig(max_cost_usd=1, max_steps=1, max_retries_total=1)) as other:
            for _ in range(2):
                await other.atool(lambda: None)

    result = await Tools([elsewhere]).execute(priced(), use("elsewhere"))
    assert result.is_error
    assert "steps" in result.content


async def test_what_a_tool_costs_is_held_before_it_runs() -> None:
    ran = []
    costly = Tool(lambda: ran.append(1), name="costly", cost_usd=2)
    with pytest.raises(BudgetExceededError):
        await Tools([costly]).execute(priced(Budget(max_cost_dollars=1)), use("costly"))
    assert ran == []
    run = priced(Budget(max_cost_dollars=3))
    await Tools([costly]).execute(run, use("costly"))
    assert run.balance.spent_usd == 2


async def test_a_tool_that_a_shield_denies_is_a_tool_error() -> None:
    class NoFind:
        def before_tool_call(self, ctx: Any) -> Decision:
            return Decision.HALT

    run = ExecutionContext(
        ExecutionConfig(max_cost_usd=1, max_steps=9, max_retries_total=1),
        ShieldPipeline(tool_dispatch=NoFind()),
        ChainMetadata(request_id="r", chain_id="c"),
    )
    result = await Tools([find]).execute(run, use("find", q="x"))
    assert result.is_error
    assert result.content.startswith("stopped: ")


async def test_the_same_call_over_and_over_is_noticed() -> None:
    run = ExecutionContext(divergence=DivergenceDetector(repeats=3, halts=True))
    chain = Tools([find])
    await chain.execute(run, use("find", q="x"))
    await chain.execute(run, use("find", q="y"))
    await chain.execute(run, use("find", q="x"))
    with pytest.raises((Halted, CancelledError), match="3 times"):
        await chain.execute(run, use("find", q="x"))


async def test_a_tool_that_needs_approval_is_denied_without_an_approver() -> None:
    ran = []
    guarded = Tool(lambda: ran.append(1), name="guarded", needs_approval=True)
    result = await Tools([guarded]).execute(priced(), use("guarded"))
    assert (result.is_error, ran) == (True, [])
    assert "no approver" in result.content


@pytest.mark.parametrize(
    ("approval", "content"),
    [
        (Approval.allow(), "3 dams for x"),
        (Approval.deny("too wet"), "not run: too wet"),
        (Approval.edit({"q": "y", "limit": 1}), "1 dams for y"),
        (Approval.edit({"limit": 1}), "the arguments of find are invalid:\n- q: Field required"),
    ],
)
async def test_approval_allows_denies_or_edits(approval: Approval, content: str) -> None:
    async def approve(context: ExecutionContext, call: ToolCall) -> Approval:
        assert call.arguments == {"q": "x"}
        return approval

    guarded = Tool(find.fn, needs_approval=True)
    outside = running_execution.set(Execution(approve=approve))
    result = await Tools([guarded]).execute(priced(), use("find", q="x"))
    running_execution.reset(outside)
    assert result.content == content
    assert result.is_error == (not content[0].isdigit())


async def test_calls_of_one_turn_run_at_once_under_a_cap_and_keep_their_order() -> None:
    running, most = 0, 0

    @tool
    async def wait(turns: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(turns):
            await asyncio.sleep(0)
        running -= 1
        return str(turns)

    calls = [use("wait", f"c{turns}", turns=turns) for turns in (9, 1, 5, 3, 7, 2)]
    results = await execute_all(Tools([wait]), priced(), calls, 3)
    assert [result.content for result in results] == ["9", "1", "5", "3", "7", "2"]
    assert most == 3


async def test_one_call_that_stops_the_agent_ends_the_others() -> None:
    ended = []

    @tool
    async def wait() -> None:
        try:
            await asyncio.sleep(3_600)
        finally:
            ended.append("wait")

    run = priced(Budget(max_cost_dollars=0.25))
    with pytest.raises(BudgetExceededError):
        await execute_all(Tools([wait, spender(None)]), run, [use("wait"), use("spend")])
    assert ended == ["wait"]


async def test_too_many_calls_in_one_turn_are_all_refused_and_recorded_once() -> None:
    calls = [use("find", f"c{number}", q="x") for number in range(MAX_CALLS_PER_TURN + 1)]
    run = priced()
    results = await execute_all(Tools([find]), run, calls)
    assert [result.call_id for result in results] == [call.id for call in calls]
    assert all(result.is_error and "call fewer" in result.content for result in results)
    assert (run.stats.failed_count, run.usage.steps_executed) == (1, 0)
    (refused,) = tool_calls(run)
    assert (refused.name, refused.error) == ("find", "TooManyToolCalls")
    assert refused.stop_reason == results[0].content


class Thing:
    def __repr__(self) -> str:
        return "a thing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        (None, "null"),
        ({"a": [1, 2.5, True]}, '{"a": [1, 2.5, true]}'),
        (("ä", float("nan")), '["ä", "nan"]'),
        (Thing(), '"a thing"'),
        (Usage(1, 2).plus(Usage()), None),
        (Reported.of({"a": 1}, cost_usd=1), '{"a": 1}'),
    ],
)
def test_results_are_rendered_as_text_or_json(value: Any, text: str | None) -> None:
    assert render_value(value) == text if text is not None else json.loads(render_value(value))["input_tokens"] == 1


@pytest.mark.parametrize("value", ["x" * 50_000_000, [list(range(100))] * 10_000, {"a": b"x" * 50_000_000}])
def test_a_result_that_is_too_long_is_cut_and_says_so(value: Any) -> None:
    text = render_value(value)
    assert len(text) < MAX_RESULT_CHARACTERS + 100


def test_a_truncated_text_has_its_full_length() -> None:
    assert render_value("x" * 200_000).endswith("[truncated: the first 100,000 of 200,000 characters]")


def test_a_list_with_too_many_items_says_how_many_there_were() -> None:
    assert render_value(list(range(15_000))).endswith('9998, "… (15000 items)"]')


def test_a_result_with_a_cycle_is_rendered_too() -> None:
    value: list[Any] = []
    value.append(value)
    assert render_value(value).startswith("[[")


async def test_a_tool_with_a_schema_of_its_own_is_checked_by_it() -> None:
    async def anything(**arguments: Any) -> dict[str, Any]:
        return arguments

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    chain = Tools([Tool(anything, parameters=schema)])
    assert (await chain.execute(priced(), use("anything", n=1, m=2))).content == '{"n": 1, "m": 2}'
    assert "n: missing" in (await chain.execute(priced(), use("anything"))).content


async def test_a_sync_function_that_returns_a_coroutine_is_a_tool_error() -> None:
    result = await Tools([Tool(lambda: asyncio.sleep(0), name="odd")]).execute(priced(), use("odd"))
    assert result.is_error
    assert "async" in result.content


async def test_tools_of_one_turn_that_are_halted_leave_no_cancel_of_their_own_behind() -> None:
    with pytest.raises(Halted):
        await execute_all(Tools([find]), priced(Budget(max_steps=1)), [use("find", q="a"), use("find", q="b")])
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0  # else the next cancel of the run would be taken for one from outside


async def test_a_cancel_that_a_tool_raises_beside_others_is_not_swallowed() -> None:
    @tool
    async def quits() -> str:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await execute_all(Tools([find, quits]), priced(), [use("find", q="a"), use("quits")])
