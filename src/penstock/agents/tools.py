"""Tools: functions that a model may call.

A tool is made from a typed Python function: its name, docstring and signature describe it to the model, and the model's
arguments are checked against the same signature. Invalid calls and failures of tools are returned to the model as tool
errors that it can act on. A cancel, and a limit that stops the agent, are raised instead.

Every call is one in the run's tree, contained like any other. A call that is refused before anything runs is recorded
as failed; unlike a tool that fails, it takes no step and draws on no retry budget.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol, cast, overload, runtime_checkable

from penstock import checks
from penstock.agents.loop import Execution, HookAbort, running_execution
from penstock.agents.messages import ToolCall, ToolResult, bytes_of
from penstock.agents.schema import Parameters, Problems, check, read_json
from penstock.containment import accounts
from penstock.containment.limits import Budget, seconds_to_ns
from penstock.errors import CancelledError, Halted, InvalidValue
from penstock.money import Usd, to_nanos
from penstock.runtime import execution
from penstock.runtime.billing.usage import Reported
from penstock.runtime.call import Call, CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal, is_json
from penstock.runtime.durable.keys import enter_scope
from penstock.runtime.replay import replay
from penstock.runtime.settlement import error_text
from penstock.stops import LIMIT_REASONS, Stop, StopReason, TerminationReason
from penstock.tracing.events import ToolCallTrace
from penstock.tracing.jsonable import jsonable, structured
from penstock.tracing.redaction import redact

MAX_RESULT_CHARACTERS = 100_000
"""Maximum length of a result sent to the model; more would be paid for in every later turn."""
MAX_CALLS_PER_TURN = 128
"""Maximum number of tool calls in a turn. A turn with more is refused as a whole; the conversation keeps this many."""
MAX_PARALLEL_TOOLS = 8
MAX_PLAIN_INTEGER = 1 << 64
MAX_NAME = 64
DIGEST_CHARACTERS = 16
"""Length of the digest that distinguishes calls with the same id."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The names that every provider accepts."""

CALL_STOPS = frozenset(
    {
        StopReason.HOOK_DENIED,
        StopReason.CIRCUIT_OPEN,
        StopReason.PROVIDER_ERROR,
        StopReason.PROVIDER_RATE_LIMIT,
    }
)
"""Stops of a single call, which are returned to the model; the agent continues."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for a model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """The JSON Schema of its arguments."""
    weight: int = 0
    """Number of bytes it adds to each request."""


class Tool:
    """A function with its description for a model."""

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
        checks.function("fn", fn)
        tool_name = name if name is not None else getattr(fn, "__name__", "")
        if not isinstance(tool_name, str) or not TOOL_NAME.fullmatch(tool_name):
            expected = "1 to 64 letters, digits, _ or -; pass name= if the function's own name is not"
            raise InvalidValue("name of a tool", tool_name, expected)
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        if budget is not None:
            checks.instance("budget", budget, Budget, none="no budget of its own")
        self.fn = fn
        self.timeout_s = timeout_s
        self.budget = budget
        """Limits of one call; None applies only the agent's."""
        self.cost_usd = cost_usd
        """Cost of one call; None if it is not known in advance."""
        self.needs_approval = needs_approval
        """Whether each call needs approval before it runs."""
        self._hint = None if cost_usd is None else to_nanos(cost_usd, "cost_usd")
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(fn)) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004  an object that is called
        )
        self._parameters = Parameters(fn, tool_name) if parameters is None else None
        """None if the schema was given: then the function gets the arguments unchanged."""
        self._context_name = None if self._parameters is None else self._parameters.context_name
        """Name of the parameter that takes the context, if there is one."""
        schema = parameters if self._parameters is None else self._parameters.schema
        text = description if description is not None else inspect.getdoc(fn) or ""
        weight = len(tool_name) + bytes_of(text) + len(json.dumps(schema))
        self.spec = ToolSpec(tool_name, text, cast(Mapping[str, Any], schema), weight)

    @property
    def name(self) -> str:
        """Name of the tool for the model."""
        return self.spec.name

    def read(self, arguments: Mapping[str, Any] | str) -> tuple[dict[str, Any], Problems]:
        """Return the arguments as the function takes them, or the problems."""
        if isinstance(arguments, str):
            arguments, problem = read_json(arguments) if arguments.strip() else ({}, None)
            if problem is not None:
                return {}, [problem]
        if type(arguments) is not dict and not isinstance(arguments, Mapping):
            return {}, ["expected a JSON object with the arguments by name"]
        if self._parameters is not None:
            return self._parameters.read(arguments)
        return dict(arguments), check(arguments, self.spec.parameters)

    def call(self, context: ExecutionContext, arguments: Mapping[str, Any]) -> Coroutine[Any, Any, Call]:
        """Run it under `context` as one contained call, with arguments from `read`."""
        name, takes = self.spec.name, self._context_name
        work = self._work if takes is None else lambda arguments: self.fn(**arguments, **{takes: context})
        spec = CallSpec("tool", name, self._hint, timeout_s=self.timeout_s)
        return execution.attempt_async(context, spec, work, (arguments,), on_worker=not self._is_async)

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
    """Decorator that makes a tool of a function: `@tool`, or `@tool(timeout_s=5)`."""
    return Tool(fn, **options) if fn is not None else lambda given: Tool(given, **options)


@runtime_checkable
class ToolChain(Protocol):
    """Executes tool calls: `Tools`, or your own implementation."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The descriptions of the tools for models."""

    def execute(self, context: ExecutionContext, call: ToolCall) -> Awaitable[ToolResult]:
        """Run one call, and return its result, which may be an error that the model can act on."""


class Tools:
    """The chain of a list of tools, functions and agents."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self._by_name: dict[str, Tool] = {}
        for tool in map(as_tool, tools):
            if tool.name in self._by_name:
                raise InvalidValue("tools", tool.name, "tools of different names")
            self._by_name[tool.name] = tool
        self.specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in self._by_name.values())

    def execute(self, context: ExecutionContext, call: ToolCall) -> Coroutine[Any, Any, ToolResult]:
        """Run one call; raises only the errors that stop the agent: a cancel, a limit that applies to it, a hook's
        abort.
        """
        execution = running_execution.get()
        if execution is None or not execution.listeners:
            return self._run(context, call)
        return self._run_observed(context, call, execution)

    async def _run_observed(self, context: ExecutionContext, call: ToolCall, execution: Execution) -> ToolResult:
        """Run one call, and call the hooks."""
        replacement = await execution.fire("before_tool_call", context, call)
        if isinstance(replacement, ToolResult):
            result = replacement
        else:
            call = replacement if isinstance(replacement, ToolCall) else call
            result = await self._run(context, call)
        replacement = await execution.fire("after_tool_call", context, call, result)
        return replacement if isinstance(replacement, ToolResult) else result

    async def _run(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
        found = self._by_name.get(call.name)
        if found is None:
            return refuse(context, call, "UnknownTool", unknown_tool(call.name, self._by_name))
        arguments, problems = found.read(call.arguments)
        if not problems and found.needs_approval:
            call, arguments, problems, denied = await _request_approval(context, found, call, arguments)
            if denied is not None:
                return refuse(context, call, "ApprovalDenied", f"not run: {denied}")
        if problems:
            listed = "\n".join(f"- {problem}" for problem in problems)
            return refuse(context, call, "InvalidArguments", f"the arguments of {call.name} are invalid:\n{listed}")
        if found.budget is None:
            contained = await found.call(context, arguments)
            if context._run.journal is not None:
                _bill_for_journal(contained)
            return _result(context, None, call, contained)
        return await self._run_within(context, found, found.budget, call, arguments)

    async def _run_within(
        self, context: ExecutionContext, found: Tool, budget: Budget, call: ToolCall, arguments: Mapping[str, Any]
    ) -> ToolResult:
        """Run it under its own budget, in a child context of its own."""
        with context.spawn_child(f"tool:{found.name}", budget=budget) as child:
            contained = await found.call(child, arguments)
            _bill_for_journal(contained)
            if contained.stop is None and contained.error is not None:
                context.complete_child(child, TerminationReason.ERROR)
            return _result(context, child, call, contained)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Tools({', '.join(self._by_name)})"


def as_tool(given: Any) -> Tool:
    """Return a tool unchanged, and a function or an agent as a tool."""
    if isinstance(given, Tool):
        return given
    make = getattr(given, "as_tool", None)
    if callable(make):
        return cast(Tool, make())
    if not callable(given):
        raise InvalidValue("tool", given, "a Tool, a function or an agent")
    return Tool(given)


def as_chain(tools: ToolChain | Iterable[Any]) -> ToolChain:
    """Return a chain unchanged, and a list as a chain."""
    return (
        tools if isinstance(tools, Tools | ToolChain) else Tools(tools)
    )  # Tools first: the check against a protocol is slow


async def execute_all(
    chain: ToolChain, context: ExecutionContext, calls: Sequence[ToolCall], max_parallel: int = MAX_PARALLEL_TOOLS
) -> list[ToolResult]:
    """Run the calls of one turn, at most `max_parallel` at once; the results are in the order of the calls."""
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
    """Wait for all tasks; a failure, or a cancel of the waiting task, cancels the others, and is raised after they end.

    Not a TaskGroup: before Python 3.13, one in which a task fails leaves its own cancel of the waiting task behind, and
    a later cancel of the run would be taken for one from outside.
    """
    ended: list[BaseException] = []
    waiting, others = set(tasks), list(tasks)
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            ended.append(error)
            waiting = {task for task in waiting if not task.done()}
        finally:
            while waiting and others:  # something went wrong; cancel each only once, as it may be cleaning up
                others.pop().cancel()
    ended += [failed for task in tasks if not task.cancelled() and (failed := task.exception()) is not None]
    if ended:
        raise _worst(ended)
    if any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError  # a tool raised it


def execute_one(chain: ToolChain, context: ExecutionContext, call: ToolCall, at: int = 0) -> Awaitable[ToolResult]:
    """Run the call at index `at` of its turn; in a journalled run, only once."""
    journal = context._run.journal
    return chain.execute(context, call) if journal is None else _execute_once(journal, chain, context, call, at)


async def _execute_once(
    journal: Journal, chain: ToolChain, context: ExecutionContext, call: ToolCall, at: int
) -> ToolResult:
    """Return the journalled result; or run the call, and journal its result before anything else can use it.

    A failure is a result too: it is returned to the model, and the next answer depends on it. The digest of tool and
    arguments is part of the journal key: providers number the calls of each answer anew, and a model that gives another
    answer than before a crash must neither get this result nor use an approval of another call.
    """
    place = journal.scope().next("tool", at, call.id, _digest(call))
    found = journal.find(place.path)
    if found is not None:
        stored = found.value
        returned = stored["content"] if stored["value"] is None else stored["value"]
        replay(journal, context, found, stored["name"], stored["content"], exchanged=(call.arguments, returned))
        return ToolResult(call.id, stored["name"], stored["content"], stored["is_error"], stored["value"])
    await journal.flush()
    if failpoints.hook is not None:
        failpoints.hook("tool.before_call")
    bill: list[Call] = []
    outside = _bill.set(bill)
    try:
        with enter_scope(place):
            result = await chain.execute(context, call)
    finally:
        with suppress(ValueError):  # closed from another context, where there is nothing to reset
            _bill.reset(outside)
    entry = {"name": result.name, "content": result.content, "is_error": result.is_error}
    entry["value"] = result.value if is_json(result.value) else None
    record = bill[-1].record if bill else None
    if record is not None and record.cost_unknown:
        entry[COST_UNKNOWN] = True
    cost, tokens_in, tokens_out = (0, 0, 0) if record is None else (record.cost, record.tokens_in, record.tokens_out)
    await journal.append(place.path, "tool", entry, cost, tokens_in or 0, tokens_out or 0)
    return result


def _digest(call: ToolCall) -> str:
    """Identifies the tool and its arguments, in whatever order those were written."""
    arguments = dict(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments
    try:
        text = json.dumps([call.name, arguments], sort_keys=True)
    except (TypeError, ValueError):  # not JSON: made by a caller's own code
        text = repr([call.name, arguments])
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


def _bill_for_journal(contained: Call) -> None:
    """Pass the call to `_execute_once`, which journals its cost with its result."""
    bill = _bill.get()
    if bill is not None:
        bill.append(contained)


_bill: ContextVar[list[Call] | None] = ContextVar("penstock_tool_bill", default=None)
"""Receives the contained call of a tool's result, in journalled runs."""


def _worst(ended: Sequence[BaseException]) -> BaseException:
    """The error to raise of those that ended several tools at once: interrupts and cancels first."""
    for kind in (KeyboardInterrupt, SystemExit, asyncio.CancelledError, CancelledError, HookAbort, Halted):
        for error in ended:
            if isinstance(error, kind):
                return error
    return ended[0]


def refuse(context: ExecutionContext, call: ToolCall, error: str, reason: str) -> ToolResult:
    """Record a call as failed without running it, and return the reason to the model."""
    name = _shortened(call.name)
    refused = ToolCallTrace(tool_name=name, input=call.arguments, status="fail", error=error, stop_reason=reason[:500])
    context.record_event(refused)
    return ToolResult(call.id, name, reason, is_error=True)


def _refuse_all(context: ExecutionContext, calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Refuse a whole turn, recorded once for all its calls, so that its cost does not depend on their number."""
    reason = f"not run: {len(calls)} calls in one turn; the maximum is {MAX_CALLS_PER_TURN}, so call fewer at a time"
    refuse(context, calls[0], "TooManyToolCalls", reason)
    return [ToolResult(call.id, _shortened(call.name), reason, is_error=True) for call in calls]


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """The message to a model that called a tool which does not exist."""
    return f"there is no tool {_shortened(name)!r}; there are: {', '.join(known) or 'none'}"


def _shortened(name: object) -> str:
    return str(name)[:MAX_NAME]


tool_to_approve: ContextVar[ToolSpec | None] = ContextVar("penstock_tool_to_approve", default=None)
"""The tool whose call is being approved: edited arguments must match its parameters."""


async def _request_approval(
    context: ExecutionContext, found: Tool, call: ToolCall, arguments: dict[str, Any]
) -> tuple[ToolCall, dict[str, Any], Problems, str | None]:
    """Return the approved call, its arguments and their problems, and the reason if it was denied."""
    execution = running_execution.get()
    if execution is None or execution.approve is None:
        return call, arguments, [], "it needs approval, and this run has no approver"
    outside = tool_to_approve.set(found.spec)
    try:
        approval = await execution.approve(context, call)
    finally:
        with suppress(ValueError):  # closed from another context, where there is nothing to reset
            tool_to_approve.reset(outside)
    if not approval.allowed:
        return call, arguments, [], approval.reason or "denied"
    if approval.arguments is None:
        return call, arguments, [], None
    call = replace(call, arguments=approval.arguments)
    return call, *found.read(approval.arguments), None


def _result(context: ExecutionContext, own: ExecutionContext | None, call: ToolCall, contained: Call) -> ToolResult:
    """Return the model's result of a call that was made; or raise the error that stops the agent."""
    if contained.stop is not None:
        cause = contained.error
        if not _is_stop_of_call(context, own, contained.stop):
            contained.result()
        if contained.stop.reason is StopReason.PROVIDER_ERROR and cause is not None:
            return _failure(call, cause)
        return ToolResult(call.id, call.name, f"stopped: {contained.stop.message}", is_error=True)
    if contained.error is not None:
        return _failure(call, contained.error)
    return ToolResult(call.id, call.name, render_value(contained.value), False, contained.value)


def _is_stop_of_call(context: ExecutionContext, own: ExecutionContext | None, stop: Stop) -> bool:
    """Whether a stop concerns only this call, and not the agent or an enclosing context."""
    if context.cancellation.is_cancelled:
        return False
    if stop.reason in CALL_STOPS:
        return True
    if stop.reason not in LIMIT_REASONS:
        return False
    # A limit that is not the agent's is the tool's own: its time, its budget, or one inside the tool.
    return not context._is_under(stop) or (own is not None and accounts.refusing(own._account, stop) is own._account)


def _failure(call: ToolCall, error: BaseException) -> ToolResult:
    """The result for an error. It is stored and sent to a provider, so secrets are redacted."""
    return ToolResult(call.id, call.name, f"{type(error).__name__}: {redact(error_text(error))}", is_error=True)


def render_value(value: Any) -> str:
    """A value as text for a model: text unchanged, anything else as JSON, truncated to `MAX_RESULT_CHARACTERS`."""
    if type(value) is int and -MAX_PLAIN_INTEGER < value < MAX_PLAIN_INTEGER:
        return str(value)
    if isinstance(value, Reported):
        value = value.value
    if not isinstance(value, str):
        value = json.dumps(jsonable(structured(value)), ensure_ascii=False)
    if len(value) <= MAX_RESULT_CHARACTERS:
        return str(value)
    shown, total = f"{MAX_RESULT_CHARACTERS:,}", f"{len(value):,}"
    return f"{value[:MAX_RESULT_CHARACTERS]}\n[truncated: the first {shown} of {total} characters]"
