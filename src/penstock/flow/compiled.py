"""Compile steps to a plan: the dependencies by number, and what runs each number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from penstock.containment.limits import UNLIMITED
from penstock.errors import InvalidValue
from penstock.flow.node import FunctionNode, type_of
from penstock.flow.session import Session
from penstock.flow.step import Step, StepGraph
from penstock.kernel.frontier import Quorum
from penstock.kernel.graph import MAX_NODES, MAX_PROBLEMS, GraphInvalid, Problem
from penstock.kernel.plan import CycleFound, Plan, plan_columns, topological_order
from penstock.policies import ErrorPolicy
from penstock.runtime.call import CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.scheduling.exclusive import turn_of
from penstock.runtime.scheduling.recovery import DEFAULT_POLICY, PLAIN, StepOptions
from penstock.runtime.scheduling.scheduler import MAX_NESTING

Feed = str | None | Callable[[Mapping[str, Any]], Any]
"""Source of a step's input: its only predecessor, the input of the graph, or a function of the results."""
Run = Callable[[Any], Any]


@dataclass(slots=True)
class Compiled:
    """A compiled graph of steps, which can run any number of times."""

    plan: Plan
    steps: list[Step]
    runs: list[Run]
    """The function that runs each step, given its context."""
    fallbacks: dict[int, Run]
    """What runs instead of a step that failed, where its policy names a node."""
    feeds: list[Feed]
    calls: list[CallSpec]
    options: list[StepOptions | None] | None
    """None if no step has any."""
    references: list[int]
    """Steps whose node is looked up in the session of the run."""
    sync: list[int]
    """Steps with a sync function, which runs on a worker if it may have to be abandoned."""
    _timed: list[StepOptions | None] | None = None
    _on_workers: list[StepOptions | None] | None = None

    def options_in(self, context: ExecutionContext) -> list[StepOptions | None] | None:
        """Return the options of each step in this run, which decides what runs on workers."""
        run, mode = context._run, context._run.settings.sync_calls
        if mode == "inline" or not (self.sync or self.fallbacks):
            return self.options
        if mode == "auto" and context._token.deadline_ns >= UNLIMITED and not run.external_token:
            if self._timed is None and self.options is not None:
                self._timed = self._with_workers(_has_time_limit)
            return self._timed
        if self._on_workers is None:
            self._on_workers = self._with_workers(lambda _: True)
        return self._on_workers

    def _with_workers(self, applies: Callable[[StepOptions], bool]) -> list[StepOptions | None]:
        """Return the options with the sync functions of these steps, and their fallbacks, on workers."""
        options: list[StepOptions | None] = [None] * len(self.runs) if self.options is None else self.options.copy()
        for step in self.sync:
            if applies(before := options[step] or PLAIN):
                options[step] = _on_worker(before)
        for step in self.fallbacks:
            before = options[step] or PLAIN
            if before.fallback is not None and applies(before) and _is_sync(_fallback_of(self.steps[step])):
                options[step] = replace(before, fallback=_on_worker(before.fallback))
        return options

    def bound_to(self, session: Session | None) -> Compiled:
        """Return the plan with the nodes that steps refer to by name; raises GraphInvalid for unknown names."""
        if not self.references:
            return self
        if session is not None and not callable(getattr(session, "get_node", None)):
            raise InvalidValue("session", session, "a Session, or left out")
        missing = list(_missing_nodes(self.steps, session))
        if missing or session is None:
            raise GraphInvalid(missing)
        runs, calls = self.runs.copy(), self.calls.copy()
        options: list[StepOptions | None] = [None] * len(runs) if self.options is None else self.options.copy()
        sync = self.sync.copy()
        nodes = [step.node for step in self.steps]
        for number in self.references:
            step = self.steps[number]
            node = nodes[number] = session.get_node(step.node_id)
            runs[number], options[number] = _run_of(node), _options_of(step, node)
            if _is_sync(node):
                sync.append(number)
            metadata = {**(calls[number].metadata or {}), "node_type": type_of(node)}
            calls[number] = replace(calls[number], metadata=metadata)
        shared = list(_shared_persistent(self.steps[0]._graph, self.plan, self.steps, nodes)) if any(options) else []
        if shared:
            raise GraphInvalid(shared)
        return Compiled(
            self.plan,
            self.steps,
            runs,
            self.fallbacks,
            self.feeds,
            calls,
            options if any(options) else None,
            [],
            sync,
        )


class CompilableGraph(StepGraph, Protocol):
    """A graph of steps that caches its compiled form."""

    def compiled(self) -> Compiled: ...


def compile_steps(graph: StepGraph) -> Compiled:
    """Return the plan of a graph; raises GraphInvalid with every problem."""
    steps = list(graph._steps.values())
    plan, problems = _plan(graph, steps)
    problems += _in_nested_graphs(graph, steps)
    if problems or plan is None:
        raise GraphInvalid(problems[:MAX_PROBLEMS])
    options = [_options_of(step, step.node) for step in steps]
    return Compiled(
        plan,
        steps,
        [_run_of(step.node) for step in steps],
        {at: _run_of(other) for at, step in enumerate(steps) if (other := _fallback_of(step)) is not None},
        [_feed_of(step) for step in steps],
        _calls_of(graph.id, steps),
        options if any(options) else None,
        [number for number, step in enumerate(steps) if step.node is None],
        [number for number, step in enumerate(steps) if _is_sync(step.node)],
    )


def _calls_of(graph_id: str, steps: list[Step]) -> list[CallSpec]:
    calls = []
    for step in steps:
        node = step.node
        node_type = "function" if type(node) is FunctionNode else type_of(node)
        metadata = {"graph": graph_id, "step": step.id, "node": step.node_id, "node_type": node_type}
        calls.append(CallSpec("system", step.id, metadata=metadata))
    return calls


def problems_of(graph: CompilableGraph) -> list[Problem]:
    """Return every problem that keeps the graph from running."""
    try:
        compiled = graph.compiled()
        if graph.session is not None:
            compiled.bound_to(graph.session)
    except GraphInvalid as invalid:
        missing = [] if graph.session is None else _missing_nodes(graph._steps.values(), graph.session)
        return list(dict.fromkeys((*invalid.problems, *missing)))
    return []


def _plan(graph: StepGraph, steps: list[Step]) -> tuple[Plan | None, list[Problem]]:
    """Return the plan, if there can be one, and every problem."""
    if len(steps) > MAX_NODES:
        detail = f"{len(steps)} steps are more than the {MAX_NODES} a graph may have"
        return None, [Problem("too_large", "steps", detail)]
    known = graph._steps
    sources = [before for step in steps for before in step.before]
    targets = [step.id for step in steps for _ in step.before]
    problems: list[Problem] = []
    if not known.keys() >= set(sources):
        problems += _unknown_dependencies(steps, known)
        pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0] in known]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    try:
        plan = plan_columns(list(known), sources, ["output"] * len(sources), targets)
    except CycleFound as cycle:
        problems.append(Problem("cycle", "steps", str(cycle).replace("nodes", "steps")))
        return None, problems
    if not problems:
        problems += _in_the_whole(graph, plan, steps)
    return plan, problems


def _unknown_dependencies(steps: Sequence[Step], known: Mapping[str, Step]) -> Iterator[Problem]:
    for step in steps:
        for before in step.before:
            if before not in known:
                path = f"steps[{step.id!r}].depends_on"
                yield Problem("unknown_step", path, f"step {step.id!r} depends on {before!r}, which is no step")


def _in_the_whole(graph: StepGraph, plan: Plan, steps: list[Step]) -> Iterator[Problem]:
    settle = graph.settle
    last = sum(not after for after in plan.successors)
    if isinstance(settle, Quorum) and settle.needed > last:
        detail = f"{settle} needs more last steps than the {last} there are"
        yield Problem("bad_settle", "settle", detail)
    yield from _shared_persistent(graph, plan, steps, [step.node for step in steps])


def _shared_persistent(graph: StepGraph, plan: Plan, steps: list[Step], nodes: list[Any]) -> Iterator[Problem]:
    """Return the steps that could use one persistent node at the same time; None stands for a node not yet known."""
    if graph.max_parallel == 1 or graph.queue_persistent:
        return
    users: dict[int, list[int]] = {}
    for number in topological_order(plan):
        if getattr(nodes[number], "persistent", False):
            users.setdefault(id(nodes[number]), []).append(number)
    for numbers in users.values():
        for before, after in pairwise(numbers):
            # In this order, each of them following from the one before makes all of them follow from each other.
            if not _leads_to(plan, before, after):
                a, b = steps[before], steps[after]
                yield Problem(
                    "shared_persistent_node",
                    f"steps[{b.id!r}]",
                    f"steps {a.id!r} and {b.id!r} both use persistent node {a.node_id!r} and can run in parallel; "
                    "add a dependency between them, or let them queue (queue_persistent=True)",
                )


def _leads_to(plan: Plan, start: int, goal: int) -> bool:
    seen, todo = {start}, [start]
    while todo:
        for after in plan.successors[todo.pop()]:
            if after == goal:
                return True
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return False


def _in_nested_graphs(graph: StepGraph, steps: list[Step]) -> Iterator[Problem]:
    """Return the problems of nested graphs; each graph is checked once, however often it occurs."""
    todo: list[tuple[Step, tuple[StepGraph, ...]]] = [(step, (graph,)) for step in steps if _is_graph(step.node)]
    seen = {id(graph)}
    while todo:
        step, above = todo.pop()
        inner: StepGraph = step.node
        path = " → ".join([one.id for one in above[:4]] + (["…"] if len(above) > 4 else []) + [inner.id])
        if any(inner is one for one in above):
            yield Problem("contains_itself", f"steps[{step.id!r}]", f"a graph contains itself: {path}")
        elif len(above) >= MAX_NESTING:
            detail = f"graphs stand inside each other more than {MAX_NESTING} deep: {path}"
            yield Problem("too_deep", f"steps[{step.id!r}]", detail)
            return
        elif id(inner) not in seen:
            seen.add(id(inner))
            below = list(inner._steps.values())
            for problem in _plan(inner, below)[1]:
                yield Problem(problem.code, f"steps[{step.id!r}].{problem.path}", f"in {path}: {problem.detail}")
            todo += [(one, (*above, inner)) for one in below if _is_graph(one.node)]


def _is_graph(node: object) -> bool:
    return getattr(node, "node_type", None) == "graph" and hasattr(node, "_steps")


def _run_of(node: Any) -> Run:
    if type(node) is FunctionNode:
        return node.fn if node.isolation is None else _isolated(node)
    return _unbound if node is None else node.execute


def _fallback_of(step: Step) -> Any | None:
    return None if step.error_policy is None else step.error_policy.fallback_node


def _isolated(node: FunctionNode) -> Run:
    from penstock.flow.isolation import isolated

    return isolated(node.fn, node.id)


def _unbound(context: Any) -> Any:
    raise AssertionError("a step that refers to a node was run before it was bound to a session")


def _feed_of(step: Step) -> Feed:
    if step.input_fn is not None:
        return step.input_fn
    given = step.input
    if given is not None:
        return lambda results: given
    before = step.before
    if not before:
        return None
    return before[0] if len(before) == 1 else lambda results: {one: results[one] for one in before if one in results}


def _options_of(step: Step, node: Any) -> StepOptions | None:
    policy, budget = step.error_policy, step.sub_budget
    if policy is None and budget is None and not _has_options(node):
        return None
    policy, other = policy or DEFAULT_POLICY, _fallback_of(step)
    fallback = None if other is None else _options_for(step, other, policy)
    return replace(_options_for(step, node, policy), sub_budget=budget, fallback=fallback)


def _options_for(step: Step, node: Any, policy: ErrorPolicy) -> StepOptions:
    turn = turn_of(node, node.id) if getattr(node, "persistent", False) else None
    return StepOptions(
        policy,
        on_thread=_is_on_thread(node),
        turn=turn,
        turn_timeout_s=step._graph.turn_timeout_s,
        is_graph=_is_graph(node),
    )


def _has_options(node: Any) -> bool:
    if type(node) is FunctionNode:  # most are, and have these attributes
        return bool(node.persistent or node.blocking or node.isolation is not None)
    return getattr(node, "persistent", False) or _is_on_thread(node)


def _on_worker(options: StepOptions) -> StepOptions:
    return replace(options, on_thread=True, may_return_awaitable=True)


def _is_sync(node: Any) -> bool:
    """Whether the step runs a sync function and does not declare where."""
    return type(node) is FunctionNode and node.blocking is None and node.isolation is None and not node.is_async


def _has_time_limit(options: StepOptions) -> bool:
    budget = options.sub_budget
    return options.policy.timeout_ms is not None or (budget is not None and budget.max_time_seconds is not None)


def _is_on_thread(node: Any) -> bool:
    return bool(getattr(node, "blocking", False)) or getattr(node, "isolation", None) is not None


def _missing_nodes(steps: Iterable[Step], session: Session | None) -> Iterator[Problem]:
    for step in steps:
        if step.node is None and (session is None or session.get_node(step.node_id) is None):
            yield _no_such_node(step, session)


def _no_such_node(step: Step, session: Session | None) -> Problem:
    path = f"steps[{step.id!r}]"
    if session is None:
        detail = f"step {step.id!r} refers to node {step.node_id!r}, and there is no session to look it up in"
    else:
        known = ", ".join(session.list_nodes()[:20]) or "none"
        detail = (
            f"step {step.id!r} refers to node {step.node_id!r}, which session {session.name!r} does not have ({known})"
        )
    return Problem("unknown_node", path, detail)
