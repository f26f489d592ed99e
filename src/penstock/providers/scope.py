"""The scope that assigns model calls to a run.

While a `contained` scope is open, the transports of httpx2 and httpx are patched to look up the current run at every
request; otherwise they are unchanged. The current run is a context variable: it follows tasks and threads that were
started with a copy of the context, and no others.
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

from penstock import checks
from penstock.errors import Halted
from penstock.providers.http.exchange import Terms
from penstock.providers.http.transport import asend, send
from penstock.providers.reading.families import FAMILIES
from penstock.runtime.billing.error_bill import ErrorBill, check_error_bill
from penstock.runtime.context import ExecutionContext

CLIENTS = frozenset(module for module, _ in FAMILIES)
AIOHTTP = frozenset({"httpx_aiohttp", "openai._vendor.httpx_aiohttp", "anthropic._vendor.httpx_aiohttp"})
"""Modules with transports over aiohttp; only those already loaded when a scope is entered are patched."""

_open_scopes: ContextVar[tuple[contained, ...]] = ContextVar("penstock_contained", default=())
"""The open scopes of the current context, innermost last."""


class contained:
    """Scope in which every model call of an OpenAI or Anthropic client belongs to the run.

    Each call is admitted, held for, clamped, sent, settled and recorded; a refused call raises the same errors as any
    other call of the run. Scopes may be nested: the innermost run is charged, and with it every enclosing budget.
    The same object may be entered any number of times, also by several threads.

    `max_output_tokens` is the output limit of a request that sets none; `floor` is the smallest output limit a request
    is clamped to before it is refused instead. `error_bill` is what error answers of the provider cost: "free",
    "unresolved", or one of them by HTTP status; without it, the status decides.
    """

    def __init__(
        self,
        run: ExecutionContext,
        *,
        max_output_tokens: int = 4_096,
        floor: int = 16,
        error_bill: ErrorBill | None = None,
    ) -> None:
        checks.instance("run", run, ExecutionContext, "an ExecutionContext, such as one of `contain(…)`")
        checks.integer("max_output_tokens", max_output_tokens, minimum=1, of="tokens")
        checks.integer("floor", floor, minimum=1, of="tokens")
        self.terms = Terms(run, max_output_tokens, floor, check_error_bill(error_bill))

    def __enter__(self) -> contained:
        _hooks.take()
        _open_scopes.set((*_open_scopes.get(), self))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scopes = _open_scopes.get()
        if self in scopes:  # fixtures and generators may exit in another context, with nothing to undo
            last = len(scopes) - 1 - scopes[::-1].index(self)
            _open_scopes.set(scopes[:last] + scopes[last + 1 :])
        _hooks.give_back()
        # Older clients wrap every error raised below them: unwrap it on exit at the latest.
        wrapped = exc.__cause__ if exc is not None and type(exc).__module__.partition(".")[0] in CLIENTS else None
        if isinstance(wrapped, Halted):
            raise wrapped from None


def terms_here() -> Terms | None:
    """Return the terms of the innermost open scope; None outside of any scope."""
    scopes = _open_scopes.get()
    return scopes[-1].terms if scopes else None


@contextmanager
def already_held() -> Iterator[None]:
    """Send requests uncontained inside this context: the caller already holds their cost."""
    outside = _open_scopes.set(())
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, with nothing to reset
            _open_scopes.reset(outside)


@functools.cache
def installed(*libraries: str) -> tuple[str, ...]:
    """Return the libraries that can be imported; cached, because the look-up searches directories."""
    return tuple(name for name in libraries if importlib.util.find_spec(name) is not None)


class _Hooks:
    """Patches of the transports, applied when the first scope is entered and removed when the last one exits."""

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
                    # If another library has patched on top of ours, ours stays and passes every request on.
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
