"""The twelve ways to make a call: a model or a tool, sync or async, for its decision, its outcome or its value.

They check their arguments and pass them on to admission and execution.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from inspect import iscoroutine
from typing import Any, NamedTuple

from penstock import checks
from penstock.containment.limits import seconds_to_ns
from penstock.containment.safety import Decision
from penstock.errors import InvalidValue
from penstock.money import Usd, to_nanos
from penstock.runtime.admission import after_end
from penstock.runtime.call import Call, CallSpec, Work
from penstock.runtime.execution import attempt_async, run_async, run_sync
from penstock.runtime.handle import Handle
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import OPEN

KINDS: tuple[CallKind, ...] = ("llm", "tool")

blank = object.__new__


def _count(field: str, value: object) -> int:
    """Return a whole number, 0 for None."""
    return 0 if value is None else checks.integer(field, value, maximum=1_000_000_000)


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """Options of a call; reusable for any number of calls."""

    operation_name: str = ""
    cost_estimate_hint: Usd = 0.0
    """US dollars to hold while the call runs, and its cost if nothing better is known; 0 is no hint."""
    timeout_ms: int | None = None
    """Time limit of each attempt in milliseconds, within the run's remaining time.

    It cannot extend the run: `ExecutionConfig.timeout_ms` limits the whole run, so a longer timeout ends with the run's
    remaining time. None and 0 leave the call the run's remaining time, all the time it needs if the run has no limit.
    """
    retry_policy_override: int | None = None
    """Maximum number of retries of this call; each one draws on the run's retry budget."""
    model: str | None = None
    """Model of the call, if it is known in advance."""
    degraded: Callable[..., Any] | None = None
    """Function that runs instead when a hook decides DEGRADE; None runs the call as it is."""
    retries: int = field(init=False, repr=False, compare=False)
    _llm: CallSpec = field(init=False, repr=False, compare=False)
    """These options for a model call."""
    _tool: CallSpec = field(init=False, repr=False, compare=False)
    """These options for a tool call."""

    def __post_init__(self) -> None:
        if not isinstance(self.operation_name, str):
            raise InvalidValue("operation_name", self.operation_name, "a string")
        if self.model is not None and not isinstance(self.model, str):
            raise InvalidValue("model", self.model, "a string, or None")
        if self.degraded is not None and not callable(self.degraded):
            raise InvalidValue("degraded", self.degraded, "a function, or None")
        hint = to_nanos(self.cost_estimate_hint, "cost_estimate_hint")
        timeout_ms = _count("timeout_ms", self.timeout_ms)
        timeout_s = timeout_ms / 1_000 if timeout_ms else None
        object.__setattr__(self, "retries", _count("retry_policy_override", self.retry_policy_override))
        for kind in KINDS:
            name = self.operation_name or kind
            spec = CallSpec(kind, name, hint or None, self.model, None, timeout_s, self.degraded)
            object.__setattr__(self, f"_{kind}", spec)


DEFAULT_OPTIONS = WrapOptions()


class Outcome(NamedTuple):
    """Outcome of one call: its value (None if it has none), the decision on it, and the call itself."""

    value: Any
    decision: Decision
    call: Call


class Calls(Handle):
    """A place from which calls are made."""

    __slots__ = ()

    # The decision.

    def wrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a model call under containment; return the decision on it.

        Returns HALT once the run was stopped or a limit was reached, also after its end; raises RunEnded if it ended
        otherwise.
        """
        return self._call("llm", fn, options).decision

    def wrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a tool call under containment; return the decision on it."""
        return self._call("tool", fn, options).decision

    async def awrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a model call under containment; return the decision on it."""
        return (await self._acall("llm", fn, options)).decision

    async def awrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a tool call under containment; return the decision on it."""
        return (await self._acall("tool", fn, options)).decision

    # The value, the decision and the call.

    def call_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a model call under containment; return its value, the decision and the call."""
        return _outcome(self._call("llm", fn, options))

    def call_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a tool call under containment; return its value, the decision and the call."""
        return _outcome(self._call("tool", fn, options))

    async def acall_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a model call under containment; return its value, the decision and the call."""
        return _outcome(await self._acall("llm", fn, options))

    async def acall_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a tool call under containment; return its value, the decision and the call."""
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
        """Return the value of a model call `fn(*args)`; raise Halted, CancelledError, or the function's own error."""
        spec = self._spec("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
        return run_sync(self, spec, fn, args, retries).result()

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
        """Return the value of a tool call `fn(*args)`; raise Halted, CancelledError, or the function's own error."""
        spec = self._spec("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
        return run_sync(self, spec, fn, args, retries).result()

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
        """Like `llm`, for functions that return an awaitable; a function that returns a value runs on the loop."""
        spec = self._spec("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
        run = run_async(self, spec, fn, args, retries) if retries else attempt_async(self, spec, fn, args)
        return (await run).result()

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
        """Like `tool`, for functions that return an awaitable; a function that returns a value runs on the loop."""
        spec = self._spec("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
        run = run_async(self, spec, fn, args, retries) if retries else attempt_async(self, spec, fn, args)
        return (await run).result()

    # Inside.

    def _call(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        if (self._base.end_seq != OPEN or type(how) is not WrapOptions or not callable(fn)) and (
            refused := self._refuse_work(kind, fn, how)
        ) is not None:
            return refused
        return run_sync(self, how._llm if kind == "llm" else how._tool, fn, (), how.retries)

    def _acall(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Coroutine[Any, Any, Call]:
        how = DEFAULT_OPTIONS if options is None else options
        if (self._base.end_seq != OPEN or type(how) is not WrapOptions or not callable(fn)) and (
            refused := self._refuse_work(kind, fn, how)
        ) is not None:
            return _refused(refused)
        spec = how._llm if kind == "llm" else how._tool
        return run_async(self, spec, fn, (), how.retries) if how.retries else attempt_async(self, spec, fn)

    def _refuse_work(self, kind: CallKind, fn: object, options: object) -> Call | None:
        """Raise if the call is invalid; return its refusal if the context has ended, None if it can be made."""
        if not isinstance(options, WrapOptions):
            raise InvalidValue("options", options, "WrapOptions or None")
        return self._check_work(kind, fn, options.operation_name or kind)

    def _spec(
        self,
        kind: CallKind,
        fn: Work,
        name: str,
        cost_hint_usd: Usd | None,
        model: str | None,
        timeout_s: float | None,
        retries: int,
        degraded: Work | None,
    ) -> CallSpec:
        """Check the arguments of a call and return its spec."""
        if not isinstance(name, str):
            raise InvalidValue("name", name, "a string")
        name = name or _name_of(fn, kind)
        if (self._base.end_seq != OPEN or not callable(fn)) and (
            refused := self._check_work(kind, fn, name)
        ) is not None:
            refused.result()
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        if retries:
            _count("retries", retries)
        if model is not None and not isinstance(model, str):
            raise InvalidValue("model", model, "a string, or None")
        if degraded is not None and not callable(degraded):
            raise InvalidValue("degraded", degraded, "a function, or None")
        hold_nanos = None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")
        # `CallSpec(…)`, inlined field by field: calling it takes longer than all of these.
        spec = blank(CallSpec)
        spec.kind = kind
        spec.name = name
        spec.hold_nanos = hold_nanos
        spec.model = model
        spec.timeout_s = timeout_s
        spec.degraded = degraded
        spec.hold_tokens = spec.metadata = None
        return spec

    def _check_work(self, kind: CallKind, fn: object, name: str) -> Call | None:
        if not callable(fn):
            if iscoroutine(fn):
                fn.close()
            expected = "a function to call, as in (fetch, url), and not its result, as in (fetch(url))"
            raise InvalidValue("fn", fn, expected)
        return after_end(self, f"{kind} call {name!r}") if self._base.end_seq != OPEN else None


async def _refused(call: Call) -> Call:
    return call


def _outcome(call: Call) -> Outcome:
    return Outcome(call.value, call.decision, call)


def _name_of(fn: Callable[..., object], kind: str) -> str:
    name = getattr(fn, "__name__", kind)
    return name if isinstance(name, str) and name != "<lambda>" else kind
