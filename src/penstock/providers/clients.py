"""HTTP clients whose model calls belong to a run, for libraries that accept an HTTP client.

Only the requests of such a client are contained. Using one does not make the requests of other clients count as escaped
from a scope.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.providers.current import close_scope, open_scope
from penstock.providers.hooks import built_on, installed
from penstock.providers.reading.families import FAMILIES
from penstock.providers.scope import contained, install_hooks
from penstock.runtime.billing.error_bill import ErrorBill
from penstock.runtime.context import ExecutionContext

if TYPE_CHECKING:
    import httpx2


def contained_client(
    run: ExecutionContext,
    *,
    max_output_tokens: int = 4_096,
    floor: int = 16,
    error_bill: ErrorBill | None = None,
    **options: Any,
) -> httpx2.Client:
    """Return a client for `OpenAI(http_client=…)` and `Anthropic(http_client=…)` that applies the run's limits.

    Needs no `with contained(…)` and works in any thread. `options` are those of `httpx2.Client`; if the official client
    is built on httpx, as those before openai 3 and anthropic 1 are, it is an `httpx.Client`.
    """
    terms = contained(run, max_output_tokens=max_output_tokens, floor=floor, error_bill=error_bill).terms
    install_hooks(run)
    plain: Any = _library().Client

    class ContainedClient(plain):  # type: ignore[misc]  # the base class is only known at run time
        def send(self, request: Any, **how: Any) -> Any:
            open_scope(terms)
            try:
                return super().send(request, **how)
            finally:
                close_scope(terms)

    client: httpx2.Client = ContainedClient(**{"follow_redirects": True, **options})
    return client


def contained_async_client(
    run: ExecutionContext,
    *,
    max_output_tokens: int = 4_096,
    floor: int = 16,
    error_bill: ErrorBill | None = None,
    **options: Any,
) -> httpx2.AsyncClient:
    """Like `contained_client`, for `AsyncOpenAI` and `AsyncAnthropic`."""
    terms = contained(run, max_output_tokens=max_output_tokens, floor=floor, error_bill=error_bill).terms
    install_hooks(run)
    plain: Any = _library().AsyncClient

    class ContainedAsyncClient(plain):  # type: ignore[misc]  # the base class is only known at run time
        async def send(self, request: Any, **how: Any) -> Any:
            open_scope(terms)
            try:
                return await super().send(request, **how)
            finally:
                close_scope(terms)

    client: httpx2.AsyncClient = ContainedAsyncClient(**{"follow_redirects": True, **options})
    return client


def _library() -> Any:
    """Return the library of the official clients that are imported, or else the first that is installed."""
    loaded = [sys.modules.get(name) for name, _ in FAMILIES]
    clients = [client for client in loaded if hasattr(client, "DefaultAsyncHttpxClient")]  # botocore has none
    for name in (*map(built_on, clients), *installed("httpx2", "httpx")):
        return importlib.import_module(name)
    raise InvalidValue("httpx2", None, "installed; it comes with openai and anthropic")
