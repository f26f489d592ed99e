"""HTTP clients whose model calls belong to a run, for whatever lets a client be passed in."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.providers.scope import contained, installed
from penstock.runtime.context import ExecutionContext

if TYPE_CHECKING:
    import httpx2


def contained_client(
    run: ExecutionContext, *, max_output_tokens: int = 4_096, floor: int = 16, **options: Any
) -> httpx2.Client:
    """A client for `OpenAI(http_client=…)` and `Anthropic(http_client=…)`: what it sends is under the run's limits.

    It needs no `with contained(…)`, and works in any thread. `options` are those of `httpx2.Client`; where only httpx
    is installed, it is a client of that.
    """
    scope = contained(run, max_output_tokens=max_output_tokens, floor=floor)
    plain: Any = _library().Client

    class ContainedClient(plain):  # type: ignore[misc]  # its class is known when it is made
        def send(self, request: Any, **how: Any) -> Any:
            with scope:
                return super().send(request, **how)

    made: httpx2.Client = ContainedClient(**{"follow_redirects": True, **options})
    return made


def contained_async_client(
    run: ExecutionContext, *, max_output_tokens: int = 4_096, floor: int = 16, **options: Any
) -> httpx2.AsyncClient:
    """Like `contained_client`, for `AsyncOpenAI` and `AsyncAnthropic`."""
    scope = contained(run, max_output_tokens=max_output_tokens, floor=floor)
    plain: Any = _library().AsyncClient

    class ContainedAsyncClient(plain):  # type: ignore[misc]  # its class is known when it is made
        async def send(self, request: Any, **how: Any) -> Any:
            with scope:
                return await super().send(request, **how)

    made: httpx2.AsyncClient = ContainedAsyncClient(**{"follow_redirects": True, **options})
    return made


def _library() -> Any:
    for name in installed("httpx2", "httpx"):
        return importlib.import_module(name)
    raise InvalidValue("httpx2", None, "installed; it comes with openai and anthropic")
