"""The scope that assigns model calls to a run.

The first scope installs the hooks: from then on the HTTP libraries look up the current run at every request, and
threads inherit the scope in which they are started. The hooks stay, so that a task or a thread that outlives its block
keeps its scope: its requests belong to the run as long as the run is open, and are refused afterwards.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

from penstock import checks
from penstock.containment import accounts
from penstock.errors import CancelledError, Halted, InvalidValue
from penstock.providers import uncontained
from penstock.providers.current import close_scope, open_scope
from penstock.providers.hooks import HookFailed, Hooks, Patch
from penstock.providers.http.exchange import Terms
from penstock.providers.inheritance import THREADS
from penstock.providers.interruption import Interruptions
from penstock.providers.reading.families import FAMILIES
from penstock.providers.stacks import PATCHES
from penstock.runtime.billing.error_bill import ErrorBill, check_error_bill
from penstock.runtime.call import stopped
from penstock.runtime.context import ExecutionContext
from penstock.runtime.handle import Handle

F = TypeVar("F", bound=Callable[..., Any])

A_PLAIN_FUNCTION = "no generator: it would run after its block has ended"

OnStop = Literal["warn", "raise", "ignore"]

CLIENTS = frozenset(module for module, _ in FAMILIES)


class contained:
    """Scope in which every model call of an existing client belongs to the run, for `with` or as a decorator.

    Each call is admitted, held for, clamped, sent, settled and recorded; a refused call raises the same errors as any
    other call of the run. Scopes may be nested: the innermost run is charged, and with it every enclosing budget.
    Threads, tasks and items of executors that are started inside belong to the scope, also after the block has ended.
    The same object may be entered any number of times, also by several threads. As a decorator, each call of the
    function, sync or async, is one block.

    `max_output_tokens` is the output limit of a request that sets none; `floor` is the smallest output limit a request
    is clamped to before it is refused instead. `error_bill` is the cost of the provider's error answers: "free",
    "unresolved", or one of them by HTTP status; without it, the status decides.

    `on_stop` applies if the run was stopped but the block ends normally, because code inside it swallowed the refusal:
    "warn" warns once for each run, "ignore" does nothing, and "raise" raises the stop, also in place of an error that a
    framework made of it.
    """

    def __init__(
        self,
        run: ExecutionContext,
        *,
        max_output_tokens: int = 4_096,
        floor: int = 16,
        error_bill: ErrorBill | None = None,
        on_stop: OnStop = "warn",
    ) -> None:
        checks.instance("run", run, ExecutionContext, "an ExecutionContext, such as one of `contain(…)`")
        checks.integer("max_output_tokens", max_output_tokens, minimum=1, of="tokens")
        checks.integer("floor", floor, minimum=1, of="tokens")
        if on_stop not in ("warn", "raise", "ignore"):
            raise InvalidValue("on_stop", on_stop, "'warn', 'raise' or 'ignore'")
        self.terms = Terms(run, max_output_tokens, floor, check_error_bill(error_bill))
        self._interruptions = Interruptions(run)
        self._run = run
        self._on_stop = on_stop

    def __call__(self, function: F) -> F:
        """Return the function with this scope around each call."""
        return around_calls(function, lambda: self)

    def __enter__(self) -> contained:
        install_hooks(self.terms.context)
        uncontained.opened(self.terms)
        open_scope(self.terms)
        self._interruptions.enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_scope(self.terms)
        uncontained.closed(self.terms)
        error = self._interruptions.leave(exc)
        self._report_removed_hooks()
        if error is not exc and error is not None:
            raise error from exc
        # Older clients wrap every error raised below them: unwrap it on exit at the latest.
        wrapped = exc.__cause__ if exc is not None and type(exc).__module__.partition(".")[0] in CLIENTS else None
        if isinstance(wrapped, Halted):
            raise wrapped from None
        if exc is None or (self._on_stop == "raise" and _may_be_replaced(exc)):
            self._surface_stop(exc)

    def _report_removed_hooks(self) -> None:
        """Report hooks that another tool has removed: requests may have passed uncounted since then."""
        for name in _hooks.removed():
            gap = f"the hook of {name} was removed inside a block: its requests may be in no figure of this run"
            if self._run._run.note_gap(gap):
                warnings.warn(f"{gap}; the next block installs it again", RuntimeWarning, stacklevel=3)

    def _surface_stop(self, exc: BaseException | None) -> None:
        """Raise the stop of the run, or warn of it, if the block ends without it."""
        stop = self._run.stop
        if stop is None or self._on_stop == "ignore":
            return
        if exc is not None and (ours := _halted_in(exc)) is not None:
            raise ours from None
        if self._on_stop == "raise":
            raise stopped(self._run, stop) from exc
        if self._run._run.note_swallowed(stop):
            facts = f"the block ended normally although run {self._run.run_id} was stopped ({stop})"
            advice = 'contained(run, on_stop="raise") raises the stop, "ignore" accepts it'
            warnings.warn(f"{facts}: what ran inside has swallowed the refusal; {advice}", RuntimeWarning, stacklevel=3)


def around_calls(function: F, block: Callable[[], AbstractContextManager[object]]) -> F:
    """Return the function, sync or async, with a block around each call."""
    if isinstance(function, type) or not callable(cast(object, function)):
        raise InvalidValue("function", function, "a function or an async function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidValue("function", function, A_PLAIN_FUNCTION)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            with block():
                return await function(*args, **kwargs)

        return cast(F, acall)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with block():
            value = function(*args, **kwargs)
            if isinstance(value, Generator | AsyncGenerator):
                raise InvalidValue("function", function, A_PLAIN_FUNCTION)
            if not isinstance(value, Awaitable):
                return value
        return _awaited(value, block())  # its work has not begun yet

    return cast(F, call)


async def _awaited(value: Awaitable[Any], block: AbstractContextManager[object]) -> Any:
    with block:
        return await value


def install_hooks(context: Handle) -> None:
    """Install the hooks, if they are not; a hook that fails is an error if the context has a money limit."""
    for failure in _hooks.install():
        _report(failure, [context])


def _report(failure: HookFailed, contexts: list[Handle]) -> None:
    if any(accounts.has_cost_limit(context._account) or context._run.shared is not None for context in contexts):
        raise failure
    if failure.patch not in _reported:
        _reported.add(failure.patch)
        warnings.warn(str(failure), RuntimeWarning, stacklevel=2)


def _may_be_replaced(exc: BaseException) -> bool:
    """Whether a framework may have raised the error; never for a cancel, an interrupt and our own errors."""
    if isinstance(exc, BaseExceptionGroup):
        return all(isinstance(inner, CancelledError) or _may_be_replaced(inner) for inner in exc.exceptions)
    return isinstance(exc, Exception) and not isinstance(exc, Halted)


def _halted_in(exc: BaseException) -> Halted | CancelledError | None:
    """Return the stop that a framework has wrapped in this error."""
    todo: list[BaseException | None] = [exc]
    seen: set[int] = set()
    while todo:
        error = todo.pop(0)
        if error is None or id(error) in seen:
            continue
        if isinstance(error, Halted | CancelledError):
            return error
        seen.add(id(error))
        todo += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            todo += error.exceptions
    return None


_reported: set[Patch] = set()
"""The hooks whose failure was reported with a warning."""

_hooks = Hooks(
    (*THREADS, *PATCHES),
    lambda failure: _report(failure, [terms.context for terms in uncontained.open_terms()]),
)
