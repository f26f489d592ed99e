"""Runs the nodes of a plan: each as soon as what it waits for is there, as many at once as allowed.

Which node may run is the frontier's to say (`kernel.frontier`, pure); this is what drives it on an event loop.

**Drivers.** The task that executes a graph drives it: it takes the oldest ready node, runs it through the door, tells
the frontier, and goes on, in place. A chain needs no task. Only when other nodes are ready does it hire: a task that
gets to run when the driver's own node has to wait for something, and takes the next node then. If nothing ever waits,
the hired one finds nothing left to do; if everything waits, each batch of hired ones is twice as large as the one
before. So there are about as many tasks as there are nodes that wait, and never one for a node that does not.

**One cap over the nest.** A driver has a slot of its `Nest`, which a graph shares with every graph inside it. The first
driver of an inner graph is the driver that runs the node the inner graph stands in, slot and all: an inner graph can
always go on, so no cap is too small and nothing waits for a slot that only it could free. A first driver that only
waits for the others of its graph has given its slot back; the last of them hands it theirs.

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
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal

from penstock.containment.limits import NO_LIMITS
from penstock.errors import CancelledError, Halted, PenstockError
from penstock.kernel.frontier import Frontier
from penstock.kernel.settle import Race
from penstock.runtime.admission import enter
from penstock.runtime.billing.usage import WITHOUT_USAGE, Reported
from penstock.runtime.call import Call, running_call, stop_of, stopped
from penstock.runtime.cancellation import absorb, taken_back
from penstock.runtime.context import ExecutionContext
from penstock.runtime.door import pause
from penstock.runtime.durable.keys import here
from penstock.runtime.scheduling.step import step_context
from penstock.runtime.settlement import fail, succeed
from penstock.stops import Stop, StopReason
from penstock.tracing.record import CallRecord

if TYPE_CHECKING:
    from penstock.runtime.durable.ports import JournalEntry
    from penstock.runtime.durable.recording import RecordedNodes
    from penstock.runtime.scheduling.recovery import Care

MAX_NESTING = 64
"""So deep may graphs stand inside graphs; each level is a stretch of Python's own stack."""
SMALL = 64
"""Nodes of a graph whose queue is a list."""
TURN_NS = 10_000_000
"""So long may nodes run without a wait before the loop gets a turn."""
BLOCKED_NS = 100_000_000
"""A sync node that keeps the loop from turning for so long is named in a warning."""

Work = Callable[[int, ExecutionContext], Any]
"""Runs a node at a place: its value, or an awaitable of it."""
Keep = Callable[[int, Any], Collection[str] | None]
"""Keeps a node's value; the handles it gave values on, None for all."""
Told = Literal["started", "completed", "error", "cancelled", "skipped"]
Tell = Callable[[Told, int, Any], None]
"""Told of what becomes of a node; with its value, its error, or why it did not run."""


class NestedTooDeep(PenstockError):
    """Graphs stand inside graphs beyond what can be run."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        super().__init__(
            f"{len(self.path)} graphs stand inside each other, at most {MAX_NESTING} can: "
            f"{' → '.join(self.path[:3])} → … → {self.path[-1]}; does one contain itself?"
        )


class Nest:
    """One cap on how many nodes run at once, over a graph and every graph inside it."""

    __slots__ = ("_waiting", "free")

    def __init__(self, slots: int) -> None:
        self.free = slots - 1
        """Slots nobody has; the first driver of the outermost graph has one from the start."""
        self._waiting: deque[Scheduler] | None = None

    def stand_in_line(self, graph: Scheduler) -> None:
        """Call `graph` when a slot is free."""
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(graph)

    def give_back(self) -> None:
        """A driver is done: its slot goes to the graph that has waited longest and still has use for it."""
        self.free += 1
        while self._waiting and self.free:
            self._waiting.popleft().come_forward()


@dataclass(slots=True)
class Behaviour:
    """What stands behind the nodes of a plan, by number."""

    work: Work
    about: Sequence[Mapping[str, Any] | None]
    """What the record of each node's calls says of it."""
    care: Sequence[Care | None] | None = None
    """What each node asks for beyond being run: a policy, a budget, a thread, a turn. None is nothing."""
    fallback: Work | None = None
    """Runs the node that stands in for another."""
    keep: Keep | None = None
    tell: Tell | None = None
    journal: list[CallRecord] | None = None
    """Gets the record of every call of a node, in the order they ended."""
    durable: RecordedNodes | None = None
    """Where nodes are recorded when they complete, and found instead of run; None records nothing."""


_steps_begun = 0
"""By all graphs: if one more has begun since, the loop has had a turn."""

_scheduler: ContextVar[Scheduler | None] = ContextVar("penstock_graph", default=None)
"""The graph whose node is being executed here."""


class Scheduler:
    """One run of one graph."""

    __slots__ = (
        "_batch",
        "_bell",
        "_care",
        "_decided",
        "_drivers",
        "_error",
        "_failed_at",
        "_in_line",
        "_journal",
        "_keep",
        "_limit",
        "_loop",
        "_nest",
        "_outer",
        "_parted",
        "_queue",
        "_started",
        "_task",
        "_tasks",
        "_tell",
        "_token",
        "_turn_due_ns",
        "_unstarted",
        "_vars",
        "about",
        "durable",
        "errors",
        "fallback",
        "frontier",
        "hint",
        "name",
        "names",
        "place",
        "results",
        "work",
    )

    place: ExecutionContext
    """Where the nodes run: the context of the graph, under the graph's own token."""
    _nest: Nest
    _loop: asyncio.AbstractEventLoop
    _task: asyncio.Task[Any]

    def __init__(
        self,
        context: ExecutionContext,
        name: str,
        frontier: Frontier,
        behaviour: Behaviour,
        max_parallel: int = 1,
        results: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.frontier = frontier
        self.results: dict[str, Any] = {} if results is None else results
        """The values of the nodes that have succeeded, in the order they did."""
        self.errors: dict[int, BaseException] = {}
        """What the nodes that failed ended with."""
        self.work = behaviour.work
        self.about = behaviour.about
        self.fallback = behaviour.fallback
        self._care = behaviour.care
        self._keep = behaviour.keep
        self._tell = behaviour.tell
        self._journal = behaviour.journal
        self.durable = behaviour.durable
        self.names = frontier.plan.ids
        self.hint = 0 if context._run.settings.strict else None
        """What a node is held to cost: nothing, where every call has to say; what it calls says it for itself."""
        outer = _scheduler.get()
        self._outer = outer if outer is not None and outer.place._run is context._run else None
        self._refuse_depth()
        self._nest = self._outer._nest if self._outer is not None else Nest(max_parallel)
        self._limit = max_parallel
        self._token = context._token.child(name)
        self.place = place = step_context(context, context.input, context.upstream)
        place._token = self._token
        # A short list is as quick as a deque, and a tenth of its size: many small graphs may wait at the same time.
        self._queue: deque[int] | list[int] = deque() if frontier.plan.size > SMALL else []
        self._drivers = 1
        self._unstarted = 0
        self._batch = 1
        self._in_line = False
        self._tasks: set[asyncio.Task[None]] | None = None
        self._vars: Context | None = None
        """The context variables of the graph, for the tasks it hires."""
        self._bell: asyncio.Future[None] | None = None
        """Rung when the first driver, which has nothing to do, is needed again."""
        self._parted = False
        """Whether the first driver has given its slot back, because it only waits."""
        self._started: set[int] | None = None
        """Nodes with care that have been told to have started."""
        self._decided = False
        self._error: BaseException | None = None
        self._failed_at: int | None = None
        self._turn_due_ns = context._run.now() + TURN_NS

    def _refuse_depth(self) -> None:
        path, outer = [self.name], self._outer
        while outer is not None:
            path.append(outer.name)
            outer = outer._outer
        if len(path) > MAX_NESTING:
            raise NestedTooDeep(path[::-1])

    async def execute(self) -> None:
        """Run what can be run; then `results` and `errors` are complete, or what stopped the graph is raised."""
        task = current_task()
        assert task is not None
        self._task = task
        entered = _scheduler.set(self)
        self._loop = task.get_loop()
        requested = task.cancelling()
        watching = self._token.watch(task)
        outside = None if self.durable is None else here.set(here.get())
        try:
            self._queue.extend(self.frontier.start())
            while True:
                try:
                    await self._drive(task, requested)
                except BaseException as error:
                    # Not a node's fault: a warning that is an error here, a fault of ours.
                    if not self._decided:
                        self._decide(error)
                if self._drivers == 1 and not self._queue:
                    break
                if isinstance(self._error, GeneratorExit):
                    raise self._error  # closed from outside, and then nothing can be awaited any more
                await self._wait_for_others(task, requested)
        finally:
            self._token.close()
            pending = self._token.unwatch(task) if watching else None
            with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
                _scheduler.reset(entered)
                if outside is not None:
                    here.reset(outside)
            if pending is not None:
                await absorb(task, requested)
        if self._tell is not None:
            for node in self.frontier.skipped:
                self._tell("skipped", node, "nothing came to it")
        if self._error is not None:
            raise self._told_partially(self._error)

    # Driving.

    async def _drive(self, task: asyncio.Task[Any], requested: int) -> None:
        """Run ready nodes, oldest first, until none is left."""
        if self._needs_no_door():
            await self._drive_bare(task, requested)
            return
        global _steps_begun
        queue, names, about, care = self._queue, self.names, self.about, self._care
        place, token, work, tell, durable = self.place, self._token, self.work, self._tell, self.durable
        note = None if self._journal is None else self._journal.append
        results, finish = self.results, self.frontier.finish
        is_plain = self._keep is None and tell is None and not isinstance(self.frontier, Race)
        while queue:
            node = queue.pop(0) if type(queue) is list else queue.popleft()  # type: ignore[union-attr]
            if queue:
                self._share()
            if durable is not None and token.cancellation is None and (entry := durable.find(node)) is not None:
                await self._replay(node, entry)
                continue
            if care is not None and (asked := care[node]) is not None:
                await self._take_care(node, asked, task, requested)
                continue
            made = enter(place, "system", names[node], self.hint, None, token, (), 1, about[node])
            if made.stop is not None:
                self._refused(node, made)
                continue
            if tell is not None:
                tell("started", node, None)
            outside = running_call.set(made)
            kind: type = type(None)
            _steps_begun = begun = _steps_begun + 1
            try:
                if durable is not None:
                    durable.begin(node, 1)
                value = work(node, place)
                kind = type(value)
                if kind is CoroutineType or (kind not in WITHOUT_USAGE and hasattr(kind, "__await__")):
                    value = await value
                if durable is not None:
                    kind = CoroutineType  # the loop may turn while the store writes
                    await durable.record(node, value)
            except BaseException as error:
                _leave(outside)
                self._broke(node, made, taken_back(token, task, error, requested))
                continue
            running_call.reset(outside)
            succeed(made, value)
            if note is not None:
                note(made.record)
            if made.stop is not None:  # it gave its value after it had been stopped
                self._fail(node, self.failure_of(made))  # type: ignore[unreachable]  # `succeed` may set it
                continue
            results[names[node]] = value = made.value
            if is_plain and not self._decided:
                queue.extend(finish(node))
            else:
                self._finished(node, value)
            ended_ns = made.record.ended_ns
            if ended_ns > self._turn_due_ns:
                if _steps_begun == begun:
                    await self._give_a_turn(node, made.record, kind)
                else:  # another graph had a turn meanwhile
                    self._turn_due_ns = ended_ns + TURN_NS

    async def _drive_bare(self, task: asyncio.Task[Any], requested: int) -> None:
        """The same where nobody asked for anything to be recorded or held."""
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
                self._fail(node, self._as_stopped(taken_back(token, task, error, requested)))
                continue
            if type(value) is Reported:
                value = self._counted(node, value)
            self._finished(node, value)
            turns += 1
            if turns & 1023 == 0:
                await pause(token, 0)

    async def _replay(self, node: int, found: JournalEntry) -> None:
        """The node has run before: it completes at once, with what it gave then."""
        assert self.durable is not None
        try:
            value, record = self.durable.replay(node, found, self.place)
        except Exception as error:  # what was written cannot be read
            if self._tell is not None:
                self._tell("skipped", node, error)
            self._fail(node, error, told=False)
            return
        if self._tell is not None:
            self._tell("started", node, None)
        self.log_record(record)
        self._finished(node, value)
        if record.ended_ns > self._turn_due_ns:
            await pause(self._token, 0)
            self._turn_due_ns = self.place._run.now() + TURN_NS

    def _counted(self, node: int, value: Reported[Any]) -> Any:
        """A value that says what it cost is written down all the same: no cost is silently zero."""
        made = enter(self.place, "system", self.names[node], self.hint, None, self._token, (), 1, self.about[node])
        if made.stop is None:
            succeed(made, value)
        return value.value

    def _needs_no_door(self) -> bool:
        run, account = self.place._run, self.place._account
        return (
            not run.settings.record_steps
            and not run.guarded
            and run.divergence is None
            and self._care is None
            and self._tell is None
            and self._journal is None
            and self.durable is None
            and account.limits == NO_LIMITS
            and account.parent is None
        )

    async def _take_care(self, node: int, care: Care, task: asyncio.Task[Any], requested: int) -> None:
        from penstock.runtime.scheduling.recovery import run_with_care

        try:
            value = await run_with_care(self, node, care)
            if self.durable is not None:
                await self.durable.record(node, value)
        except BaseException as error:
            told = self._as_stopped(taken_back(self._token, task, error, requested))
            started = self._started is not None and node in self._started
            if self._tell is not None and not started:
                self._tell("skipped", node, told)
            self._fail(node, told, told=started)
        else:
            self._finished(node, value)

    def _finished(self, node: int, value: Any) -> None:
        self.results[self.names[node]] = value
        used = None if self._keep is None else self._keep(node, value)
        if self._tell is not None:
            self._tell("completed", node, value)
        if self._decided:
            return
        ready = self.frontier.finish(node, used)
        if self.frontier.decided:
            self._decide(None)
        elif ready:
            self._queue.extend(ready)

    # What went wrong.

    def _refused(self, node: int, made: Call) -> None:
        """The node was not let in."""
        if self._tell is not None:
            self._tell("skipped", node, made.stop)
        if self._journal is not None:
            self._journal.append(made.record)
        assert made.stop is not None
        self._stop_for(made.stop, node)

    def _stop_for(self, stop: Stop, node: int) -> None:
        self._fail(node, stopped(self.place, stop), told=False)

    def _broke(self, node: int, made: Call, error: BaseException) -> None:
        """The node raised."""
        try:
            fail(made, error)
        except BaseException as raised:
            self.log(made)
            self._fail(node, raised)
            return
        self.log(made)
        if not self._decided or self._tell is not None:
            self._fail(node, self.failure_of(made))

    def tell_started(self, node: int) -> None:
        """The node was let in, perhaps not for the first time."""
        if self._started is None:
            self._started = set()
        if self._tell is not None and node not in self._started:
            self._started.add(node)
            self._tell("started", node, None)

    def failure_of(self, made: Call) -> BaseException:
        """What a call that gave no value is to be told with."""
        error = made.error
        if made.stop is None:
            assert error is not None
            return error
        if isinstance(error, Halted | CancelledError) and error.stop is made.stop:
            return self._as_stopped(error)
        told = stopped(self.place, made.stop)
        told.__cause__ = error
        return told

    def log(self, made: Call) -> None:
        """The call of a node has ended."""
        self.log_record(made.record)

    def log_record(self, record: CallRecord) -> None:
        """What was written down of a node is complete."""
        if self._journal is not None:
            self._journal.append(record)

    def _as_stopped(self, error: BaseException) -> BaseException:
        """What to raise for `error`: a cancel of ours tells of the limit behind it."""
        if isinstance(error, CancelledError) and error.stop.reason is not StopReason.ABORTED:
            return stopped(self.place, error.stop)
        return error

    def _fail(self, node: int, error: BaseException, *, told: bool = True) -> None:
        """The node is lost for good; whether the graph is lost with it is the frontier's to say, or is plain."""
        stops = isinstance(error, CancelledError | Halted) or not isinstance(error, Exception)
        if self._tell is not None and told:
            self._tell("cancelled" if stops and not isinstance(error, Halted) else "error", node, error)
        if self._decided:
            return
        self.errors[node] = error
        self._failed_at = node
        if stops and self._reaches_the_graph(error):
            # Where everything is to be collected, what runs has paid for itself: only nothing more is started.
            goes_on = isinstance(error, Halted) and self._collects and not self._token.is_cancelled
            self._decide(error, cancels=not goes_on)
            return
        ready = self.frontier.fail(node)
        if self.frontier.decided:
            self._decide(self._lost(error))
        elif ready:
            self._queue.extend(ready)

    def _reaches_the_graph(self, error: BaseException) -> bool:
        """Whether what stopped the node stops the graph too: a cancel, or a budget that the whole graph is under."""
        if self._token.is_cancelled or not isinstance(error, Halted | CancelledError):
            return True
        return isinstance(error, Halted) and self.place._is_under(error.stop)

    def _lost(self, last: BaseException) -> BaseException:
        """What a graph raises that did not get what it needs."""
        errors = list(self.errors.values())
        if len(errors) == 1 or not isinstance(self.frontier, Race):
            return last
        exceptions = [error for error in errors if isinstance(error, Exception)]
        return ExceptionGroup(f"too few steps of graph {self.name!r} succeeded", exceptions)

    @property
    def _collects(self) -> bool:
        return type(self.frontier) is Frontier

    def _decide(self, error: BaseException | None, *, cancels: bool = True) -> None:
        """What the graph comes to is known: start nothing more, and stop what runs if it is of no use any more."""
        self._decided = True
        self._error = error
        self._queue.clear()
        if isinstance(error, GeneratorExit):
            # Whoever closed the first driver's coroutine goes on with its task, and is not to be interrupted.
            self._token.unwatch(self._task)
        if cancels and self._drivers > 1:
            why = "has what it needs" if error is None else f"is stopped by {self.names[self._failed_at or 0]!r}"
            self._token.cancel(cause="limit", stop=Stop(StopReason.ABORTED, f"graph {self.name!r} {why}"))

    def _told_partially(self, error: BaseException) -> BaseException:
        """The error with what was there when it came: the results so far, and which node it came from."""
        at = None if self._failed_at is None else self.names[self._failed_at]
        if isinstance(error, Halted | CancelledError):
            inner = error.partial if getattr(error, "_of_graph", False) and at is not None else None
            error.partial = {**self.results, at: inner} if at is not None and inner else dict(self.results)
            error._of_graph = True  # type: ignore[union-attr]
        if at is not None and error is self.errors.get(self._failed_at or 0):
            note = f"in step {at!r} of graph {self.name!r}"
            if note not in getattr(error, "__notes__", ()):  # one object may be raised again and again
                error.add_note(note)
        return error

    # Hiring.

    def _share(self) -> None:
        """More nodes are ready than the one that is about to run: see that somebody takes them if it has to wait."""
        if self._bell is not None:
            self._call_back()
        elif not self._unstarted and self._drivers < self._limit:
            self._hire()

    def _call_back(self) -> None:
        """The first driver, which waits, is needed again; it needs a slot again, too."""
        if self._parted and not self._nest.free:
            self._stand_in_line()
            return
        if self._parted:
            self._parted = False
            self._nest.free -= 1
        self._ring()

    def _stand_in_line(self) -> None:
        if not self._in_line:
            self._context_vars()
            self._in_line = True
            self._nest.stand_in_line(self)

    def _hire(self) -> None:
        nest = self._nest
        count = min(len(self._queue), self._batch, self._limit - self._drivers, nest.free)
        if count < 1:
            self._stand_in_line()
            return
        nest.free -= count
        self._drivers += count
        self._unstarted += count
        if self._tasks is None:
            self._tasks = set()
        for _ in range(count):
            self._tasks.add(self._loop.create_task(self._help(), context=self._context_vars().copy()))

    def _context_vars(self) -> Context:
        # First asked for by the first driver, between two nodes; later perhaps in the middle of another graph's.
        if self._vars is None:
            self._vars = copy_context()
        return self._vars

    def come_forward(self) -> None:
        """A slot has become free for which this graph stood in line."""
        self._in_line = False
        if self._queue and not self._decided:
            self._share()

    async def _help(self) -> None:
        """What a hired task does."""
        task = current_task()
        assert task is not None
        self._unstarted -= 1
        self._batch = self._batch * 2 if self._queue else 1
        if not self._queue:
            self._go(task)
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
            self._go(task)
            if pending is not None:
                task.uncancel()

    def _go(self, task: asyncio.Task[None]) -> None:
        assert self._tasks is not None
        self._tasks.discard(task)
        self._drivers -= 1
        needed = self._drivers == 1 or self._queue
        if needed and self._parted:
            self._parted = False  # the slot goes to the first driver, past the line: the graph could not end without it
        else:
            self._nest.give_back()
        if needed:
            self._ring()

    def _ring(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None and not bell.done():
            bell.set_result(None)

    async def _wait_for_others(self, task: asyncio.Task[Any], requested: int) -> None:
        """The first driver has nothing to do: wait until there is something, or all others are done."""
        while self._drivers > 1 and not self._queue:
            if not self._parted:
                self._parted = True
                self._nest.give_back()
            self._bell = self._loop.create_future()
            try:
                await self._bell
            except asyncio.CancelledError as error:
                self._bell = None
                ours = taken_back(self._token, task, error, requested)
                if not self._decided:
                    self._decide(self._as_stopped(ours))
                elif ours is error:
                    self._error = error  # somebody wants this task to end, whatever the graph came to

    async def _give_a_turn(self, node: int, record: CallRecord, kind: type) -> None:
        """Let the loop have a turn, and say so if one node alone has kept it from turning for long."""
        if record.ended_ns - record.started_ns > BLOCKED_NS and kind is not CoroutineType:
            _warn_of_blocking(self.names[node], self.name, record.ended_ns - record.started_ns)
        await pause(self._token, 0)
        self._turn_due_ns = self.place._run.now() + TURN_NS


def _leave(outside: Any) -> None:
    try:  # noqa: SIM105  in every step
        running_call.reset(outside)
    except ValueError:
        pass  # closed from elsewhere, where there is nothing to reset


def _warn_of_blocking(step: str, graph: str, for_ns: int) -> None:
    warnings.warn(
        f"step {step!r} of graph {graph!r} kept the event loop from turning for {for_ns / 1e9:.2f} s; "
        "make it async, or let it run on a thread (blocking=True)",
        RuntimeWarning,
        stacklevel=2,
    )
