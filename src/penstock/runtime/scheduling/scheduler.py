"""Run the nodes of a plan: each as soon as its inputs are ready, within the concurrency limit.

The frontier (`kernel.frontier`, pure) decides which nodes may run; the scheduler drives it on an event loop.

**Drivers.** The task that executes a graph drives it: it takes the oldest ready node, runs it, reports the result to
the frontier, and continues, in place. A chain needs no task. Only when other nodes are ready does it spawn a driver:
a task that gets to run when the first driver's own node waits for something, and takes the next node then. If nothing
ever waits, the spawned driver finds nothing left to do; if everything waits, each batch of spawned drivers is twice
as large as the one before. So there are about as many tasks as there are nodes that wait, and never one for a node
that does not.

**One cap over nested graphs.** A driver has a slot of its `ConcurrencyLimit`, which a graph shares with every graph
inside it. The first driver of an inner graph is the driver that runs the node containing the inner graph, with its
slot: an inner graph can always continue, so no cap is too small and no slot is waited for that only the waiting graph
could free. A first driver that only waits for the others of its graph has released its slot; the last of them hands
it theirs.

**Stopping.** The graph has a token under that of its context, and every driver's task is watched by it, once, for as
long as it drives. A failure that decides the graph, an abort, a deadline: all of them cancel that token, the nodes
under way are interrupted and end as halted, and the first driver waits for the others to be done before it raises.
Nothing is left behind, however often the waiting itself is cancelled.
"""

from __future__ import annotations

import asyncio
import warnings
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, Token, copy_context
from dataclasses import dataclass, field, replace
from types import CoroutineType
from typing import Any, Literal

from penstock.containment.limits import NO_LIMITS
from penstock.errors import CancelledError, Halted, PenstockError, StepTimeout
from penstock.kernel.frontier import Frontier, Race
from penstock.runtime.admission import admit, await_room
from penstock.runtime.billing.usage import WITHOUT_USAGE, Reported
from penstock.runtime.call import Call, CallSpec, blank, running_call, stop_of, stopped
from penstock.runtime.cancellation import drain_cancel, translate_cancel
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.keys import current_scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.execution import pause, record_value
from penstock.runtime.handle import Handle
from penstock.runtime.scheduling.recording import RecordedNodes
from penstock.runtime.scheduling.recovery import NotifyRecovery, StepOptions, Work, run_with_options
from penstock.runtime.settlement import end_interrupted, fail, load_prices_for, succeed
from penstock.runtime.streams import Output
from penstock.stops import Stop, StopReason
from penstock.tracing.record import CallRecord

MAX_NESTING = 64
"""Maximum nesting depth of graphs; each level uses part of Python's own stack."""
SMALL = 64
"""Maximum number of nodes of a graph whose queue is a list."""
TURN_NS = 10_000_000
"""Maximum time that nodes run without yielding to the event loop."""
BLOCKED_NS = 100_000_000
"""A sync node that blocks the event loop for longer is named in a warning."""

Store = Callable[[int, Any], Collection[str] | None]
"""Store a node's value; return the handles that have values, None for all."""
NodeStatus = Literal["started", "completed", "error", "cancelled", "skipped"]
Notify = Callable[[NodeStatus, int, Any], None]
"""Called with each status of a node, and its value, its error, or why it did not run."""


class NestedTooDeep(PenstockError):
    """Graphs are nested too deeply to run."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        super().__init__(
            f"{len(self.path)} graphs are nested inside each other, at most {MAX_NESTING} can be: "
            f"{' → '.join(self.path[:3])} → … → {self.path[-1]}; does one contain itself?"
        )


class ConcurrencyLimit:
    """One cap on how many nodes run at once, over a graph and every graph inside it."""

    __slots__ = ("_waiting", "free")

    def __init__(self, slots: int) -> None:
        self.free = slots - 1
        """Free slots; the first driver of the outermost graph has one from the start."""
        self._waiting: deque[Scheduler] | None = None

    def enqueue(self, graph: Scheduler) -> None:
        """Call `graph` when a slot is free."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(graph)

    def release(self) -> None:
        """Free a driver's slot; the graph that has waited longest and still needs one takes it."""
        self.free += 1
        while self._waiting and self.free:
            self._waiting.popleft().slot_released()


@dataclass(slots=True)
class NodeCallbacks:
    """How the nodes of a plan are run, stored and reported, by number."""

    run: Work
    calls: Sequence[CallSpec]
    """The call of each node, by number."""
    options: Sequence[StepOptions | None] | None = None
    """Options of each node: policy, sub-budget, thread, exclusive use. None for none."""
    fallback: Work | None = None
    """Runs the fallback node of another."""
    store: Store | None = None
    notify: Notify | None = None
    notify_recovery: NotifyRecovery | None = None
    call_log: list[CallRecord] | None = None
    """Receives the record of every call of a node, in the order they ended."""
    recorder: RecordedNodes | None = None
    """Records completed nodes, and replays those recorded before; None records nothing."""
    streams: dict[int, Output] = field(default_factory=dict)
    """The output so far of each node that streams; written by `run`."""


_steps_begun = 0
"""Steps started by all graphs: if it has grown since, the event loop has run."""

_scheduler: ContextVar[Scheduler | None] = ContextVar("penstock_graph", default=None)
"""The graph whose node is being executed in this context."""


class Scheduler:
    """One run of one graph."""

    __slots__ = (
        "_batch",
        "_call_log",
        "_decided",
        "_drivers",
        "_error",
        "_failed_at",
        "_inner_failures",
        "_is_queued",
        "_limit",
        "_loop",
        "_notify",
        "_options",
        "_outer",
        "_queue",
        "_released",
        "_slots",
        "_started",
        "_store",
        "_streams",
        "_task",
        "_tasks",
        "_token",
        "_turn_due_ns",
        "_unstarted",
        "_vars",
        "_wakeup",
        "calls",
        "errors",
        "fallback",
        "frontier",
        "name",
        "names",
        "notify_recovery",
        "place",
        "recorder",
        "results",
        "work",
    )

    place: ExecutionContext
    """Where the nodes run: the context of the graph, under the graph's own token."""
    _slots: ConcurrencyLimit
    _loop: asyncio.AbstractEventLoop
    _task: asyncio.Task[Any]

    def __init__(
        self,
        context: ExecutionContext,
        name: str,
        frontier: Frontier,
        callbacks: NodeCallbacks,
        max_parallel: int = 1,
        results: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.frontier = frontier
        self.results: dict[str, Any] = {} if results is None else results
        """The values of the nodes that have succeeded, in the order they did."""
        self.errors: dict[int, BaseException] = {}
        """Errors of the failed nodes."""
        self.work = callbacks.run
        self.fallback = callbacks.fallback
        self._options = callbacks.options
        self._store = callbacks.store
        self._notify = callbacks.notify
        self.notify_recovery = callbacks.notify_recovery
        self._call_log = callbacks.call_log
        self.recorder = callbacks.recorder
        self._streams = callbacks.streams
        self.names = frontier.plan.ids
        self.calls: Sequence[CallSpec] = callbacks.calls
        if context._run.settings.strict:
            # A strict run requires a hint for every call: a node itself costs nothing, and its calls have their own.
            self.calls = [replace(spec, hold_nanos=0) for spec in callbacks.calls]
        outer = _scheduler.get()
        self._outer = outer if outer is not None and outer.place._run is context._run else None
        self._refuse_depth()
        self._slots = self._outer._slots if self._outer is not None else ConcurrencyLimit(max_parallel)
        self._limit = max_parallel
        self._token = context._token.child(name)
        self.place = place = step_context(context, context.input, context._upstream_source)
        place._token = self._token
        # A short list is as fast as a deque and a tenth of its size: many small graphs may wait at the same time.
        self._queue: deque[int] | list[int] = deque() if frontier.plan.size > SMALL else []
        self._drivers = 1
        self._unstarted = 0
        self._batch = 1
        self._is_queued = False
        self._tasks: set[asyncio.Task[None]] | None = None
        self._vars: Context | None = None
        """The context variables of the graph, for the tasks it spawns."""
        self._wakeup: asyncio.Future[None] | None = None
        """Set when the first driver, which has nothing to do, is needed again."""
        self._released = False
        """Whether the first driver has released its slot, because it only waits."""
        self._started: set[int] | None = None
        """Nodes with options whose start was reported."""
        self._decided = False
        self._error: BaseException | None = None
        self._failed_at: int | None = None
        self._inner_failures: set[int] | None = None
        """Ids of the errors that inner graphs raised: holding the errors would keep their frames alive."""
        self._turn_due_ns = context._run.now() + TURN_NS

    def _refuse_depth(self) -> None:
        path, outer = [self.name], self._outer
        while outer is not None:
            path.append(outer.name)
            outer = outer._outer
        if len(path) > MAX_NESTING:
            raise NestedTooDeep(path[::-1])

    async def execute(self) -> None:
        """Run all nodes that can run, and complete `results` and `errors`; raise if the graph was stopped."""
        task = current_task()
        assert task is not None
        self._task = task
        entered = _scheduler.set(self)
        self._loop = task.get_loop()
        requested = task.cancelling()
        watching = self._token.watch(task)
        outside = None if self.recorder is None else current_scope.set(current_scope.get())
        try:
            self._queue.extend(self.frontier.start())
            while True:
                try:
                    await self._drive(task, requested)
                except BaseException as error:
                    # Not a node's error: a warning raised as an error, or a bug of this module.
                    if not self._decided:
                        self._decide(error)
                if self._drivers == 1 and not self._queue:
                    break
                if isinstance(self._error, GeneratorExit):
                    raise self._error  # closed from outside: nothing can be awaited any more
                await self._wait_for_others(task, requested)
        finally:
            self._token.close()
            pending = self._token.unwatch(task) if watching else None
            with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
                _scheduler.reset(entered)
                if outside is not None:
                    current_scope.reset(outside)
            if pending is not None:
                await drain_cancel(task, requested)
        if self._notify is not None:
            for node in self.frontier.skipped:
                self._notify("skipped", node, "no value reached it")
        if self._error is not None:
            raise self._with_partial_results(self._error)

    # Driving.

    async def _drive(self, task: asyncio.Task[Any], requested: int) -> None:
        """Run ready nodes, oldest first, until none is left."""
        if self._needs_no_door():
            await self._drive_bare(task, requested)
            return
        global _steps_begun
        queue, names, calls, options = self._queue, self.names, self.calls, self._options
        place, token, work, notify, recorder = self.place, self._token, self.work, self._notify, self.recorder
        note = None if self._call_log is None else self._call_log.append
        results, finish, prices = self.results, self.frontier.finish, place._run.prices
        is_plain = self._store is None and notify is None and not isinstance(self.frontier, Race)
        while queue:
            node = queue.pop(0) if type(queue) is list else queue.popleft()  # type: ignore[union-attr]
            if queue:
                self._share()
            if recorder is not None and token.cancellation is None and (entry := recorder.find(node)) is not None:
                await self._replay(node, entry)
                continue
            if options is not None and (node_options := options[node]) is not None:
                await self._run_with_options(node, node_options, task, requested)
                continue
            call = blank(Call)
            try:
                may_run = admit(call, place, calls[node], token, (), 1, "async") or await await_room(call)
            except BaseException as error:
                end_interrupted(call, error)
                raise
            if not may_run:
                self._refused(node, call)
                continue
            if notify is not None:
                notify("started", node, None)
            # `execution.attempt_async`, inlined: one more coroutine per step costs a tenth of the step.
            previous = running_call.set(call)
            kind: type = type(None)
            _steps_begun = begun = _steps_begun + 1
            try:
                call.began = True
                if recorder is not None:
                    await recorder.before(node)
                    recorder.begin(node, 1)
                value = work(node, place)
                kind = type(value)
                if kind is CoroutineType or (kind not in WITHOUT_USAGE and hasattr(kind, "__await__")):
                    value = await value
                if prices.is_pending and type(value) not in WITHOUT_USAGE:
                    await load_prices_for(call, value)
                if recorder is not None:
                    kind = CoroutineType  # the event loop may run while the store writes
                    await recorder.record(node, value)
            except BaseException as error:
                _reset(previous)
                self._broke(node, call, translate_cancel(token, task, error, requested))
                continue
            running_call.reset(previous)
            succeed(call, value)
            if note is not None:
                note(call.record)
            if call.stop is not None:  # it returned its value after it had been stopped
                self._fail(node, self.failure_of(call))
                continue
            results[names[node]] = value = call.value
            if is_plain and not self._decided:
                queue.extend(finish(node))
            else:
                self._finished(node, value)
            ended_ns = call.record.ended_ns
            if ended_ns > self._turn_due_ns:
                if _steps_begun == begun:
                    await self._give_a_turn(node, call.record, kind)
                else:  # the event loop has run another graph meanwhile
                    self._turn_due_ns = ended_ns + TURN_NS

    async def _drive_bare(self, task: asyncio.Task[Any], requested: int) -> None:
        """Run ready nodes without admission, where nothing is recorded or held."""
        queue, place, token, work = self._queue, self.place, self._token, self.work
        turns = 0
        while queue:
            node = queue.pop(0) if type(queue) is list else queue.popleft()  # type: ignore[union-attr]
            if queue:
                self._share()
            if token.cancellation is not None:
                self._stop_for(stop_of(token), node)
                return
            try:
                value = work(node, place)
                kind = type(value)
                if kind is CoroutineType or (kind not in WITHOUT_USAGE and hasattr(kind, "__await__")):
                    value = await value
            except BaseException as error:
                self._fail(node, self._as_stopped(translate_cancel(token, task, error, requested)))
                continue
            if type(value) is Reported:
                value = self._counted(node, value)
            self._finished(node, value)
            turns += 1
            if turns & 1023 == 0:
                await pause(token, 0)

    async def _replay(self, node: int, found: JournalEntry) -> None:
        """Complete a node that has run before with its recorded value."""
        assert self.recorder is not None
        try:
            value, record = self.recorder.replay(node, found, self.place)
        except Exception as error:  # the recorded value cannot be read
            if self._notify is not None:
                self._notify("skipped", node, error)
            self._fail(node, error, notifies=False)
            return
        if self._notify is not None:
            self._notify("started", node, None)
        self.log_record(record)
        self._finished(node, value)
        if record.ended_ns > self._turn_due_ns:
            await pause(self._token, 0)
            self._turn_due_ns = self.place._run.now() + TURN_NS

    def _counted(self, node: int, value: Reported[Any]) -> Any:
        """Record the reported cost of a value although steps are not recorded: no cost is silently zero."""
        record_value(self.place, self.calls[node], value)
        return value.value

    def _needs_no_door(self) -> bool:
        run, account = self.place._run, self.place._account
        return (
            not run.settings.record_steps
            and not run.guarded
            and run.divergence is None
            and self._options is None
            and self._notify is None
            and self._call_log is None
            and self.recorder is None
            and account.limits == NO_LIMITS
            and account.parent is None
        )

    async def _run_with_options(self, node: int, options: StepOptions, task: asyncio.Task[Any], requested: int) -> None:
        try:
            value = await run_with_options(self, node, options)
            if self.recorder is not None:
                await self.recorder.record(node, value)
        except BaseException as error:
            failure = self._as_stopped(translate_cancel(self._token, task, error, requested))
            started = self._started is not None and node in self._started
            if self._notify is not None and not started:
                self._notify("skipped", node, failure)
            self._fail(node, failure, notifies=started)
        else:
            self._finished(node, value)

    def _finished(self, node: int, value: Any) -> None:
        self.results[self.names[node]] = value
        used = None if self._store is None else self._store(node, value)
        if self._notify is not None:
            self._notify("completed", node, value)
        if self._decided:
            return
        ready = self.frontier.finish(node, used)
        if self.frontier.decided:
            self._decide(None)
        elif ready:
            self._queue.extend(ready)

    # Failures.

    def _refused(self, node: int, call: Call) -> None:
        """Handle a node that was not admitted."""
        if self._notify is not None:
            self._notify("skipped", node, call.stop)
        if self._call_log is not None:
            self._call_log.append(call.record)
        assert call.stop is not None
        self._stop_for(call.stop, node)

    def _stop_for(self, stop: Stop, node: int) -> None:
        self._fail(node, stopped(self.place, stop), notifies=False)

    def _broke(self, node: int, call: Call, error: BaseException) -> None:
        """Handle a node that raised."""
        try:
            fail(call, error)
        except BaseException as raised:
            self.log(call)
            self._fail(node, raised)
            return
        self.log(call)
        if not self._decided or self._notify is not None:
            self._fail(node, self.failure_of(call))

    def notify_started(self, node: int) -> None:
        """Report that the node was admitted, unless that was reported before."""
        if self._started is None:
            self._started = set()
        if self._notify is not None and node not in self._started:
            self._started.add(node)
            self._notify("started", node, None)

    def failure_of(self, call: Call) -> BaseException:
        """Return the error to raise for a call without a value."""
        error = call.error
        if call.stop is None:
            assert error is not None
            return error
        if isinstance(error, Halted | CancelledError) and error.stop is call.stop:
            return self._as_stopped(error)
        failure = stopped(call.context, call.stop)  # under the sub-budget of the node, if it has one
        failure.__cause__ = error
        return failure

    def log(self, call: Call) -> None:
        """Add the record of a node's call to the call log."""
        self.log_record(call.record)

    def log_record(self, record: CallRecord) -> None:
        """Add a record to the call log."""
        if self._call_log is not None:
            self._call_log.append(record)

    def _as_stopped(self, error: BaseException) -> BaseException:
        """Return the error to raise for `error`: for our own cancel, the limit that caused it."""
        if isinstance(error, CancelledError) and error.stop.reason is not StopReason.ABORTED:
            return stopped(self.place, error.stop)
        return error

    def _fail(self, node: int, error: BaseException, *, notifies: bool = True) -> None:
        """Record that the node failed for good; a stop or the frontier decides whether the graph fails with it."""
        stops = isinstance(error, CancelledError | Halted) or not isinstance(error, Exception)
        if self._notify is not None and notifies:
            self._notify("cancelled" if stops and not isinstance(error, Halted) else "error", node, error)
        if not stops and not isinstance(error, StepTimeout):
            self._streams.pop(node, None)  # a stream that failed was not stopped
        if self._decided:
            return
        self.errors[node] = error
        self._failed_at = node
        if stops and self._reaches_the_graph(error):
            # A graph that collects all results lets running nodes finish, as they are paid for, and starts no more.
            lets_finish = isinstance(error, Halted) and self._collects and not self._token.is_cancelled
            self._decide(error, cancels=not lets_finish)
            return
        ready = self.frontier.fail(node)
        if self.frontier.decided:
            self._decide(self._lost(error))
        elif ready:
            self._queue.extend(ready)

    def _reaches_the_graph(self, error: BaseException) -> bool:
        """Whether the node's stop stops the graph too: a cancel, or a budget of the whole graph."""
        if self._token.is_cancelled or not isinstance(error, Halted | CancelledError):
            return True
        return isinstance(error, Halted) and self.place._is_under(error.stop)

    def _lost(self, last: BaseException) -> BaseException:
        """Return the error of a graph with too few successful nodes."""
        errors = list(self.errors.values())
        if len(errors) == 1 or not isinstance(self.frontier, Race):
            return last
        exceptions = [error for error in errors if isinstance(error, Exception)]
        return ExceptionGroup(f"too few steps of graph {self.name!r} succeeded", exceptions)

    @property
    def _collects(self) -> bool:
        return type(self.frontier) is Frontier

    def _decide(self, error: BaseException | None, *, cancels: bool = True) -> None:
        """Set the outcome of the graph: start no more nodes, and stop running ones if they are no longer needed."""
        self._decided = True
        self._error = error
        self._queue.clear()
        if isinstance(error, GeneratorExit):
            # The code that closed the first driver's coroutine continues in its task: it must not be interrupted.
            self._token.unwatch(self._task)
        if cancels and self._drivers > 1:
            why = "has what it needs" if error is None else f"is stopped by {self.names[self._failed_at or 0]!r}"
            self._token.cancel(cause="limit", stop=Stop(StopReason.ABORTED, f"graph {self.name!r} {why}"))

    def _with_partial_results(self, error: BaseException) -> BaseException:
        """Return the error with the partial results, and a note that names the failed node."""
        failed_at = self._failed_at
        name = None if failed_at is None else self.names[failed_at]
        partial = self._partial()
        if name is not None and id(error) in (self._inner_failures or ()):
            inner = _attached(error)
            if inner:
                partial[name] = inner
        if isinstance(error, Halted | CancelledError):
            error.partial = partial
        elif isinstance(error, Exception):
            _attach(error, partial)
        if failed_at is not None and error is self.errors.get(failed_at):
            note = f"in step {name!r} of graph {self.name!r}"
            if note not in getattr(error, "__notes__", ()):  # one exception object may be raised repeatedly
                with suppress(Exception):  # a frozen exception accepts no notes
                    error.add_note(note)
        if self._outer is not None:
            if self._outer._inner_failures is None:
                self._outer._inner_failures = set()
            self._outer._inner_failures.add(id(error))
        return error

    def _partial(self) -> dict[str, Any]:
        """Return the results so far, and the output of nodes stopped while they streamed."""
        partial, names = dict(self.results), self.names
        for node, stream in list(self._streams.items()):  # an abandoned thread may add to them
            if names[node] not in partial and (output := stream()) is not None:
                partial[names[node]] = output
        return partial

    # Drivers.

    def _share(self) -> None:
        """Have other drivers take the remaining ready nodes if the one about to run has to wait."""
        if self._wakeup is not None:
            self._recall()
        elif not self._unstarted and self._drivers < self._limit:
            self._spawn()

    def _recall(self) -> None:
        """Wake the waiting first driver, once it has a slot again."""
        if self._released and not self._slots.free:
            self._enqueue()
            return
        if self._released:
            self._released = False
            self._slots.free -= 1
        self._wake()

    def _enqueue(self) -> None:
        if not self._is_queued:
            self._context_vars()
            self._is_queued = True
            self._slots.enqueue(self)

    def _spawn(self) -> None:
        slots = self._slots
        count = min(len(self._queue), self._batch, self._limit - self._drivers, slots.free)
        if count < 1:
            self._enqueue()
            return
        slots.free -= count
        self._drivers += count
        self._unstarted += count
        if self._tasks is None:
            self._tasks = set()
        for _ in range(count):
            self._tasks.add(self._loop.create_task(self._help(), context=self._context_vars().copy()))

    def _context_vars(self) -> Context:
        # Copied by the first driver between two nodes: a later call may come from a node of another graph.
        if self._vars is None:
            self._vars = copy_context()
        return self._vars

    def slot_released(self) -> None:
        """Use the slot that this graph was queued for."""
        self._is_queued = False
        if self._queue and not self._decided:
            self._share()

    async def _help(self) -> None:
        """Run a spawned driver."""
        task = current_task()
        assert task is not None
        self._unstarted -= 1
        self._batch = self._batch * 2 if self._queue else 1
        if not self._queue:
            self._exit(task)
            return
        requested = task.cancelling()
        watching = self._token.watch(task)
        try:
            await self._drive(task, requested)
        except BaseException as error:
            if not self._decided:
                self._decide(error)
        finally:
            pending = self._token.unwatch(task) if watching else None
            self._exit(task)
            if pending is not None:
                task.uncancel()

    def _exit(self, task: asyncio.Task[None]) -> None:
        assert self._tasks is not None
        self._tasks.discard(task)
        self._drivers -= 1
        needed = self._drivers == 1 or self._queue
        if needed and self._released:
            # The slot goes to the first driver, past the queue: the graph could not end without it.
            self._released = False
        else:
            self._slots.release()
        if needed:
            self._wake()

    def _wake(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None and not wakeup.done():
            wakeup.set_result(None)

    async def _wait_for_others(self, task: asyncio.Task[Any], requested: int) -> None:
        """Wait, as the first driver with nothing to do, until nodes are ready or all other drivers are done."""
        while self._drivers > 1 and not self._queue:
            if not self._released:
                self._released = True
                self._slots.release()
            self._wakeup = self._loop.create_future()
            try:
                await self._wakeup
            except asyncio.CancelledError as error:
                self._wakeup = None
                ours = translate_cancel(self._token, task, error, requested)
                if not self._decided:
                    self._decide(self._as_stopped(ours))
                elif ours is error:
                    self._error = error  # the task itself was cancelled, which takes precedence over the outcome

    async def _give_a_turn(self, node: int, record: CallRecord, kind: type) -> None:
        """Yield to the event loop, and warn if this node alone has blocked it for long."""
        if record.ended_ns - record.started_ns > BLOCKED_NS and kind is not CoroutineType:
            _warn_of_blocking(self.names[node], self.name, record.ended_ns - record.started_ns)
        await pause(self._token, 0)
        self._turn_due_ns = self.place._run.now() + TURN_NS


class _PartialResults(dict[str, Any]):
    """Marks results that a graph attached, as opposed to an attribute of the exception's own."""


def _attach(error: Exception, partial: dict[str, Any]) -> None:
    """Set `partial_results` on the error, unless it has one of its own or refuses attributes."""
    with suppress(Exception):
        if isinstance(getattr(error, "partial_results", None), _PartialResults | None):
            error.partial_results = _PartialResults(partial)  # type: ignore[attr-defined]


def _attached(error: BaseException) -> Mapping[str, Any] | None:
    """Return the partial results that a graph has attached to the error."""
    if isinstance(error, Halted | CancelledError):
        return error.partial
    found = vars(error).get("partial_results")
    return found if isinstance(found, _PartialResults) else None


def _reset(previous: Token[Call | None]) -> None:
    try:  # noqa: SIM105  in every step
        running_call.reset(previous)
    except ValueError:
        pass  # closed from another context, where there is nothing to reset


def _warn_of_blocking(step: str, graph: str, for_ns: int) -> None:
    warnings.warn(
        f"step {step!r} of graph {graph!r} kept the event loop from turning for {for_ns / 1e9:.2f} s; "
        "make it async, or let it run on a thread (blocking=True)",
        RuntimeWarning,
        stacklevel=2,
    )


class StepContext(ExecutionContext):
    """The context of a graph's run, with the input and the upstream results of one step.

    Every step gets its own, so creating one has to be cheap: the attributes that calls need are copied, the step's
    input and the source of its upstream results are set, and every other attribute is that of the graph's context.
    """

    __slots__ = ("_of",)

    _of: ExecutionContext

    @property
    def _origin(self) -> ExecutionContext:
        return self._of._origin


COPIED = ("_account", "_base", "_run", "_source", "_token", "_upstream", "_upstream_source", "input")
"""Attributes that `step_context` sets."""


class _GraphAttribute:
    """An attribute of a step's context: its own if it was set, else that of the graph's context.

    A `__getattr__` would do the same, and make every attribute of the class slow to read.
    """

    __slots__ = ("_name", "_own")

    def __init__(self, name: str) -> None:
        self._name = name
        self._own = getattr(ExecutionContext, name)

    def __get__(self, context: StepContext | None, owner: object = None) -> Any:
        if context is None:
            return self
        try:
            return self._own.__get__(context)
        except AttributeError:
            return getattr(context._of, self._name)

    def __set__(self, context: StepContext, value: object) -> None:
        self._own.__set__(context, value)


for _name in {*Handle.__slots__, *ExecutionContext.__slots__} - {"__weakref__", *COPIED}:
    setattr(StepContext, _name, _GraphAttribute(_name))


def step_context(place: ExecutionContext, input: Any, upstream: Mapping[str, Any]) -> StepContext:
    """Return a context at `place` for one step."""
    context = blank(StepContext)
    context._of = place
    context._run = place._run
    context._account = place._account
    context._token = place._token
    context._base = place._base
    context._source = place._source
    context.input = input
    context._upstream = None
    context._upstream_source = upstream
    return context
