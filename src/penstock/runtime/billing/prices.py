"""Prices of models.

A registered price comes first, then that of genai-prices; without either, the call is refused, charged an assumed
price, or counted as of unknown cost. Everything works without genai-prices. Knows nothing of budgets.

The table of genai-prices takes up to seconds to make, in a process of its own (`price_table`), and milliseconds to read
where an earlier process has kept it. A look-up waits for it if necessary. Code on an event loop checks `must_load_for`
before a look-up and awaits `aload`, which waits on a thread; sync calls on an event loop start the process before their
function runs (`begin_load`), so that the function and the process run at the same time.

Prices make the same distinctions as a usage: audio and image tokens, one-hour cache writes, searches and service tiers
count as plain tokens at the standard rate. For more precision, report the cost.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeGuard

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.errors import InvalidValue
from penstock.runtime.billing.rates import Price as Price
from penstock.runtime.billing.usage import MAX_NAME, Usage

if TYPE_CHECKING:
    from penstock.runtime.billing.price_table import Export, PriceTable, Quote

Source = Literal["reported", "registered", "genai-prices", "assumed", "unknown"]
Unknown = Literal["refuse", "assume", "count"]

KEPT_LOOK_UPS = 10_000
MAX_REPORTED = 1_000
"""Maximum number of models without a price that are reported in the log."""


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
            _the_table()
            self.is_pending = False

    async def aload(self) -> None:
        """Load the table of genai-prices, if it is used, without blocking the event loop."""
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

    def begin_load(self, model: str) -> None:
        """Start loading the table if a call of `model` needs it and this thread has an event loop to keep free.

        Does not wait for a table that has to be made; `load` waits for the rest.
        """
        if asyncio._get_running_loop() is not None and self.must_load_for(model):
            _begin()

    def must_load_for(self, model: str | None, otherwise: str | None = None) -> bool:
        """Whether looking up the price of a call of `model` would load the table first."""
        if not self.is_pending:
            return False
        names = [name for name in (model, otherwise) if _is_name(name)]
        return bool(names) and self._registered_price(names) is None

    @property
    def available(self) -> bool:
        """Whether genai-prices is installed and used."""
        from penstock.runtime.billing.price_table import is_installed  # not needed by a program without prices

        return self._uses_genai_prices and is_installed()

    def price_of(self, model: str) -> Price | None:
        """Return the current price of `model`; None if it is unknown. The assumed price does not count."""
        found = self._find(model)
        return None if found is None else found[0]

    def source_of(self, model: str) -> Source:
        """Return the source of the price of `model`; "assumed" or "unknown" if it has none."""
        found = self._find(model)
        if found is not None:
            return found[1]
        return "unknown" if self.assumed is None else "assumed"

    def is_priced(self, model: str | None) -> bool:
        """Whether a call of `model` can be charged, if only at the assumed price."""
        return self.unknown == "assume" or self._find(model) is not None

    def report_unpriced(self, model: str) -> str:
        """Return the warning about a model without a price; logged once for each model."""
        otherwise = "refuse such calls (PriceBook(unknown='refuse'), --unknown-prices refuse)"
        if self.unknown == "refuse":  # only the answer has named the model
            otherwise = "name the model in the call, so that it is refused"
        facts = f"model {model!r} has no known price, so its calls are not limited by cost"
        message = f"{facts}: register a price for it (PriceBook.register, --prices), or {otherwise}"
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
            price = None if quote is None else quote.at(utc_from_ns(self._clock.time_ns()))
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


def _look_up(name: str) -> Quote | None:
    """Return the price at genai-prices of the first spelling of `name` that it knows."""
    table = _the_table()
    for model, provider in _spellings(name):
        if (quote := table.find(model, provider)) is not None:
            return quote
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


_one_at_a_time = threading.Lock()
"""Held while the table is loaded: a second thread waits for it instead of loading it too."""
_table: PriceTable | None = None
_export: Export | None = None
"""The process that was started before the table was needed."""


def _begin() -> None:
    """Read the table if it is kept, or start the process that exports it; unless it is loaded or being loaded."""
    global _table, _export
    if _table is None and _export is None and _one_at_a_time.acquire(blocking=False):
        try:
            from penstock.runtime.billing.price_table import kept_table, start_export  # not needed without prices

            _table = kept_table()
            _export = None if _table is not None else start_export()
        finally:
            _one_at_a_time.release()


def _the_table() -> PriceTable:
    """Return the table of genai-prices, which is loaded once for all price books; blocks meanwhile."""
    global _table, _export
    if _table is None:
        with _one_at_a_time:
            if _table is None:
                from penstock.runtime.billing.price_table import load_table  # not needed by a program without prices

                export, _export = _export, None
                _table = load_table(export)
    return _table


def _is_name(model: object) -> TypeGuard[str]:
    return isinstance(model, str) and 0 < len(model) <= MAX_NAME


_DEFAULT = PriceBook()  # imports nothing until the first look-up


def default_prices() -> PriceBook:
    """Return the default price book, shared by the whole process."""
    return _DEFAULT
