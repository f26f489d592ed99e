"""How much output can be paid for?

The worst case of a model call is all of its input and as much output as it may give. Where the budget cannot pay for
that, the call may ask for less output, down to a floor. Nothing is taken here and nothing refused: the door holds what
this says, and refuses it if somebody else has taken the rest meanwhile. Nobody ever waits for what others hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.containment import accounts
from penstock.runtime.handle import Handle


class Worst(NamedTuple):
    """The most that a model call can use."""

    cost_nanos: int | None
    """None if the model has no known price."""
    tokens: int
    output_tokens: int
    """What the call may ask for."""


def clamp(context: Handle, model: str, input_tokens: int, wanted_output: int, floor: int) -> Worst:
    """The worst case of a call, with as much of the wanted output as every budget above it can pay for now.

    If not even `floor` fits, it is the worst case with `floor`: the door refuses it, and says whose limit it was.
    """
    price, account = context._run.prices, context._account
    cost = price.worst_case_nanos(model, input_tokens, wanted_output)
    tokens = input_tokens + wanted_output
    if accounts.has_room(account, cost or 0, tokens):
        return Worst(cost, tokens, wanted_output)
    cost_left, tokens_left = accounts.cost_left(account), accounts.tokens_left(account)

    def fits(output: int) -> bool:
        asked = price.worst_case_nanos(model, input_tokens, output)
        return asked is None or asked <= cost_left

    output = max(floor, min(wanted_output, tokens_left - input_tokens))
    if not fits(output):
        output = _largest(fits, floor, output)
    return Worst(price.worst_case_nanos(model, input_tokens, output), input_tokens + output, output)


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number that fits and is less than `most`, which does not; `least` if none does."""
    while least + 1 < most:
        middle = (least + most) // 2
        if fits(middle):
            least = middle
        else:
            most = middle
    return least
