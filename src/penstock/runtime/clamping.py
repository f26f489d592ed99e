"""Clamp the output of a model call to what its budgets can pay for.

The worst case of a model call is all of its input and its maximum output. If the budget cannot pay for that, the call
may request less output, down to a floor. Only spent and unresolved amounts count: for amounts that other calls hold, a
call waits instead. This module neither holds nor refuses anything: admission holds the clamped amount.

The refusal of a budget in a store has the rest of that budget: the call then requests no more than the rest pays for
(`clamp_to`). An answer that was truncated because of a budget is a halt by that budget (`cut`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from penstock.containment import accounts
from penstock.containment.accounts import Account, Unit
from penstock.containment.limits import UNLIMITED
from penstock.containment.safety import Decision
from penstock.money import to_nanos
from penstock.runtime.handle import Handle
from penstock.stops import Stop
from penstock.tracing.record import CallRecord

Limit = tuple[Account, Unit] | Stop
"""The limit on a call's output: an account of the run, or the refusal of an account at a store."""


class Worst(NamedTuple):
    """The worst case of a model call."""

    cost_nanos: int | None
    """None if the model has no known price."""
    tokens: int
    output_tokens: int
    """Maximum output that the call may request."""
    limit: Limit | None = None
    """The limit that clamped the output; None if it was not clamped."""


def clamp(context: Handle, model: str, input_tokens: int, wanted_output: int, floor: int) -> Worst:
    """Return the worst case of a call, with as much of the wanted output as all its budgets can pay for.

    If not even `floor` fits, return the worst case with `floor`: admission refuses it, and names the limit.
    """
    tokens = input_tokens + wanted_output
    if context._token.cancellation is not None:
        # Admission refuses the call. The cancel may have ended the wait for the table of prices: a look-up would block.
        return Worst(None, tokens, wanted_output)
    account = context._account
    cost = context._run.prices.worst_case_nanos(model, input_tokens, wanted_output)
    if accounts.fits_alone(account, cost or 0, tokens):
        return Worst(cost, tokens, wanted_output)
    left = accounts.cost_left(account), accounts.tokens_left(account)
    worst, unit = _within(context, model, input_tokens, wanted_output, floor, *left)
    return worst._replace(limit=(accounts.tightest(account, unit), unit))


def clamp_to(context: Handle, model: str, input_tokens: int, wanted_output: int, floor: int, refusal: Stop) -> Worst:
    """Return the worst case of a call that a store refused, with as much output as the store can still pay for.

    Only amounts that are spent or unresolved there count, as for `clamp`.
    """
    limit, used = refusal.limit or 0, refusal.used or 0
    if refusal.unit == "usd":
        left = to_nanos(limit) - to_nanos(used) - to_nanos(refusal.unresolved), UNLIMITED
    else:
        left = UNLIMITED, int(limit - used - refusal.unresolved)
    worst, _ = _within(context, model, input_tokens, wanted_output, floor, *left)
    return worst._replace(limit=refusal)


def can_be_less(refusal: Stop) -> bool:
    """Whether a call with less output might be admitted."""
    return refusal.unit in ("usd", "tokens") and bool(refusal.asked)


def cut(context: Handle, record: CallRecord, limit: Limit, output: int, wanted: int) -> Stop:
    """Record and return the stop of a limit that truncated an answer to `output` tokens.

    The call itself has succeeded, and is paid.
    """
    run = context._run
    if isinstance(limit, Stop):
        reached, figures = limit, f"{limit.message.rpartition('; the call would ')[0]} before the answer"
    else:
        with run.lock:
            reached = accounts.reached(*limit)
        figures = reached.message
    message = f"{figures}: it paid for {output} of the {wanted} tokens the answer might have had, and cut it there"
    is_momentary = isinstance(limit, Stop) and limit.momentary
    stop = replace(reached, message=message, momentary=is_momentary)
    context._remember(stop)
    run.record_stop(stop, Decision.HALT, context._source, record, "ExecutionContext")
    return stop


def _within(
    context: Handle, model: str, input_tokens: int, most: int, floor: int, cost_left: int, tokens_left: int
) -> tuple[Worst, Unit]:
    """Return the worst case with as much output as the rest pays for, and the unit that limits it."""
    price = context._run.prices

    def fits(output: int) -> bool:
        cost = price.worst_case_nanos(model, input_tokens, output)
        return cost is None or cost <= cost_left

    unit: Unit = "tokens"
    output = max(floor, min(most, tokens_left - input_tokens))
    if not fits(output):
        unit, output = "usd", _largest(fits, floor, output)
    return Worst(price.worst_case_nanos(model, input_tokens, output), input_tokens + output, output), unit


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number below `most` that fits; `least` if none does."""
    while least + 1 < most:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least
