"""Which run pays for a request.

The open scopes are a context variable: they follow tasks and threads that were started with a copy of the context.
Knows terms, and nothing of HTTP libraries or of how requests are intercepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from penstock.providers.http.exchange import Terms

_open_scopes: ContextVar[tuple[Terms, ...]] = ContextVar("penstock_contained", default=())
"""The terms of the open scopes of the current context, innermost last."""


def open_scope(terms: Terms) -> None:
    """Let the requests of this context belong to the run of these terms."""
    _open_scopes.set((*_open_scopes.get(), terms))


def close_scope(terms: Terms) -> None:
    """Undo the latest `open_scope` of these terms; nothing if the scope was opened in another context."""
    scopes = _open_scopes.get()
    if terms in scopes:
        last = len(scopes) - 1 - scopes[::-1].index(terms)
        _open_scopes.set(scopes[:last] + scopes[last + 1 :])


def terms_for(method: str, host: str, path: str, headers: Mapping[str, str]) -> Terms | None:
    """Return the terms that apply to this request; None if it is sent as it is."""
    scopes = _open_scopes.get()
    return scopes[-1] if scopes else None


@contextmanager
def already_held() -> Iterator[None]:
    """Send requests uncontained inside this context: the caller already holds their cost."""
    outside = _open_scopes.set(())
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, with nothing to reset
            _open_scopes.reset(outside)
