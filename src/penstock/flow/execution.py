"""Run a graph of steps: the context of each step, the events, and the results."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, closing, suppress
from contextvars import ContextVar, Token
from functools import partial
from types import AsyncGeneratorType, GeneratorType, MappingProxyType
from typing import Any, Protocol

from penstock.clock import utc_from_ns
from penstock.containment.limits import UNLIMITED
from penstock.errors import InvalidValue
from penstock.flow.compiled import CompilableGraph
from penstock.flow.step import StepEvent
from penstock.flow.trace import ExecutionTrace
from penstock.kernel.frontier import frontier_for
from penstock.runtime.call import Call, blank, running_call
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import must_be_json
from penstock.runtime.graphs.execution import GraphExecution, stream_run
from penstock.runtime.scheduling.listener import Listener
from penstock.runtime.scheduling.scheduler import NodeCallbacks, Scheduler, StepContext, step_context
from penstock.runtime.streams import STREAMS, first_pieces, turning
from penstock.tracing.record import CallRecord


class RunnableGraph(CompilableGraph, Protocol):
    """The part of a graph that its execution needs."""

    _lock: threading.Lock
    _running: set[CancellationToken]


class Results(dict[str, Any]):
    """The results by step, in the order in which the steps were added, and the outcome of steps without one."""

    def __init__(self, results: Mapping[str, Any], errors: Mapping[str, BaseException], skipped: list[str]) -> None:
        super().__init__(results)
        self.errors = dict(errors)
        """The errors of failed steps; empty unless the graph continues after a failure."""
        self.skipped = skipped
        """Steps that did not run because a step they depend on has no result."""


_listening: ContextVar[tuple[Listener[StepEvent], str | None] | None] = ContextVar("penstock_listener", default=None)
"""The listener of the graph that is executed here, and the path of that graph; the path of the outermost is None."""


async def execute(graph: RunnableGraph, context: ExecutionContext | None) -> Results:
    """Run `graph` in `context`, or as a run of its own."""
    if context is None:
        with ExecutionContext(name=graph.id, session=graph.session) as own:
            return await execute(graph, own)
    execution = StepExecution(graph, context)
    if execution.may_block_for_prices():
        await context._run.prices.aload()
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
    return Results({name: found[name] for name in names if name in found}, errors, skipped)


def stream(graph: RunnableGraph, context: ExecutionContext | None) -> AsyncGenerator[StepEvent, None]:
    """Run `graph` in a task of its own and yield its events as they happen."""

    async def work(place: ExecutionContext, listener: Listener[StepEvent]) -> None:
        _listening.set((listener, None))
        await execute(graph, place)

    own = partial(ExecutionContext, name=graph.id, session=graph.session)
    return stream_run(own if context is None else _checked(context), f"stream of {graph.id}", work)


class StepExecution(GraphExecution[StepEvent]):
    """One run of one graph of steps."""

    __slots__ = (
        "_compiled",
        "_feeds",
        "_graph",
        "_inputs",
        "_options",
        "_prefix",
        "_results",
        "_runs",
        "_upstream",
        "_upstream_source",
        "trace",
    )

    def __init__(self, graph: RunnableGraph, context: ExecutionContext) -> None:
        context = _checked(context)
        context._must_take_work(f"graph {graph.id!r}")
        listener, outer_path = _listening.get() or (None, None)
        super().__init__(context, listener)
        session, trace = context.session, context.trace  # once: a step's context looks them up in the graph's
        self._graph = graph
        self._compiled = compiled = graph.compiled().bound_to(graph.session if session is None else session)
        self._options = compiled.options_in(context)
        self._runs = compiled.runs
        self._feeds = compiled.feeds
        parent_call = context._call_here()
        self._prefix = "" if outer_path is None else f"{outer_path}{_step_around(parent_call)}/"
        """The path of the graph inside its outer graphs, for the ids in events."""
        self.trace = trace if isinstance(trace, ExecutionTrace) else None
        self._inputs: list[Any] | None = None if self.trace is None else [None] * compiled.plan.size
        self._results: dict[str, Any] = {}
        outer = context._upstream_source
        source: dict[str, Any] | ChainMap[str, Any] = self._results
        if parent_call is not None or outer:
            source = ChainMap(source, *outer.maps) if type(outer) is ChainMap else ChainMap(source, outer)  # type: ignore[arg-type]
        self._upstream_source = source
        """The results of this graph, on top of those of its outer graphs; grows while they run."""
        self._upstream: Mapping[str, Any] = MappingProxyType(source)
        """What an `input_fn` receives."""

    def may_block_for_prices(self) -> bool:
        """Whether a sync step could need prices that are not loaded; it would block the event loop until they are."""
        return bool(self._compiled.sync) and self._context._run.prices.is_pending

    def listen(self) -> Token[tuple[Listener[StepEvent], str | None] | None] | None:
        """Send the events of nested graphs to the same listener."""
        listening = _listening.get()
        return None if listening is None else _listening.set((listening[0], self._prefix))

    def scheduler(self) -> Scheduler:
        """Create the scheduler of this run."""
        graph, compiled, trace = self._graph, self._compiled, self.trace
        fallback = self._run_fallback if compiled.fallbacks else None
        callbacks = NodeCallbacks(self._run, compiled.calls, self._options, fallback)
        if trace is not None:
            callbacks.call_log = journal = list[CallRecord]()
            trace.watch(self._context._run, journal, self._results, self._inputs, compiled.plan.index)
        frontier = frontier_for(compiled.plan, graph.settle, needs_all=True)
        return self._scheduler_of(graph.id, frontier, callbacks, graph.max_parallel, results=self._results)

    def _encode(self, step: int, value: Any) -> Any:
        must_be_json(f"step {self._compiled.plan.ids[step]!r} of graph {self._graph.id!r}", value)
        return value

    def _decode(self, step: int, encoded: Any) -> Any:
        return encoded

    def _event(self, event_type: Any, node: int, data: Any) -> StepEvent:
        run, step = self._context._run, self._compiled.steps[node]
        timestamp = utc_from_ns(run.wall_time_ns(run.now()))
        return StepEvent(event_type, self._graph.id, self._prefix + step.id, step.node_id, run.id, timestamp, data)

    # Steps.

    def _run(self, node: int, place: ExecutionContext) -> Any:
        # `step_context` written out: for every step, to call it costs more than what it does.
        feed = self._feeds[node]
        if type(feed) is str:
            input = self._results[feed]
        elif feed is None:
            input = self._context.input
        else:
            input = feed(self._upstream)  # type: ignore[operator]  # a str was met above
            if input is self._upstream:  # a result that has the step's own input in it would contain itself
                input = dict(input)
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
        context._upstream = None
        context._upstream_source = self._upstream_source
        value = self._runs[node](context)
        return self._stream(node, place, value, False) if type(value) in STREAMS else value

    def _run_fallback(self, node: int, place: ExecutionContext) -> Any:
        feed = self._feeds[node]
        if isinstance(feed, str):
            input = self._results[feed]
        else:
            input = self._context.input if feed is None else feed(self._upstream)
            if input is self._upstream:
                input = dict(input)
            if place._token.cancellation is not None:
                place.check_cancelled()
        value = self._compiled.fallbacks[node](step_context(place, input, self._upstream_source))
        return self._stream(node, place, value, True) if type(value) in STREAMS else value

    # Steps that stream.

    def _stream(self, node: int, place: ExecutionContext, stream: Any, is_fallback: bool) -> Any:
        """Return the pieces of a generator as a list, or an awaitable of it; each piece is emitted as progress."""
        pieces: list[Any] = []
        output = partial(first_pieces, pieces, place._run.settings.max_kept_pieces)
        self._streams[node] = output
        call = running_call.get()
        if call is not None and call.context is place:  # unrecorded steps have no call of their own
            call.stream = output
        options = None if self._options is None else self._options[node]
        if is_fallback and options is not None:
            options = options.fallback
        if options is not None and options.on_thread and type(stream) is GeneratorType:
            return self._drain(node, place._token, stream, pieces)
        if type(stream) is GeneratorType:
            stream = turning(stream)
        return self._adrain(node, place._token, stream, pieces)

    async def _adrain(
        self, node: int, token: CancellationToken, stream: AsyncGeneratorType[Any, Any], pieces: list[Any]
    ) -> list[Any]:
        async with aclosing(stream):
            async for piece in stream:
                pieces.append(piece)
                if self._audience is not None:
                    self._emit_progress(node, "progress", piece)
                    await self._audience.make_room()
                if token.cancellation is not None or token.deadline_ns < UNLIMITED:  # spares most pieces a call
                    token.check()
        return pieces

    def _drain(
        self, node: int, token: CancellationToken, stream: GeneratorType[Any, Any, Any], pieces: list[Any]
    ) -> list[Any]:
        """Do the same on the thread of a blocking node, which waits there while the reader is behind."""
        with closing(stream):
            for piece in stream:
                pieces.append(piece)
                self._emit_progress(node, "progress", piece)
                self._wait_for_room(token)
                token.check()
        return pieces


def _step_around(call: Call | None) -> str:
    """Return the step that a call was made in, through any number of other calls."""
    while call is not None:
        about = call.record.metadata
        if about is not None and "step" in about:
            return str(about["step"])
        call = call.parent_call
    return ""


def _checked(context: object) -> ExecutionContext:
    if not isinstance(context, ExecutionContext):
        raise InvalidValue("context", context, "an ExecutionContext, or left out")
    return context
