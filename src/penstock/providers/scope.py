"""Which run the model calls made here belong to.

While somebody is inside `contained`, the transports of httpx2 and httpx ask at every request which run it belongs to;
outside, nothing of them is changed. The answer is a context variable: it follows tasks and threads that were started
with a copy of the context, and no others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from penstock.errors import Halted, InvalidValue
from penstock.providers.http.exchange import Terms
from penstock.providers.http.refusals import FAMILIES
from penstock.providers.http.transport import asend, send
from penstock.runtime.context import ExecutionContext

CLIENTS = frozenset(module for module, _ in FAMILIES)
AIOHTTP = frozenset({"httpx_aiohttp", "openai._vendor.httpx_aiohttp", "anthropic._vendor.httpx_aiohttp"})
"""Where transports over aiohttp come from; those that are loaded when a scope is entered are seen."""

_here: ContextVar[tuple[contained, ...]] = ContextVar("penstock_contained", default=())
"""The scopes that were entered here and not left yet, innermost last."""


class contained:
    """Inside `with contained(run):`, every model call of an OpenAI or Anthropic client is one of the run's.

    It is admitted, held for, clamped, sent, settled and recorded; what the run refuses raises here what the run raises
    everywhere. Scopes may be nested: the innermost one pays, and with it every budget above its own. The same object
    may be entered any number of times, also by several threads.

    `max_output_tokens` is what a request may give that does not set a maximum; `floor` is the least output that a
    request is cut down to before it is refused.
    """

    def __init__(self, run: ExecutionContext, *, max_output_tokens: int = 4_096, floor: int = 16) -> None:
        if not isinstance(run, ExecutionContext):
            raise InvalidValue("run", run, "an ExecutionContext, such as `contain(…)` gives")
        for name, count in (("max_output_tokens", max_output_tokens), ("floor", floor)):
            if type(count) is not int or count < 1:
                raise InvalidValue(name, count, "a whole number of tokens, one or more")
        self.terms = Terms(run, max_output_tokens, floor)

    def __enter__(self) -> contained:
        _hooks.take()
        _here.set((*_here.get(), self))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scopes = _here.get()
        if self in scopes:  # left where it was not entered, as fixtures and generators do, there is nothing to undo
            last = len(scopes) - 1 - scopes[::-1].index(self)
            _here.set(scopes[:last] + scopes[last + 1 :])
        _hooks.give_back()
        # Older clients wrap whatever is raised below them: here, at the latest, it is what it was.
        wrapped = exc.__cause__ if exc is not None and type(exc).__module__.partition(".")[0] in CLIENTS else None
        if isinstance(wrapped, Halted):
            raise wrapped from None


def terms_here() -> Terms | None:
    """Under what a model call made here is made; None outside of any scope."""
    scopes = _here.get()
    return scopes[-1].terms if scopes else None


@contextmanager
def already_held() -> Iterator[None]:
    """Inside, requests are sent as they are: what they may cost is held by whoever sends them."""
    outside = _here.set(())
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            _here.reset(outside)


@functools.cache
def installed(*libraries: str) -> tuple[str, ...]:
    """Those that can be imported; looked up once, since that means a walk through directories."""
    return tuple(name for name in libraries if importlib.util.find_spec(name) is not None)


class _Hooks:
    """Our place before the transports, taken when the first scope is entered and given back with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._hooked: list[tuple[type, str, Any, Any]] = []

    def take(self) -> None:
        with self._lock:
            self._scopes += 1
            for name in installed("httpx2", "httpx"):
                library = importlib.import_module(name)
                self._hook(library.HTTPTransport, "handle_request", _sync)
                self._hook(library.AsyncHTTPTransport, "handle_async_request", _async)
            for name in AIOHTTP & sys.modules.keys():
                self._hook(sys.modules[name].AiohttpTransport, "handle_async_request", _async)

    def give_back(self) -> None:
        with self._lock:
            self._scopes -= 1
            if self._scopes == 0:
                for transport, method, original, ours in self._hooked:
                    # Somebody may have put himself before us: then ours stays, and passes everything on.
                    if getattr(transport, method) is ours:
                        setattr(transport, method, original)
                self._hooked.clear()

    def _hook(self, transport: type, method: str, wrapped: Callable[[Any], Any]) -> None:
        if any(transport is hooked for hooked, *_ in self._hooked):
            return
        original = getattr(transport, method)
        ours = functools.wraps(original)(wrapped(original))
        setattr(transport, method, ours)
        self._hooked.append((transport, method, original, ours))


def _sync(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def handle_request(transport: Any, request: Any) -> Any:
        terms = terms_here()
        return original(transport, request) if terms is None else send(terms, original, transport, request)

    return handle_request


def _async(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def handle_async_request(transport: Any, request: Any) -> Any:
        terms = terms_here()
        if terms is None:
            return await original(transport, request)
        return await asend(terms, original, transport, request)

    return handle_async_request


_hooks = _Hooks()
