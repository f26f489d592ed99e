"""The front door for existing code: limits in one line.

Composes a run from plain arguments; everything else is the `ExecutionContext` it returns.
"""

from __future__ import annotations

from penstock import checks
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
from penstock.runtime.run import RunSettings, SyncCalls, UnknownBill
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.payloads import RecordPayloads

MAX_RETRIES = 1_000_000_000
"""Largest retry budget accepted; more is a mistake."""


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
    max_wait_s: float = 300.0,
    max_kept_calls: int | None = 100_000,
    record_payloads: RecordPayloads = "off",
    prices: PriceBook | None = None,
    pipeline: ShieldPipeline | None = None,
    breaker: CircuitBreaker | None = None,
    divergence: DivergenceDetector | bool = True,
    metadata: ChainMetadata | None = None,
    cancellation: CancellationToken | None = None,
    ledger: Ledger | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> ExecutionContext:
    """Return a run under these limits, for `with` or `async with`; None is no limit, 0 allows nothing.

    `max_retries` is the run's retry budget: each failed call uses one, and when it is used up, no call starts.
    `strict` refuses calls without a cost hint. `unknown_bill` decides what happens to the hold of a failed call whose
    cost is unknown. `sync_calls` decides where sync functions run. A call that other calls leave no room for waits for
    up to `max_wait_s`; with 0 it is refused at once. `record_payloads` records the arguments and results of model and
    tool calls: "redacted" without apparent secrets, "full" unchanged. `divergence` detects runaway call patterns: True
    uses the default thresholds, False turns detection off.
    """
    if timeout_s is not None:
        seconds_to_ns(timeout_s, "timeout_s")
    if max_retries is not None:
        checks.integer("max_retries", max_retries, maximum=MAX_RETRIES, none="no limit")
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
            strict=strict,
            unknown_bill=unknown_bill,
            sync_calls=sync_calls,
            max_wait_s=max_wait_s,
            max_kept_calls=max_kept_calls,
            record_payloads=record_payloads,
        ),
        clock=clock,
    )
