"""Graphs written in Python.

A graph consists of steps and their dependencies. It compiles, once, into the same kind of plan as a graph from an
editor, and the same scheduler runs it. A graph is a node itself, so graphs can contain graphs.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar, overload

from penstock import checks
from penstock.containment.limits import Budget
from penstock.errors import InvalidValue
from penstock.flow import execution
from penstock.flow.compiled import Compiled, compile_steps, problems_of
from penstock.flow.execution import Results
from penstock.flow.node import FunctionNode, type_of
from penstock.flow.session import Session
from penstock.flow.step import (
    FunctionStep,
    InputFn,
    Reference,
    Step,
    StepEvent,
    StepFunction,
    graph_of,
    is_function,
    is_node,
    step_ids,
)
from penstock.kernel.frontier import Settle, as_settle
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.kernel.plan import topological_order
from penstock.kernel.render import to_mermaid, to_text
from penstock.policies import ErrorPolicy
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext

R = TypeVar("R")

A_STEP_NODE = "a function, an object with an id and execute(context), or the id of a node of the session"
A_FUNCTION_OPTION = "set on the node: FunctionNode(id, fn, blocking=True)"

_Options = tuple[Any, InputFn | None, Sequence[Reference] | None, ErrorPolicy | None, Budget | None]
_Resolved = tuple[Any, InputFn | None, tuple[str, ...] | None, ErrorPolicy | None, Budget | None]


class StepNode(Protocol):
    """The part of a node that `Graph.step` needs."""

    @property
    def id(self) -> str: ...

    @property
    def execute(self) -> Callable[..., Any]: ...


class Graph:
    """Steps and their dependencies. `execute` runs them, at most `max_parallel` at a time, nested graphs included."""

    node_type = "graph"
    persistent = False

    def __init__(
        self,
        id: str,
        session: Session | None = None,
        max_parallel: int = 1,
        settle: Settle | str = "fail_fast",
        *,
        queue_persistent: bool = False,
        turn_timeout_s: float = 30.0,
    ) -> None:
        checks.text("id", id, minimum=1)
        if session is not None:
            checks.instance("session", session, Session, none="no session")
        checks.integer("max_parallel", max_parallel, minimum=1)
        checks.boolean("queue_persistent", queue_persistent)
        checks.seconds("turn_timeout_s", turn_timeout_s)
        self.id = id
        self.session = session
        self.max_parallel = max_parallel
        self.settle: Settle = as_settle(settle)
        """What happens to the other steps when one fails."""
        self.queue_persistent = queue_persistent
        """Whether steps that can run in parallel may share a persistent node; they then take turns."""
        self.turn_timeout_s = turn_timeout_s
        """How long a step waits for its turn at a persistent node before it fails with DeadlockError."""
        self._steps: dict[str, Step] = {}
        self._compiled: Compiled | None = None
        self._running: set[CancellationToken] = set()
        self._lock = threading.Lock()
        if session is not None:
            session.register(self)

    # Writing.

    def add_step(
        self,
        node: Any,
        step_id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Graph:
        """Add a step as `step` does, and return the graph, so that calls can be chained."""
        self.step(node, step_id, input, input_fn, depends_on, error_policy, sub_budget)
        return self

    def add_step_ref(
        self,
        node_id: str,
        step_id: str,
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Graph:
        """Add a step whose node is looked up by its id, in the session of the run or of the graph, when it runs."""
        checks.text(f"node_id of step {step_id!r}", node_id, minimum=1)
        self.step(node_id, step_id, input, input_fn, depends_on, error_policy, sub_budget)
        return self

    @overload
    def step(
        self,
        node: StepNode | Step | str,
        step_id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Step: ...

    @overload
    def step(
        self,
        node: StepFunction[R],
        step_id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
        *,
        blocking: bool | None = None,
    ) -> FunctionStep[R]: ...

    @overload
    def step(
        self,
        *,
        step_id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
        blocking: bool | None = None,
    ) -> Callable[[StepFunction[R]], FunctionStep[R]]: ...

    def step(
        self,
        node: Any = ...,
        step_id: str = "",
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[Reference] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
        *,
        blocking: bool | None = None,
    ) -> Any:
        """Add a step and return it, for `a >> b`; without a node it is a decorator, and so is `@graph.step` itself.

        The node is a function, sync or async, a node, the id of a node of the session, or a `Step` made by hand. A step
        without a `step_id` has the name of its function or the id of its node. A decorated function becomes its step,
        which can still be called. `blocking=True` runs a sync function on a thread, `False` on the event loop; by
        default it runs on a thread if the step or the run has a time limit or the run was given a cancellation token.
        """
        if type(step_id) is not str:
            raise InvalidValue("step_id", step_id, "text, or left out")
        if type(node) is not FunctionNode and (not is_node(node) or isinstance(node, type)):
            options = (input, input_fn, depends_on, error_policy, sub_budget)
            return self._add_other(node, step_id, options, blocking)
        if blocking is not None:
            raise InvalidValue("blocking", blocking, A_FUNCTION_OPTION)
        step = Step(node, step_id or node.id, input, input_fn, None, error_policy, sub_budget)
        if depends_on is not None:
            step.before = step_ids(step.id, depends_on, self._id_of)
        return self._add(step)

    def _add_other(self, node: Any, step_id: str, options: _Options, blocking: bool | None) -> Any:
        """Add a step that is not given as a node, or return the decorator that adds it."""
        if node is ...:
            return partial(self._decorate, step_id, options, blocking)
        if isinstance(node, FunctionStep):
            node = node.__wrapped__
        if is_function(node):
            return self._add_function(node, step_id, options, blocking)
        if blocking is not None:
            raise InvalidValue("blocking", blocking, A_FUNCTION_OPTION)
        if isinstance(node, Step):
            return self._add_by_hand(node, step_id, options)
        if isinstance(node, str) and node:
            return self._add(Step(None, step_id or node, *self._resolved(step_id, options), node_id=node))
        raise InvalidValue(f"node of step {step_id!r}" if step_id else "node", node, A_STEP_NODE)

    def _decorate(self, step_id: str, options: _Options, blocking: bool | None, fn: Any) -> Step:
        if not is_function(fn):
            raise InvalidValue("the decorated object", fn, "a function")
        return self._add_function(fn, step_id, options, blocking)

    def _add_function(self, fn: StepFunction[R], step_id: str, options: _Options, blocking: bool | None) -> Step:
        return self._add(FunctionStep(fn, step_id, *self._resolved(step_id, options), blocking=blocking))

    def _add_by_hand(self, step: Step, step_id: str, options: _Options) -> Step:
        if any(option is not None for option in options):
            raise InvalidValue("step", step, "passed alone or with a step_id: its options are its own")
        if graph_of(step) is not None:
            raise InvalidValue("step", step, "a step that is in no graph yet")
        if step_id and step.id and step_id != step.id:
            raise InvalidValue("step_id", step_id, f"left out, or {step.id!r} as in the step")
        step.id = step_id or step.id or step.node_id
        return self._add(step)

    def _add(self, step: Step) -> Step:
        step_id = step.id
        if type(step_id) is not str or not step_id:
            raise InvalidValue("step_id", step_id, "text that is not empty")
        if step_id in self._steps:
            raise InvalidValue("step_id", step_id, f"an id that graph {self.id!r} does not have yet")
        step._graph = self
        self._steps[step_id] = step
        self._compiled = None
        return step

    def chain(self, *steps: Reference) -> Graph:
        """Make each of these steps wait for the one before it."""
        found = [self.get_step(step if isinstance(step, str) else self._id_of("step", step)) for step in steps]
        for before, after in pairwise(found):
            self._connect(before, after)
        return self

    def _connect(self, before: Step, after: Step) -> None:
        for step in (before, after):
            if getattr(step, "_graph", None) is not self:
                raise InvalidValue("step", step, f"a step of graph {self.id!r}")
        if before.id not in after.before:
            after.before += (before.id,)
            self._compiled = None

    def _resolved(self, step_id: str, options: _Options) -> _Resolved:
        """Return the options, with the ids of the steps in `depends_on`."""
        input, input_fn, depends_on, error_policy, sub_budget = options
        before = None if depends_on is None else step_ids(step_id, depends_on, self._id_of)
        return input, input_fn, before, error_policy, sub_budget

    def _id_of(self, field: str, reference: object) -> str:
        """The id of a step of this graph, or of the only step that runs a function."""
        if isinstance(reference, Step):
            if graph_of(reference) is self:
                return reference.id
        elif is_function(reference):
            nodes = [(step.id, step.node) for step in self._steps.values() if type(step.node) is FunctionNode]
            found = [
                step_id for step_id, node in nodes if node.fn == reference
            ]  # bound methods are equal, not the same
            if len(found) == 1:
                return found[0]
            if found:
                several = " and ".join(repr(step_id) for step_id in found[:2])
                expected = f"a function that is one step of graph {self.id!r}; it is {several}: refer to one by its id"
                raise InvalidValue(field, reference, expected)
        raise InvalidValue(field, reference, f"a step of graph {self.id!r}, its function or its id")

    # Reading.

    def get_step(self, step_id: str) -> Step:
        """Return the step with that id; raises KeyError if there is none."""
        try:
            return self._steps[step_id]
        except KeyError:
            raise KeyError(f"graph {self.id!r} has no step {step_id!r}") from None

    def list_steps(self) -> list[str]:
        """Return the ids of the steps, in the order in which they were added."""
        return list(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def validate(self) -> list[str]:
        """Return every problem that keeps the graph from running; empty if there is none."""
        return [str(problem) for problem in problems_of(self)]

    def execution_order(self) -> list[str]:
        """Return the steps so that each comes after its dependencies; raises GraphInvalid if there is no such order."""
        plan = self.compiled().plan
        return [plan.ids[node] for node in topological_order(plan)]

    def compiled(self) -> Compiled:
        """Return the compiled graph; compiled again after a change. Raises GraphInvalid with all problems."""
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = compile_steps(self)
        return compiled

    def to_spec(self) -> GraphSpec:
        """Return the graph as a GraphSpec, for rendering; without what the steps run, which exists only in Python."""
        nodes = tuple(
            NodeSpec(step.id, "node" if step.node is None else type_of(step.node), {"node": step.node_id})
            for step in self._steps.values()
        )
        pairs = [(before, step.id) for step in self._steps.values() for before in step.before]
        edges = tuple(EdgeSpec(f"e{at}", source, target, "flow") for at, (source, target) in enumerate(pairs))
        return GraphSpec(nodes, edges, self.id)

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        return to_mermaid(self.to_spec())

    def __str__(self) -> str:
        return to_text(self.to_spec()).rstrip()

    def __repr__(self) -> str:
        return f"<Graph {self.id!r} with {len(self._steps)} step(s)>"

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self.to_mermaid()}```"

    # Running.

    def execute(self, context: ExecutionContext | None = None) -> Coroutine[Any, Any, Results]:
        """Run the graph and return the results by step. Raises the error of a step, BudgetExceededError or
        CancelledError.

        Without a context it runs without limits, as a run of its own.
        """
        return execution.execute(self, context)

    def execute_stream(self, context: ExecutionContext | None = None) -> AsyncIterator[StepEvent]:
        """Run the graph and yield the events of its steps; raises at the end what `execute` would raise.

        Leaving the iteration early cancels the graph. Close it (`contextlib.aclosing`) to wait until that is done.
        """
        return execution.stream(self, context)

    def interrupt(self, reason: str = "interrupted") -> bool:
        """Cancel every execution of this graph in progress, from any thread; return whether there was one."""
        with self._lock:
            running = list(self._running)
        return sum(token.cancel(f"graph {self.id!r}: {reason}") for token in running) > 0
