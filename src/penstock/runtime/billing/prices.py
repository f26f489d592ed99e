"""Prices of models.

A registered price comes first, then that of genai-prices; without either, the call is refused, charged an assumed
price, or counted as of unknown cost. Everything works without genai-prices. Knows nothing of budgets.

The table of genai-prices takes up to seconds to load, once per process. A look-up loads it in place if necessary. Code
on an event loop checks `must_load_for` before a look-up and awaits `aload`, which loads the table on a thread.

A model is looked up once: its rates become a `Price` of exact integers, which rounds up to a whole nano-dollar. Before
a price from genai-prices is used, it is compared with that package's own calculation, at and above each tier's
threshold; on a mismatch there is no price, so that an incompatible change there shows as unknown and not as wrong.

Prices distinguish only what a usage does: audio and image tokens, one-hour cache writes, searches and service tiers
count as plain tokens at the standard rate. For more precision, report the cost.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.errors import InvalidValue
from penstock.money import NANOS_PER_USD, Usd, is_decimal
from penstock.runtime.billing.usage import MAX_NAME, Usage

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice

Source = Literal["reported", "registered", "genai-prices", "assumed", "unknown"]
Unknown = Literal["refuse", "assume", "count"]

KEPT_LOOK_UPS = 10_000
MAX_REPORTED = 1_000
"""Maximum number of models without a price that are reported in the log."""
MAX_RATE_USD = 10**9

_YOCTOS_PER_USD = 10**24
"""Rates are held in yocto-dollars per token: published ones have up to 18 decimals per million tokens."""
_YOCTOS_PER_NANO = _YOCTOS_PER_USD // NANOS_PER_USD
_MTOK = 1_000_000
_EXACT = Context(prec=100, rounding=ROUND_CEILING, traps=[])
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
        return _nanos(yoctos + plain * price._input)

    def covers(self, usage: Usage) -> bool:
        """Whether every token of `usage` has a price; if not, `cost_nanos` is a lower bound."""
        price = self._for(usage.input_tokens) if self.tiers else self
        return price.output_usd_per_mtok is not None or usage.output_tokens == 0

    def worst_case_nanos(self, input_tokens: int, max_output_tokens: int) -> int | None:
        """Return the maximum cost of a call with at most these tokens; None if the output has no price."""
        if not type(input_tokens) is type(max_output_tokens) is int or input_tokens < 0 or max_output_tokens < 0:
            _check_count("input_tokens", input_tokens)
            _check_count("max_output_tokens", max_output_tokens)
        if not self.tiers:  # the common case, before every call
            if self.output_usd_per_mtok is None and max_output_tokens:
                return None
            return self._most(input_tokens, max_output_tokens)
        reachable = [self, *(price for threshold, price in self.tiers if threshold < input_tokens)]
        if max_output_tokens and any(price.output_usd_per_mtok is None for price in reachable):
            return None
        return max(price._most(input_tokens, max_output_tokens) for price in reachable)

    def _most(self, input_tokens: int, output_tokens: int) -> int:
        return _nanos(self._request + input_tokens * self._max_input + output_tokens * self._output)

    def _for(self, input_tokens: int) -> Price:
        for threshold, price in reversed(self.tiers):
            if input_tokens > threshold:
                return price
        return self

    def _hold(self, name: str, slot: str, missing: int | None, per: int = _MTOK) -> int:
        """Convert the field `name` to an exact decimal, and keep it in `slot` as yocto-dollars per token."""
        given = getattr(self, name)
        if given is None and missing is not None:
            amount, yoctos = None, missing
        else:
            amount = _amount(given, name)
            yoctos = _yoctos(amount, per)
        object.__setattr__(self, name, amount)
        object.__setattr__(self, slot, yoctos)
        return yoctos


class Cost(NamedTuple):
    """Cost of a call. If `known` is False, `nanos` is only the part that has a price, possibly 0."""

    nanos: int
    known: bool
    source: Source


UNKNOWN_COST = Cost(0, False, "unknown")


class PriceBook:
    """Looks up prices, and decides for models without one.

    `unknown` is "count" (the call may run and its cost is counted as unknown), "assume" (it costs the `assumed` price,
    which should be an upper bound) or "refuse" (the caller checks `is_priced` first, and refuses other calls).
    """

    def __init__(
        self,
        *,
        registered: Mapping[str, Price] | None = None,
        unknown: Unknown = "count",
        assumed: Price | None = None,
        use_genai_prices: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if unknown not in ("refuse", "assume", "count"):
            raise InvalidValue("unknown", unknown, "'refuse', 'assume' or 'count'")
        if not isinstance(assumed, Price if unknown == "assume" else type(None)):
            raise InvalidValue("assumed", assumed, "a Price if unknown is 'assume', and None otherwise")
        self.unknown: Unknown = unknown
        self.assumed = assumed
        self._registered: dict[str, Price] = {}
        self._uses_genai_prices = use_genai_prices
        self.is_pending = use_genai_prices
        """Whether the table of genai-prices is used and not loaded yet."""
        self._loading: asyncio.Future[None] | None = None
        """The latest load started by `aload`."""
        self._clock = clock
        self._reported: set[str] = set()
        """Models without a price that were reported in the log."""
        self._look_up = lru_cache(maxsize=KEPT_LOOK_UPS)(_look_up)
        for model, price in (registered or {}).items():
            self.register(model, price)

    def register(self, model: str, price: Price) -> None:
        """Set the price of `model`, which takes precedence over genai-prices; may be called from any thread."""
        if not _is_name(model):
            raise InvalidValue("model", model, f"a model name of 1 to {MAX_NAME} characters")
        if not isinstance(price, Price):
            raise InvalidValue("price", price, "a Price")
        self._registered[model] = price

    def load(self) -> None:
        """Load the table of genai-prices, if it is used; blocks, and may be called from any thread."""
        if self.is_pending:
            with _one_at_a_time:
                _load_table()
            self.is_pending = False

    async def aload(self) -> None:
        """Load the table of genai-prices on a thread, if it is used, without blocking the event loop."""
        if not self.is_pending:
            return
        loop, loading = asyncio.get_running_loop(), self._loading
        if loading is None or loading.done() or loading.get_loop() is not loop:
            try:
                loading = self._loading = loop.run_in_executor(None, self.load)
            except RuntimeError:  # a loop without threads, such as a simulated one
                self.load()
                return
        # Shielded: another task may wait for the same load.
        await asyncio.shield(loading)

    def must_load_for(self, model: str | None, otherwise: str | None = None) -> bool:
        """Whether looking up the price of a call of `model` would load the table first."""
        if not self.is_pending:
            return False
        names = [name for name in (model, otherwise) if _is_name(name)]
        return bool(names) and self._registered_price(names) is None

    @property
    def available(self) -> bool:
        """Whether genai-prices is installed and used; imports it, which takes a moment."""
        return self._uses_genai_prices and _genai() is not None

    def price_of(self, model: str) -> Price | None:
        """Return the current price of `model`; None if it is unknown. The assumed price does not count."""
        found = self._find(model)
        return None if found is None else found[0]

    def is_priced(self, model: str | None) -> bool:
        """Whether a call of `model` can be charged, if only at the assumed price."""
        return self.unknown == "assume" or self._find(model) is not None

    def report_unpriced(self, model: str) -> str:
        """Return the warning about a model without a price; logged once for each model."""
        otherwise = "refuse such calls (PriceBook(unknown='refuse'))"
        if self.unknown == "refuse":  # only the answer has named the model
            otherwise = "name the model in the call, so that it is refused"
        facts = f"model {model!r} has no known price, so its calls are not limited by cost"
        message = f"{facts}: register a price for it (PriceBook.register), or {otherwise}"
        if model not in self._reported and len(self._reported) < MAX_REPORTED:
            import logging  # rarely needed, and slow to import

            self._reported.add(model)
            logging.getLogger("penstock.prices").warning(message)
        return message

    def cost(self, usage: Usage | None, model: str | None = None) -> Cost:
        """Return the cost of `usage`: as reported, else by price, else by the rule for unknown prices.

        The model in the usage takes precedence over `model`, the one in the request: "gpt-4o" is served by a dated
        model whose price may differ. A price registered for either takes precedence over genai-prices.
        """
        if usage is None:
            return UNKNOWN_COST
        if usage.cost_nanos is not None:
            return Cost(usage.cost_nanos, True, "reported")
        found = self._find(usage.model, model)
        if found is not None:
            price, source = found
            if price.covers(usage):
                return Cost(price.cost_nanos(usage), True, source)
        if self.assumed is not None:
            return Cost(self.assumed.cost_nanos(usage), self.assumed.covers(usage), "assumed")
        return UNKNOWN_COST if found is None else Cost(found[0].cost_nanos(usage), False, found[1])

    def worst_case_nanos(self, model: str | None, input_tokens: int, max_output_tokens: int) -> int | None:
        """Return the maximum cost of a call with at most these tokens; None if it is unknown."""
        found = self._find(model)
        price = self.assumed if found is None else found[0]
        return None if price is None else price.worst_case_nanos(input_tokens, max_output_tokens)

    def _find(self, model: str | None, otherwise: str | None = None) -> tuple[Price, Source] | None:
        first = otherwise if model is None else model
        if type(first) is str and (known := self._registered.get(first)) is not None:
            return known, "registered"  # fast path: looked up twice in every call
        names = [name for name in (model, otherwise) if _is_name(name)]
        if (price := self._registered_price(names)) is not None:
            return price, "registered"
        for name in names if self._uses_genai_prices else ():
            quote = self._look_up(name)
            self.is_pending = False
            price = quote.at(utc_from_ns(self._clock.time_ns())) if isinstance(quote, _Timetable) else quote
            if price is not None:
                return price, "genai-prices"
        return None

    def _registered_price(self, names: Sequence[str]) -> Price | None:
        for name in names if self._registered else ():
            price = self._registered.get(name) or self._registered.get(name.rpartition("/")[2])
            if price is not None:
                return price
        return None


_BEDROCK_NAME = re.compile(
    r"(?:[a-z]{2,6}(?:-gov)?\.)?"
    r"(?:ai21|amazon|anthropic|cohere|deepseek|meta|minimax|mistral|moonshot|nvidia|openai|qwen|stability|writer|zai)\."
)
"""Names of models on Bedrock: the vendor with a dot, behind the region of an inference profile."""


class _Timetable:
    """A model whose price depends on the date or the hour, looked up at every call."""

    __slots__ = ("_model", "_prices")

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._prices: dict[int, Price | None] = {}

    def at(self, moment: datetime) -> Price | None:
        rates = self._model.get_prices(moment)
        key = id(rates)  # stable: the model keeps its rates alive
        if key not in self._prices:
            self._prices[key] = _price_from(rates)
        return self._prices[key]


def _look_up(name: str) -> Price | _Timetable | None:
    """Return the price at genai-prices of the first spelling of `name` that it knows."""
    genai_prices = _genai()
    if genai_prices is None:
        return None
    for model, provider in _spellings(name):
        try:
            found = genai_prices.calc_price(genai_prices.Usage(), model, provider_id=provider).model
        except Exception:  # LookupError for an unknown name, others for invalid data
            continue
        return _Timetable(found) if isinstance(found.prices, list) else _price_from(found.prices)
    return None


def _spellings(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield `name` itself; its first part as the provider ("azure/gpt-4o"); its last part ("models/gpt-4o")."""
    yield name, _provider_of(name)
    provider, slash, rest = name.partition("/")
    if slash:
        yield rest, provider
        last = name.rpartition("/")[2]
        yield last, _provider_of(last)


def _provider_of(name: str) -> str | None:
    """Return the provider of a name that genai-prices knows only together with it; None for other names."""
    if _BEDROCK_NAME.match(name):
        return "aws"
    return "openai" if name.startswith("text-embedding-") else None


def _genai() -> Any:
    """Return the module genai_prices; None if it is not installed or cannot be imported."""
    try:
        import genai_prices
    except Exception:
        return None
    return genai_prices


_one_at_a_time = threading.Lock()
"""Held while the table is loaded: a second thread waits for it instead of loading it too."""


def _load_table() -> None:
    """Import genai-prices, and look up one model: its table is built at the first look-up."""
    if (genai_prices := _genai()) is not None:
        with suppress(Exception):  # as in a look-up: unreadable data means no price
            genai_prices.calc_price(genai_prices.Usage(), "gpt-4o")


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
    return Price(plain, output, cached, written, request_usd=_EXACT.divide(per_thousand or Decimal(0), Decimal(1000)))


def _rate_for(rate: Any, input_tokens: int) -> Any:
    if rate is None or isinstance(rate, Decimal):
        return rate
    return next((tier.price for tier in reversed(rate.tiers) if input_tokens > tier.start), rate.base)


def _probes(starts: Sequence[int]) -> Iterator[int]:
    """Yield input sizes that exercise every rate, and both sides of every threshold."""
    ends = [*starts, (starts[-1] if starts else 0) + _MTOK]
    for start, end in zip([0, *(start + 1 for start in starts)], ends, strict=True):
        yield start
        yield end


def _agrees(price: Price, rates: ModelPrice, input_tokens: int) -> bool:
    """Whether genai-prices itself computes the same cost for a call with every kind of token."""
    outputs = 0 if price.output_usd_per_mtok is None else 70_001
    usage = Usage(input_tokens, outputs, input_tokens // 3, input_tokens // 5)
    counted = _genai().Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    return price.cost_nanos(usage) == _nanos(_yoctos(rates.calc_price(counted)["total_price"]))


def _amount(given: object, name: str) -> Decimal:
    expected = "a finite, non-negative number of US dollars (float, int, Decimal or str), at most 10**9"
    if isinstance(given, bool) or not isinstance(given, (int, float, Decimal, str)):
        raise InvalidValue(name, given, expected)
    if isinstance(given, str) and not is_decimal(given):
        raise InvalidValue(name, given, expected)
    # A float is read by its repr: 0.1 is exactly a tenth.
    amount = Decimal(repr(given) if isinstance(given, float) else given, _EXACT)
    if not (amount.is_finite() and 0 <= amount <= MAX_RATE_USD):
        raise InvalidValue(name, given, expected)
    return amount


def _yoctos(amount: Decimal, per: int = 1) -> int:
    """US dollars per `per` tokens as yocto-dollars per token, rounded up."""
    return int(_EXACT.to_integral_value(_EXACT.multiply(amount, Decimal(_YOCTOS_PER_USD // per))))


def _nanos(yoctos: int) -> int:
    return -(-yoctos // _YOCTOS_PER_NANO)


def _is_name(model: object) -> TypeGuard[str]:
    return isinstance(model, str) and 0 < len(model) <= MAX_NAME


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidValue(name, value, "a whole number of tokens, 0 or more")


def _check_tiers(tiers: tuple[tuple[int, object], ...]) -> None:
    last = -1
    for threshold, price in tiers:
        _check_count("tiers", threshold)
        if threshold <= last or not isinstance(price, Price) or price.tiers:
            raise InvalidValue("tiers", tiers, "ascending thresholds, each with a price that has no tiers itself")
        last = threshold


_DEFAULT = PriceBook()  # imports nothing until the first look-up


def default_prices() -> PriceBook:
    """Return the default price book, shared by the whole process."""
    return _DEFAULT
