"""Runs a graph for the command line: to its end, to a limit, or until Ctrl-C.

Every result of the graph, including a failure, is returned as an `Outcome`; none is raised. Programs get an outcome as
one JSON document, people as the last event of the run and a few lines of results.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Literal

from penstock.cli.exits import Exit
from penstock.cli.loading.code import describe_error
from penstock.cli.loading.graphs import Runnable, as_spec
from penstock.cli.render.events import EXITS, RunEvent
from penstock.cli.render.screen import printable
from penstock.cli.render.text import titled
from penstock.containment.limits import UNLIMITED, Limits
from penstock.errors import CancelledError, Halted
from penstock.flow.graph import Graph
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import DEFAULT_OUTPUT, GraphInvalid, GraphSpec
from penstock.money import known_usd, to_usd
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import MAX_PARALLEL, run_flow
from penstock.stops import Stop, StopReason, TerminationReason
from penstock.tracing.jsonable import jsonable

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

Status = Literal["ok", "failed", "halted", "cancelled"]

RUN_STATUS: Mapping[Status, str] = {"ok": "completed"}
"""Status of a run on a server, where its name differs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run, with the results that were complete by then."""

    status: Status
    results: Mapping[str, Any] = field(default_factory=dict)
    stop: Stop | None = None
    error: BaseException | None = None
    errors: Mapping[str, BaseException] = field(default_factory=dict)
    """Errors of steps whose failure did not end the run."""
    skipped: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        """The exit code for the status."""
        return EXITS[RUN_STATUS.get(self.status, self.status)]


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
    """Run the graph and return its outcome; executors, and services but approvals, are for graphs in JSON."""
    results = NodeResults(dict.fromkeys(node.id for node in as_spec(graph).nodes))
    try:
        with _woken_by_signals():
            async with run:
                if isinstance(graph, Graph):
                    with _approving(graph, run, services):
                        await _run_steps(graph, run, results)
                else:
                    context = FlowContext(run_id=run.run_id, services=services, execution=run)
                    await _run_nodes(graph, context, executors, max_parallel or MAX_PARALLEL, results)
    except (Halted, CancelledError) as stopped:
        return results.outcome(_status_of(stopped.stop), stopped.stop)
    except asyncio.CancelledError:
        return results.outcome(_ended_as(run), run.stop)
    except SystemExit as error:  # a step that exits the program has failed, whatever its exit code
        return results.outcome("failed", None, error)
    except Exception as error:
        return results.outcome(_ended_as(run), run.stop, error)
    # A graph with settle="collect" returns its failures for the caller to judge; the command line counts it as failed.
    has_failures = isinstance(graph, Graph) and graph.settle == "collect" and results.errors
    return results.outcome("failed" if has_failures else "ok", run.stop)


@dataclass(slots=True)
class NodeResults:
    """Node results collected so far, so that a stopped run can report them."""

    nodes: Collection[str]
    """Node ids in graph order, which is the order of the results."""
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def take(self, event_type: str, node: str, data: Any) -> None:
        """Record the result of a node."""
        if event_type == "completed":
            self.results[node] = data
            self.errors.pop(node, None)
        elif event_type == "error":
            self.errors[node] = data
        elif event_type == "skipped":
            self.skipped.append(node)

    def outcome(self, status: Status, stop: Stop | None, error: BaseException | None = None) -> Outcome:
        """Return the outcome; the error or stop that ended the run is not repeated among the node errors."""
        others = {
            node: failure
            for node, failure in self.errors.items()
            if failure is not error and (stop is None or getattr(failure, "stop", None) != stop)
        }
        results = {node: self.results[node] for node in self.nodes if node in self.results}
        return Outcome(status, results, stop, error, others, tuple(self.skipped))


def _approving(graph: Graph, run: ExecutionContext, services: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Let agents among the steps request approval of tool calls, if there is a service for it."""
    if not services:
        return nullcontext()
    from penstock.nodes.program import inside_execution  # imports agents, which a Graph does not need

    return inside_execution(FlowContext(graph.id, run_id=run.run_id, services=services, execution=run))


async def _run_steps(graph: Graph, run: ExecutionContext, results: NodeResults) -> None:
    async for event in graph.execute_stream(run):
        if event.graph_id == graph.id and event.step_id in results.nodes:  # steps of nested graphs have a path
            results.take(event.event_type, event.step_id, event.data)


async def _run_nodes(
    graph: GraphSpec, context: FlowContext, executors: ExecutorRegistry, max_parallel: int, results: NodeResults
) -> None:
    async with aclosing(run_flow(graph, context, executors, max_parallel=max_parallel)) as events:
        async for event in events:
            if not isinstance(event, ExecutionResult):  # the final event repeats the node results
                done = event.event_type == "completed"
                results.take(event.event_type, event.node_id, _plain_outputs(event.data) if done else event.data)


def _plain_outputs(outputs: Mapping[str, DataValue]) -> Any:
    """Return a node's output values without types; a single value on the default handle is returned alone."""
    values = {handle: output.value for handle, output in outputs.items()}
    return values[DEFAULT_OUTPUT] if values.keys() == {DEFAULT_OUTPUT} else values


def _ended_as(run: ExecutionContext) -> Status:
    """Return the status of a run that ended with an exception; never "ok"."""
    status = STATUS_OF[run.termination_reason or TerminationReason.ERROR]
    return "failed" if status == "ok" else status


def _status_of(stop: Stop) -> Status:
    return "cancelled" if stop.reason is StopReason.ABORTED else "halted"


@contextmanager
def _woken_by_signals() -> Iterator[None]:
    """Wake the loop on a signal, also when another thread received it or it came just before the loop blocked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair()
    with receiver, sender:
        receiver.setblocking(False)
        sender.setblocking(False)
        loop.add_reader(receiver, receiver.recv, 4_096)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(receiver)


@contextmanager
def interruptible(run: ExecutionContext, leave: Callable[[], None]) -> Iterator[None]:
    """Cancel the run on the first Ctrl-C or SIGTERM; on the second, call `leave` and exit the process immediately."""
    interrupted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            try:
                leave()
            finally:
                os._exit(Exit.CANCELLED)
        interrupted = True
        run.abort(SIGNALS[signal.Signals(number)])

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Rendering.


def document(outcome: Outcome, run: ExecutionContext | None) -> dict[str, Any]:
    """Return the outcome as one JSON document; `run` is None if it never started."""
    return {
        "status": outcome.status,
        "results": {name: jsonable(value) for name, value in outcome.results.items()},
        "stop": None if outcome.stop is None else asdict(outcome.stop),
        "error": None if outcome.error is None else _error_data(outcome.error),
        "errors": {step: _error_data(error) for step, error in outcome.errors.items()},
        "skipped": list(outcome.skipped),
        "usage": None if run is None else usage(run),
        "trace": None if run is None else run.graph.snapshot(),
        "run_id": None if run is None else run.run_id,
    }


def usage(run: ExecutionContext) -> dict[str, Any]:
    """Return the usage and the limits of the run."""
    balance, snapshot = run.balance, run.get_snapshot()
    return {
        "cost_usd": known_usd(balance.spent_nanos, snapshot.unknown_costs),
        "held_usd": balance.held_usd,
        "unresolved_usd": balance.unresolved_usd,
        "unknown_costs": snapshot.unknown_costs,
        "steps": balance.steps,
        "attempts": balance.attempts,
        "retries": balance.retries,
        "api_calls": balance.api_calls,
        "tokens_in": balance.tokens_in,
        "tokens_out": balance.tokens_out,
        "elapsed_s": round(snapshot.elapsed_ms / 1_000, 3),
        "limits": _limits(balance.limits),
    }


def _limits(limits: Limits) -> dict[str, Any]:
    def or_none(limit: int) -> int | None:
        return None if limit == UNLIMITED else limit

    return {
        "cost_usd": None if limits.cost_nanos == UNLIMITED else to_usd(limits.cost_nanos),
        "steps": or_none(limits.steps),
        "tokens": or_none(limits.tokens),
        "api_calls": or_none(limits.api_calls),
        "retries": or_none(limits.retries),
        "time_s": limits.time_s,
    }


def _error_data(error: BaseException) -> dict[str, Any]:
    data: dict[str, Any] = {"type": type(error).__name__, "message": describe_error(error)}
    if isinstance(error, GraphInvalid):
        data["message"] = f"the graph has {len(error.problems)} problem(s)"
        data["problems"] = [asdict(problem) for problem in error.problems]
    return data


def final_event(outcome: Outcome, run: ExecutionContext) -> RunEvent:
    """Return the outcome as the last event of the run, in the form of a server's event log."""
    stop, is_stopped = outcome.stop, outcome.status in ("halted", "cancelled")
    data: dict[str, Any] = {
        "errors": {step: describe_error(error) for step, error in outcome.errors.items()},
        "skipped": outcome.skipped,
    }
    if stop is not None and is_stopped:
        data |= {"stop_reason": str(stop.reason), "message": stop.message}
    elif outcome.error is not None:
        data["message"] = describe_error(outcome.error)
    elif stop is not None:
        data["handled_stop"] = str(stop)
    seconds = run.usage.time_elapsed_seconds
    data["usage"] = f"{run.explain().rpartition(chr(10))[2]} · {seconds:.1f} s"
    return RunEvent(0, f"run.{RUN_STATUS.get(outcome.status, outcome.status)}", data, seconds)


def result_lines(outcome: Outcome) -> Iterator[str]:
    """Yield each result as text for people: on one line if it fits, otherwise below its name."""
    for name, value in outcome.results.items():
        yield "\n".join(titled(printable(name), value, "; --json shows them"))
