"""Tools: functions that a model may ask for.

A tool is made from a typed Python function: its name, its docstring and its signature are what the model is told, and
what the model sends back is checked against the same signature. A wrong call is told to the model, in words it can act
on; a tool that fails is told as well. What is never told but raised: a cancel, and a limit that stopped the agent.

Every call is one in the run's tree, contained like any other. A call that is wrong before anything runs is written down
as a failed one; it takes no step and draws on no retry budget, which a tool that fails does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import sha256
from typing import Any, Protocol, cast, overload, runtime_checkable

from penstock.agents.blocking import call_on_worker
from penstock.agents.hooks import Execution, HookAbort, running_execution
from penstock.agents.messages import ToolCall, ToolResult, bytes_of
from penstock.agents.schema import Parameters, Problems, check, read_json
from penstock.containment import accounts
from penstock.containment.limits import Budget, seconds_to_ns
from penstock.errors import CancelledError, Halted, InvalidValue
from penstock.money import Usd, to_nanos
from penstock.runtime import door
from penstock.runtime.billing.usage import Reported
from penstock.runtime.call import Call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import points
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal, is_json
from penstock.runtime.durable.keys import Entered
from penstock.runtime.durable.replay import replay
from penstock.runtime.options import must_be
from penstock.runtime.settlement import told_by
from penstock.stops import LIMIT_REASONS, Stop, StopReason, TerminationReason
from penstock.tracing.events import ToolCallTrace
from penstock.tracing.jsonable import jsonable
from penstock.tracing.redaction import redact

MAX_RESULT_CHARACTERS = 100_000
"""So much of a result is told to the model; more would be paid for in every later turn."""
MAX_CALLS_PER_TURN = 128
"""A turn that asks for more is refused as a whole; the conversation keeps so many of its calls."""
MAX_PARALLEL_TOOLS = 8
MAX_PLAIN = 1 << 64
MAX_NAME = 64
DIGEST = 16
"""So many characters of a digest tell the calls under one id apart."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every provider accepts."""

TOLD = frozenset(
    {
        StopReason.HOOK_DENIED,
        StopReason.CIRCUIT_OPEN,
        StopReason.PROVIDER_ERROR,
        StopReason.PROVIDER_RATE_LIMIT,
    }
)
"""Stops of a single call: the model is told, and the agent goes on."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a model is told of a tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON Schema of its arguments."""
    weight: int = 0
    """Bytes it adds to each request."""


class Tool:
    """A function with what a model has to know of it."""

    __slots__ = (
        "_context_name",
        "_hint",
        "_is_async",
        "_parameters",
        "budget",
        "cost_usd",
        "fn",
        "needs_approval",
        "spec",
        "timeout_s",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        budget: Budget | None = None,
        cost_usd: Usd | None = None,
        needs_approval: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise InvalidValue("fn", fn, "a function")
        called = name if name is not None else getattr(fn, "__name__", "")
        if not isinstance(called, str) or not TOOL_NAME.fullmatch(called):
            raise InvalidValue(
                "name of a tool", called, "1 to 64 letters, digits, _ or -, given if the function's is not"
            )
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        must_be("budget", budget, Budget)
        self.fn = fn
        self.timeout_s = timeout_s
        self.budget = budget
        """What one call of it may use; None draws on the agent's."""
        self.cost_usd = cost_usd
        """What one call costs; None if that is not known before."""
        self.needs_approval = needs_approval
        """Whether somebody is asked before it runs."""
        self._hint = None if cost_usd is None else to_nanos(cost_usd, "cost_usd")
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(fn)) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004  an object that is called
        )
        self._parameters = Parameters(fn, called) if parameters is None else None
        """None if the schema was given: then the function gets what it lists, as it is."""
        self._context_name = None if self._parameters is None else self._parameters.context_name
        """The parameter that takes the context, if one does."""
        schema = parameters if self._parameters is None else self._parameters.schema
        told = description if description is not None else inspect.getdoc(fn) or ""
        weight = len(called) + bytes_of(told) + len(json.dumps(schema))
        self.spec = ToolSpec(called, told, cast(Mapping[str, Any], schema), weight)

    @property
    def name(self) -> str:
        """What the model calls it by."""
        return self.spec.name

    def read(self, arguments: Mapping[str, Any] | str) -> tuple[dict[str, Any], Problems]:
        """The arguments as the function takes them, or what is wrong with them."""
        if isinstance(arguments, str):
            arguments, wrong = read_json(arguments) if arguments.strip() else ({}, None)
            if wrong is not None:
                return {}, [wrong]
        if type(arguments) is not dict and not isinstance(arguments, Mapping):
            return {}, ["expected a JSON object with the arguments by name"]
        if self._parameters is not None:
            return self._parameters.read(arguments)
        return dict(arguments), check(arguments, self.spec.parameters)

    def call(self, context: ExecutionContext, arguments: Mapping[str, Any]) -> Coroutine[Any, Any, Call]:
        """Run it under `context` as one contained call, with arguments that were read."""
        name, takes = self.spec.name, self._context_name
        work = self._work if takes is None else lambda arguments: self.fn(**arguments, **{takes: context})
        if self._is_async:
            return door.attempt(context, "tool", work, (arguments,), name, self._hint, None, self.timeout_s, None)
        return call_on_worker(context, "tool", work, (arguments,), name, self._hint, self.timeout_s)

    def _work(self, arguments: Mapping[str, Any]) -> Any:
        return self.fn(**arguments)

    def __repr__(self) -> str:
        return f"Tool({self.spec.name!r})"


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    budget: Budget | None = None,
    cost_usd: Usd | None = None,
    needs_approval: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of the function below: `@tool`, or `@tool(timeout_s=5)`."""
    return Tool(fn, **options) if fn is not None else lambda given: Tool(given, **options)


@runtime_checkable
class ToolChain(Protocol):
    """Where tool calls go: `Tools`, or something of your own."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What models are told."""

    def execute(self, context: ExecutionContext, call: ToolCall) -> Awaitable[ToolResult]:
        """Run one call; the result, an error that the model can act on included."""


class Tools:
    """The chain of a list of tools, functions and agents."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._by_name: dict[str, Tool] = {}
        for given in tools:
            made = as_tool(given)
            if made.name in self._by_name:
                raise InvalidValue("tools", made.name, "tools of different names")
            self._by_name[made.name] = made
        self.specs: tuple[ToolSpec, ...] = tuple(made.spec for made in self._by_name.values())

    def execute(self, context: ExecutionContext, call: ToolCall) -> Coroutine[Any, Any, ToolResult]:
        """Run one call; raises only what stops the agent: a cancel, a limit of its own or above, a hook's abort."""
        execution = running_execution.get()
        if execution is None or not execution.listeners:
            return self._run(context, call)
        return self._run_told(context, call, execution)

    async def _run_told(self, context: ExecutionContext, call: ToolCall, execution: Execution) -> ToolResult:
        """Run one call, and tell those who listen."""
        said = await execution.fire("before_tool_call", context, call)
        if isinstance(said, ToolResult):
            result = said
        else:
            call = said if isinstance(said, ToolCall) else call
            result = await self._run(context, call)
        said = await execution.fire("after_tool_call", context, call, result)
        return said if isinstance(said, ToolResult) else result

    async def _run(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
        found = self._by_name.get(call.name)
        if found is None:
            known = ", ".join(self._by_name) or "none"
            return _refuse(context, call, "UnknownTool", f"there is no tool {_cut(call.name)!r}; there are: {known}")
        arguments, problems = found.read(call.arguments)
        if not problems and found.needs_approval:
            call, arguments, problems, denied = await _ask(context, found, call, arguments)
            if denied is not None:
                return _refuse(context, call, "ApprovalDenied", f"not run: {denied}")
        if problems:
            told = "\n".join(f"- {problem}" for problem in problems)
            return _refuse(context, call, "InvalidArguments", f"the arguments of {call.name} are wrong:\n{told}")
        if found.budget is None:
            made = await found.call(context, arguments)
            if context._run.journal is not None:
                _note(made)
            return _result(context, None, call, made)
        return await self._run_within(context, found, found.budget, call, arguments)

    async def _run_within(
        self, context: ExecutionContext, found: Tool, budget: Budget, call: ToolCall, arguments: Mapping[str, Any]
    ) -> ToolResult:
        """Run it under a budget of its own, which has a place of its own in the tree."""
        with context.spawn_child(f"tool:{found.name}", budget=budget) as child:
            made = await found.call(child, arguments)
            _note(made)
            if made.stop is None and made.error is not None:
                context.complete_child(child, TerminationReason.ERROR)
            return _result(context, child, call, made)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Tools({', '.join(self._by_name)})"


def as_tool(given: Any) -> Tool:
    """A tool as it is, a function as a tool, an agent as one that runs it."""
    if isinstance(given, Tool):
        return given
    make = getattr(given, "as_tool", None)
    if callable(make):
        return cast(Tool, make())
    if not callable(given):
        raise InvalidValue("tool", given, "a Tool, a function or an agent")
    return Tool(given)


def as_chain(tools: ToolChain | Iterable[Any]) -> ToolChain:
    """A chain as it is, or the chain of a list."""
    return tools if isinstance(tools, Tools | ToolChain) else Tools(tools)  # a Tools is told at once


async def execute_all(
    chain: ToolChain, context: ExecutionContext, calls: Sequence[ToolCall], max_parallel: int = MAX_PARALLEL_TOOLS
) -> list[ToolResult]:
    """Run the calls of one turn, so many at a time; the results in the order of the calls."""
    if len(calls) > MAX_CALLS_PER_TURN:
        return _refuse_all(context, calls)
    if len(calls) == 1 or max_parallel == 1:
        return [await execute_one(chain, context, call, at) for at, call in enumerate(calls)]
    results: list[Any] = [None] * len(calls)
    waiting = iter(enumerate(calls))

    async def work() -> None:
        for at, call in waiting:
            results[at] = await execute_one(chain, context, call, at)

    await _all_done([asyncio.create_task(work()) for _ in range(min(max_parallel, len(calls)))])
    return results


async def _all_done(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for all of them; one that fails, or a cancel of whoever waits, stops the others, and is raised after them.

    Not a TaskGroup: before Python 3.13, one in which a task fails leaves its own cancel of the waiting task behind, and
    a cancel of ours that comes later is taken for somebody else's.
    """
    ended: list[BaseException] = []
    waiting, others = set(tasks), list(tasks)
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            ended.append(error)
            waiting = {one for one in waiting if not one.done()}
        finally:
            while waiting and others:  # something went wrong; once, for they may be clearing up
                others.pop().cancel()
    ended += [failed for one in tasks if not one.cancelled() and (failed := one.exception()) is not None]
    if ended:
        raise _worst(ended)
    if any(one.cancelled() for one in tasks):
        raise asyncio.CancelledError  # a tool raised it


def execute_one(chain: ToolChain, context: ExecutionContext, call: ToolCall, at: int = 0) -> Awaitable[ToolResult]:
    """Run the call that stands `at` that position in its turn; of a journalled run, once."""
    journal = context._run.journal
    return chain.execute(context, call) if journal is None else _execute_once(journal, chain, context, call, at)


async def _execute_once(
    journal: Journal, chain: ToolChain, context: ExecutionContext, call: ToolCall, at: int
) -> ToolResult:
    """The result that the run has had here before; or run it, and write the result down before anybody has it.

    A failure is a result too: the model is told of it, and what it says next depends on that. What is asked for is part
    of the place: providers number the calls of each answer anew, and a model that answers otherwise than before, being
    another one or asked again, has not had this result, nor was anybody asked about this call.
    """
    place = journal.here().next("tool", at, call.id, _digest(call))
    found = journal.find(place.path)
    if found is not None:
        said = found.value
        replay(journal, context, found, said["name"], said["content"])
        return ToolResult(call.id, said["name"], said["content"], said["is_error"], said["value"])
    if points.hook is not None:
        points.hook("tool.before_call")
    bill: list[Call] = []
    outside = _bill.set(bill)
    try:
        with Entered(place):
            result = await chain.execute(context, call)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            _bill.reset(outside)
    written = {"name": result.name, "content": result.content, "is_error": result.is_error}
    written["value"] = result.value if is_json(result.value) else None
    record = bill[-1].record if bill else None
    if record is not None and record.cost_unknown:
        written[COST_UNKNOWN] = True
    cost, tokens_in, tokens_out = (0, 0, 0) if record is None else (record.cost, record.tokens_in, record.tokens_out)
    await journal.append(place.path, "tool", written, cost, tokens_in or 0, tokens_out or 0)
    return result


def _digest(call: ToolCall) -> str:
    """Which tool is asked for with which arguments, in whatever order those were written."""
    said = dict(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments
    try:
        text = json.dumps([call.name, said], sort_keys=True)
    except (TypeError, ValueError):  # no JSON: somebody's code has made the call
        text = repr([call.name, said])
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST]


def _note(made: Call) -> None:
    """Let whoever writes down its result know the call."""
    bill = _bill.get()
    if bill is not None:
        bill.append(made)


_bill: ContextVar[list[Call] | None] = ContextVar("penstock_tool_bill", default=None)
"""Gets the call behind a tool's result, in journalled runs."""


def _worst(ended: Sequence[BaseException]) -> BaseException:
    """Of what ended several tools at once, what matters most to whoever waits for them."""
    for kind in (KeyboardInterrupt, SystemExit, asyncio.CancelledError, CancelledError, HookAbort, Halted):
        for one in ended:
            if isinstance(one, kind):
                return one
    return ended[0]


def _refuse(context: ExecutionContext, call: ToolCall, error: str, told: str) -> ToolResult:
    """Nothing runs: write the call down as a failed one, and tell the model."""
    name = _cut(call.name)
    context.record_event(ToolCallTrace(name=name, status="fail", error=error, stop_reason=told[:500]))
    return ToolResult(call.id, name, told, is_error=True)


def _refuse_all(context: ExecutionContext, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Nothing of the turn runs: written down once, for all of them, so that a turn costs the same whatever it asks."""
    told = f"not run: {len(calls)} calls in one turn, and at most {MAX_CALLS_PER_TURN} are; ask for fewer at a time"
    _refuse(context, calls[0], "TooManyToolCalls", told)
    return [ToolResult(call.id, _cut(call.name), told, is_error=True) for call in calls]


def _cut(name: object) -> str:
    return str(name)[:MAX_NAME]


asked_about: ContextVar[ToolSpec | None] = ContextVar("penstock_asked_about", default=None)
"""The tool that somebody is being asked about, for whoever asks: other arguments must be such as it takes."""


async def _ask(
    context: ExecutionContext, found: Tool, call: ToolCall, arguments: dict[str, Any]
) -> tuple[ToolCall, dict[str, Any], Problems, str | None]:
    """Ask for approval: the call as it may run, its arguments and what is wrong with them, and why it may not run."""
    execution = running_execution.get()
    if execution is None or execution.approve is None:
        return call, arguments, [], "it needs approval, and there is nobody to ask"
    outside = asked_about.set(found.spec)
    try:
        approval = await execution.approve(context, call)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            asked_about.reset(outside)
    if not approval.allowed:
        return call, arguments, [], approval.reason or "denied"
    if approval.arguments is None:
        return call, arguments, [], None
    call = replace(call, arguments=approval.arguments)
    return call, *found.read(approval.arguments), None


def _result(context: ExecutionContext, own: ExecutionContext | None, call: ToolCall, made: Call) -> ToolResult:
    """What the model is told of a call that was made; or raise what stops the agent."""
    if made.stop is not None:
        cause = made.error
        if not _is_told(context, own, made.stop):
            made.result()
        if made.stop.reason is StopReason.PROVIDER_ERROR and cause is not None:
            return _failure(call, cause)
        return ToolResult(call.id, call.name, f"stopped: {made.stop.message}", is_error=True)
    if made.error is not None:
        return _failure(call, made.error)
    return ToolResult(call.id, call.name, shown(made.value), False, made.value)


def _is_told(context: ExecutionContext, own: ExecutionContext | None, stop: Stop) -> bool:
    """Whether a stop is the tool's own affair; what stops the agent, or somebody above it, goes on."""
    if context.cancellation.is_cancelled:
        return False
    if stop.reason in TOLD:
        return True
    if stop.reason not in LIMIT_REASONS:
        return False
    # A limit that is none of ours is the tool's own: its time, its budget, or one it set for something below it.
    return not context._is_under(stop) or (own is not None and accounts.refusing(own._account, stop) is own._account)


def _failure(call: ToolCall, error: BaseException) -> ToolResult:
    """What the model is told of an error: it goes to a provider, and is kept, so that no secret may be in it."""
    return ToolResult(call.id, call.name, f"{type(error).__name__}: {redact(told_by(error))}", is_error=True)


def shown(value: Any) -> str:
    """A tool's value as the model is told it: text as it is, anything else as JSON, cut where it is too long."""
    if type(value) is int and -MAX_PLAIN < value < MAX_PLAIN:
        return str(value)
    if isinstance(value, Reported):
        value = value.value
    if not isinstance(value, str):
        value = json.dumps(jsonable(_plain(value)), ensure_ascii=False)
    if len(value) <= MAX_RESULT_CHARACTERS:
        return str(value)
    return f"{value[:MAX_RESULT_CHARACTERS]}\n[cut: the first {MAX_RESULT_CHARACTERS:,} of {len(value):,} characters]"


def _plain(value: Any) -> Any:
    """What JSON can make more of than the value itself."""
    try:
        if callable(dump := getattr(value, "model_dump", None)):
            return dump(mode="json")
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    except Exception:  # whatever somebody's class does; it is shown by its repr
        return value
    return value
