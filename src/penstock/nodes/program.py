"""`program`: a graph or an agent written in Python, run as a part of the same run.

The service `programs` has the programs of this process by name. A document only names one, with the structure that it
had when the document was saved; opening, checking or importing a document runs no code. A program that the process does
not have is `ProgramNotServed`.

A graph receives the node's input and outputs the result of its last step, or the results by step if it has several. An
agent receives the same as an `agent` node: the conversation in a chat, else the node's input. Inside, steps, model
calls and tools are recorded under the node in the journal, and agents ask for approval and emit their text as those of
an `agent` node do. Text of a graph counts as the answer if its only last step emits it; text of other steps, and the
lifecycle of all steps, is emitted as `inside`.

A run may be continued by a program that has changed since: see `structure`. Steps that match the recorded ones are
found in the journal. All others are recorded under another name, so that results of different programs are never mixed,
and the event `program_changed` lists which recorded steps are used and which are not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from penstock.agents.agent import Agent
from penstock.agents.history import answering_after
from penstock.agents.loop import Execution, OnDelta, running_execution
from penstock.agents.messages import Delta
from penstock.agents.tools import ToolChain
from penstock.errors import PenstockError
from penstock.flow.graph import Graph
from penstock.flow.step import StepEvent
from penstock.kernel.executor import DataValue, Handle, typed
from penstock.kernel.graph import shown
from penstock.nodes.approval import approve_with
from penstock.nodes.client_tools import (
    ClientToolLoop,
    ResultsOverdue,
    client_output,
    client_request,
    with_client_tools,
    without_client_calls,
)
from penstock.nodes.parts.chat import delta_event, history_before, prompt_for, with_user_tools
from penstock.nodes.parts.nested import INSIDE
from penstock.nodes.parts.services import service_mapping
from penstock.nodes.parts.structure import (
    Kind,
    Structure,
    change_of,
    fingerprint_of,
    kind_of,
    new_names,
    structure_of,
)
from penstock.runtime.call import running_call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal, is_json
from penstock.runtime.durable.keys import unescaped
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import LIFECYCLE, EmitProgress, ProgressStream
from penstock.runtime.graphs.settings import Checked, Data, Json, Name, Settings

logger = logging.getLogger("penstock.programs")

SERVICE = "programs"
NODE, START = "program", "start"
"""Ids of the nodes of a program's document."""
CHANGED = "program_changed"
"""Type of the event that lists which recorded steps a changed program uses."""
MAX_LISTED = 20


class ProgramNotServed(PenstockError):
    """A node names a program that this process does not have."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        self.name = name
        listed = ", ".join(sorted(known)[:MAX_LISTED]) or "none"
        super().__init__(
            f"program {shown(name)} is not served here; start penstock serve with it "
            f"(programs that are served here: {listed})"
        )


class ProgramFailed(PenstockError):
    """None of the last steps of a graph has a result, because steps before them failed."""

    def __init__(self, graph_id: str, step_id: str, error: BaseException) -> None:
        self.step_id = step_id
        super().__init__(f"graph {graph_id!r} has no result: step {step_id!r} failed with {error}")


@dataclass(frozen=True, slots=True)
class Program:
    """A graph or an agent in Python that nodes can run by name."""

    name: str
    target: Graph | Agent
    structure: Structure
    description: str = ""

    @classmethod
    def of(cls, target: Graph | Agent, description: str = "") -> Program:
        """Return the program of a valid graph or of an agent; its name is that of the graph or agent."""
        return cls(target.id, target, structure_of(target), description)

    @property
    def kind(self) -> Kind:
        """Whether it is a graph or an agent."""
        return kind_of(self.structure)

    def document(self) -> dict[str, Any]:
        """Return the graph document that runs this program; a chat can enter it."""
        start: dict[str, Any] = {"id": START, "type": "chat-start", "data": {}}
        if self.kind == "graph":
            start |= {"type": "input", "data": {"type": "any"}}
        data = {
            "program": self.name,
            "kind": self.kind,
            "fingerprint": fingerprint_of(self.structure),
            "structure": dict(self.structure),
        }
        edge = {"id": "e1", "source": START, "sourceHandle": "output", "target": NODE, "targetHandle": "input"}
        document: dict[str, Any] = {
            "id": self.name,
            "source": "program",
            "nodes": [
                {**start, "position": {"x": 0, "y": 0}},
                {"id": NODE, "type": "program", "data": data, "position": {"x": 240, "y": 0}},
            ],
            "edges": [{**edge, "data": {"channel": "flow"}}],
        }
        return {**document, "description": self.description} if self.description else document


def is_program(document: Mapping[str, Any]) -> bool:
    """Whether a graph document was made from a program, and so follows its code."""
    return document.get("source") == "program"


def program_name(document: Mapping[str, Any]) -> str | None:
    """Return the name of the program that a document was made from; None if it was not."""
    nodes: Any = document.get("nodes") if is_program(document) else None
    for node in nodes if isinstance(nodes, list) else ():
        data = node.get("data") if isinstance(node, Mapping) and node.get("type") == "program" else None
        if isinstance(data, Mapping):
            return str(data.get("program"))
    return None


def program_kind(data: Mapping[str, Any]) -> str | None:
    """Return whether the program of a node is a graph or an agent, as far as its data shows."""
    kind = data.get("kind")
    return kind if kind in ("graph", "agent") else None


@dataclass(frozen=True, slots=True)
class ProgramData(Data):
    """The program, and the structure that it had when the document was saved."""

    program: Name
    kind: Literal["graph", "agent"] | None = None
    fingerprint: Name | None = None
    """Digest of the structure."""
    structure: Json | None = None
    """The steps of a graph, or the model and tools of an agent; compared when a changed program continues a run."""


class ProgramNode(Checked[ProgramData]):
    """Runs a graph or an agent written in Python."""

    settings = Settings(ProgramData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> ProgressStream:
        """Return the result of the program on the node's input; on the graph's input if no edge leads to it."""
        read = self.settings.read(data)
        programs = service_mapping(context, SERVICE)
        if read.program not in programs:
            raise ProgramNotServed(read.program, programs)
        program: Program = programs[read.program]
        target = program.target

        async def work(place: ExecutionContext, emit: EmitProgress) -> DataValue:
            if read.structure is not None:
                _compare(read.structure, program, context, emit)
            if isinstance(target, Agent):
                return await _run_agent(target, inputs, context, place, emit)
            given = inputs["input"].value if "input" in inputs else context.execution.input
            return await _run_graph(target, given, context, place, emit)

        return ProgressStream(context.execution, work)


async def _run_agent(
    agent: Agent,
    inputs: Mapping[str, DataValue],
    context: FlowContext,
    place: ExecutionContext,
    emit: EmitProgress,
) -> DataValue:
    prompt, request = await prompt_for(inputs, context), client_request(context)
    agent = _with_user_tools(agent, context)
    on_delta: OnDelta | None = lambda delta: emit("delta", delta_event(delta))  # noqa: E731
    if request is not None:
        agent = with_client_tools(agent, request, context)
        assert isinstance(agent.loop, ClientToolLoop)
        # An answer with a format is emitted once it is checked, as that of an agent node is.
        on_delta = without_client_calls(agent.loop, None if request.schema is not None else on_delta)
    with inside_execution(context, on_delta):
        result = await agent.run(prompt.text, place, history=prompt.history)
    if isinstance(result.error, ResultsOverdue) and request is not None and request.ends_with_calls:
        return typed(client_output(result.error))
    return typed(_as_json(result.output), result.finish_reason)


def _with_user_tools(agent: Agent, context: FlowContext) -> Agent:
    """Return the agent with the user's tools added, if the chat includes them; the agent itself is not changed."""
    own = getattr(agent.loop, "tools", None)
    tools = with_user_tools(own, context) if isinstance(own, ToolChain) else own
    if tools is own:
        return agent
    extended, loop, executor = copy.copy(agent), copy.copy(agent.loop), copy.copy(agent.executor)
    loop.tools = tools  # type: ignore[attr-defined]  # it has some, as seen above
    extended.loop = executor.loop = loop
    extended.executor = executor
    return extended


async def _run_graph(
    graph: Graph, given: Any, context: FlowContext, place: ExecutionContext, emit: EmitProgress
) -> DataValue:
    plan = graph.compiled().plan
    last = [id for id, after in zip(plan.ids, plan.successors, strict=True) if not after]

    def on_delta(delta: Delta) -> None:
        step, data = _current_step(graph.id), delta_event(delta)
        if [step] == last:
            emit("delta", data)
        else:
            emit(INSIDE, {"node": step, "type": "step", "event": "delta", "data": data})

    results: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}
    with inside_execution(context, on_delta), answering_after(await history_before(context)):
        events = graph.execute_stream(place.with_input(given))
        async with aclosing(events) as stream:  # type: ignore[type-var]  # an async generator
            async for event in stream:
                emit(INSIDE, _step_event(event))
                if event.event_type == "completed":
                    results[event.step_id] = event.data
                elif event.event_type == "error":
                    errors[event.step_id] = event.data
    reached = {id: results[id] for id in last if id in results}
    if not reached and errors:
        step_id, error = next(iter(errors.items()))
        raise ProgramFailed(graph.id, step_id, error) from error
    return typed(_as_json(reached[last[0]] if len(last) == 1 and reached else reached or None))


def _step_event(event: StepEvent) -> dict[str, Any]:
    data = {"node": event.step_id, "type": "step", "event": event.event_type}
    return data if event.event_type in LIFECYCLE else {**data, "data": event.data}


def _current_step(graph_id: str) -> str:
    """Return the step of this graph that is running here, however many calls are below it."""
    call, found = running_call.get(), ""
    while call is not None:
        about = call.record.metadata
        if about is not None and about.get("graph") == graph_id and "step" in about:
            found = str(about["step"])  # the outermost one: a nested graph may have the same id
        call = call.parent_call
    return found


@contextmanager
def inside_execution(context: FlowContext, on_delta: OnDelta | None = None) -> Iterator[None]:
    """Let agents without their own use this consumer of deltas, and the run's approvals."""
    token = running_execution.set(Execution(on_delta=on_delta, approve=approve_with(context)))
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, where there is nothing to reset
            running_execution.reset(token)


def _as_json(value: Any) -> Any:
    """Return the data in pydantic models and dataclasses; leave any other value to the journal."""
    if is_json(value):
        return value
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        return value


# Changed programs.


def fingerprints_in(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of the programs that the nodes of a document had when it was saved, by name."""
    found = {}
    for node in document.get("nodes") or ():
        data = node.get("data") if isinstance(node, Mapping) else None
        if isinstance(data, Mapping) and isinstance(data.get("fingerprint"), str):
            found[str(data.get("program"))] = data["fingerprint"]
    return found


def fingerprints_of(programs: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of programs of this process, by name."""
    return {name: fingerprint_of(one.structure) for name, one in programs.items() if isinstance(one, Program)}


def _compare(before: Structure, program: Program, context: FlowContext, emit: EmitProgress) -> None:
    """Record changed steps under other names, and emit which recorded steps the changed program uses."""
    now = program.structure
    if fingerprint_of(before) == fingerprint_of(now):
        return
    journal = context.execution._run.journal
    recorded: list[str] = []
    if journal is not None:
        place = journal.scope().path
        recorded = _recorded_calls(journal, place) if kind_of(before) == "agent" else _recorded_steps(journal, place)
        if kind_of(before) == kind_of(now) == "graph":
            journal.renamed[place] = new_names(before, now)
    change = change_of(before, now, recorded)
    advice = f"; fork it at {str(context.node_id)!r} to run everything again" if change.again or change.ignored else ""
    message = f"program {program.name!r} has changed since this run was submitted{advice}"
    emit(CHANGED, {"program": program.name, "message": message, **change.to_json()})
    logger.warning(
        "run %s: program %r has changed since it was submitted; recorded results used: %s; run again: %s; not used: %s",
        context.run_id,
        program.name,
        _listed(change.reused),
        _listed(change.again),
        _listed(change.ignored),
    )


def _recorded_steps(journal: Journal, place: str) -> list[str]:
    """Return the names of steps that are recorded, as a whole or in part, in the order they were first recorded."""
    segments = (entry.key.removeprefix(f"{place}/").partition("/")[0] for entry in journal.under(place))
    names = (segment.partition("~")[0] for segment in segments if ":" not in segment)
    return [unescaped(name) for name in dict.fromkeys(names)]


def _recorded_calls(journal: Journal, place: str) -> list[str]:
    """Return the paths of recorded model and tool calls."""
    return [entry.key.removeprefix(f"{place}/") for entry in journal.under(place) if entry.kind in ("llm", "tool")]


def _listed(names: tuple[object, ...]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(map(str, names[:MAX_LISTED])) + more if names else "none"
