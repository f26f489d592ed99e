"""Graphs written in Python.

A graph is steps and what each of them waits for. It compiles, once, into the same plan that a graph from an editor
does, and is driven by the same scheduler. A graph is a node, so graphs stand inside graphs.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from inspect import iscoroutinefunction
from itertools import pairwise
from typing import Any

from penstock.containment.limits import Budget, seconds_to_ns
from penstock.errors import InvalidValue
from penstock.flow import execution
from penstock.flow.compiled import Compiled, compile_steps, problems_of
from penstock.flow.execution import Results
from penstock.flow.node import type_of
from penstock.flow.session import Session
from penstock.flow.step import InputFn, Step, StepEvent
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.kernel.plan import topological_order
from penstock.kernel.render import to_mermaid, to_text
from penstock.kernel.settle import Settle, as_settle
from penstock.policies import ErrorPolicy
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be, must_be_at_least, must_be_name

A_NODE = "an object with an id and execute(context), such as FunctionNode(id, fn) or a Graph"


class Graph:
    """Steps, and what each waits for. `execute` runs them, at most `max_parallel` at a time, nested graphs included."""

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
        must_be_name("id", id)
        must_be("session", session, Session)
        must_be_at_least(1, "max_parallel", max_parallel)
        if not isinstance(queue_persistent, bool):
            raise InvalidValue("queue_persistent", queue_persistent, "True or False")
        seconds_to_ns(turn_timeout_s, "turn_timeout_s")
        self.id = id
        self.session = session
        self.max_parallel = max_parallel
        self.settle: Settle = as_settle(settle)
        """What becomes of the others when a step fails."""
        self.queue_persistent = queue_persistent
        """Whether steps that can run in parallel may use one persistent node; then they take turns."""
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
        step_id: str,
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[str] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Graph:
        """Add a step that runs `node`; the graph itself, so that calls can be chained."""
        self.step(node, step_id, input, input_fn, depends_on, error_policy, sub_budget)
        return self

    def add_step_ref(
        self,
        node_id: str,
        step_id: str,
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[str] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Graph:
        """Add a step whose node is looked up by its id, in the session of the run or of the graph, when it runs."""
        must_be_name(f"node_id of step {step_id!r}", node_id, "the id of a node")
        self._add(None, node_id, step_id, input, input_fn, depends_on, error_policy, sub_budget)
        return self

    def step(
        self,
        node: Any,
        step_id: str,
        input: Any = None,
        input_fn: InputFn | None = None,
        depends_on: Sequence[str] | None = None,
        error_policy: ErrorPolicy | None = None,
        sub_budget: Budget | None = None,
    ) -> Step:
        """Add a step and return it, for `a >> b`."""
        if not _is_node(node):
            raise InvalidValue(f"node of step {step_id!r}", node, A_NODE)
        return self._add(node, node.id, step_id, input, input_fn, depends_on, error_policy, sub_budget)

    def _add(
        self,
        node: Any,
        node_id: str,
        step_id: str,
        input: Any,
        input_fn: InputFn | None,
        depends_on: Sequence[str] | None,
        error_policy: ErrorPolicy | None,
        sub_budget: Budget | None,
    ) -> Step:
        if type(step_id) is not str or not step_id:
            raise InvalidValue("step_id", step_id, "a name")
        if step_id in self._steps:
            raise InvalidValue("step_id", step_id, f"one that graph {self.id!r} does not have yet")
        feed: object = input_fn
        if feed is not None and (not callable(feed) or iscoroutinefunction(feed)):
            raise InvalidValue(f"input_fn of step {step_id!r}", feed, "a sync function of the results so far")
        if input is not None and input_fn is not None:
            raise InvalidValue(f"input of step {step_id!r}", input, "left out where input_fn is given")
        if error_policy is not None:
            must_be(f"error_policy of step {step_id!r}", error_policy, ErrorPolicy)
            if error_policy.fallback_node is not None and not _is_node(error_policy.fallback_node):
                raise InvalidValue(f"fallback_node of step {step_id!r}", error_policy.fallback_node, A_NODE)
        if sub_budget is not None:
            must_be(f"sub_budget of step {step_id!r}", sub_budget, Budget)
        before = () if depends_on is None else _names(step_id, depends_on)
        made = Step(self, step_id, node, node_id, input, input_fn, before, error_policy, sub_budget)
        self._steps[step_id] = made
        self._compiled = None
        return made

    def chain(self, *step_ids: str) -> Graph:
        """Let each of these steps wait for the one before it."""
        steps = [self.get_step(step_id) for step_id in step_ids]
        for before, after in pairwise(steps):
            self._connect(before, after)
        return self

    def _connect(self, before: Step, after: Step) -> None:
        for step in (before, after):
            if getattr(step, "_graph", None) is not self:
                raise InvalidValue("step", step, f"a step of graph {self.id!r}")
        if before.id not in after.before:
            after.before += (before.id,)
            self._compiled = None

    # Reading.

    def get_step(self, step_id: str) -> Step:
        """The step of that id; KeyError if there is none."""
        try:
            return self._steps[step_id]
        except KeyError:
            raise KeyError(f"graph {self.id!r} has no step {step_id!r}") from None

    def list_steps(self) -> list[str]:
        """The ids of the steps, in the order they were added."""
        return list(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def validate(self) -> list[str]:
        """Everything that keeps the graph from running; empty if nothing does."""
        return [str(problem) for problem in problems_of(self)]

    def execution_order(self) -> list[str]:
        """The steps so that each comes after those it waits for; GraphInvalid if there is no such order."""
        plan = self.compiled().plan
        return [plan.ids[node] for node in topological_order(plan)]

    def compiled(self) -> Compiled:
        """The graph as it runs; compiled when first asked for after a change. GraphInvalid has all problems."""
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = compile_steps(self)
        return compiled

    def to_spec(self) -> GraphSpec:
        """The graph in the kernel's own terms, for pictures; what a step runs is in Python and does not go with it."""
        nodes = tuple(
            NodeSpec(step.id, "node" if step.node is None else type_of(step.node), {"node": step.node_id})
            for step in self._steps.values()
        )
        pairs = [(before, step.id) for step in self._steps.values() for before in step.before]
        edges = tuple(EdgeSpec(f"e{at}", source, target, "flow") for at, (source, target) in enumerate(pairs))
        return GraphSpec(nodes, edges, self.id)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        return to_mermaid(self.to_spec())

    def __str__(self) -> str:
        return to_text(self.to_spec()).rstrip()

    def __repr__(self) -> str:
        return f"<Graph {self.id!r} with {len(self._steps)} step(s)>"

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self.to_mermaid()}```"

    # Running.

    def execute(self, context: ExecutionContext | None = None) -> Coroutine[Any, Any, Results]:
        """Run the graph: the results by step. Raises what a step raised, BudgetExceededError or CancelledError.

        Without a context it runs without limits, as a run of its own.
        """
        return execution.execute(self, context)

    def execute_stream(self, context: ExecutionContext | None = None) -> AsyncIterator[StepEvent]:
        """Run the graph and tell what becomes of each step; raises at the end what `execute` would raise.

        Leaving it in the middle cancels the graph. Close it (`contextlib.aclosing`) to wait until that is done.
        """
        return execution.stream(self, context)

    def interrupt(self, reason: str = "interrupted") -> bool:
        """Cancel every execution of this graph that is under way, from any thread; False if there is none."""
        with self._lock:
            running = list(self._running)
        return sum(token.cancel(f"graph {self.id!r}: {reason}") for token in running) > 0


def _is_node(given: Any) -> bool:
    return isinstance(getattr(given, "id", None), str) and callable(getattr(given, "execute", None))


def _names(step_id: str, depends_on: Sequence[str]) -> tuple[str, ...]:
    if type(depends_on) is list and len(depends_on) == 1 and type(depends_on[0]) is str:
        return tuple(depends_on)  # as nearly every step has it
    if isinstance(depends_on, str):
        raise InvalidValue(f"depends_on of step {step_id!r}", depends_on, f"a list, such as [{depends_on!r}]")
    if not isinstance(depends_on, Iterable):
        raise InvalidValue(f"depends_on of step {step_id!r}", depends_on, "a list of step ids")
    names = tuple(depends_on)
    for one in names:
        if type(one) is not str:
            raise InvalidValue(f"depends_on of step {step_id!r}", one, "a list of step ids")
    return tuple(dict.fromkeys(names))
