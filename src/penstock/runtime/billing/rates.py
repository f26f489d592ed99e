"""The price of a model's tokens, as exact integers.

A cost is rounded up to a whole nano-dollar. Knows nothing of models, budgets or the source of prices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal

from penstock.errors import InvalidValue
from penstock.money import NANOS_PER_USD, Usd, is_decimal
from penstock.runtime.billing.usage import Usage

MAX_RATE_USD = 10**9
_YOCTOS_PER_USD = 10**24
"""Rates are held in yocto-dollars per token: published ones have up to 18 decimals per million tokens."""
_YOCTOS_PER_NANO = _YOCTOS_PER_USD // NANOS_PER_USD
MTOK = 1_000_000
EXACT = Context(prec=100, rounding=ROUND_CEILING, traps=[])
"""Used instead of the thread's context, which may have another precision."""


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a model's tokens, in US dollars per million."""

    input_usd_per_mtok: Usd
    output_usd_per_mtok: Usd | None
    """None for a model without output, such as an embedding: output tokens then have no known cost."""
    cached_input_usd_per_mtok: Usd | None = None
    """None if input read from the provider's cache costs the same as other input."""
    cache_write_usd_per_mtok: Usd | None = None
    """None if input written to the provider's cache costs the same as other input."""
    request_usd: Usd = 0
    """Price of each call in addition to its tokens."""
    tiers: tuple[tuple[int, Price], ...] = ()
    """Ascending thresholds: a call with more input tokens pays the threshold's price for all its tokens."""
    _input: int = field(init=False, repr=False, compare=False)
    _output: int = field(init=False, repr=False, compare=False)
    _cached: int = field(init=False, repr=False, compare=False)
    _written: int = field(init=False, repr=False, compare=False)
    _request: int = field(init=False, repr=False, compare=False)
    _max_input: int = field(init=False, repr=False, compare=False)
    """Highest price of an input token."""

    def __post_init__(self) -> None:
        plain = self._hold("input_usd_per_mtok", "_input", missing=None)
        self._hold("output_usd_per_mtok", "_output", missing=0)
        cached = self._hold("cached_input_usd_per_mtok", "_cached", missing=plain)
        written = self._hold("cache_write_usd_per_mtok", "_written", missing=plain)
        object.__setattr__(self, "_max_input", max(plain, cached, written))
        self._hold("request_usd", "_request", missing=None, per=1)
        _check_tiers(self.tiers)

    def cost_nanos(self, usage: Usage) -> int:
        """Return the cost of `usage`, rounded up to a whole nano-dollar; tokens without a price cost nothing."""
        plain = usage.input_tokens
        price = self._for(plain) if self.tiers else self
        yoctos = price._request + usage.output_tokens * price._output
        cached, written = usage.cached_input_tokens, usage.cache_write_tokens
        if cached or written:
            yoctos += cached * price._cached + written * price._written
            plain = max(0, plain - cached - written)
        return to_nanos(yoctos + plain * price._input)

    def covers(self, usage: Usage) -> bool:
        """Whether every token of `usage` has a price; if not, `cost_nanos` is a lower bound."""
        price = self._for(usage.input_tokens) if self.tiers else self
        return price.output_usd_per_mtok is not None or usage.output_tokens == 0

    def worst_case_nanos(self, input_tokens: int, max_output_tokens: int) -> int | None:
        """Return the maximum cost of a call with at most these tokens; None if the output has no price."""
        if not type(input_tokens) is type(max_output_tokens) is int or input_tokens < 0 or max_output_tokens < 0:
            check_count("input_tokens", input_tokens)
            check_count("max_output_tokens", max_output_tokens)
        if not self.tiers:  # the common case, before every call
            if self.output_usd_per_mtok is None and max_output_tokens:
                return None
            return self._most(input_tokens, max_output_tokens)
        reachable = [self, *(price for threshold, price in self.tiers if threshold < input_tokens)]
        if max_output_tokens and any(price.output_usd_per_mtok is None for price in reachable):
            return None
        return max(price._most(input_tokens, max_output_tokens) for price in reachable)

    def _most(self, input_tokens: int, output_tokens: int) -> int:
        return to_nanos(self._request + input_tokens * self._max_input + output_tokens * self._output)

    def _for(self, input_tokens: int) -> Price:
        for threshold, price in reversed(self.tiers):
            if input_tokens > threshold:
                return price
        return self

    def _hold(self, name: str, slot: str, missing: int | None, per: int = MTOK) -> int:
        """Convert the field `name` to an exact decimal, and keep it in `slot` as yocto-dollars per token."""
        given = getattr(self, name)
        if given is None and missing is not None:
            amount, yoctos = None, missing
        else:
            amount = _amount(given, name)
            yoctos = to_yoctos(amount, per)
        object.__setattr__(self, name, amount)
        object.__setattr__(self, slot, yoctos)
        return yoctos


def _amount(given: object, name: str) -> Decimal:
    expected = "a finite, non-negative number of US dollars (float, int, Decimal or str), at most 10**9"
    if isinstance(given, bool) or not isinstance(given, (int, float, Decimal, str)):
        raise InvalidValue(name, given, expected)
    if isinstance(given, str) and not is_decimal(given):
        raise InvalidValue(name, given, expected)
    # A float is read by its repr: 0.1 is exactly a tenth.
    amount = Decimal(repr(given) if isinstance(given, float) else given, EXACT)
    if not (amount.is_finite() and 0 <= amount <= MAX_RATE_USD):
        raise InvalidValue(name, given, expected)
    return amount


def to_yoctos(amount: Decimal, per: int = 1) -> int:
    """US dollars per `per` tokens as yocto-dollars per token, rounded up."""
    return int(EXACT.to_integral_value(EXACT.multiply(amount, Decimal(_YOCTOS_PER_USD // per))))


def to_nanos(yoctos: int) -> int:
    return -(-yoctos // _YOCTOS_PER_NANO)


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidValue(name, value, "a whole number of tokens, 0 or more")


def _check_tiers(tiers: tuple[tuple[int, object], ...]) -> None:
    last = -1
    for threshold, price in tiers:
        check_count("tiers", threshold)
        if threshold <= last or not isinstance(price, Price) or price.tiers:
            raise InvalidValue("tiers", tiers, "ascending thresholds, each with a price that has no tiers itself")
        last = threshold
