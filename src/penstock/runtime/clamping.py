"""How much output can be paid for?

The worst case of a model call is all of its input and as much output as it may give. Where the budget cannot pay for
that, the call may ask for less output, down to a floor. Nothing is taken here and nothing refused: the door holds what
this says, and refuses it if somebody else has taken the rest meanwhile. Nobody ever waits for what others hold.

What a budget in a store can pay is known when it has refused: its refusal says what is left, and the call asks for no
more than that (`clamp_to`). An answer that was cut where the budget paid for no more is a halt by that budget (`cut`).
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
"""What allows a call no more output: a level of the run's accounts, or what a store has said of one of its own."""


class Worst(NamedTuple):
    """The most that a model call can use."""

    cost_nanos: int | None
    """None if the model has no known price."""
    tokens: int
    output_tokens: int
    """What the call may ask for."""
    limit: Limit | None = None
    """What allows no more output; None if it is all that was wanted."""


def clamp(context: Handle, model: str, input_tokens: int, wanted_output: int, floor: int) -> Worst:
    """The worst case of a call, with as much of the wanted output as every budget above it can pay for now.

    If not even `floor` fits, it is the worst case with `floor`: the door refuses it, and says whose limit it was.
    """
    account = context._account
    cost = context._run.prices.worst_case_nanos(model, input_tokens, wanted_output)
    tokens = input_tokens + wanted_output
    if accounts.has_room(account, cost or 0, tokens):
        return Worst(cost, tokens, wanted_output)
    left = accounts.cost_left(account), accounts.tokens_left(account)
    worst, unit = _within(context, model, input_tokens, wanted_output, floor, *left)
    return worst._replace(limit=(accounts.tightest(account, unit), unit))


def clamp_to(context: Handle, model: str, input_tokens: int, wanted_output: int, floor: int, refusal: Stop) -> Worst:
    """The worst case of a call that a store has refused, with as much output as the refusal says can be paid there."""
    if refusal.unit == "usd":
        left = to_nanos(refusal.limit or 0) - to_nanos(refusal.used or 0) - to_nanos(refusal.held or 0), UNLIMITED
    else:
        left = UNLIMITED, int((refusal.limit or 0) - (refusal.used or 0) - (refusal.held or 0))
    worst, _ = _within(context, model, input_tokens, wanted_output, floor, *left)
    return worst._replace(limit=refusal)


def can_be_less(refusal: Stop) -> bool:
    """Whether a call that asks for less output might not be refused so."""
    return refusal.unit in ("usd", "tokens") and bool(refusal.asked)


def cut(context: Handle, record: CallRecord, limit: Limit, output: int, wanted: int) -> Stop:
    """The stop by a limit that has cut an answer to `output` tokens: told, and known to all who are under that limit.

    The call itself has succeeded, and is paid.
    """
    run = context._run
    if isinstance(limit, Stop):
        reached, figures = limit, f"{limit.message.rpartition('; the call would ')[0]} before the answer"
    else:
        with run.lock:
            reached = accounts.reached(*limit)
        figures = reached.message
    told = f"{figures}: it paid for {output} of the {wanted} tokens the answer might have had, and cut it there"
    is_momentary = isinstance(limit, Stop) and limit.momentary
    stop = replace(reached, message=told, momentary=is_momentary)
    context._remember(stop)
    run.record_stop(stop, Decision.HALT, context._source, record, "ExecutionContext")
    return stop


def _within(
    context: Handle, model: str, input_tokens: int, most: int, floor: int, cost_left: int, tokens_left: int
) -> tuple[Worst, Unit]:
    """The worst case with as much output as that much pays for, and what it is that pays for no more."""
    price = context._run.prices

    def fits(output: int) -> bool:
        asked = price.worst_case_nanos(model, input_tokens, output)
        return asked is None or asked <= cost_left

    unit: Unit = "tokens"
    output = max(floor, min(most, tokens_left - input_tokens))
    if not fits(output):
        unit, output = "usd", _largest(fits, floor, output)
    return Worst(price.worst_case_nanos(model, input_tokens, output), input_tokens + output, output), unit


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number that fits and is less than `most`, which does not; `least` if none does."""
    while least + 1 < most:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least
