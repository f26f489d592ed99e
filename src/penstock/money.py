"""Money as integers.

Internally, an amount is a whole number of nano-dollars: sums are exact, in any order, of any number of amounts. Floats,
decimals and strings exist only at the edges, where values that are not finite amounts are refused by name.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation
from functools import lru_cache

from penstock.errors import InvalidValue

NANOS_PER_USD = 1_000_000_000
MAX_NANOS = 1 << 60
"""A little over a billion dollars: larger amounts are a mistake, not a budget."""

Usd = float | int | Decimal | str

# Our own arithmetic, so that neither the precision nor the rounding a program sets for itself changes an amount.
_EXACT = Context(prec=40, rounding=ROUND_HALF_EVEN, traps=[InvalidOperation])
_MAX_USD = _EXACT.scaleb(Decimal(MAX_NANOS), -9)
_NANO = Decimal("1E-9")
_DECIMAL = re.compile(r"\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*", re.ASCII)


def is_decimal(text: str) -> bool:
    """Whether `text` is a number in plain notation: ASCII digits, optional point and exponent, surrounding spaces.

    Python itself accepts more: `1_0`, the digits of every script, `Infinity`.
    """
    return _DECIMAL.fullmatch(text) is not None


def to_nanos(amount: Usd, field: str = "amount") -> int:
    """Return `amount` US dollars in nano-dollars, rounded to the nearest.

    Raises InvalidValue, which names `field`, if it is not an amount.
    """
    if type(amount) is float or type(amount) is int:
        # NaN fails both comparisons, and so does an infinity.
        if 0 <= amount <= MAX_NANOS / NANOS_PER_USD:
            return round(amount * NANOS_PER_USD)
        raise InvalidValue(field, amount, "a finite, non-negative number of US dollars below one billion")
    return _nanos_of_text(amount, field) if type(amount) is str else _exact_nanos(amount, field)


@lru_cache(maxsize=1_024)
def _nanos_of_text(amount: str, field: str) -> int:
    """Convert text; cached, because limits come as text, and the same ones again and again."""
    return _exact_nanos(amount, field)


def _exact_nanos(amount: object, field: str) -> int:
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Decimal, str)):
        raise InvalidValue(field, amount, "a number of US dollars (float, int, Decimal or str)")
    try:
        if isinstance(amount, str) and not is_decimal(amount):
            raise InvalidOperation
        exact = Decimal(amount)
    except InvalidOperation:
        raise InvalidValue(field, amount, "a number of US dollars, such as '0.50'") from None
    if not exact.is_finite() or not 0 <= exact <= _MAX_USD:
        raise InvalidValue(field, amount, "a finite, non-negative number of US dollars below one billion")
    return int(_EXACT.scaleb(_EXACT.quantize(exact, _NANO), 9))


def to_usd(nanos: int) -> float:
    """Return nano-dollars as a float of US dollars, for display and JSON."""
    return nanos / NANOS_PER_USD


def format_usd(nanos: int) -> str:
    """Format as `$0.50` or `$0.000123`: at least cents, and as many further digits as the amount has."""
    sign = "-" if nanos < 0 else ""
    whole, rest = divmod(abs(nanos), NANOS_PER_USD)
    fraction = f"{rest:09d}"
    return f"{sign}${whole}.{fraction[:2]}{fraction[2:].rstrip('0')}"


def known_usd(nanos: int, unknown_calls: int) -> float | None:
    """Return the known part of a sum of costs in US dollars; None if nothing of it is known."""
    return None if unknown_calls and not nanos else to_usd(nanos)


def format_cost(nanos: int, unknown_calls: int, of: str = "") -> str:
    """Format a sum of costs for people, followed by `of`: its limit.

    A sum with unknown parts is a lower bound: `at least $0.12, 2 calls unknown`.
    """
    if not unknown_calls:
        return f"{format_usd(nanos)}{of}"
    calls = f"{unknown_calls:,} call{'' if unknown_calls == 1 else 's'}"
    return f"at least {format_usd(nanos)}{of}, {calls} unknown" if nanos else f"unknown ({calls}){of}"
