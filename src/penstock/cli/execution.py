"""Runs a graph for the command line: to its end, to a limit, or until somebody presses Ctrl-C.

Whatever happens to the graph is an `Outcome`; nothing of it is raised here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from penstock.cli.exits import Exit
from penstock.cli.loading.target import Runnable, as_spec
from penstock.cli.showing.outcome import Outcome, Status
from penstock.errors import CancelledError, Halted
from penstock.flow.graph import Graph
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import DEFAULT_OUTPUT, GraphSpec
from penstock.kernel.values import DataValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.graph_runtime import MAX_PARALLEL, run_flow
from penstock.stops import Stop, StopReason, TerminationReason

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

STATUS_OF: dict[TerminationReason, Status] = {
    TerminationReason.SUCCESS: "ok",
    TerminationReason.MAX_ITERATIONS: "halted",
    TerminationReason.ERROR: "failed",
    TerminationReason.CONTEXT_CANCELED: "cancelled",
    TerminationReason.HOOK_ABORT: "halted",
    TerminationReason.LIMIT_EXCEEDED: "halted",
}


async def execute(
    graph: Runnable,
    run: ExecutionContext,
    executors: ExecutorRegistry,
    services: Mapping[str, Any],
    max_parallel: int | None,
) -> Outcome:
    """Run the graph to its end, whatever that is; executors and services are for one that was not written in Python."""
    seen = Seen(dict.fromkeys(node.id for node in as_spec(graph).nodes))
    try:
        with _woken_by_signals():
            async with run:
                if isinstance(graph, Graph):
                    await _run_steps(graph, run, seen)
                else:
                    within = FlowContext(run_id=run.run_id, services=services, execution=run)
                    await _run_nodes(graph, within, executors, max_parallel or MAX_PARALLEL, seen)
    except (Halted, CancelledError) as stopped:
        return seen.outcome(_status_of(stopped.stop), stopped.stop)
    except asyncio.CancelledError:
        return seen.outcome(_ended_as(run), run.stop)
    except SystemExit as error:  # code that ends its program is a step that raised, whatever code it asks for
        return seen.outcome("failed", None, error)
    except Exception as error:
        return seen.outcome(_ended_as(run), run.stop, error)
    # A graph that collects comes back with its failures, for whoever called it to judge: here, that is this line.
    is_lacking = isinstance(graph, Graph) and graph.settle == "collect" and seen.errors
    return seen.outcome("failed" if is_lacking else "ok", run.stop)


@dataclass(slots=True)
class Seen:
    """What was seen of the nodes so far: what a run that is stopped has to show."""

    nodes: Collection[str]
    """In the order of the graph, which is that of the results."""
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def take(self, event_type: str, node: str, data: Any) -> None:
        """Take in what became of a node."""
        if event_type == "completed":
            self.results[node] = data
            self.errors.pop(node, None)
        elif event_type == "error":
            self.errors[node] = data
        elif event_type == "skipped":
            self.skipped.append(node)

    def outcome(self, status: Status, stop: Stop | None, error: BaseException | None = None) -> Outcome:
        """All of it, at the end; what ended the run is not told twice."""
        others = {
            node: one
            for node, one in self.errors.items()
            if one is not error and (stop is None or getattr(one, "stop", None) != stop)
        }
        results = {node: self.results[node] for node in self.nodes if node in self.results}
        return Outcome(status, results, stop, error, others, tuple(self.skipped))


async def _run_steps(graph: Graph, run: ExecutionContext, seen: Seen) -> None:
    async for event in graph.execute_stream(run):
        if event.graph_id == graph.id and event.step_id in seen.nodes:  # those of graphs inside have a path
            seen.take(event.event_type, event.step_id, event.data)


async def _run_nodes(
    graph: GraphSpec, within: FlowContext, executors: ExecutorRegistry, max_parallel: int, seen: Seen
) -> None:
    async with aclosing(run_flow(graph, within, executors, max_parallel=max_parallel)) as events:
        async for event in events:
            if not isinstance(event, ExecutionResult):  # that is the last, and says the same again
                done = event.event_type == "completed"
                seen.take(event.event_type, event.node_id, _given(event.data) if done else event.data)


def _given(outputs: Mapping[str, DataValue]) -> Any:
    """What a node gave, without types; the value alone, if it is on the usual handle and there is no other."""
    values = {handle: output.value for handle, output in outputs.items()}
    return values[DEFAULT_OUTPUT] if values.keys() == {DEFAULT_OUTPUT} else values


def _ended_as(run: ExecutionContext) -> Status:
    """How a run ended that something has ended."""
    status = STATUS_OF[run.termination_reason or TerminationReason.ERROR]
    return "failed" if status == "ok" else status


def _status_of(stop: Stop) -> Status:
    return "cancelled" if stop.reason is StopReason.ABORTED else "halted"


@contextmanager
def _woken_by_signals() -> Iterator[None]:
    """A signal wakes the loop, also one that another thread received, or that came just before the loop fell asleep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard, rung = socket.socketpair()
    with heard, rung:
        heard.setblocking(False)
        rung.setblocking(False)
        loop.add_reader(heard, heard.recv, 4_096)
        before = signal.set_wakeup_fd(rung.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(heard)


@contextmanager
def interruptible(run: ExecutionContext, leave: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM cancels the run; a second one calls `leave` and ends the process at once."""
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            try:
                leave()
            finally:
                os._exit(Exit.CANCELLED)
        asked = True
        run.abort(SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
