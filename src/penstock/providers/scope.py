"""The scope that assigns model calls to a run.

While a `contained` scope is open, the transports of httpx2 and httpx are patched to look up the current run at every
request; otherwise they are unchanged. The current run is a context variable: it follows tasks and threads that were
started with a copy of the context, and no others.
"""

from __future__ import annotations

import importlib
from types import TracebackType

from penstock import checks
from penstock.errors import Halted
from penstock.providers.current import close_scope, open_scope
from penstock.providers.hooks import Hooks, installed
from penstock.providers.http.exchange import Terms
from penstock.providers.interruption import Interruptions
from penstock.providers.reading.families import FAMILIES
from penstock.providers.stacks import PATCHES
from penstock.runtime.billing.error_bill import ErrorBill, check_error_bill
from penstock.runtime.context import ExecutionContext

CLIENTS = frozenset(module for module, _ in FAMILIES)


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
        self._interruptions = Interruptions(run)

    def __enter__(self) -> contained:
        for name in installed("httpx2", "httpx"):
            importlib.import_module(name)
        _hooks.take()
        open_scope(self.terms)
        self._interruptions.enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        close_scope(self.terms)
        _hooks.give_back()
        error = self._interruptions.leave(exc)
        if error is not exc and error is not None:
            raise error from exc
        # Older clients wrap every error raised below them: unwrap it on exit at the latest.
        wrapped = exc.__cause__ if exc is not None and type(exc).__module__.partition(".")[0] in CLIENTS else None
        if isinstance(wrapped, Halted):
            raise wrapped from None


_hooks = Hooks(PATCHES)
