"""The code examples of the design document on the agent loop, translated from Go into Python line by line.

A Go method becomes a Python method, an accessor a property, both in snake case; `context.Context` has no counterpart,
since the context of the library is also what cancels; `defer` becomes `finally`. An example that returns a value and an
error returns both here, except where the library raises the error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import pytest

from penstock import (
    AfterExecutionEvent,
    AfterIterationEvent,
    AgentLoop,
    AgentLoopResult,
    BeforeExecutionEvent,
    BeforeIterationEvent,
    ChildCompleteTrace,
    ChildSpawnTrace,
    CustomTrace,
    ExecutionContext,
    Executor,
    Iteration,
    IterationEndTrace,
    IterationStartTrace,
    LoopAction,
    LoopData,
    Model,
    ModelCallTrace,
    ModelResponse,
    Price,
    PriceBook,
    TerminationReason,
    ToolCall,
    ToolCallTrace,
    TraceEvent,
    Usage,
    tool,
)
from penstock.agents import (
    Conversation,
    ExecutorResult,
    HookAbort,
    JsonFormat,
    MaxIterationsReached,
    Message,
    ModelRequest,
    ScriptedModel,
    Tools,
)
from penstock.export import trace_tree
from penstock.runtime.context import Outcome
from penstock.testing import ManualClock

# Core types: the context and its methods.

CONTEXT_FIELDS = {
    "data": None,
    "iteration": 0,
    "depth": 0,
    "parent": None,
    "children": (),
    "name": "main",
    "end_time": None,
    "termination_reason": None,
}
"""The fields of `ExecutionContext` with their values in a new one; `events`, `stats` and `startTime` are filled."""
STATS_FIELDS: dict[str, Any] = {
    "total_input_tokens": 0,
    "total_output_tokens": 0,
    "total_cost": 0.0,
    "input_tokens_by_model": {},
    "output_tokens_by_model": {},
    "cost_by_model": {},
    "tool_call_count": 0,
    "tool_calls_by_name": {},
}


@pytest.mark.requirement("T-1", "T-3", "T-13")
def test_the_context_and_its_stats_have_the_fields_of_the_document() -> None:
    ctx = ExecutionContext(name="main")
    assert {name: getattr(ctx, name) for name in CONTEXT_FIELDS} == CONTEXT_FIELDS
    assert {name: getattr(ctx.stats, name) for name in STATS_FIELDS} == STATS_FIELDS
    assert isinstance(ctx.start_time, datetime)
    assert all(isinstance(event, TraceEvent) for event in ctx.events)


@pytest.mark.requirement("T-1", "T-2", "T-4")
def test_the_methods_of_the_context() -> None:
    data = Conversation("Find the dam.")
    ctx = ExecutionContext(name="main", data=data)
    assert (ctx.data, ctx.iteration, ctx.depth, ctx.parent, ctx.name) == (data, 0, 0, None, "main")

    ctx.start_iteration()
    assert ctx.iteration == 1
    ctx.record_event(ToolCallTrace(tool_name="search"))
    assert ctx.stats.tool_call_count == 1
    ctx.trace_custom("plan", {"steps": 3})
    ctx.end_iteration(LoopAction.CONTINUE)
    child = ctx.spawn_child("compaction", Conversation("Sum it up."))
    try:
        assert (child.parent, child.depth, child.name) == (ctx, 1, "compaction")
    finally:
        ctx.complete_child(child)
    ctx.complete_child(child)
    assert ctx.children == (child,)
    assert child.termination_reason is TerminationReason.SUCCESS

    own = [event for event in ctx.events if event.kind not in ("run_started", "call_started")]
    assert [type(event) for event in own] == [
        IterationStartTrace,
        ToolCallTrace,
        CustomTrace,
        IterationEndTrace,
        ChildSpawnTrace,
        ChildCompleteTrace,
    ]
    assert all((event.iteration, event.depth) == (1, 0) for event in own)
    assert all(isinstance(event.timestamp, datetime) for event in own)
    (plan,) = [event for event in own if isinstance(event, CustomTrace)]
    assert (plan.name, plan.data) == ("plan", {"steps": 3})


@pytest.mark.requirement("T-3")
def test_tracing_an_event_updates_the_eight_figures() -> None:
    ctx = ExecutionContext(name="main")
    ctx.record_event(ModelCallTrace(model="claude-3", input_tokens=1500, output_tokens=200, cost=0.02))
    ctx.record_event(ModelCallTrace(model="claude-3-haiku", input_tokens=3000, output_tokens=50, cost=0.01))
    ctx.record_event(ToolCallTrace(name="search", duration_ms=500.0))
    stats = ctx.stats
    assert (stats.total_input_tokens, stats.total_output_tokens) == (4500, 250)
    assert stats.total_cost == pytest.approx(0.03)
    assert stats.input_tokens_by_model == {"claude-3": 1500, "claude-3-haiku": 3000}
    assert stats.output_tokens_by_model == {"claude-3": 200, "claude-3-haiku": 50}
    assert stats.cost_by_model == {"claude-3": 0.02, "claude-3-haiku": 0.01}
    assert (stats.tool_call_count, stats.tool_calls_by_name) == (1, {"search": 1})


@pytest.mark.requirement("T-12")
def test_a_tool_call_trace_has_the_name_the_input_and_the_output() -> None:
    ctx = ExecutionContext(name="main")
    ctx.record_event(ToolCallTrace(tool_name="search", input={"query": "dam"}, output="60 m", duration_ms=500.0))
    (call,) = [event for event in ctx.events if isinstance(event, ToolCallTrace)]
    assert (call.tool_name, call.duration_ms) == ("search", 500.0)
    assert ctx.stats.tool_calls_by_name == {"search": 1}
    made = ToolCallTrace(tool_name="search", input={"query": "dam"}, output="60 m")
    assert (made.input, made.output) == ({"query": "dam"}, "60 m")


def test_the_termination_reasons() -> None:
    reasons = ("success", "max_iterations", "error", "context_canceled", "hook_abort")
    assert [TerminationReason(reason).value for reason in reasons] == list(reasons)


# LoopData: the user's own state.


class OwnData:
    """Loop data of the user's own, with a field that only its loop knows."""

    def __init__(self, text: str) -> None:
        self.original_input: tuple[str, ...] = (text,)
        self.iteration_history: list[Iteration] = []
        self.iterations: Sequence[Iteration] = []
        self.visited: set[str] = set()

    def add_iteration_history(self, iteration: Iteration) -> None:
        self.iteration_history.append(iteration)

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        self.iterations = list(iterations)


@pytest.mark.requirement("T-6")
async def test_a_loop_keeps_state_of_its_own_in_its_loop_data() -> None:
    class Visiting:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            context.data.visited.add(f"page {context.iteration}")
            context.data.add_iteration_history(Iteration((Message.user(f"page {context.iteration}"),)))
            done = context.iteration == 3
            return AgentLoopResult(LoopAction.TERMINATE if done else LoopAction.CONTINUE, result=["read"])

    data = OwnData("Read it all.")
    assert isinstance(data, LoopData)
    assert isinstance(Visiting(), AgentLoop)
    result = await Executor(Visiting()).execute(data)
    assert (result.result, result.context.data) == (["read"], data)
    assert data.visited == {"page 1", "page 2", "page 3"}
    assert len(data.iteration_history) == 3
    assert data.iterations == []


# Trace events.

WELL_KNOWN: list[tuple[type[TraceEvent], dict[str, Any]]] = [
    (
        ModelCallTrace,
        {
            "model": "claude-3",
            "input_tokens": 1500,
            "output_tokens": 200,
            "cost": 0.02,
            "duration_ms": 800.0,
            "error": "TimeoutError",
        },
    ),
    (
        ToolCallTrace,
        {"tool_name": "search", "input": {"query": "dam"}, "output": "60 m", "duration_ms": 500.0, "error": None},
    ),
    (IterationStartTrace, {}),
    (IterationEndTrace, {"duration_ms": 900.0, "action": LoopAction.CONTINUE}),
    (ChildSpawnTrace, {"child_name": "compaction"}),
    (
        ChildCompleteTrace,
        {"child_name": "compaction", "termination_reason": TerminationReason.SUCCESS, "duration_ms": 900.0},
    ),
    (CustomTrace, {"name": "plan", "data": {"steps": 3}}),
]
"""Every trace type of the document with its fields."""


@pytest.mark.requirement("T-2", "T-12")
@pytest.mark.parametrize(("kind", "fields"), WELL_KNOWN, ids=lambda one: getattr(one, "__name__", ""))
def test_a_trace_type_has_the_fields_of_the_document_and_those_of_the_base(
    kind: Callable[..., TraceEvent], fields: dict[str, Any]
) -> None:
    event = kind(**fields)
    assert {name: getattr(event, name) for name in fields} == fields
    assert isinstance(event, TraceEvent)
    assert isinstance(event.timestamp, datetime)
    assert (event.iteration, event.depth) == (0, 0)


@pytest.mark.requirement("T-2")
def test_an_event_of_the_users_own_is_filled_in() -> None:
    class PageRead(CustomTrace):
        pass

    ctx = ExecutionContext(name="main")
    child = ctx.spawn_child("reader")
    child.start_iteration()
    child.record_event(PageRead(name="page", data={"number": 7}))
    (event,) = [event for event in child.events if isinstance(event, PageRead)]
    assert isinstance(event, TraceEvent)
    assert (event.iteration, event.depth, event.data) == (1, 1, {"number": 7})


# Framework integration: model, tools, formats, loop.


class ModelImpl:
    """`modelImpl` of the document, which traces its calls."""

    def __init__(self, name: str, underlying: Any, clock: ManualClock) -> None:
        self.name = name
        self.underlying = underlying
        self.clock = clock

    def calculate_cost(self, usage: Usage) -> float:
        return usage.input_tokens * 1e-6

    async def generate(
        self,
        exec_ctx: ExecutionContext,
        messages: list[Message],
    ) -> tuple[Any, Exception | None]:
        start = self.clock.monotonic_ns()
        resp, err = await self.underlying.generate(messages)

        # Automatic tracing - user doesn't think about this
        exec_ctx.record_event(
            ModelCallTrace(
                model=self.name,
                input_tokens=resp.usage.input_tokens,
                output_tokens=resp.usage.output_tokens,
                cost=self.calculate_cost(resp.usage),
                duration_ms=(self.clock.monotonic_ns() - start) / 1_000_000,
                error=err and type(err).__name__,
            )
        )

        return resp, err


@pytest.mark.requirement("T-8")
@pytest.mark.parametrize("err", [None, TimeoutError("late")], ids=["answered", "failed"])
async def test_a_model_of_the_users_own_traces_its_calls(err: Exception | None) -> None:
    clock = ManualClock()

    class Underlying:
        async def generate(self, messages: list[Message]) -> tuple[ModelResponse, Exception | None]:
            clock.advance(0.8)
            return ModelResponse("60 m", usage=Usage(1500, 200)), err

    ctx = ExecutionContext(name="main", clock=clock)
    model = ModelImpl("claude-3", Underlying(), clock)
    resp, returned = await model.generate(ctx, [Message.user("How high is it?")])
    assert (resp.text, returned) == ("60 m", err)
    (call,) = [event for event in ctx.events if isinstance(event, ModelCallTrace)]
    assert (call.model, call.input_tokens, call.output_tokens) == ("claude-3", 1500, 200)
    assert (call.duration_ms, call.error) == (800.0, None if err is None else "TimeoutError")
    assert ctx.stats.total_cost == pytest.approx(0.0015)


@pytest.mark.requirement("T-8")
async def test_a_model_of_the_library_traces_its_calls_also_those_that_fail() -> None:
    model: Model = ScriptedModel([ModelResponse("60 m", usage=Usage(1500, 200)), OSError("gone")], name="claude-3")
    ctx = ExecutionContext(name="main")
    await model.generate(ctx, [Message.user("How high is it?")])
    with pytest.raises(OSError, match="gone"):
        await model.generate(ctx, [Message.user("How high is it?")])
    first, second = [event for event in ctx.events if isinstance(event, ModelCallTrace)]
    assert (first.model, first.input_tokens, first.output_tokens, first.error) == ("claude-3", 1500, 200, None)
    assert (second.status, second.error) == ("fail", "OSError")


@tool
async def search(query: str) -> str:
    """Search the web."""
    if not query:
        raise ValueError("what for?")
    return f"found {query}"


@pytest.mark.requirement("T-8")
async def test_a_tool_chain_traces_its_calls() -> None:
    chain, ctx = Tools([search]), ExecutionContext(name="main")
    result = await chain.execute(ctx, ToolCall("c1", "search", {"query": "dam"}))
    assert (result.content, result.is_error) == ("found dam", False)
    assert (await chain.execute(ctx, ToolCall("c2", "search", {"query": ""}))).is_error
    first, second = [event for event in ctx.events if isinstance(event, ToolCallTrace)]
    assert (first.tool_name, first.error) == ("search", None)
    assert (second.tool_name, second.error) == ("search", "ValueError")
    assert ctx.stats.tool_calls_by_name == {"search": 2}


@pytest.mark.requirement("T-1", "T-9")
def test_a_text_output_format_is_given_the_context() -> None:
    ctx = ExecutionContext(name="main")
    assert JsonFormat(dict[str, int]).parse('{"height": 60}', ctx) == {"height": 60}


# Hooks.


@pytest.mark.requirement("T-5", "T-13")
async def test_a_hook_is_fired_with_the_context_and_the_event() -> None:
    fired: list[Any] = []

    class Recorder:
        def fire(self, context: ExecutionContext, event: Any) -> None:
            assert isinstance(context, ExecutionContext)
            fired.append(event)

    result = await Executor(Counting(2), hooks=[Recorder()]).execute("count")
    assert result.result == [2]
    loop_events = [
        event
        for event in fired
        if isinstance(
            event,
            (
                BeforeExecutionEvent,
                BeforeIterationEvent,
                AfterIterationEvent,
                AfterExecutionEvent,
            ),
        )
    ]
    assert [type(event).__name__ for event in loop_events] == [
        "BeforeExecutionEvent",
        "BeforeIterationEvent",
        "AfterIterationEvent",
        "BeforeIterationEvent",
        "AfterIterationEvent",
        "AfterExecutionEvent",
    ]
    _, before, after, _, last, end = loop_events
    assert (before.iteration, after.iteration, last.iteration) == (1, 1, 2)
    assert (after.result.action, last.result.action) == (LoopAction.CONTINUE, LoopAction.TERMINATE)
    assert after.duration_ms >= 0
    assert (end.result, end.termination_reason, end.error) == ([2], TerminationReason.SUCCESS, None)


class Counting:
    """A loop that ends after so many iterations, with their number."""

    def __init__(self, until: int) -> None:
        self.until = until

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        if context.iteration < self.until:
            return AgentLoopResult(LoopAction.CONTINUE, next_prompt="go on")
        return AgentLoopResult(LoopAction.TERMINATE, result=[context.iteration])


@pytest.mark.requirement("T-5")
@pytest.mark.parametrize("moment", ["before_execution", "before_iteration", "after_iteration"])
async def test_a_hook_that_aborts_ends_the_execution_with_hook_abort(moment: str) -> None:
    class Aborting:
        pass

    def abort(self: Any, context: ExecutionContext, *rest: Any) -> None:
        raise HookAbort("enough")

    setattr(Aborting, moment, abort)
    result = await Executor(Counting(2), hooks=[Aborting()]).execute("count")
    assert result.termination_reason is TerminationReason.HOOK_ABORT
    assert str(result.error) == "enough"


@pytest.mark.requirement("T-13")
async def test_a_hook_that_raises_anything_ends_the_execution_with_a_reason_of_hooks() -> None:
    class Broken:
        def before_iteration(self, context: ExecutionContext) -> None:
            raise OSError("no disk")

    result = await Executor(Counting(2), hooks=[Broken()]).execute("count")
    assert result.termination_reason.startswith("hook_")
    assert "no disk" in str(result.error)


@pytest.mark.requirement("T-5")
async def test_a_hook_spawns_a_child_context() -> None:
    class Checking:
        def before_iteration(self, context: ExecutionContext) -> None:
            with context.spawn_child("check") as child:
                child.tool(lambda: "fine", name="check")

    result = await Executor(Counting(2), hooks=[Checking()]).execute("count")
    assert [child.name for child in result.context.children] == ["check", "check"]
    assert result.context.stats.tool_calls_by_name == {"check": 2}


# Nested agent loops: compaction as a sub-agent, its trace tree and its stats.


class CompactionLoop:
    """A sub-agent of two iterations that sums up what its data holds."""

    def __init__(self, model: Model) -> None:
        self.model = model

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        response = await self.model.generate(context, [Message.user("Sum it up.")])
        if context.iteration == 1:
            return AgentLoopResult(LoopAction.CONTINUE)
        return AgentLoopResult(LoopAction.TERMINATE, result=response.text)


def new_compaction_loop_data(data: Any) -> Conversation:
    return Conversation(f"Sum up {len(data.iterations)} iterations.")


def extract_compacted_iterations(result: Any) -> list[Iteration]:
    return [Iteration((Message.user(result.result),))]


class ReActLoop:
    """The loop of the document; what it leaves out is one model call an iteration, and a search in the second."""

    def __init__(self, model: Model, compaction_agent: CompactionLoop, tools: Tools) -> None:
        self.model = model
        self.executor = Executor(compaction_agent)  # an executor of the library is made for one agent
        self.tools = tools

    async def next(
        self,
        exec_ctx: ExecutionContext,
    ) -> AgentLoopResult:
        # ... normal iteration logic ...
        response = await self.model.generate(exec_ctx, [Message.user("Find the dam.")])
        exec_ctx.data.add(Iteration((Message.user(response.text),)))
        if exec_ctx.iteration == 2:
            await self.tools.execute(exec_ctx, ToolCall("c1", "search", {"query": "dam"}))
        needs_compaction = exec_ctx.iteration == 3

        if needs_compaction:
            compacted_iterations, err = await self.run_compaction(exec_ctx)
            if err is not None:
                return AgentLoopResult(action=LoopAction.TERMINATE, error=err)
            exec_ctx.data.set_iterations(compacted_iterations)

        # ... continue with iteration ...
        if exec_ctx.iteration < 4:
            return AgentLoopResult(action=LoopAction.CONTINUE)
        return AgentLoopResult(action=LoopAction.TERMINATE, result=[response.text])

    async def run_compaction(
        self,
        exec_ctx: ExecutionContext,
    ) -> tuple[Any, BaseException | None]:
        # Create child context - finally ensures complete_child is always called
        child_data = new_compaction_loop_data(exec_ctx.data)
        child_ctx = exec_ctx.spawn_child("compaction", child_data)
        try:
            # Run compaction agent with the child context
            result = await self.executor.execute(child_ctx)
            err = result.error
            if err is not None:
                return None, err

            return extract_compacted_iterations(result), None
        finally:
            exec_ctx.complete_child(child_ctx)


class Timed(ScriptedModel):
    """A scripted model whose answers use the tokens it is given, one number a call."""

    def __init__(self, name: str, *tokens: int) -> None:
        super().__init__([ModelResponse(f"{name} {number}", usage=Usage(number, 0)) for number in tokens], name=name)


def main_loop() -> tuple[ReActLoop, Conversation]:
    compaction = CompactionLoop(Timed("claude-3-haiku", 3000, 500))
    return ReActLoop(Timed("claude-3", 1500, 2000, 800, 1200), compaction, Tools([search])), Conversation("Find it.")


TREE = """\
ExecutionContext "main"
├── IterationStartTrace {iteration: 1}
├── ModelCallTrace {model: "claude-3", tokens: 1500}
├── IterationEndTrace {iteration: 1, action: continue}
├── IterationStartTrace {iteration: 2}
├── ModelCallTrace {model: "claude-3", tokens: 2000}
├── ToolCallTrace {tool: "search", duration: 500ms}
├── IterationEndTrace {iteration: 2, action: continue}
├── IterationStartTrace {iteration: 3}
├── ModelCallTrace {model: "claude-3", tokens: 800}
├── ChildSpawnTrace {name: "compaction"}
│   └── ExecutionContext "compaction" (child)
│       ├── IterationStartTrace {iteration: 1}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 3000}
│       ├── IterationEndTrace {iteration: 1, action: continue}
│       ├── IterationStartTrace {iteration: 2}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 500}
│       └── IterationEndTrace {iteration: 2, action: terminate}
├── ChildCompleteTrace {name: "compaction", reason: success}
├── IterationEndTrace {iteration: 3, action: continue}
├── IterationStartTrace {iteration: 4}
├── ModelCallTrace {model: "claude-3", tokens: 1200}
└── IterationEndTrace {iteration: 4, action: terminate}

Stats (auto-aggregated, includes children):
  TotalInputTokens: 7000
  TotalOutputTokens: ...
  InputTokensByModel: {"claude-3": 3500, "claude-3-haiku": 3500}
  ToolCallCount: 1
  ToolCallsByName: {"search": 1}
"""
PRICES = PriceBook(registered={"claude-3": Price(0, 0), "claude-3-haiku": Price(0, 0)}, use_genai_prices=False)
"""Costs that are not 0 would be printed too."""


@pytest.mark.requirement("T-4", "T-6", "T-7", "T-11")
async def test_the_trace_tree_of_the_compaction_example_is_the_one_of_the_document() -> None:
    """Its stats are not: the document's sums are not those of its own tree (docs/decisions.md)."""
    loop, data = main_loop()
    clock = ManualClock()

    @tool(name="search")
    async def search_for_a_while(query: str) -> str:
        """Search the web."""
        clock.advance(0.5)
        return f"found {query}"

    loop.tools = Tools([search_for_a_while])
    ctx = ExecutionContext(name="main", data=data, clock=clock, prices=PRICES)
    result = await Executor(loop).execute(ctx)
    assert (result.result, result.error) == (["claude-3 1200"], None)
    drawn, _, stats = TREE.partition("\n\n")
    tree, _, ours = trace_tree(ctx).partition("\n\n")
    assert tree == drawn
    assert ours.split("\n")[0] == stats.split("\n")[0] == "Stats (auto-aggregated, includes children):"
    assert {line.partition(":")[0] for line in stats.strip().split("\n")} <= {
        line.partition(":")[0] for line in ours.split("\n")
    }
    for line in ("  ToolCallCount: 1", '  ToolCallsByName: {"search": 1}'):
        assert line in stats.split("\n")
        assert line in ours.split("\n")


@pytest.mark.requirement("T-3", "T-7")
async def test_the_stats_of_the_compaction_example_include_the_child() -> None:
    loop, data = main_loop()
    ctx = ExecutionContext(name="main", data=data)
    await Executor(loop).execute(ctx)
    stats = ctx.stats
    assert stats.total_input_tokens == 1500 + 2000 + 800 + 3000 + 500 + 1200  # the document prints 7000
    assert stats.input_tokens_by_model == {"claude-3": 5500, "claude-3-haiku": 3500}
    assert (stats.tool_call_count, stats.tool_calls_by_name) == (1, {"search": 1})
    assert stats.own is not None
    assert stats.own.input_tokens_by_model == {"claude-3": 5500}
    assert len(data.iteration_history) == 4
    assert [one.messages[0].text for one in data.iterations] == ["claude-3-haiku 500", "claude-3 1200"]


@pytest.mark.requirement("T-4")
async def test_a_child_is_completed_also_when_its_agent_fails() -> None:
    class Failing(CompactionLoop):
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            raise OSError("no summary")

    loop, data = main_loop()
    loop.executor = Executor(Failing(loop.model))
    ctx = ExecutionContext(name="main", data=data)
    result = await Executor(loop).execute(ctx)
    assert (result.termination_reason, str(result.error)) == (TerminationReason.ERROR, "no summary")
    assert [event for event in ctx.events if isinstance(event, ChildCompleteTrace)]


# The executor.


class FiredHooks:
    """`e.hooks` of the document: returns the error of the hook, or None; keeps what was fired."""

    def __init__(self, fails_at: type | None = None) -> None:
        self.fails_at = fails_at
        self.fired: list[Any] = []

    def fire(self, exec_ctx: ExecutionContext, event: Any) -> None:
        self.fired.append(event)
        if self.fails_at is not None and isinstance(event, self.fails_at):
            raise HookAbort("enough")

    async def returned(self, exec_ctx: ExecutionContext, event: Any) -> Exception | None:
        try:
            self.fire(exec_ctx, event)
        except Exception as err:
            return err
        return None


class DocumentExecutor:
    """`Executor` of the document."""

    def __init__(self, agent_loop: Any, hooks: FiredHooks) -> None:
        self.agent_loop = agent_loop
        self.hooks = hooks

    async def execute(
        self,
        data: Any,
    ) -> tuple[ExecutorResult | None, Exception | None]:
        exec_ctx = ExecutionContext(name="main", data=data)

        # Fire before execution hook
        if (err := await self.hooks.returned(exec_ctx, BeforeExecutionEvent())) is not None:
            return None, err

        while True:
            exec_ctx.start_iteration()

            # Fire before iteration hook
            if (
                err := await self.hooks.returned(
                    exec_ctx,
                    BeforeIterationEvent(
                        iteration=exec_ctx.iteration,
                    ),
                )
            ) is not None:
                exec_ctx.end_iteration(LoopAction.TERMINATE)
                break

            start = time.monotonic()
            result = await self.agent_loop.next(exec_ctx)
            duration = time.monotonic() - start

            exec_ctx.end_iteration(result.action)

            # Fire after iteration hook
            if (
                err := await self.hooks.returned(
                    exec_ctx,
                    AfterIterationEvent(
                        iteration=exec_ctx.iteration,
                        result=result,
                        duration_ms=duration * 1000,
                    ),
                )
            ) is not None:
                break

            if result.action == LoopAction.TERMINATE:
                # The document does not show what sets `FinalResult` and `TerminationReason`.
                exec_ctx._outcome = Outcome(result.result, result.error)
                exec_ctx.end(result.error)
                break

            # Check max iterations, context cancellation, etc.

        # Fire after execution hook
        await self.hooks.returned(
            exec_ctx,
            AfterExecutionEvent(
                result=exec_ctx.final_result,
                termination_reason=exec_ctx.termination_reason or TerminationReason.HOOK_ABORT,
                error=exec_ctx.error,
            ),
        )

        return ExecutorResult(
            result=exec_ctx.final_result,
            context=exec_ctx,  # Full trace available here
            error=exec_ctx.error,
            termination_reason=exec_ctx.termination_reason or TerminationReason.HOOK_ABORT,
        ), None


@pytest.mark.requirement("T-2", "T-5", "T-6")
@pytest.mark.parametrize("fails_at", [None, BeforeExecutionEvent, BeforeIterationEvent, AfterIterationEvent])
async def test_the_executor_does_what_the_one_of_the_document_does(fails_at: type | None) -> None:
    loop, data = main_loop()
    sketched = FiredHooks(fails_at)
    theirs, err = await DocumentExecutor(loop, sketched).execute(data)
    loop, data = main_loop()
    hooks = FiredHooks(fails_at)
    ours = await Executor(loop, hooks=[hooks]).execute(data)
    if theirs is None:
        # The document returns the error of a hook before the execution, and fires nothing more.
        assert fails_at is BeforeExecutionEvent
        assert (str(err), ours.termination_reason) == ("enough", TerminationReason.HOOK_ABORT)
        assert [type(event) for event in hooks.fired] == [BeforeExecutionEvent, AfterExecutionEvent]
        return
    assert (ours.result, ours.termination_reason) == (theirs.result, theirs.termination_reason)
    assert ours.result == (["claude-3 1200"] if fails_at is None else None)
    assert [type(event) for event in hooks.fired] == [type(event) for event in sketched.fired]
    assert loop_events(ours.context) == loop_events(theirs.context)


LOOP_EVENTS = (
    IterationStartTrace,
    IterationEndTrace,
    ChildSpawnTrace,
    ChildCompleteTrace,
    ModelCallTrace,
    ToolCallTrace,
)


def loop_events(context: ExecutionContext) -> list[str]:
    """The names of the events that the document knows."""
    return [type(event).__name__ for event in context.events if isinstance(event, LOOP_EVENTS)]


@pytest.mark.requirement("T-5")
async def test_the_executor_makes_the_root_context_and_hands_it_back() -> None:
    result = await Executor(Counting(2)).execute(Conversation("count"))
    assert (result.result, result.error) == ([2], None)
    assert (result.context.name, result.context.depth, result.context.iteration) == ("main", 0, 2)
    assert result.termination_reason is result.context.termination_reason is TerminationReason.SUCCESS


@pytest.mark.requirement("T-5")
async def test_the_ways_an_execution_ends() -> None:
    class Failing:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            raise OSError("gone")

    class Aborting:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            context.abort("the user left")
            await asyncio.sleep(0)
            return AgentLoopResult(LoopAction.CONTINUE)

    used_up = await Executor(Counting(9), max_iterations=3).execute("count")
    assert used_up.termination_reason is TerminationReason.MAX_ITERATIONS
    assert isinstance(used_up.error, MaxIterationsReached)
    assert (await Executor(Failing()).execute("fail")).termination_reason is TerminationReason.ERROR
    assert (await Executor(Aborting()).execute("stop")).termination_reason is TerminationReason.CONTEXT_CANCELED


@pytest.mark.requirement("T-13")
async def test_the_context_has_its_result_its_error_and_its_times() -> None:
    result = await Executor(Counting(2)).execute(Conversation("count"))
    ctx = result.context
    assert (ctx.final_result, ctx.error) == ([2], None)
    assert isinstance(ctx.start_time, datetime)
    assert ctx.end_time is not None
    assert ctx.start_time <= ctx.end_time

    failed = await Executor(Counting(9), max_iterations=3).execute(Conversation("count"))
    assert failed.context.final_result is None
    assert failed.context.error is failed.error
    assert isinstance(failed.error, MaxIterationsReached)
    assert ExecutionContext().end_time is None


@pytest.mark.requirement("T-8")
async def test_a_model_needs_request_only_and_is_traced() -> None:
    class Own(Model):
        async def request(self, request: ModelRequest) -> ModelResponse:
            return ModelResponse(f"{len(request.messages)} message", usage=Usage(1, 1))

    ctx = ExecutionContext(name="main")
    assert (await Own("own").generate(ctx, [Message.user("hm")])).text == "1 message"
    assert ctx.stats.input_tokens_by_model == {"own": 1}
