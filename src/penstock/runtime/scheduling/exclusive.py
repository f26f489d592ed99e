"""Exclusive use of a node: one step at a time.

A terminal, a browser, a stateful worker: each has one `Turn`, shared by all graphs, tasks, event loops and threads. A
step that finds it taken waits in a first-in, first-out queue. A turn that is given back while others wait is handed
over directly and is never free in between.

A turn is handed over in one thread and received in another, a moment later. In that moment it belongs to a wait that
has not noticed yet (`Turn._handed`). If that wait is cancelled just then, or its event loop is gone, the turn is passed
on. The lock decides between a hand-over, a timeout and a cancel at the same time: the first to acquire it wins.

A wait that can never end is refused instead. A step ends after everything inside it, so a holder gives its turn back
only after all waits of its own and of the steps under it:

    wait → the turn it waits for → the holder of that turn → each wait of that holder or of something under it → …

A path along these arrows back to its start is a cycle, and so a deadlock. Arrows appear in two places only, and there
the search for cycles runs: when a wait begins, and when a turn is handed over to a holder with waits under it. A wait
that is about to end (cancelled, timed out, its loop closed) does not count, even if it is still queued.

Knows only holders, and which one is inside which; nothing of graphs, steps or nodes.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import DeadlockError, InvalidValue
from penstock.runtime.cancellation import CancellationToken, drain_cancel, translate_cancel


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """One use of a persistent node, such as a step; `parent` is the one it happens inside of."""

    name: str
    parent: Holder | None = None


class Turn:
    """The exclusive use of one persistent node, with its queue; safe to use from any thread and any event loop."""

    __slots__ = ("__weakref__", "_handed", "_holder", "_queue", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._holder: Holder | None = None
        """None only while the queue is empty."""
        self._handed: _Wait | None = None
        """The wait of the holder, until it has noticed that it is over."""
        self._queue: deque[_Wait] = deque()

    @property
    def waiting(self) -> int:
        """Number of queued waits."""
        return len(self._queue)

    async def take(self, holder: Holder, token: CancellationToken, timeout_s: float) -> None:
        """Give `holder` the turn; wait for it if it is taken.

        Raises CancelledError as soon as `token` is cancelled, and DeadlockError when `timeout_s` is over or when the
        wait could never end. Whenever it raises, `holder` does not have the turn.
        """
        if not timeout_s >= 0:
            raise InvalidValue("timeout_s", timeout_s, "zero or more seconds")
        token.check()
        if self._taken_if_free(holder):
            return
        wait = _Wait(self, holder, token, timeout_s)
        _books.write(wait.begin)
        if wait.began:  # not `queued`: another thread may have ended it meanwhile
            await wait.over()
        if wait.refusal is not None:
            raise wait.refusal

    def give_back(self, holder: Holder) -> None:
        """End the turn of `holder`; the first in the queue gets it next."""
        misuse: list[InvalidValue] = []

        def end_turn() -> None:
            if self._holder is holder and self._handed is None:
                self._pass_on()
            else:
                has = "it is free" if self._holder is None else f"{self._holder.name!r} has it"
                misuse.append(InvalidValue("holder", holder.name, f"the one whose turn it is at {self.name!r} ({has})"))

        _books.write(end_turn)
        if misuse:
            raise misuse[0]

    def _taken_if_free(self, holder: Holder) -> bool:
        """Take the turn if it is free, the common case, without a wait and without an entry in `_Books`."""
        with _books.lock:
            free = self._holder is None
            if free:
                self._holder = holder
        return free

    # Under the lock.

    def _pass_on(self) -> None:
        self._holder = self._handed = None
        while self._queue:
            wait = self._queue[0]
            wait.leave()
            if wait.wake():
                self._holder, self._handed = wait.holder, wait
                _refuse_deadlocks_under(wait.holder)
                return

    def _pass_on_if_lost(self) -> None:
        """Pass the turn on if the loop of the new holder was closed before it noticed the hand-over."""
        if self._handed is not None and self._handed.loop.is_closed():
            self._pass_on()


class _Wait:
    """One task's request for a turn: it `began` to wait, or never had to; it is over when it is no longer `queued`."""

    __slots__ = (
        "_woken",
        "began",
        "ends_at",
        "holder",
        "loop",
        "queued",
        "refusal",
        "requested",
        "task",
        "timeout_s",
        "token",
        "turn",
    )

    def __init__(self, turn: Turn, holder: Holder, token: CancellationToken, timeout_s: float) -> None:
        task = current_task()
        assert task is not None
        self.turn = turn
        self.holder = holder
        self.token = token
        self.timeout_s = timeout_s
        self.task = task
        self.requested = task.cancelling()
        self.loop = asyncio.get_running_loop()
        self.ends_at = self.loop.time() + timeout_s
        self.began = False
        self.queued = False
        self.refusal: DeadlockError | None = None
        self._woken: asyncio.Future[None] = self.loop.create_future()

    async def over(self) -> None:
        """Wait for the turn or a refusal; if it raises, the wait was withdrawn and has neither."""
        try:
            await self._until_woken()
            self.token.check()
        except BaseException:
            _books.write(self._withdraw)
            raise
        _books.write(self._notice)

    async def _until_woken(self) -> None:
        token, task = self.token, self.task
        watching = token.watch(task)
        timer = self.loop.call_later(self.timeout_s, self._expire) if math.isfinite(self.timeout_s) else None
        closed = False
        try:
            if token.cancellation is None:
                await self._woken
        except asyncio.CancelledError as error:
            if translate_cancel(token, task, error, self.requested) is error:
                raise
        except GeneratorExit:
            closed = True  # the task no longer runs, so nothing may be awaited
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if watching and token.unwatch(task) is not None and not closed:
                await drain_cancel(task, self.requested)

    def wake(self) -> bool:
        """Wake the task, as its wait is over; return False if its loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            return False
        return True

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _expire(self) -> None:
        """Handle the timeout, on the loop of the task."""
        _books.write(self._time_out)

    # Under the lock.

    def begin(self) -> None:
        turn = self.turn
        turn._pass_on_if_lost()
        if turn._holder is None:
            turn._holder = self.holder
            return
        self.queued = True
        turn._queue.append(self)
        _books.add(self)
        self.began = not self.refuse_if_endless()

    def leave(self) -> None:
        if self.queued:
            self.queued = False
            self.turn._queue.remove(self)
            _books.remove(self)

    def refuse_if_endless(self) -> bool:
        cycle = _cycle_through(self)
        if cycle:
            self.refusal = DeadlockError(self.turn.name, None, "; ".join(_describe(cycle)))
            self.leave()
        return bool(cycle)

    def will_stay(self) -> bool:
        """Whether nothing but the turn is known to end this wait."""
        left_s = self.token.seconds_left()
        return (
            self.token.cancellation is None
            and (left_s is None or left_s > 0)
            and self.task.cancelling() <= self.requested
            and (self.loop.time() < self.ends_at or not self.queued)
            and not self.loop.is_closed()
        )

    def _time_out(self) -> None:
        self.turn._pass_on_if_lost()
        if self.queued:
            assert self.turn._holder is not None
            self.refusal = DeadlockError(self.turn.name, self.timeout_s, f"{self.turn._holder.name!r} still has it")
            self.leave()
            self._wake()

    def _notice(self) -> None:
        if self.turn._handed is self:
            self.turn._handed = None

    def _withdraw(self) -> None:
        self.leave()
        if self.turn._handed is self:
            self.turn._pass_on()


class _Books:
    """All waits of all turns by holder, and the lock that guards every change of a turn.

    The same thread may request a change in the middle of another one: the garbage collector closes an abandoned
    coroutine at any line, and its `finally` gives a turn back. Such a change is applied right after the current one.
    """

    __slots__ = ("_busy", "_changes", "_under", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changes: deque[Callable[[], None]] = deque()
        self._busy = False
        self._under: dict[Holder, dict[_Wait, None]] = {}
        """The waits of each holder and of all under it, oldest first; no entry without a wait."""

    def write(self, change: Callable[[], None]) -> None:
        with self.lock:
            self._changes.append(change)
            while self._changes and not self._busy:
                self._busy = True
                try:
                    if self._changes:  # an interruption before the line above may have applied them all
                        self._changes.popleft()()
                finally:
                    self._busy = False

    def add(self, wait: _Wait) -> None:
        for holder in _chain(wait.holder):
            self._under.setdefault(holder, {})[wait] = None

    def remove(self, wait: _Wait) -> None:
        for holder in _chain(wait.holder):
            waits = self._under[holder]
            del waits[wait]
            if not waits:
                del self._under[holder]

    def under(self, holder: Holder) -> list[_Wait]:
        return list(self._under.get(holder, ()))


_books = _Books()


def _chain(holder: Holder | None) -> Iterator[Holder]:
    while holder is not None:
        yield holder
        holder = holder.parent


def _refuse_deadlocks_under(holder: Holder) -> None:
    for wait in _books.under(holder):
        if wait.will_stay() and wait.refuse_if_endless():
            wait.wake()


def _cycle_through(wait: _Wait) -> list[_Wait]:
    """Return the waits of a cycle, each blocked by the next and the last by `wait`; empty if there is none."""
    came_from: dict[_Wait, _Wait | None] = {wait: None}
    todo = [wait]
    while todo:
        blocked = todo.pop()
        for blocker in _blockers(blocked):
            if blocker is wait:
                return _path_to(blocked, came_from)
            if blocker not in came_from and blocker.will_stay():
                came_from[blocker] = blocked
                todo.append(blocker)
    return []


def _blockers(wait: _Wait) -> list[_Wait]:
    """Return the waits that have to end before the turn that `wait` waits for is given back."""
    turn = wait.turn
    if turn._holder is None or (turn._handed is not None and not turn._handed.will_stay()):
        return []
    return _books.under(turn._holder)


def _path_to(last: _Wait, came_from: dict[_Wait, _Wait | None]) -> list[_Wait]:
    path: list[_Wait] = []
    step: _Wait | None = last
    while step is not None:
        path.append(step)
        step = came_from[step]
    return path[::-1]


def _describe(cycle: list[_Wait]) -> Iterator[str]:
    for wait, blocker in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        holder = wait.turn._holder
        assert holder is not None
        has = f"{wait.holder.name!r} waits for {wait.turn.name!r}, which "
        if holder is wait.holder:
            yield f"{has}it has itself"
        elif holder is blocker.holder:
            yield f"{has}{holder.name!r} has"
        else:
            yield f"{has}{holder.name!r} has until {blocker.holder.name!r} inside it has ended"


# By identity: a node may have no hash, and equal nodes are different nodes. An entry is removed with its node; a node
# without weak references is kept alive, because its id could be reused.
_turns: dict[int, tuple[Callable[[], object], Turn]] = {}


def turn_of(node: object, name: str) -> Turn:
    """Return the turn of `node`, created with that name by the first call."""
    key = id(node)
    found = _turns.get(key)
    if found is None:
        found = _turns.setdefault(key, (_reference(node, key), Turn(name)))  # atomic: two threads get the same turn
    return found[1]


def _reference(node: object, key: int) -> Callable[[], object]:
    try:
        return weakref.ref(node, lambda _: _turns.pop(key, None))
    except TypeError:
        return lambda: node
