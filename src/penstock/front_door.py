"""The front door for existing code: limits in one line.

Composes a run from plain arguments; everything else is the `ExecutionContext` it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.limits import Budget, ExecutionConfig, seconds_to_ns
from penstock.containment.safety import ChainMetadata
from penstock.containment.shield import ShieldPipeline
from penstock.ids import new_run_id
from penstock.money import Usd
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.run import RunSettings, SyncCalls, UnknownBill
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.payloads import RecordPayloads

MAX_RETRIES = 1_000_000_000
"""Largest retry budget accepted; more is a mistake."""

F = TypeVar("F", bound=Callable[..., Any])


class ContainedRun(ExecutionContext):
    """A run made by `contain`, and a decorator that makes a run under the same limits for each call of a function."""

    __slots__ = ("_arguments",)

    _arguments: dict[str, Any]

    def __call__(self, function: F) -> F:
        """Return the function, sync or async, as a run of its own in each call.

        A call makes a new run with the arguments of `contain(…)`, enters it, opens `contained(run)` for the clients
        that the function uses, and ends the run when the function returns or raises. The run is `current_context()`
        inside the function. What was passed as an object is shared by the runs: a ledger, a breaker, a pipeline, a
        detector, a token; the labels of `metadata` are kept, and each run has ids of its own.
        """
        from penstock.providers.scope import around_calls  # most runs have no existing clients

        return around_calls(function, lambda: _run_in_scope(self._arguments))


@contextmanager
def _run_in_scope(arguments: dict[str, Any]) -> Iterator[ExecutionContext]:
    from penstock.providers.scope import contained

    metadata = arguments["metadata"]
    if metadata is not None:
        run_id = new_run_id()
        arguments = {**arguments, "metadata": replace(metadata, request_id=run_id, chain_id=run_id)}
    with contain(**arguments) as run, contained(run):
        yield run


def contain(
    *,
    max_cost_usd: Usd | None = None,
    max_steps: int | None = None,
    max_tokens: int | None = None,
    max_api_calls: int | None = None,
    max_retries: int | None = None,
    timeout_s: float | None = None,
    name: str = "main",
    strict: bool = False,
    adopt: bool = False,
    unknown_bill: UnknownBill = "hold",
    sync_calls: SyncCalls = "auto",
    max_wait_s: float = 300.0,
    max_kept_calls: int | None = 100_000,
    record_payloads: RecordPayloads = "off",
    prices: PriceBook | Mapping[str, Price] | None = None,
    pipeline: ShieldPipeline | None = None,
    breaker: CircuitBreaker | None = None,
    divergence: DivergenceDetector | bool = True,
    metadata: ChainMetadata | None = None,
    cancellation: CancellationToken | None = None,
    ledger: Ledger | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> ContainedRun:
    """Return a run under these limits, for `with` or `async with`; None is no limit, 0 allows nothing.

    As a decorator, `@contain(…)` makes each call of a function a run of its own under these limits, with
    `contained(run)` around it: see `ContainedRun.__call__`.

    `max_retries` is the run's retry budget: each failed call uses one, and when it is used up, no call starts.
    `strict` refuses calls without a cost hint, and model requests of existing clients that belong to no run while a
    block of this one is open; `adopt` counts the latter to this run, if no other run has an open block. `prices` are
    registered prices by model, or a `PriceBook`. `unknown_bill` decides what happens to the hold of a failed call whose
    cost is unknown. `sync_calls` decides where sync functions run. A call that other calls leave no room for waits for
    up to `max_wait_s`; with 0 it is refused at once. `record_payloads` records the arguments and results of model and
    tool calls: "redacted" without apparent secrets, "full" unchanged. `divergence` detects runaway call patterns: True
    uses the default thresholds, False turns detection off.
    """
    arguments = locals().copy()
    if timeout_s is not None:
        seconds_to_ns(timeout_s, "timeout_s")
    if max_retries is not None:
        checks.integer("max_retries", max_retries, maximum=MAX_RETRIES, none="no limit")
    if isinstance(prices, Mapping):
        prices = PriceBook(registered=prices)
    run = ContainedRun(
        ExecutionConfig(max_cost_usd=max_cost_usd, max_steps=max_steps, max_retries_total=max_retries),
        pipeline,
        metadata,
        name=name,
        budget=Budget(max_tokens=max_tokens, max_api_calls=max_api_calls, max_time_seconds=timeout_s),
        cancellation=cancellation,
        breaker=breaker,
        prices=prices,
        divergence=(DivergenceDetector() if divergence else None) if isinstance(divergence, bool) else divergence,
        ledger=ledger,
        settings=RunSettings(
            strict=strict,
            adopt=adopt,
            unknown_bill=unknown_bill,
            sync_calls=sync_calls,
            max_wait_s=max_wait_s,
            max_kept_calls=max_kept_calls,
            record_payloads=record_payloads,
        ),
        clock=clock,
    )
    run._arguments = arguments
    return run
