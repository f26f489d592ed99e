"""The twelve ways to make a call: a model or a tool, sync or async, for its decision, its outcome or its value.

They check what was said and pass it to the door, which does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import iscoroutine
from typing import Any, NamedTuple

from penstock.containment.limits import seconds_to_ns
from penstock.containment.safety import Decision
from penstock.errors import InvalidValue
from penstock.money import Usd, to_nanos
from penstock.runtime import door
from penstock.runtime.call import Call
from penstock.runtime.door import Work
from penstock.runtime.handle import Handle
from penstock.runtime.options import DEFAULT_OPTIONS, WrapOptions, whole
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import OPEN


class Outcome(NamedTuple):
    """What came of one call: its value (None if it has none), the decision on it, and the call itself."""

    value: Any
    decision: Decision
    call: Call


class Calls(Handle):
    """A place from which calls are made."""

    __slots__ = ()

    # The decision.

    def wrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a model call under containment; the decision on it."""
        return self._call("llm", fn, options).decision

    def wrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a tool call under containment; the decision on it."""
        return self._call("tool", fn, options).decision

    async def awrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a model call under containment; the decision on it."""
        return (await self._acall("llm", fn, options)).decision

    async def awrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a tool call under containment; the decision on it."""
        return (await self._acall("tool", fn, options)).decision

    # The value, the decision and the call.

    def call_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a model call under containment; its value, the decision, the call."""
        return _outcome(self._call("llm", fn, options))

    def call_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a tool call under containment; its value, the decision, the call."""
        return _outcome(self._call("tool", fn, options))

    async def acall_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a model call under containment; its value, the decision, the call."""
        return _outcome(await self._acall("llm", fn, options))

    async def acall_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a tool call under containment; its value, the decision, the call."""
        return _outcome(await self._acall("tool", fn, options))

    # The value.

    def llm(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        model: str | None = None,
        degraded: Work | None = None,
    ) -> Any:
        """The value of a model call `fn(*args)`; or raise Halted, CancelledError, or what the function raised."""
        name, hint = self._said("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
        return door.call(self, "llm", fn, args, name, hint, model, timeout_s, retries, degraded).result()

    def tool(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        degraded: Work | None = None,
    ) -> Any:
        """The value of a tool call `fn(*args)`; or raise Halted, CancelledError, or what the function raised."""
        name, hint = self._said("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
        return door.call(self, "tool", fn, args, name, hint, None, timeout_s, retries, degraded).result()

    async def allm(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        model: str | None = None,
        degraded: Work | None = None,
    ) -> Any:
        """Like `llm`, for functions that return an awaitable; one that returns a value runs on the loop as it is."""
        name, hint = self._said("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
        return (await door.acall(self, "llm", fn, args, name, hint, model, timeout_s, retries, degraded)).result()

    async def atool(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        degraded: Work | None = None,
    ) -> Any:
        """Like `tool`, for functions that return an awaitable; one that returns a value runs on the loop as it is."""
        name, hint = self._said("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
        return (await door.acall(self, "tool", fn, args, name, hint, None, timeout_s, retries, degraded)).result()

    # Inside.

    def _call(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        if self._base.end_seq != OPEN or type(how) is not WrapOptions or not callable(fn):
            self._refuse_work(kind, fn, how)
        name = how.operation_name or kind
        return door.call(self, kind, fn, (), name, how.hint_nanos, how.model, how.timeout_s, how.retries, how.degraded)

    def _acall(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Coroutine[Any, Any, Call]:
        how = DEFAULT_OPTIONS if options is None else options
        if self._base.end_seq != OPEN or type(how) is not WrapOptions or not callable(fn):
            self._refuse_work(kind, fn, how)
        name = how.operation_name or kind
        hint, timeout_s = how.hint_nanos, how.timeout_s
        if how.retries:
            return door.acall(self, kind, fn, (), name, hint, how.model, timeout_s, how.retries, how.degraded)
        return door.attempt(self, kind, fn, (), name, hint, how.model, timeout_s, how.degraded)

    def _refuse_work(self, kind: CallKind, fn: object, options: object) -> None:
        """Say what is wrong with a call that cannot be made."""
        if not isinstance(options, WrapOptions):
            raise InvalidValue("options", options, "WrapOptions or None")
        self._check_work(kind, fn, options.operation_name or kind)

    def _said(
        self,
        kind: CallKind,
        fn: Work,
        name: str,
        cost_hint_usd: Usd | None,
        model: str | None,
        timeout_s: float | None,
        retries: int,
        degraded: Work | None,
    ) -> tuple[str, int | None]:
        """The name and the hint of a call, once everything that was said about it has been checked."""
        if not isinstance(name, str):
            raise InvalidValue("name", name, "a string")
        name = name or _name_of(fn, kind)
        self._check_work(kind, fn, name)
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        if retries:
            whole("retries", retries)
        if model is not None and not isinstance(model, str):
            raise InvalidValue("model", model, "a string, or None")
        if degraded is not None and not callable(degraded):
            raise InvalidValue("degraded", degraded, "a function, or None")
        return name, None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")

    def _check_work(self, kind: CallKind, fn: object, name: str) -> None:
        if not callable(fn):
            if iscoroutine(fn):
                fn.close()
            expected = "a function to call, as in (fetch, url), and not its result, as in (fetch(url))"
            raise InvalidValue("fn", fn, expected)
        if self._base.end_seq != OPEN:
            raise self._after_the_end(f"{kind} call {name!r}")


def _outcome(call: Call) -> Outcome:
    return Outcome(call.value, call.decision, call)


def _name_of(fn: Callable[..., object], kind: str) -> str:
    name = getattr(fn, "__name__", kind)
    return name if isinstance(name, str) and name != "<lambda>" else kind
