"""Which run pays for a request.

The open scopes are a context variable: they follow tasks, and threads that are started with a copy of the context.
`inheritance` takes them to other threads, with `captured`. A request outside of any scope is judged by `uncontained`.
Knows terms, and nothing of HTTP libraries or of how requests are intercepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from penstock.providers import uncontained
from penstock.providers.http.exchange import Terms
from penstock.runtime.call import Call, running_call
from penstock.runtime.context import ExecutionContext, entered_contexts

T = TypeVar("T")

Scopes = tuple[Terms | None, ...]
ELSEWHERE = "a block gave work to another process or interpreter: what is requested there is in no figure of this run"


def _variable() -> ContextVar[Scopes]:
    return ContextVar("penstock_contained", default=())


_open_scopes = _variable()
"""The terms of the open scopes of the current context, innermost last; None where the caller holds the cost itself."""


def open_scope(terms: Terms) -> None:
    """Let the requests of this context belong to the run of these terms."""
    _open_scopes.set((*_open_scopes.get(), terms))


def close_scope(terms: Terms) -> None:
    """Undo the latest `open_scope` of these terms; nothing if the scope was opened in another context."""
    scopes = _open_scopes.get()
    if terms in scopes:
        last = len(scopes) - 1 - scopes[::-1].index(terms)
        _open_scopes.set(scopes[:last] + scopes[last + 1 :])


def terms_for(
    method: str, host: str, path: str, headers: Mapping[str, str], content: bytes | None = None
) -> Terms | None:
    """Return the terms that apply to this request; None if it is sent unchanged. Raises if it is refused.

    `content` is its body, if that is known: outside of any scope it distinguishes model requests from others.
    """
    scopes = _open_scopes.get()
    if scopes:
        return scopes[-1]
    return uncontained.judge(method, host, path, headers, content) if uncontained.is_watching else None


def is_in_scope() -> bool:
    """Whether requests belong to a scope here."""
    return bool(_open_scopes.get())


def pass_by(method: str, host: str, path: str, headers: Mapping[str, str]) -> None:
    """Report a request that cannot be contained where it is made, if it is a model request; raise if it is refused."""
    scopes = _open_scopes.get()
    if not scopes:
        uncontained.pass_by(method, host, path, headers)
    elif (terms := scopes[-1]) is not None:
        uncontained.pass_by(method, host, path, headers, terms)


def open_socket(host: str, path: str) -> None:
    """Report a WebSocket that is opened here, if model requests are sent over it; raise if it is refused."""
    scopes = _open_scopes.get()
    if not scopes:
        if uncontained.is_watching:
            uncontained.open_socket(host, path)
    elif (terms := scopes[-1]) is not None:
        uncontained.open_socket(host, path, terms)


def note_work_elsewhere() -> None:
    """Record on the runs of this scope that work leaves the process or interpreter, where no limit holds."""
    for terms in _open_scopes.get():
        if terms is not None:
            terms.context._run.note_gap(ELSEWHERE)


def may_apply(method: str) -> bool:
    """Whether `terms_for` may return terms for this method here; a cheap check for hooks that need preparation."""
    return method == "POST" and bool(_open_scopes.get() or uncontained.is_watching)


@contextmanager
def already_held() -> Iterator[None]:
    """Send requests uncontained inside this context: the caller already holds their cost."""
    outside = _open_scopes.set((*_open_scopes.get(), None))
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, with nothing to reset
            _open_scopes.reset(outside)


class Captured(NamedTuple):
    """The scope of one place in the program, for work that runs in another thread."""

    scopes: Scopes
    call: Call | None
    contexts: tuple[ExecutionContext, ...]

    def enter(self) -> None:
        """Make this the scope of the current context, permanently."""
        _open_scopes.set(self.scopes)
        running_call.set(self.call)
        entered_contexts.set(self.contexts)

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call the function in this scope."""
        before = _captured()
        self.enter()
        try:
            return function(*args, **kwargs)
        finally:
            before.enter()


NO_SCOPE = Captured((), None, ())


def captured() -> Captured | None:
    """Return the scope of the current context; None outside of any."""
    return _captured() if _open_scopes.get() else None


def _captured() -> Captured:
    return Captured(_open_scopes.get(), running_call.get(), entered_contexts.get())


def _forked() -> None:
    """Leave every scope of the parent process: a copy of a run in a child process limits nothing."""
    global _open_scopes
    _open_scopes = _variable()  # a new variable is unset in all contexts, also in those of suspended tasks


os.register_at_fork(after_in_child=_forked)
