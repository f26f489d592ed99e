"""`approval`: wait until a person approves, edits or rejects a value before it is passed on.

The service `approvals` of a run (`ApprovalService`) puts questions to people; agents use it too, for tools that need
approval. `Approvals` is an in-memory implementation: the node puts questions, and reviewers list, approve, edit and
reject them, from any thread. A question is removed when the task waiting for it is cancelled; the first answer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from penstock.agents.loop import Approval, Approve
from penstock.agents.messages import ToolCall
from penstock.agents.schema import check
from penstock.agents.tools import tool_to_approve
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle, typed
from penstock.nodes.parts.services import ServiceMissing
from penstock.nodes.parts.template import Template, TemplateInvalid
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent
from penstock.runtime.graphs.settings import Checked, Data, Finding, Seconds, Settings, Text


class ApprovalGone(PenstockError):
    """No question is open under this id: it was answered or withdrawn, or never existed."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(f"there is no open question {id!r}: it was answered or withdrawn, or never existed")


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question that is waiting for an answer."""

    id: str
    run_id: str
    node_id: str
    question: str
    value: Any
    """The value passed on if approved: a value, or the name and arguments of a tool call."""
    expects: Mapping[str, Any] | None = None
    """Constraint on an edit: for a tool call its `tool`, and as `parameters` the JSON Schema of the arguments; None
    allows any value.
    """
    waited_s: float = 0.0
    """How long the question had been open when the current waiter started: it may outlive its process."""

    def to_dict(self) -> dict[str, Any]:
        """Return the question as JSON data."""
        return {
            "id": self.id,
            "run_id": self.run_id,
            "node_id": self.node_id,
            "question": self.question,
            "value": self.value,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question."""

    approved: bool
    value: Any = None
    """The value to pass on instead, if it was edited."""
    edited: bool = False
    reason: str = ""


class Question(Protocol):
    """An open question."""

    request: ApprovalRequest

    async def answer(self) -> Answer:
        """Wait for the answer and return it."""

    async def at_last(self) -> Answer | None:
        """Close the question at its timeout; return an answer that was already given, else None."""


@runtime_checkable
class ApprovalService(Protocol):
    """Service that puts questions to people and waits for their answers."""

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> AbstractAsyncContextManager[Question]:
        """Put the question on entering the context manager, and withdraw it on exit.

        An edit is converted by `as_edited` to the form that the question `expects`.
        """


class OpenQuestion:
    """An open in-memory question; as a context manager, it is withdrawn on exit."""

    __slots__ = ("_approvals", "_future", "_loop", "request")

    def __init__(self, approvals: Approvals, request: ApprovalRequest) -> None:
        self._approvals = approvals
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer] = self._loop.create_future()
        self.request = request

    async def answer(self) -> Answer:
        """Wait for the answer and return it."""
        return await self._future

    async def at_last(self) -> Answer | None:
        """Close the question; return an answer that was already given, else None."""
        self._approvals._withdraw(self)
        await asyncio.sleep(0)  # let an answer given on another thread arrive
        return self._future.result() if self._future.done() and not self._future.cancelled() else None

    def __enter__(self) -> OpenQuestion:
        return self

    def __exit__(self, *error: object) -> None:
        self._approvals._withdraw(self)

    async def __aenter__(self) -> OpenQuestion:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._approvals._withdraw(self)

    def _resolve(self, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            self._loop.call_soon_threadsafe(self._take, answer)

    def _take(self, answer: Answer) -> None:
        if not self._future.done():
            self._future.set_result(answer)


class Approvals:
    """Open questions in memory, oldest first; answers may come from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = count(1)
        self._waiting: dict[str, OpenQuestion] = {}

    def list(self, run_id: str | None = None) -> tuple[ApprovalRequest, ...]:
        """Return the open questions, only those of `run_id` if given."""
        with self._lock:
            waiting = [question.request for question in self._waiting.values()]
        return tuple(request for request in waiting if run_id in (None, request.run_id))

    def approve(self, id: str) -> None:
        """Approve the value unchanged."""
        self._answer(id, Answer(True))

    def edit(self, id: str, value: Any) -> None:
        """Approve with `value` instead; InvalidValue if it does not fit, and the question stays open."""
        with self._lock:
            waiting = self._waiting.get(id)
        if waiting is None:
            raise ApprovalGone(id)
        self._answer(id, Answer(True, as_edited(waiting.request.expects, value), edited=True))

    def reject(self, id: str, reason: str = "rejected") -> None:
        """Reject the value."""
        self._answer(id, Answer(False, reason=reason))

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> OpenQuestion:
        """Put a question, open until answered or withdrawn; call it on the event loop that waits for the answer."""
        with self._lock:
            id = f"{run_id}/{node_id}/{next(self._numbers)}"
            request = ApprovalRequest(id, run_id, node_id, question, value, expects)
            opened = self._waiting[id] = OpenQuestion(self, request)
        return opened

    def _answer(self, id: str, answer: Answer) -> None:
        with self._lock:
            waiting = self._waiting.pop(id, None)
        if waiting is None:
            raise ApprovalGone(id)
        waiting._resolve(answer)

    def _withdraw(self, question: OpenQuestion) -> None:
        with self._lock:
            self._waiting.pop(question.request.id, None)


def as_edited(expects: Mapping[str, Any] | None, value: Any) -> Any:
    """Return the value that an edit passes on; InvalidValue if it does not match what the question expects.

    For a tool call, this is its arguments. An object with `tool` and `arguments`, as the question shows it, is also
    accepted.
    """
    if expects is None or "tool" not in expects:
        return value
    tool, parameters = expects["tool"], expects["parameters"]
    arguments = value["arguments"] if _is_as_shown(value, parameters) else value
    if arguments is not value and value["tool"] != tool:
        raise InvalidValue("answer", value, f"only the arguments of {tool}: another tool cannot run instead")
    if not isinstance(arguments, Mapping):
        raise InvalidValue("answer", value, f"an object with the arguments of {tool} by name")
    problems = check(dict(arguments), parameters)
    if problems:
        raise InvalidValue("answer", value, f"arguments that {tool} takes ({'; '.join(problems)})")
    return arguments


def _is_as_shown(value: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether it has the shape in which a question shows a tool call, unless the tool has parameters of those names."""
    shown = {"tool", "arguments"}
    return isinstance(value, Mapping) and value.keys() == shown and not shown <= {*(parameters.get("properties") or ())}


def approvals_in(context: FlowContext, needed_for: str) -> ApprovalService:
    """Return the run's `approvals` service; raise ServiceMissing if there is none."""
    found: ApprovalService | None = context.services.get("approvals")
    if found is None or not callable(getattr(found, "ask", None)):
        raise ServiceMissing("approvals", needed_for, "an Approvals, whose questions a person can answer")
    return found


def approve_with(context: FlowContext) -> Approve | None:
    """Return the function by which an agent requests approval of tool calls; None without an `approvals` service."""
    if context.services.get("approvals") is None:
        return None
    approvals = approvals_in(context, "an agent")

    async def approve(execution: ExecutionContext, call: ToolCall) -> Approval:
        value = {"tool": call.name, "arguments": call.arguments}
        question, spec = f"May {call.name} run?", tool_to_approve.get()
        expects = None if spec is None else {"tool": spec.name, "parameters": spec.parameters}
        async with approvals.ask(str(context.run_id), str(context.node_id), question, value, expects) as opened:
            answer = await opened.answer()
        if not answer.approved:
            return Approval.deny(answer.reason)
        if not answer.edited:
            return Approval.allow()
        if not isinstance(answer.value, Mapping):
            return Approval.deny("the edited value is not an object of arguments")
        return Approval.edit(answer.value)

    return approve


@dataclass(frozen=True, slots=True)
class ApprovalData(Data):
    """The question, and the timeout of an answer."""

    question: Text = "May this go on?"
    """A template; `{{ input }}` is the node's input."""
    timeout_s: Seconds | None = None
    """Time after which it is rejected; without it the question stays open as long as the run."""


class ApprovalNode(Checked[ApprovalData]):
    """Outputs an approved value on `approved`, and a rejected one, with the reason, on `rejected`."""

    settings = Settings(ApprovalData)
    inputs = (Handle("input", required=True),)
    outputs = (Handle("approved"), Handle("rejected", "object"))

    def look(self, data: ApprovalData, executors: ExecutorRegistry) -> list[Finding]:
        """Check that the question is a valid template."""
        try:
            Template(data.question)
        except TemplateInvalid as invalid:
            return [(".question", str(invalid))]
        return []

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | ExecutionResult]:
        """Put the question, wait for the answer, and pass the value on."""
        read = self.settings.read(data)
        approvals = approvals_in(context, f"node {context.node_id!r}")
        given = inputs["input"]
        question = Template(read.question).render({"input": given.value})
        async with approvals.ask(str(context.run_id), str(context.node_id), question, given.value) as opened:
            yield NodeEvent.progress("approval_requested", opened.request.to_dict())
            answer = await answer_within(opened, read.timeout_s)
            if answer is None:
                answer = Answer(False, reason=f"not answered within {read.timeout_s:g} s")
        if answer.approved:
            yield ExecutionResult({"approved": typed(answer.value) if answer.edited else given})
        else:
            rejected = {"value": given.value, "reason": answer.reason}
            yield ExecutionResult({"rejected": DataValue("object", rejected)})


async def answer_within(question: Question, timeout_s: float | None) -> Answer | None:
    """Wait for the answer; None if none came in time, which counts from when the question was put, in any process."""
    left_s = None if timeout_s is None else max(0.0, timeout_s - question.request.waited_s)
    try:
        async with asyncio.timeout(left_s) as limit:
            return await question.answer()
    except TimeoutError:
        if not limit.expired():
            raise
    return await question.at_last()
