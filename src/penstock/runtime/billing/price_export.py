"""The table of genai-prices as lines of JSON.

genai-prices takes up to seconds to import, during which every other thread of the process waits for the interpreter
lock, an event loop included. So a process of its own imports it and writes the table, and `price_table` reads it.

One line for each provider, followed by one for each of its models, then an end line. A matcher is `[kind, argument]`.
The prices of a model are a list of `[condition, price]`; with several, the last whose condition is met applies.

Before a price is written, it is compared with the calculation of genai-prices itself, at and above each tier's
threshold; on a mismatch the model has no price. A matcher or a condition that is not known here ends the export: an
incompatible change there shows as unknown prices and not as wrong ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from penstock.runtime.billing.price_cache import Cache
from penstock.runtime.billing.rates import EXACT, MTOK, Price, to_nanos, to_yoctos
from penstock.runtime.billing.usage import Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice, Provider

END = "end"
TEXT_MATCHERS = {
    "ClauseStartsWith": "starts_with",
    "ClauseEndsWith": "ends_with",
    "ClauseContains": "contains",
    "ClauseEquals": "equals",
}
LIST_MATCHERS = {"ClauseOr": "or", "ClauseAnd": "and"}


def lines() -> Iterator[str]:
    """Import genai-prices, and yield its table."""
    prices = _Prices()
    for provider in get_providers():
        matchers = [_matcher(one) for one in (provider.model_match, provider.provider_match)]
        yield json.dumps(["provider", provider.id, *matchers, provider.fallback_model_providers or []])
        for model in provider.models:
            yield json.dumps(["model", _matcher(model.match), prices.of(model.prices)])
    yield json.dumps([END])


def get_providers() -> list[Provider]:
    """Return the providers that genai-prices knows."""
    from genai_prices.data_snapshot import get_snapshot

    return get_snapshot().providers


def main() -> None:
    """Write the table to stdout, and keep it for other processes."""
    cache = Cache.find()  # before genai-prices is imported: the sources may change meanwhile
    table = list(lines())
    sys.stdout.writelines(f"{line}\n" for line in table)
    sys.stdout.flush()
    if cache is not None:
        cache.write(table)


def _matcher(clause: Any) -> list[Any] | None:
    if clause is None:
        return None
    kind = type(clause).__name__
    if kind in TEXT_MATCHERS:
        return [TEXT_MATCHERS[kind], getattr(clause, TEXT_MATCHERS[kind]).lower()]
    if kind in LIST_MATCHERS:
        return [LIST_MATCHERS[kind], [_matcher(one) for one in getattr(clause, f"{LIST_MATCHERS[kind]}_")]]
    if kind == "ClauseRegex":
        return ["regex", clause.regex]
    raise TypeError(f"genai-prices has a matcher that is not known here: {kind}")


class _Prices:
    """Converts prices, each different one once."""

    def __init__(self) -> None:
        self._converted: dict[str, list[Any] | None] = {}

    def of(self, prices: Any) -> list[Any]:
        if not isinstance(prices, list):
            return [[None, self._price(prices)]]
        return [[_condition(one.constraint), self._price(one.prices)] for one in prices]

    def _price(self, rates: ModelPrice) -> list[Any] | None:
        key = repr(sorted(vars(rates).items()))
        if key not in self._converted:
            price = _price_from(rates)
            self._converted[key] = None if price is None else _fields(price)
        return self._converted[key]


def _condition(constraint: Any) -> list[str] | None:
    """A condition in UTC: the date from which a price applies, or its hours."""
    if constraint is None:
        return None
    kind = type(constraint).__name__
    if kind == "StartDateConstraint":
        return ["from", constraint.start_date.isoformat()]
    if kind == "TimeOfDateConstraint":
        return ["between", *(_utc_time(one) for one in (constraint.start_time, constraint.end_time))]
    raise TypeError(f"genai-prices has a condition that is not known here: {kind}")


def _utc_time(time: Any) -> str:
    aware = datetime.combine(date(2000, 1, 1), time, time.tzinfo or UTC)
    return aware.astimezone(UTC).time().isoformat()


def _fields(price: Price) -> list[Any]:
    rates = (
        price.input_usd_per_mtok,
        price.output_usd_per_mtok,
        price.cached_input_usd_per_mtok,
        price.cache_write_usd_per_mtok,
        price.request_usd,
    )
    return [
        *(None if rate is None else str(rate) for rate in rates),
        [[start, _fields(tier)] for start, tier in price.tiers],
    ]


def _price_from(rates: ModelPrice) -> Price | None:
    """Convert rates of genai-prices to a price; None if they are not per token, or the results differ."""
    try:
        starts = sorted({tier.start for rate in _rates(rates) for tier in getattr(rate, "tiers", ())})
        tiers = tuple((start, _flat(rates, start + 1)) for start in starts)
        price = replace(_flat(rates, 0), tiers=tiers)
        return price if all(_agrees(price, rates, tokens) for tokens in _probes(starts)) else None
    except Exception:  # unreadable data means no price
        return None


def _rates(rates: ModelPrice) -> tuple[Any, Any, Any, Any]:
    return rates.input_mtok, rates.output_mtok, rates.cache_read_mtok, rates.cache_write_mtok


def _flat(rates: ModelPrice, input_tokens: int) -> Price:
    """Return the price of calls with that many input tokens."""
    plain, output, cached, written = (_rate_for(rate, input_tokens) for rate in _rates(rates))
    per_thousand: Any = rates.requests_kcount
    return Price(plain, output, cached, written, request_usd=EXACT.divide(per_thousand or Decimal(0), Decimal(1000)))


def _rate_for(rate: Any, input_tokens: int) -> Any:
    if rate is None or isinstance(rate, Decimal):
        return rate
    return next((tier.price for tier in reversed(rate.tiers) if input_tokens > tier.start), rate.base)


def _probes(starts: Sequence[int]) -> Iterator[int]:
    """Yield input sizes that exercise every rate, and both sides of every threshold."""
    ends = [*starts, (starts[-1] if starts else 0) + MTOK]
    for start, end in zip([0, *(start + 1 for start in starts)], ends, strict=True):
        yield start
        yield end


def _agrees(price: Price, rates: ModelPrice, input_tokens: int) -> bool:
    """Whether genai-prices itself computes the same cost for a call with every kind of token."""
    import genai_prices

    outputs = 0 if price.output_usd_per_mtok is None else 70_001
    usage = Usage(input_tokens, outputs, input_tokens // 3, input_tokens // 5)
    counted = genai_prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    return price.cost_nanos(usage) == to_nanos(to_yoctos(rates.calc_price(counted)["total_price"]))
