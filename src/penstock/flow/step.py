"""One step of a graph, and its events.

Knows nodes and functions. Of its graph, it knows only what `StepGraph` lists.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial, update_wrapper
from inspect import iscoroutinefunction
from typing import Any, Generic, Literal, Protocol, TypeVar

from penstock import checks
from penstock.containment.limits import Budget
from penstock.errors import InvalidValue
from penstock.flow.node import FunctionNode
from penstock.flow.session import Session
from penstock.kernel.frontier import Settle
from penstock.policies import ErrorPolicy
from penstock.runtime.context import ExecutionContext
from penstock.tracing.jsonable import jsonable

R = TypeVar("R")

InputFn = Callable[[Mapping[str, Any]], Any]
"""Computes a step's input from the results so far."""
StepFunction = Callable[[ExecutionContext], R]
"""A function that a step can run: sync or async, or a generator that streams."""

A_NODE = "an object with an id and execute(context), such as FunctionNode(id, fn) or a Graph"


class StepGraph(Protocol):
    """The part of a step's graph that steps, their compilation and their execution need."""

    id: str
    session: Session | None
    max_parallel: int
    settle: Settle
    queue_persistent: bool
    turn_timeout_s: float
    _steps: dict[str, Step]

    def _connect(self, before: Step, after: Step) -> None: ...


class Step:
    """A node with its place in a graph; `a >> b` makes b wait for a.

    `Graph.step` and `Graph.add_step` create one. To create one by hand, pass it to them instead of a node, once.
    """

    __slots__ = ("_graph", "before", "error_policy", "id", "input", "input_fn", "node", "node_id", "sub_budget")

    _graph: StepGraph
    """The graph of the step; missing until it is added to one."""

    def __init__(
        self,
        node: Any = None,
        id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[str | Step] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
        *,
        node_id: str | None = None,
    ) -> None:
        """`node_id` is the id of a node of the session, for a step without a node."""
        if type(id) is not str:
            checks.text("id", id)
        if node_id is None:
            if type(node) is not FunctionNode and not is_node(node):
                raise InvalidValue(_field("node", id), node, A_NODE)
            node_id = node.id
        elif node is not None:
            raise InvalidValue(_field("node_id", id), node_id, "left out where a node is given")
        else:
            checks.text(_field("node_id", id), node_id, minimum=1)
        feed: object = input_fn
        if feed is not None and (not callable(feed) or iscoroutinefunction(feed)):
            raise InvalidValue(_field("input_fn", id), feed, "a sync function of the results so far")
        if input is not None and input_fn is not None:
            raise InvalidValue(_field("input", id), input, "left out where input_fn is given")
        if error_policy is not None:
            checks.instance(_field("error_policy", id), error_policy, ErrorPolicy, none="no policy")
            if error_policy.fallback_node is not None and not is_node(error_policy.fallback_node):
                raise InvalidValue(_field("fallback_node", id), error_policy.fallback_node, A_NODE)
        if sub_budget is not None:
            checks.instance(_field("sub_budget", id), sub_budget, Budget, none="no budget of its own")
        self.id = id
        self.node = node
        """The node; None if the step refers to a node of the session."""
        self.node_id = node_id
        self.input = input
        self.input_fn = input_fn
        self.before = () if depends_on is None else step_ids(id, depends_on, _id_of)
        """The ids of the steps it depends on."""
        self.error_policy = error_policy
        self.sub_budget = sub_budget

    @property
    def depends_on(self) -> list[str]:
        """The ids of the steps it depends on; to change them, use `>>` or `Graph.chain`."""
        return list(self.before)

    def __rshift__(self, after: Step | Iterable[Step]) -> Any:
        """Make `after`, or each step of a list, depend on this step."""
        return Steps(_its_graph(self), [self]) >> after

    def __rrshift__(self, before: Iterable[Step]) -> Step:
        """Make this step depend on each step of a list."""
        Steps(_its_graph(self), list(before)) >> self
        return self

    def __repr__(self) -> str:
        after = f" after {', '.join(self.before)}" if self.before else ""
        graph = graph_of(self)
        return f"<Step {self.id!r} of {'no graph yet' if graph is None else repr(graph.id)}{after}>"


class FunctionStep(Step, Generic[R]):
    """A step that runs a function, and can itself be called as that function; `Graph.step` creates one."""

    __name__: str
    __qualname__: str
    __wrapped__: StepFunction[R]

    def __init__(
        self,
        fn: StepFunction[R],
        id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[str] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
        *,
        blocking: bool | None = None,
    ) -> None:
        name = _name_of(fn)
        id = id or name
        if not id:
            raise InvalidValue("step_id", id, "given for a function without a name")
        node = FunctionNode(name or id, fn, blocking=blocking)
        super().__init__(node, id, input, input_fn, depends_on, error_policy, sub_budget)
        update_wrapper(self, fn)

    def __call__(self, context: ExecutionContext) -> R:
        """Call the function, outside of the graph."""
        return self.__wrapped__(context)


class Steps:
    """Several steps together, as in `a >> [b, c] >> d`."""

    __slots__ = ("_graph", "steps")

    def __init__(self, graph: StepGraph, steps: list[Step]) -> None:
        self._graph = graph
        self.steps = steps

    def __rshift__(self, after: Step | Iterable[Step]) -> Any:
        targets: object = after
        if isinstance(targets, str) or not isinstance(targets, Step | Iterable):
            raise InvalidValue("step", after, f"a step of graph {self._graph.id!r}, or a list of them")
        targets = [targets] if isinstance(targets, Step) else list(targets)
        for target in targets:
            for before in self.steps:
                self._graph._connect(before, target)
        return after if isinstance(after, Step) else Steps(self._graph, targets)


Reference = str | Step | StepFunction[Any]
"""A reference to a step of a graph: its id, the step itself, or a function that no other step runs."""


def is_node(candidate: Any) -> bool:
    """Whether a step can run the value."""
    return isinstance(getattr(candidate, "id", None), str) and callable(getattr(candidate, "execute", None))


def is_function(candidate: object) -> bool:
    """Whether the value can be made a node: a callable that is neither a class nor a node."""
    return not is_node(candidate) and callable(candidate) and not isinstance(candidate, type)


def graph_of(step: Step) -> StepGraph | None:
    """Return the graph of the step."""
    return getattr(step, "_graph", None)


def step_ids(step_id: str, depends_on: object, id_of: Callable[[str, object], str]) -> tuple[str, ...]:
    """Return the ids in `depends_on` without repetitions; `id_of` resolves references that are not text."""
    if (type(depends_on) is list or type(depends_on) is tuple) and len(depends_on) == 1 and type(depends_on[0]) is str:
        return tuple(depends_on)  # as nearly every step has it
    field = _field("depends_on", step_id)
    if isinstance(depends_on, str | Step):
        raise InvalidValue(field, depends_on, f"a list, such as [{reprlib.repr(depends_on)}]")
    if not isinstance(depends_on, Iterable):
        raise InvalidValue(field, depends_on, "a list of steps or step ids")
    ids = [reference if type(reference) is str else id_of(field, reference) for reference in depends_on]
    return tuple(dict.fromkeys(ids))


def _id_of(field: str, reference: object) -> str:
    if isinstance(reference, Step) and reference.id:
        return reference.id
    raise InvalidValue(field, reference, "a list of step ids, or steps that have one")


def _field(name: str, step_id: object) -> str:
    return f"{name} of step {step_id!r}" if step_id else name


def _name_of(fn: object) -> str:
    """Return the name a function was defined with; empty for lambdas and callable objects."""
    while isinstance(fn, partial):
        fn = fn.func
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else ""  # a lambda's is "<lambda>"


def _its_graph(step: Step) -> StepGraph:
    graph = graph_of(step)
    if graph is None:
        raise InvalidValue("step", step, "a step of a graph (add it with Graph.add_step first)")
    return graph


StepEventType = Literal["started", "progress", "completed", "error", "cancelled", "skipped"]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One event of a step while its graph runs."""

    event_type: StepEventType
    graph_id: str
    step_id: str
    """The id; in a nested graph, after the ids of the outer steps: `outer/inner`."""
    node_id: str
    run_id: str
    timestamp: datetime
    data: Any = None
    """The result, the piece, the error, or the reason for skipping."""

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON data."""
        return {
            "event_type": self.event_type,
            "graph_id": self.graph_id,
            "step_id": self.step_id,
            "node_id": self.node_id,
            "run_id": self.run_id,
            "timestamp": self.timestamp.isoformat(),
            "data": jsonable(self.data),
        }
