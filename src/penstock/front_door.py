"""The front door for code that exists already: limits in one line.

Composes a run from plain arguments; everything else is the `ExecutionContext` it returns.
"""

from __future__ import annotations

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.limits import Budget, ExecutionConfig, seconds_to_ns
from penstock.containment.safety import ChainMetadata
from penstock.containment.shield import ShieldPipeline
from penstock.money import Usd
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import whole
from penstock.runtime.run import RunSettings, SyncCalls, UnknownBill
from penstock.tracing.divergence import DivergenceDetector


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
    unknown_bill: UnknownBill = "hold",
    sync_calls: SyncCalls = "auto",
    max_kept_calls: int | None = 100_000,
    prices: PriceBook | None = None,
    pipeline: ShieldPipeline | None = None,
    breaker: CircuitBreaker | None = None,
    divergence: DivergenceDetector | bool = True,
    metadata: ChainMetadata | None = None,
    cancellation: CancellationToken | None = None,
    ledger: Ledger | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> ExecutionContext:
    """A run under these limits, for `with` or `async with`; None is no limit, 0 is nothing.

    `max_retries` is the run's retry budget: every call that fails draws one, and once it is used up nothing more
    starts. `strict` refuses calls without a cost hint. `unknown_bill` says what becomes of the hold of a call that
    failed with nobody knowing its bill. `sync_calls` says where sync functions run. `divergence` looks out for runaway
    shapes: True with the usual thresholds, False not at all.
    """
    if timeout_s is not None:
        seconds_to_ns(timeout_s, "timeout_s")
    whole("max_retries", max_retries)
    return ExecutionContext(
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
            strict=strict, unknown_bill=unknown_bill, sync_calls=sync_calls, max_kept_calls=max_kept_calls
        ),
        clock=clock,
    )
