"""`approval`: somebody is asked before anything goes on, and may change what goes on.

What can put questions to people (`AsksPeople`) stands in the services of a run as `approvals`; agents ask there too,
for tools that need approval. `Approvals` is one such, in memory: the node asks there, and whoever may answer lists,
approves, edits and rejects, from any thread. A question whose asker is cancelled is gone, and the first answer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from penstock.agents.hooks import Approval, Approve
from penstock.agents.messages import ToolCall
from penstock.agents.schema import check
from penstock.agents.tools import asked_about
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts.services import ServiceMissing
from penstock.nodes.parts.settings import Checked, Data, Finding, Seconds, Settings, Text
from penstock.nodes.parts.template import Template, TemplateInvalid
from penstock.nodes.parts.values import typed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.node_events import NodeEvent


class ApprovalGone(PenstockError):
    """Nobody waits for an answer under this id: it was answered, its asker was stopped, or it never was."""

    def __init__(self, id: str) -> None:
        self.id = id
        super().__init__(f"nobody waits for an answer to {id!r}")


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question that waits for an answer."""

    id: str
    run_id: str
    node_id: str
    question: str
    value: Any
    """What goes on if it is approved: a value, or the name and arguments of a tool call."""
    expects: Mapping[str, Any] | None = None
    """What may go on instead: of a tool call its `tool`, and as `parameters` the JSON Schema of the arguments; None if
    anything may."""
    waited_s: float = 0.0
    """How long it had waited already when whoever asks came to it: a question may outlive its asker."""

    def to_dict(self) -> dict[str, Any]:
        """The question as JSON data."""
        return {
            "id": self.id,
            "run_id": self.run_id,
            "node_id": self.node_id,
            "question": self.question,
            "value": self.value,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What somebody said."""

    approved: bool
    value: Any = None
    """What goes on instead, if it was edited."""
    edited: bool = False
    reason: str = ""


class Question(Protocol):
    """A question that was put."""

    request: ApprovalRequest

    async def answer(self) -> Answer:
        """Wait for it."""

    async def at_last(self) -> Answer | None:
        """The time is up: the answer that somebody has given after all; else None, and nobody gives one any more."""


@runtime_checkable
class AsksPeople(Protocol):
    """What puts questions to people and waits for their answers."""

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> AbstractAsyncContextManager[Question]:
        """The question is put on entering; on leaving, nobody waits for the answer any more.

        An edit is taken as `as_edited` makes it of what the question `expects`.
        """


class Asked:
    """A question on its way; as a context manager, it is withdrawn on leaving."""

    __slots__ = ("_approvals", "_future", "_loop", "request")

    def __init__(self, approvals: Approvals, request: ApprovalRequest) -> None:
        self._approvals = approvals
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer] = self._loop.create_future()
        self.request = request

    async def answer(self) -> Answer:
        """Wait for it."""
        return await self._future

    async def at_last(self) -> Answer | None:
        """The answer that has come; else None, and none comes any more."""
        self._approvals._forget(self)
        await asyncio.sleep(0)  # one that was given on another thread arrives
        return self._future.result() if self._future.done() and not self._future.cancelled() else None

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *error: object) -> None:
        self._approvals._forget(self)

    async def __aenter__(self) -> Asked:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._approvals._forget(self)

    def _give(self, answer: Answer) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._take, answer)

    def _take(self, answer: Answer) -> None:
        if not self._future.done():
            self._future.set_result(answer)


class Approvals:
    """Questions that wait for somebody's answer, oldest first; answers may come from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers = count(1)
        self._waiting: dict[str, Asked] = {}

    def list(self, run_id: str | None = None) -> tuple[ApprovalRequest, ...]:
        """What waits; of one run alone, if it is named."""
        with self._lock:
            waiting = [one.request for one in self._waiting.values()]
        return tuple(one for one in waiting if run_id in (None, one.run_id))

    def approve(self, id: str) -> None:
        """It may go on as it is."""
        self._answer(id, Answer(True))

    def edit(self, id: str, value: Any) -> None:
        """This may go on instead; InvalidValue if it cannot, and the question still waits."""
        with self._lock:
            asked = self._waiting.get(id)
        if asked is None:
            raise ApprovalGone(id)
        self._answer(id, Answer(True, as_edited(asked.request.expects, value), edited=True))

    def reject(self, id: str, reason: str = "rejected") -> None:
        """It may not go on."""
        self._answer(id, Answer(False, reason=reason))

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> Asked:
        """Put a question; it waits until it is answered or withdrawn. On the event loop of whoever waits."""
        with self._lock:
            id = f"{run_id}/{node_id}/{next(self._numbers)}"
            asked = self._waiting[id] = Asked(self, ApprovalRequest(id, run_id, node_id, question, value, expects))
        return asked

    def _answer(self, id: str, answer: Answer) -> None:
        with self._lock:
            asked = self._waiting.pop(id, None)
        if asked is None:
            raise ApprovalGone(id)
        asked._give(answer)

    def _forget(self, asked: Asked) -> None:
        with self._lock:
            self._waiting.pop(asked.request.id, None)


def as_edited(expects: Mapping[str, Any] | None, value: Any) -> Any:
    """What goes on instead, by an edit of a question; InvalidValue if whoever asked could not go on with it.

    Of a tool call, these are its arguments. The tool with its arguments, as the question shows them, are taken too.
    """
    if expects is None:
        return value
    tool, parameters = expects["tool"], expects["parameters"]
    arguments = value["arguments"] if _is_as_shown(value, parameters) else value
    if arguments is not value and value["tool"] != tool:
        raise InvalidValue("answer", value, f"the arguments of {tool} alone, for another tool cannot run instead")
    if not isinstance(arguments, Mapping):
        raise InvalidValue("answer", value, f"an object with the arguments of {tool} by name")
    problems = check(dict(arguments), parameters)
    if problems:
        raise InvalidValue("answer", value, f"arguments that {tool} takes ({'; '.join(problems)})")
    return arguments


def _is_as_shown(value: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether it has the shape in which the question shows a tool call, and is not what a tool of such words takes."""
    shown = {"tool", "arguments"}
    return isinstance(value, Mapping) and value.keys() == shown and not shown <= {*(parameters.get("properties") or ())}


def approvals_in(context: FlowContext, needed_for: str) -> AsksPeople:
    """Where a run's questions wait."""
    found: AsksPeople | None = context.services.get("approvals")
    if found is None or not callable(getattr(found, "ask", None)):
        raise ServiceMissing("approvals", needed_for, "an Approvals, where somebody can answer")
    return found


def approve_with(context: FlowContext) -> Approve | None:
    """How an agent asks about tool calls; None if there is nobody to ask."""
    if context.services.get("approvals") is None:
        return None
    approvals = approvals_in(context, "an agent")

    async def approve(execution: ExecutionContext, call: ToolCall) -> Approval:
        value = {"tool": call.name, "arguments": call.arguments}
        question, spec = f"May {call.name} run?", asked_about.get()
        expects = None if spec is None else {"tool": spec.name, "parameters": spec.parameters}
        async with approvals.ask(str(context.run_id), str(context.node_id), question, value, expects) as asked:
            answer = await asked.answer()
        if not answer.approved:
            return Approval.deny(answer.reason)
        if not answer.edited:
            return Approval.allow()
        if not isinstance(answer.value, Mapping):
            return Approval.deny("what it was changed to is no object of arguments")
        return Approval.edit(answer.value)

    return approve


@dataclass(frozen=True, slots=True)
class ApprovalData(Data):
    """What is asked, and how long an answer may take."""

    question: Text = "May this go on?"
    """A template; `{{ input }}` is what came in."""
    timeout_s: Seconds | None = None
    """After so long it is rejected; without it the question waits as long as the run does."""


class ApprovalNode(Checked[ApprovalData]):
    """Passes on what was approved on `approved`; what was not, with the reason, on `rejected`."""

    settings = Settings(ApprovalData)
    inputs = (Handle("input", required=True),)
    outputs = (Handle("approved"), Handle("rejected", "object"))

    def look(self, data: ApprovalData, executors: ExecutorRegistry) -> list[Finding]:
        """Whether the question can be read."""
        try:
            Template(data.question)
        except TemplateInvalid as invalid:
            return [(".question", str(invalid))]
        return []

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | ExecutionResult]:
        """Ask, wait, and pass on."""
        read = self.settings.read(data)
        approvals = approvals_in(context, f"node {context.node_id!r}")
        given = inputs["input"]
        question = Template(read.question).render({"input": given.value})
        async with approvals.ask(str(context.run_id), str(context.node_id), question, given.value) as asked:
            yield NodeEvent.progress("approval_requested", asked.request.to_dict())
            answer = await _answered(asked, read.timeout_s)
        if answer.approved:
            yield ExecutionResult({"approved": typed(answer.value) if answer.edited else given})
        else:
            rejected = {"value": given.value, "reason": answer.reason}
            yield ExecutionResult({"rejected": DataValue("object", rejected)})


async def _answered(asked: Question, timeout_s: float | None) -> Answer:
    """The answer that comes in time; the time began when the question was put, by whichever process that was."""
    left_s = None if timeout_s is None else max(0.0, timeout_s - asked.request.waited_s)
    try:
        async with asyncio.timeout(left_s) as limit:
            return await asked.answer()
    except TimeoutError:
        if not limit.expired():
            raise
    return await asked.at_last() or Answer(False, reason=f"nobody answered within {timeout_s:g} s")
