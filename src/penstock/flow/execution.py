"""One execution of a graph of steps: what each is given, what is told, what comes back."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar, Token
from types import AsyncGeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from penstock.clock import utc_from_ns
from penstock.errors import InvalidValue
from penstock.flow.step import StepEvent
from penstock.flow.trace import ExecutionTrace
from penstock.kernel.settle import frontier_for
from penstock.runtime.call import Call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal, must_be_json
from penstock.runtime.durable.recording import RecordedNodes
from penstock.runtime.scheduling.listener import Listener, Listening
from penstock.runtime.scheduling.scheduler import Behaviour, Scheduler, Told
from penstock.runtime.scheduling.step import StepContext, blank, step_context
from penstock.tracing.record import CallRecord

if TYPE_CHECKING:
    from penstock.flow.graph import Graph


class Results(dict[str, Any]):
    """The results by step, in the order the steps were added; and what became of those that have none."""

    def __init__(self, results: Mapping[str, Any], errors: Mapping[str, BaseException], skipped: list[str]) -> None:
        super().__init__(results)
        self.errors = dict(errors)
        """What the steps that failed ended with; only a graph that does not fail fast comes back with any."""
        self.skipped = skipped
        """Steps that did not run, because one that they wait for has no result."""


_listening: ContextVar[tuple[Listener[StepEvent], str | None] | None] = ContextVar("penstock_listener", default=None)
"""Who listens to what is executed here, and the path of the graph this is inside of; None outside of the first."""


async def execute(graph: Graph, context: ExecutionContext | None) -> Results:
    """Run `graph` in `context`, or as a run of its own."""
    if context is None:
        with ExecutionContext(name=graph.id, session=graph.session) as own:
            return await execute(graph, own)
    execution = Execution(graph, context)
    scheduler = execution.scheduler()
    token = scheduler.place._token
    listening = execution.listen()
    with graph._lock:
        graph._running.add(token)
    try:
        if execution.trace is None:
            await scheduler.execute()
        else:
            with execution.trace.during(context):
                await scheduler.execute()
    finally:
        graph._running.discard(token)
        if listening is not None:
            with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
                _listening.reset(listening)
    return _results(scheduler)


def _results(scheduler: Scheduler) -> Results:
    names, found = scheduler.names, scheduler.results
    errors = {names[node]: error for node, error in scheduler.errors.items()}
    skipped = [names[node] for node in scheduler.frontier.skipped]
    return Results({one: found[one] for one in names if one in found}, errors, skipped)


async def stream(graph: Graph, context: ExecutionContext | None) -> AsyncIterator[StepEvent]:
    """Run `graph` in a task of its own and give what it tells, as it tells it."""
    own = ExecutionContext(name=graph.id, session=graph.session) if context is None else None
    within = _checked(own if context is None else context)
    token = within._token.child(f"stream of {graph.id}")

    async def run(listener: Listener[StepEvent]) -> None:
        _listening.set((listener, None))
        await execute(graph, within._under(token))

    try:
        async with Listening(run, token) as listener:
            while await listener.has_more():
                while listener.events:
                    yield listener.events.popleft()
    except BaseException as error:
        if own is not None:
            own.end(error)
        raise
    if own is not None:
        own.end()


class Execution:
    """One graph, run once."""

    __slots__ = (
        "_compiled",
        "_context",
        "_feeds",
        "_graph",
        "_inputs",
        "_listener",
        "_prefix",
        "_results",
        "_runs",
        "_upstream",
        "trace",
    )

    def __init__(self, graph: Graph, context: ExecutionContext) -> None:
        context = _checked(context)
        context._must_be_open(f"graph {graph.id!r}")
        session = context.session if context.session is not None else graph.session
        self._graph = graph
        self._context = context
        self._compiled = compiled = graph.compiled().bound_to(session)
        self._runs = compiled.runs
        self._feeds = compiled.feeds
        listening = _listening.get()
        above = context._call_here()
        self._listener = None if listening is None else listening[0]
        self._prefix = "" if listening is None or listening[1] is None else f"{listening[1]}{_step_around(above)}/"
        self.trace = context.trace if isinstance(context.trace, ExecutionTrace) else None
        self._inputs: list[Any] | None = None if self.trace is None else [None] * compiled.plan.size
        self._results: dict[str, Any] = {}
        self._upstream: Mapping[str, Any] = MappingProxyType(
            self._results if above is None and not context.upstream else ChainMap(self._results, context.upstream)  # type: ignore[arg-type]
        )

    def listen(self) -> Token[tuple[Listener[StepEvent], str | None] | None] | None:
        """Let whoever listens hear of graphs inside this one too."""
        return None if self._listener is None else _listening.set((self._listener, self._prefix))

    def scheduler(self) -> Scheduler:
        """What runs it. It knows this execution and is not known by it, so that both are gone when it has ended."""
        graph, compiled, trace = self._graph, self._compiled, self.trace
        journal: list[CallRecord] | None = None if trace is None else []
        behaviour = Behaviour(
            self._run,
            compiled.about,
            compiled.care,
            self._run_fallback if compiled.fallbacks else None,
            tell=None if self._listener is None else self._tell,
            journal=journal,
        )
        if self._context._run.journal is not None:
            behaviour.durable = self._recorded(self._context._run.journal)
        frontier = frontier_for(compiled.plan, graph.settle, needs_all=True)
        if trace is not None and journal is not None:
            trace.watch(self._context._run, journal, self._results, self._inputs, compiled.plan.index)
        return Scheduler(self._context, graph.id, frontier, behaviour, graph.max_parallel, self._results)

    def _recorded(self, journal: Journal) -> RecordedNodes:
        """The steps in the journal of the run; a step's value has to be JSON."""
        graph, plan = self._graph, self._compiled.plan

        def written(step: int, value: Any) -> Any:
            must_be_json(f"step {plan.ids[step]!r} of graph {graph.id!r}", value)
            return value

        return RecordedNodes(journal, plan.ids, written, lambda step, value: value, about=self._compiled.about)

    # What the scheduler asks for.

    def _run(self, node: int, place: ExecutionContext) -> Any:
        # `step_context` written out: for every step, to call it costs more than what it does.
        feed = self._feeds[node]
        if type(feed) is str:
            input = self._results[feed]
        elif feed is None:
            input = self._context.input
        else:
            input = feed(self._upstream)  # type: ignore[operator]  # a str was met above
            if place._token.cancellation is not None:  # by what the user's own function did
                place.check_cancelled()
        if self._inputs is not None:
            self._inputs[node] = input
        context = blank(StepContext)
        context._of = place
        context._run = place._run
        context._account = place._account
        context._token = place._token
        context._base = place._base
        context._source = place._source
        context.input = input
        context.upstream = self._upstream
        value = self._runs[node](context)
        return self._streamed(node, value) if type(value) is AsyncGeneratorType else value

    def _run_fallback(self, node: int, place: ExecutionContext) -> Any:
        feed = self._feeds[node]
        if isinstance(feed, str):
            input = self._results[feed]
        else:
            input = self._context.input if feed is None else feed(self._upstream)
            if place._token.cancellation is not None:
                place.check_cancelled()
        value = self._compiled.fallbacks[node](step_context(place, input, self._upstream))
        return self._streamed(node, value) if type(value) is AsyncGeneratorType else value

    async def _streamed(self, node: int, pieces: AsyncGeneratorType[Any, Any]) -> list[Any]:
        """What a step that streams has given; told piece by piece to whoever listens."""
        given: list[Any] = []
        async with aclosing(pieces):
            async for piece in pieces:
                given.append(piece)
                if self._listener is not None:
                    self._listener.tell(self._event("progress", node, piece))
                    await self._listener.make_room()
        return given

    def _tell(self, told: Told, node: int, data: Any) -> None:
        assert self._listener is not None
        self._listener.tell(self._event(told, node, data))

    def _event(self, told: Told | Literal["progress"], node: int, data: Any) -> StepEvent:
        run, step = self._context._run, self._compiled.steps[node]
        return StepEvent(
            told,
            self._graph.id,
            self._prefix + step.id,
            step.node_id,
            run.id,
            utc_from_ns(run.wall_time_ns(run.now())),
            data,
        )


def _step_around(call: Call | None) -> str:
    """The step that a call is made in, however many other calls stand between them."""
    while call is not None:
        about = call.record.metadata
        if about is not None and "step" in about:
            return str(about["step"])
        call = call.above
    return ""


def _checked(context: object) -> ExecutionContext:
    if not isinstance(context, ExecutionContext):
        raise InvalidValue("context", context, "an ExecutionContext, or left out")
    return context
