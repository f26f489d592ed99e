"""What does a model cost?

A price that somebody registered, else the one genai-prices knows, else none; what then is refused, assumed or counted
as unknown. genai-prices is imported at the first look-up, and everything works without it. Knows nothing of budgets.

A model is looked up once: its rates become a `Price`, which is integers, exact, and rounds up to a whole nano-dollar.
Before a price from genai-prices is used, it is held against that package's own calculation, on and above each tier's
threshold; a price that does not agree is no price, so that a change over there shows as unknown and not as wrong.

What a usage does not tell apart is not priced apart: audio and image tokens, one-hour cache writes, searches and
service tiers count as plain tokens at the standard rate. Whoever needs more precision reports the cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
MAX_RATE_USD = 10**9

_YOCTOS_PER_USD = 10**24
"""Rates are held in yocto-dollars per token: published ones have up to 18 decimals per million tokens."""
_YOCTOS_PER_NANO = _YOCTOS_PER_USD // NANOS_PER_USD
_MTOK = 1_000_000
_EXACT = Context(prec=100, rounding=ROUND_CEILING, traps=[])
"""Our own, because the caller's thread may have set another precision."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a model's tokens cost, in US dollars per million."""

    input_usd_per_mtok: Usd
    output_usd_per_mtok: Usd | None
    """None for a model that sells no output, such as an embedding: output tokens then have no known cost."""
    cached_input_usd_per_mtok: Usd | None = None
    """None if input read from the provider's cache costs what other input costs."""
    cache_write_usd_per_mtok: Usd | None = None
    """None if input written to the provider's cache costs what other input costs."""
    request_usd: Usd = 0
    """What each call costs beside its tokens."""
    tiers: tuple[tuple[int, Price], ...] = ()
    """Thresholds, ascending: a call with more input tokens than that pays, for all its tokens, the price beside it."""
    _input: int = field(init=False, repr=False, compare=False)
    _output: int = field(init=False, repr=False, compare=False)
    _cached: int = field(init=False, repr=False, compare=False)
    _written: int = field(init=False, repr=False, compare=False)
    _request: int = field(init=False, repr=False, compare=False)
    _dearest: int = field(init=False, repr=False, compare=False)
    """What a token of input costs at most."""

    def __post_init__(self) -> None:
        plain = self._hold("input_usd_per_mtok", "_input", missing=None)
        self._hold("output_usd_per_mtok", "_output", missing=0)
        cached = self._hold("cached_input_usd_per_mtok", "_cached", missing=plain)
        written = self._hold("cache_write_usd_per_mtok", "_written", missing=plain)
        object.__setattr__(self, "_dearest", max(plain, cached, written))
        self._hold("request_usd", "_request", missing=None, per=1)
        _check_tiers(self.tiers)

    def cost_nanos(self, usage: Usage) -> int:
        """What `usage` costs, rounded up to a whole nano-dollar; tokens that have no price count as nothing."""
        plain = usage.input_tokens
        price = self._for(plain) if self.tiers else self
        yoctos = price._request + usage.output_tokens * price._output
        cached, written = usage.cached_input_tokens, usage.cache_write_tokens
        if cached or written:
            yoctos += cached * price._cached + written * price._written
            plain = max(0, plain - cached - written)
        return _nanos(yoctos + plain * price._input)

    def covers(self, usage: Usage) -> bool:
        """Whether every token of `usage` has a price here; if not, its cost is at least what `cost_nanos` says."""
        price = self._for(usage.input_tokens) if self.tiers else self
        return price.output_usd_per_mtok is not None or usage.output_tokens == 0

    def worst_case_nanos(self, input_tokens: int, max_output_tokens: int) -> int | None:
        """The most that a call can cost with no more tokens than these; None if the output has no price."""
        if not type(input_tokens) is type(max_output_tokens) is int or input_tokens < 0 or max_output_tokens < 0:
            _check_count("input_tokens", input_tokens)
            _check_count("max_output_tokens", max_output_tokens)
        if not self.tiers:  # as most prices are, and asked before every call
            if self.output_usd_per_mtok is None and max_output_tokens:
                return None
            return self._most(input_tokens, max_output_tokens)
        reachable = [self, *(price for above, price in self.tiers if above < input_tokens)]
        if max_output_tokens and any(price.output_usd_per_mtok is None for price in reachable):
            return None
        return max(price._most(input_tokens, max_output_tokens) for price in reachable)

    def _most(self, input_tokens: int, output_tokens: int) -> int:
        return _nanos(self._request + input_tokens * self._dearest + output_tokens * self._output)

    def _for(self, input_tokens: int) -> Price:
        for above, price in reversed(self.tiers):
            if input_tokens > above:
                return price
        return self

    def _hold(self, name: str, slot: str, missing: int | None, per: int = _MTOK) -> int:
        """Make the amount called `name` an exact decimal, and keep it in `slot` as yocto-dollars per token."""
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
    """What a call cost. `known` is False when `nanos` is only the part that could be priced, which may be nothing."""

    nanos: int
    known: bool
    source: Source


UNKNOWN_COST = Cost(0, False, "unknown")


class PriceBook:
    """Where prices are looked up, and what holds for a model that has none.

    `unknown` is "count" (the call may run and its cost is counted as unknown), "assume" (it costs what `assumed` says,
    which should be a ceiling) or "refuse" (the caller asks `is_priced` first, and does not run what is not).
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
        self._clock = clock
        self._look_up = lru_cache(maxsize=KEPT_LOOK_UPS)(_look_up)
        for model, price in (registered or {}).items():
            self.register(model, price)

    def register(self, model: str, price: Price) -> None:
        """Let `model` cost `price` from now on, whatever others say; may be called from any thread."""
        if not _is_name(model):
            raise InvalidValue("model", model, f"a model name of 1 to {MAX_NAME} characters")
        if not isinstance(price, Price):
            raise InvalidValue("price", price, "a Price")
        self._registered[model] = price

    @property
    def available(self) -> bool:
        """Whether genai-prices is installed and used; imports it, which takes a moment."""
        return self._uses_genai_prices and _genai() is not None

    def price_of(self, model: str) -> Price | None:
        """The price of `model` at this moment; None if none is known. The assumed price is not a known one."""
        found = self._find(model)
        return None if found is None else found[0]

    def is_priced(self, model: str | None) -> bool:
        """Whether a call of `model` can be charged, be it at the assumed price."""
        return self.unknown == "assume" or self._find(model) is not None

    def cost(self, usage: Usage | None, model: str | None = None) -> Cost:
        """What `usage` cost: as reported, else by price, else by what holds for unknown prices.

        The model that the usage names comes before `model`, the name the call was made with: "gpt-4o" is answered by a
        dated model whose price may differ. A price registered for either comes before genai-prices.
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
        """The most that a call can cost with no more tokens than these; None if that is not known."""
        found = self._find(model)
        price = self.assumed if found is None else found[0]
        return None if price is None else price.worst_case_nanos(input_tokens, max_output_tokens)

    def _find(self, model: str | None, otherwise: str | None = None) -> tuple[Price, Source] | None:
        first = otherwise if model is None else model
        if type(first) is str and (known := self._registered.get(first)) is not None:
            return known, "registered"  # asked twice for every call
        names = [name for name in (model, otherwise) if _is_name(name)]
        for name in names if self._registered else ():
            price = self._registered.get(name) or self._registered.get(name.rpartition("/")[2])
            if price is not None:
                return price, "registered"
        for name in names if self._uses_genai_prices else ():
            quote = self._look_up(name)
            price = quote.at(utc_from_ns(self._clock.time_ns())) if isinstance(quote, _Timetable) else quote
            if price is not None:
                return price, "genai-prices"
        return None


class _Timetable:
    """A model whose price depends on the date or the hour: which one holds is asked at every call."""

    __slots__ = ("_model", "_prices")

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._prices: dict[int, Price | None] = {}

    def at(self, moment: datetime) -> Price | None:
        rates = self._model.get_prices(moment)
        key = id(rates)  # the model keeps its rates, so the id stays theirs
        if key not in self._prices:
            self._prices[key] = _price_from(rates)
        return self._prices[key]


def _look_up(name: str) -> Price | _Timetable | None:
    """What genai-prices says of the first spelling of `name` that it knows."""
    genai_prices = _genai()
    if genai_prices is None:
        return None
    for model, provider in _spellings(name):
        try:
            found = genai_prices.calc_price(genai_prices.Usage(), model, provider_id=provider).model
        except Exception:  # LookupError for a name it does not know, others for data it cannot work with
            continue
        return _Timetable(found) if isinstance(found.prices, list) else _price_from(found.prices)
    return None


def _spellings(name: str) -> Iterator[tuple[str, str | None]]:
    """`name` as it is; its first part as the provider, as in "azure/gpt-4o"; its last part, as in "models/gpt-4o"."""
    yield name, None
    provider, slash, rest = name.partition("/")
    if slash:
        yield rest, provider
        yield name.rpartition("/")[2], None


def _genai() -> Any:
    """The module genai_prices, or None if it is not installed or cannot be imported."""
    try:
        import genai_prices
    except Exception:
        return None
    return genai_prices


def _price_from(rates: ModelPrice) -> Price | None:
    """The rates of genai-prices as a price; None if they are not per token, or if the price would not say the same."""
    try:
        starts = sorted({tier.start for rate in _rates(rates) for tier in getattr(rate, "tiers", ())})
        tiers = tuple((start, _flat(rates, start + 1)) for start in starts)
        price = replace(_flat(rates, 0), tiers=tiers)
        return price if all(_agrees(price, rates, tokens) for tokens in _probes(starts)) else None
    except Exception:  # of data that cannot be read nothing is known
        return None


def _rates(rates: ModelPrice) -> tuple[Any, Any, Any, Any]:
    return rates.input_mtok, rates.output_mtok, rates.cache_read_mtok, rates.cache_write_mtok


def _flat(rates: ModelPrice, input_tokens: int) -> Price:
    """The price of calls with so many input tokens."""
    plain, output, cached, written = (_rate_for(rate, input_tokens) for rate in _rates(rates))
    per_thousand: Any = rates.requests_kcount
    return Price(plain, output, cached, written, request_usd=_EXACT.divide(per_thousand or Decimal(0), Decimal(1000)))


def _rate_for(rate: Any, input_tokens: int) -> Any:
    if rate is None or isinstance(rate, Decimal):
        return rate
    return next((tier.price for tier in reversed(rate.tiers) if input_tokens > tier.start), rate.base)


def _probes(starts: Sequence[int]) -> Iterator[int]:
    """Sizes of input that show every rate, and to which side of a threshold the threshold itself belongs."""
    ends = [*starts, (starts[-1] if starts else 0) + _MTOK]
    for start, end in zip([0, *(start + 1 for start in starts)], ends, strict=True):
        yield start
        yield end


def _agrees(price: Price, rates: ModelPrice, input_tokens: int) -> bool:
    """Whether genai-prices itself asks the same for a call with every kind of token."""
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
    # A float is the decimal it is shown as: 0.1 is a tenth.
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
    for above, price in tiers:
        _check_count("tiers", above)
        if above <= last or not isinstance(price, Price) or price.tiers:
            raise InvalidValue("tiers", tiers, "ascending thresholds, each with a price that has no tiers itself")
        last = above


_DEFAULT = PriceBook()  # imports and looks up nothing until it is asked


def default_prices() -> PriceBook:
    """The book that is used where none is given, shared by the whole process."""
    return _DEFAULT
