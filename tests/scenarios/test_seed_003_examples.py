"""The code examples of the design document on the agent loop, translated from Go into Python line by line, and run.

`golang.py` translates the quoted text itself; the names that differ in more than their case are listed here, and are
those of docs/decisions.md. What the document calls and does not show is given by the classes beside each example.
`context.Context` is the context of the library too, since that is what cancels. An example that returns a value and
an error returns both here, where the library raises the error.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from datetime import datetime
from types import SimpleNamespace
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
    TextOutputFormat,
    ToolChain,
    Tools,
)
from penstock.export import trace_tree
from penstock.runtime.context import Outcome
from penstock.testing import ManualClock
from tests.scenarios.agent_loop_document import (
    BLOCKS,
    COMPACTION,
    CORE_TYPES,
    EXECUTOR,
    MODEL,
    TREE,
)
from tests.scenarios.examples import digest, filled_in, run
from tests.scenarios.golang import CONSTANT, declarations, snake, translated

ACCESSORS = ("Data", "Iteration", "FinalResult", "TerminationReason", "Error")
"""Accessor methods of the context that the examples call; they are attributes here."""
RENAMED = {
    "Trace": "record_event",
    "Duration": "duration_ms",
    "GetOriginalInput": "original_input",
    "GetIterationHistory": "iteration_history",
    "GetIterations": "iterations",
}
"""The names that differ in more than their case."""
GO: dict[str, Any] = {
    "ModelCallTrace": ModelCallTrace,
    "AgentLoopResult": AgentLoopResult,
    "BeforeExecutionEvent": BeforeExecutionEvent,
    "BeforeIterationEvent": BeforeIterationEvent,
    "AfterIterationEvent": AfterIterationEvent,
    "AfterExecutionEvent": AfterExecutionEvent,
    "LATerminate": LoopAction.TERMINATE,
}
"""The names of the library that the examples use."""


def in_python(text: str) -> str:
    """The functions of the document as Python."""
    return translated(text, accessors=ACCESSORS, names=RENAMED)


class GoTime:
    """The package `time` of the examples, on a clock of the library; a duration is in milliseconds."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def now(self) -> int:
        return self.clock.monotonic_ns()

    def since(self, start: int) -> float:
        return (self.clock.monotonic_ns() - start) / 1_000_000


def test_the_quotations_are_the_code_blocks_of_the_document() -> None:
    assert digest(*BLOCKS) == "74ad72ea525b2e24fe3b63b1a6b6fdb264de10cc4f3f8b2d271c81a2c73bb672"


MARKERS = {"traceEvent", "hookEvent", "BaseTrace"}
"""Members that only say which interface a type has; the base classes of the library do."""
INSTANCES: dict[str, Callable[[], Any]] = {
    "ExecutionContext": lambda: ExecutionContext(name="main"),
    "ExecutionStats": lambda: ExecutionContext(name="main").stats,
    "LoopData": lambda: Conversation("Find the dam."),
    "Iteration": lambda: Iteration(()),
    "BaseTrace": TraceEvent,
    "TraceEvent": TraceEvent,
    "ModelCallTrace": ModelCallTrace,
    "ToolCallTrace": ToolCallTrace,
    "IterationStartTrace": IterationStartTrace,
    "IterationEndTrace": IterationEndTrace,
    "ChildSpawnTrace": ChildSpawnTrace,
    "ChildCompleteTrace": ChildCompleteTrace,
    "CustomTrace": CustomTrace,
    "Model": lambda: Model,
    "ToolChain": lambda: ToolChain,
    "TextOutputFormat": lambda: TextOutputFormat,
    "AgentLoop": lambda: AgentLoop,
    "AgentLoopResult": lambda: AgentLoopResult(LoopAction.CONTINUE),
    "Hook": lambda: FiredHooks,  # which the executor of the library fires below
    "HookEvent": BeforeExecutionEvent,
    "BeforeExecutionEvent": BeforeExecutionEvent,
    "BeforeIterationEvent": lambda: BeforeIterationEvent(1),
    "AfterIterationEvent": lambda: AfterIterationEvent(1, AgentLoopResult(LoopAction.CONTINUE), 0.0),
    "AfterExecutionEvent": lambda: AfterExecutionEvent(None, TerminationReason.SUCCESS, None),
    "Executor": lambda: Executor,
}
"""What stands for each type of the document."""
EXAMPLES = {"modelImpl", "ReActLoop"}
"""The types of the document that are examples of use; they run below."""
DECLARED = [
    (kind, member, parameters)
    for block in BLOCKS
    for kind, members in declarations(block).items()
    for member, parameters in members.items()
    if member not in MARKERS and kind not in EXAMPLES
]


@pytest.mark.requirement("T-1", "T-2", "T-3", "T-5", "T-12", "T-13")
@pytest.mark.parametrize(("kind", "member", "parameters"), DECLARED, ids=lambda one: one if type(one) is str else "")
def test_every_field_and_method_of_the_document_is_there(kind: str, member: str, parameters: tuple[str, ...]) -> None:
    """`ctx` and `execCtx` are one parameter here; an executor is made for its agent, so it takes one less."""
    found = getattr(INSTANCES[kind](), RENAMED.get(member, snake(member)))
    if parameters:
        given = [name for name in parameters if name != "ctx"]
        signature = inspect.signature(found)
        signature.bind(*given, *(["self"] if "self" in signature.parameters else []))


def test_every_type_of_the_document_has_a_counterpart() -> None:
    assert {kind for block in BLOCKS for kind in declarations(block)} == set(INSTANCES) | EXAMPLES
    assert len(DECLARED) == 77


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
    reasons = [value for kind, value in CONSTANT.findall(CORE_TYPES) if kind == "TerminationReason"]
    assert reasons == ["success", "max_iterations", "error", "context_canceled", "hook_abort"]
    assert [TerminationReason(reason).value for reason in reasons] == reasons


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


@pytest.mark.requirement("T-8")
@pytest.mark.parametrize("err", [None, TimeoutError("late")], ids=["answered", "failed"])
async def test_a_model_of_the_users_own_traces_its_calls(err: Exception | None) -> None:
    """`modelImpl` of the document."""
    clock = ManualClock()

    class Underlying:
        async def generate(self, ctx: Any, messages: list[Message]) -> tuple[ModelResponse, Exception | None]:
            clock.advance(0.8)
            return ModelResponse("60 m", usage=Usage(1500, 200)), err

    class ModelImpl:
        name = "claude-3"
        underlying = Underlying()
        generate = run(in_python(MODEL), **GO, time=GoTime(clock))["generate"]

        def calculate_cost(self, usage: Usage) -> float:
            return usage.input_tokens * 1e-6

    ctx = ExecutionContext(name="main", clock=clock)
    resp, returned = await ModelImpl().generate(ctx, ctx, [Message.user("How high is it?")])
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


class LibraryExecutor:
    """`loop.executor` of the document: an executor of the library is made for one agent, and raises no error."""

    async def execute(self, ctx: Any, child_ctx: ExecutionContext, agent: Any) -> tuple[Any, BaseException | None]:
        result = await Executor(agent).execute(child_ctx)
        return result, result.error


COMPACTING = run(
    filled_in(
        in_python(COMPACTION),
        {
            "# ... normal iteration logic ...": "needs_compaction, response = await loop.iterate(exec_ctx)",
            "# ... continue with iteration ...": "return loop.result(exec_ctx, response)",
        },
    ),
    **GO,
    new_compaction_loop_data=new_compaction_loop_data,
    extract_compacted_iterations=extract_compacted_iterations,
)


class ReActLoop:
    """The loop of the document; what it leaves out is one model call an iteration, and a search in the second."""

    def __init__(self, model: Model, compaction_agent: Any, tools: Tools) -> None:
        self.model = model
        self.executor = LibraryExecutor()
        self.compaction_agent = compaction_agent
        self.tools = tools

    next = COMPACTING["next"]
    run_compaction = COMPACTING["run_compaction"]

    async def iterate(self, exec_ctx: ExecutionContext) -> tuple[bool, ModelResponse]:
        response = await self.model.generate(exec_ctx, [Message.user("Find the dam.")])
        exec_ctx.data.add(Iteration((Message.user(response.text),)))
        if exec_ctx.iteration == 2:
            await self.tools.execute(exec_ctx, ToolCall("c1", "search", {"query": "dam"}))
        return exec_ctx.iteration == 3, response

    def result(self, exec_ctx: ExecutionContext, response: ModelResponse) -> AgentLoopResult:
        if exec_ctx.iteration < 4:
            return AgentLoopResult(action=LoopAction.CONTINUE)
        return AgentLoopResult(action=LoopAction.TERMINATE, result=[response.text])


class ForLibrary:
    """A loop of the document for the executor of the library, whose context is both of the document's."""

    def __init__(self, loop: ReActLoop) -> None:
        self.loop = loop

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        result: AgentLoopResult = await self.loop.next(context, context)
        return result


class Timed(ScriptedModel):
    """A scripted model whose answers use the tokens it is given, one number a call."""

    def __init__(self, name: str, *tokens: int) -> None:
        super().__init__([ModelResponse(f"{name} {number}", usage=Usage(number, 0)) for number in tokens], name=name)


def main_loop() -> tuple[ReActLoop, Conversation]:
    compaction = CompactionLoop(Timed("claude-3-haiku", 3000, 500))
    return ReActLoop(Timed("claude-3", 1500, 2000, 800, 1200), compaction, Tools([search])), Conversation("Find it.")


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
    result = await Executor(ForLibrary(loop)).execute(ctx)
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
    await Executor(ForLibrary(loop)).execute(ctx)
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
    loop.compaction_agent = Failing(loop.model)
    ctx = ExecutionContext(name="main", data=data)
    result = await Executor(ForLibrary(loop)).execute(ctx)
    assert (result.termination_reason, str(result.error)) == (TerminationReason.ERROR, "no summary")
    assert [event for event in ctx.events if isinstance(event, ChildCompleteTrace)]


# The executor.


class FiredHooks:
    """A hook that keeps what was fired."""

    def __init__(self, fails_at: type | None = None) -> None:
        self.fails_at = fails_at
        self.fired: list[Any] = []

    def fire(self, exec_ctx: ExecutionContext, event: Any) -> None:
        self.fired.append(event)
        if self.fails_at is not None and isinstance(event, self.fails_at):
            raise HookAbort("enough")


class DocumentHooks(FiredHooks):
    """`e.hooks` of the document: returns the error of the hook, or None."""

    async def fire(self, ctx: Any, exec_ctx: ExecutionContext, event: Any) -> Exception | None:  # type: ignore[override]
        try:
            super().fire(exec_ctx, event)
        except HookAbort as err:
            return err
        return None


def finish(exec_ctx: ExecutionContext, result: AgentLoopResult | None) -> None:
    """The document does not show what sets `FinalResult`, `TerminationReason` and `Error`."""
    if result is not None and result.action is LoopAction.TERMINATE:
        exec_ctx._outcome = Outcome(result.result, result.error)
        exec_ctx.end(result.error)


def execution_result(result: Any, context: ExecutionContext, error: BaseException | None) -> ExecutorResult:
    reason = context.termination_reason or TerminationReason.HOOK_ABORT
    return ExecutorResult(result=result, context=context, error=error, termination_reason=reason)


EXECUTING = run(
    filled_in(
        in_python(EXECUTOR),
        {
            "    while True:\n": "    result = None\n    while True:\n",
            "    # Fire after execution hook\n": "    finish(exec_ctx, result)\n",
        },
    ),
    **GO,
    time=GoTime(ManualClock()),
    new_execution_context=lambda name, data: ExecutionContext(name=name, data=data),
    finish=finish,
    ExecutionResult=execution_result,
)


class DocumentExecutor(SimpleNamespace):
    """`Executor` of the document."""

    agent_loop: ReActLoop
    hooks: DocumentHooks
    execute = EXECUTING["execute"]


@pytest.mark.requirement("T-2", "T-5", "T-6")
@pytest.mark.parametrize("fails_at", [None, BeforeExecutionEvent, BeforeIterationEvent, AfterIterationEvent])
async def test_the_executor_does_what_the_one_of_the_document_does(fails_at: type | None) -> None:
    loop, data = main_loop()
    sketched = DocumentHooks(fails_at)
    theirs, err = await DocumentExecutor(agent_loop=loop, hooks=sketched).execute(None, data)
    loop, data = main_loop()
    hooks = FiredHooks(fails_at)
    ours = await Executor(ForLibrary(loop), hooks=[hooks]).execute(data)
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
