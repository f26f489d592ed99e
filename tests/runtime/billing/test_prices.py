"""A price is exact, rounds up, and is never silently nothing."""

from __future__ import annotations

import decimal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction
from math import ceil
from threading import Thread
from typing import Any

import genai_prices
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.runtime.billing import price_export
from penstock.runtime.billing import prices as prices_module
from penstock.runtime.billing.price_table import PriceTable
from penstock.runtime.billing.prices import Cost, Price, PriceBook, default_prices
from penstock.runtime.billing.usage import Usage

MILLION = 1_000_000
OURS = Price(2.5, 10, cached_input_usd_per_mtok=1.25, cache_write_usd_per_mtok="3.125")
CEILING = Price(100, 500)


class FixedClock:
    """A clock that stands at one moment."""

    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def monotonic_ns(self) -> int:
        return 0

    def time_ns(self) -> int:
        return int(self.moment.timestamp()) * 1_000_000_000


def book(**settings: Any) -> PriceBook:
    """A book that knows only what a test tells it."""
    return PriceBook(**{"use_genai_prices": False, **settings})


@pytest.mark.parametrize(
    ("usage", "nanos"),
    [
        (Usage(), 0),
        (Usage(MILLION), 2_500_000_000),
        (Usage(0, MILLION), 10_000_000_000),
        (Usage(MILLION, 0, MILLION), 1_250_000_000),
        (Usage(MILLION, 0, 0, MILLION), 3_125_000_000),
        (Usage(100, 20, 40, 10), 50 * 2500 + 40 * 1250 + 10 * 3125 + 20 * 10_000),
    ],
    ids=str,
)
def test_each_kind_of_token_costs_its_own_rate(usage: Usage, nanos: int) -> None:
    assert OURS.cost_nanos(usage) == nanos


def test_cached_and_written_input_without_a_rate_of_its_own_costs_what_input_costs() -> None:
    assert Price(3, 15).cost_nanos(Usage(90, 0, 30, 30)) == Price(3, 15).cost_nanos(Usage(90))


@pytest.mark.parametrize(("rate", "tokens", "nanos"), [("0.0000001", 1, 1), ("0.0375", 1, 38), (0.1, 10, 1000)])
def test_a_part_of_a_nano_dollar_is_rounded_up(rate: Any, tokens: int, nanos: int) -> None:
    assert Price(rate, 0).cost_nanos(Usage(tokens)) == nanos


def test_a_fee_per_request_is_charged_without_any_token() -> None:
    assert Price(1, 1, request_usd="0.012").cost_nanos(Usage(1)) == 12_001_000


def test_a_call_above_a_threshold_pays_the_higher_price_for_all_its_tokens() -> None:
    price = Price(1, 10, tiers=((1000, Price(2, 20)), (5000, Price(4, 40))))
    at = [price.cost_nanos(Usage(tokens, 1)) for tokens in (1000, 1001, 5000, 5001)]
    assert at == [1000 * 1000 + 10_000, 1001 * 2000 + 20_000, 5000 * 2000 + 20_000, 5001 * 4000 + 40_000]


@pytest.mark.parametrize(
    "wrong", [None, True, -1, float("nan"), float("inf"), "free", "NaN", "1_0", "١٢", [], Decimal("sNaN"), 10**10]
)
def test_an_invalid_rate_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="input_usd_per_mtok"):
        Price(wrong, 1)
    with pytest.raises(InvalidValue, match="request_usd"):
        Price(1, 1, request_usd=wrong)
    if wrong is not None:
        with pytest.raises(InvalidValue, match="cache_write_usd_per_mtok"):
            Price(1, 1, cache_write_usd_per_mtok=wrong)


@pytest.mark.parametrize(
    "tiers", [((5, CEILING), (5, CEILING)), ((-1, CEILING),), ((1, 2.5),), ((1, Price(1, 1, tiers=((2, CEILING),))),)]
)
def test_tiers_that_contradict_themselves_are_refused(tiers: Any) -> None:
    with pytest.raises(InvalidValue, match="tiers"):
        Price(1, 1, tiers=tiers)


rates = st.decimals(0, 1000, places=9)
counts = st.integers(0, 10**12)
flat_prices = st.builds(Price, rates, rates, rates, rates, request_usd=rates)
prices = st.builds(
    lambda base, tiers: replace(base, tiers=tuple(sorted(tiers.items()))),
    flat_prices,
    st.dictionaries(st.integers(0, 10**6), flat_prices, max_size=3),
)


@st.composite
def usages(draw: st.DrawFn, most: int = 10**12) -> Usage:
    cached, written, plain = (draw(st.integers(0, most // 3)) for _ in range(3))
    return Usage(cached + written + plain, draw(st.integers(0, most)), cached, written)


@given(flat_prices, usages())
def test_a_cost_is_the_exact_fraction_rounded_up(price: Price, usage: Usage) -> None:
    plain = usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens
    usd = sum(
        (
            Fraction(rate) * tokens / MILLION  # type: ignore[arg-type]
            for rate, tokens in (
                (price.input_usd_per_mtok, plain),
                (price.output_usd_per_mtok, usage.output_tokens),
                (price.cached_input_usd_per_mtok, usage.cached_input_tokens),
                (price.cache_write_usd_per_mtok, usage.cache_write_tokens),
            )
        ),
        Fraction(price.request_usd),
    )
    assert price.cost_nanos(usage) == ceil(usd * 10**9)


def test_a_price_is_exact_whatever_precision_the_thread_has_set() -> None:
    with decimal.localcontext(decimal.Context(prec=3)):
        assert Price("1.23456789", 0).cost_nanos(Usage(MILLION)) == 1_234_567_890


@pytest.mark.requirement("X-1")
@given(prices, usages(3 * 10**6), counts, counts)
def test_no_call_costs_more_than_its_worst_case(price: Price, usage: Usage, more_in: int, more_out: int) -> None:
    worst = price.worst_case_nanos(usage.input_tokens + more_in, usage.output_tokens + more_out)
    assert worst is not None
    assert worst >= price.cost_nanos(usage)


@pytest.mark.requirement("X-1")
def test_the_worst_case_counts_input_at_its_dearest_rate() -> None:
    assert book(registered={"m": OURS}).worst_case_nanos("m", 1000, 100) == 1000 * 3125 + 100 * 10_000


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_a_worst_case_needs_whole_numbers_of_tokens(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="input_tokens"):
        OURS.worst_case_nanos(wrong, 1)
    with pytest.raises(InvalidValue, match="max_output_tokens"):
        OURS.worst_case_nanos(1, wrong)


# The book


@pytest.mark.requirement("P-B2")
def test_a_reported_cost_comes_before_every_price() -> None:
    usage = Usage(MILLION, model="m", cost_nanos=7)
    assert book(registered={"m": OURS}).cost(usage) == Cost(7, True, "reported")


def test_a_registered_price_comes_before_genai_prices() -> None:
    mine = PriceBook(registered={"gpt-4o": Price(1, 1)})
    assert mine.cost(Usage(1, model="gpt-4o")) == Cost(1000, True, "registered")
    assert mine.cost(Usage(1, model="openai/gpt-4o")) == Cost(1000, True, "registered")
    mine.register("gpt-4o", Price(2, 2))
    assert mine.cost(Usage(1, model="gpt-4o")) == Cost(2000, True, "registered")


def test_the_model_in_the_response_takes_precedence_over_the_requested_one() -> None:
    prices = book(registered={"requested": Price(1, 1), "answered": Price(2, 2)})
    assert prices.cost(Usage(1, model="answered"), "requested").nanos == 2000
    assert prices.cost(Usage(1, model="not listed"), "requested").nanos == 1000
    assert prices.cost(Usage(1), "requested").nanos == 1000


def test_a_price_registered_for_the_requested_name_applies_to_a_dated_answer() -> None:
    mine = PriceBook(registered={"gpt-4o": Price(1, 1)})
    assert mine.cost(Usage(1, model="gpt-4o-2024-08-06"), "gpt-4o") == Cost(1000, True, "registered")


@pytest.mark.requirement("X-2")
@pytest.mark.parametrize(
    ("settings", "expected", "priced", "worst"),
    [
        ({"unknown": "count"}, Cost(0, False, "unknown"), False, None),
        ({"unknown": "refuse"}, Cost(0, False, "unknown"), False, None),
        ({"unknown": "assume", "assumed": CEILING}, Cost(600_000, True, "assumed"), True, 600_000),
    ],
    ids=lambda case: case.get("unknown") if isinstance(case, dict) else None,
)
@pytest.mark.parametrize("make", [book, PriceBook])
@pytest.mark.parametrize("model", ["unknown-model", "a/b/unknown", "", None, "m" * 10_000])
def test_an_unknown_price_is_refused_assumed_or_counted_as_unknown(
    make: Callable[..., PriceBook], model: str | None, settings: Any, expected: Cost, priced: bool, worst: int | None
) -> None:
    prices = make(**settings)
    assert prices.cost(Usage(1, 1, model=model)) == expected
    assert prices.is_priced(model) is priced
    assert prices.worst_case_nanos(model, 1, 1) == worst


@pytest.mark.requirement("X-2")
def test_a_call_without_a_usage_has_no_known_cost() -> None:
    for prices in (book(registered={"m": OURS}), book(unknown="assume", assumed=CEILING)):
        assert prices.cost(None, "m") == Cost(0, False, "unknown")


@pytest.mark.requirement("X-2")
def test_tokens_without_a_price_make_the_cost_at_least_what_is_known() -> None:
    embedding = {"e": Price(1, None)}
    assert book(registered=embedding).cost(Usage(5, 0, model="e")) == Cost(5000, True, "registered")
    assert book(registered=embedding).cost(Usage(5, 1, model="e")) == Cost(5000, False, "registered")
    assert book(registered=embedding).worst_case_nanos("e", 5, 0) == 5000
    assert book(registered=embedding).worst_case_nanos("e", 5, 1) is None
    assumed = book(registered=embedding, unknown="assume", assumed=CEILING)
    assert assumed.cost(Usage(5, 1, model="e")) == Cost(1_000_000, True, "assumed")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"unknown": "ignore"}, "unknown"),
        ({"unknown": "assume"}, "assumed"),
        ({"unknown": "assume", "assumed": 5}, "assumed"),
        ({"unknown": "count", "assumed": CEILING}, "assumed"),
        ({"registered": {"": OURS}}, "model"),
        ({"registered": {5: OURS}}, "model"),
        ({"registered": {"m": 2.5}}, "price"),
    ],
    ids=str,
)
def test_contradictory_settings_are_refused_by_name(settings: Any, field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        book(**settings)


def test_prices_are_registered_from_many_threads() -> None:
    prices = book()

    def register(thread: int) -> None:
        for number in range(200):
            prices.register(f"{thread}-{number}", Price(thread, number))

    threads = [Thread(target=register, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(prices.price_of(f"{t}-{n}") == Price(t, n) for t in range(8) for n in range(200))


def test_one_book_is_shared_by_the_process() -> None:
    assert default_prices() is default_prices()
    assert default_prices().unknown == "count"


# genai-prices


def theirs(usage: Usage, model: str, provider: str | None = None, at: datetime | None = None) -> int:
    """What genai-prices itself asks for `usage`, rounded up to a whole nano-dollar."""
    counted = genai_prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    calculated = genai_prices.calc_price(counted, model, provider_id=provider, genai_request_timestamp=at)
    return int((calculated.total_price * 10**9).to_integral_value(ROUND_CEILING))


SIZES = [
    Usage(1, 1),
    Usage(1000, 10, 333, 100),
    Usage(200_000, 5),
    Usage(200_001, 5, 7, 9),
    Usage(900_000, 70_001, 3, 3),
]


@pytest.mark.requirement("X-2")
@pytest.mark.parametrize("usage", SIZES, ids=lambda usage: str(usage.input_tokens))
@pytest.mark.parametrize(
    "model",
    ["gpt-4o", "gpt-4o-2024-08-06", "gpt-4o-mini", "claude-sonnet-4-5", "gemini-2.5-pro", "deepseek-chat", "gpt-5"],
)
def test_a_model_costs_what_genai_prices_calculates_also_above_a_threshold(model: str, usage: Usage) -> None:
    now = datetime(2026, 11, 5, 12, tzinfo=UTC)
    cost = PriceBook(clock=FixedClock(now)).cost(usage, model)
    assert cost == Cost(theirs(usage, model, at=now), True, "genai-prices")


def test_a_threshold_really_changes_the_price() -> None:
    prices = PriceBook()
    below, above = (prices.cost(Usage(tokens, model="gemini-2.5-pro")).nanos for tokens in (200_000, 200_001))
    assert above > below * Decimal("1.5")


@pytest.mark.parametrize("name", ["openai/gpt-4o", "models/gpt-4o", "OPENAI/GPT-4o", "some/where/gpt-4o"])
def test_a_name_with_a_path_is_looked_up_by_its_parts(name: str) -> None:
    assert PriceBook().price_of(name) == PriceBook().price_of("gpt-4o") is not None


@pytest.mark.parametrize(
    "name",
    [
        "text-embedding-3-small",
        "amazon.nova-lite-v1:0",
        "eu.amazon.nova-lite-v1:0",
        "anthropic.claude-3-5-sonnet-20240620-v1:0",
        "global.anthropic.claude-sonnet-4-20250514-v1:0",
        "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-sonnet-4-20250514-v1:0",
    ],
)
def test_names_that_are_known_only_with_their_provider_have_a_price(name: str) -> None:
    assert PriceBook().price_of(name) is not None


def test_the_first_part_of_a_name_is_the_provider() -> None:
    usage = Usage(1000, 1000)
    groq, model = "groq/llama-3.1-8b-instant", "llama-3.1-8b-instant"
    assert PriceBook().cost(usage, groq).nanos == theirs(usage, model, "groq")


@pytest.mark.parametrize(("hour", "nanos"), [(12, 270), (20, 135)])
def test_a_price_that_depends_on_the_hour_is_the_one_of_the_hour(hour: int, nanos: int) -> None:
    """The price of a model that is cheaper at night is looked up at every call, not once."""
    at = datetime(2025, 6, 1, hour, tzinfo=UTC)
    clock = FixedClock(at.replace(hour=12))
    prices = PriceBook(clock=clock)
    prices.price_of("deepseek-chat")
    clock.moment = at
    assert prices.cost(Usage(1, model="deepseek-chat")).nanos == theirs(Usage(1), "deepseek-chat", at=at) == nanos


@pytest.mark.requirement("X-2")
@pytest.mark.parametrize("model", ["whisper-1", "tts-1"])
def test_a_model_that_is_not_sold_by_the_token_has_no_known_price(model: str) -> None:
    assert genai_prices.calc_price(genai_prices.Usage(input_tokens=10**6), model).total_price == 0
    assert PriceBook().cost(Usage(10**6, model=model)) == Cost(0, False, "unknown")


def test_every_price_of_genai_prices_is_the_same_here_or_is_not_used() -> None:
    from genai_prices.data_snapshot import get_snapshot

    at = datetime(2026, 11, 5, 12, tzinfo=UTC)
    prices, usage, found = PriceBook(clock=FixedClock(at)), Usage(1234, 567, 89, 10), 0
    models = [(provider.id, model.id) for provider in get_snapshot().providers[:12] for model in provider.models][:150]
    for provider, model in models:
        price = prices.price_of(model)
        if price is not None and price.covers(usage) and "/" not in model:
            # The names of Bedrock are found only together with their provider.
            assert price.cost_nanos(usage) == theirs(usage, model, "aws" if provider == "aws" else None, at), model
            found += 1
    assert found > 20


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were looked up in the table of genai-prices."""
    names: list[str] = []
    find = PriceTable.find

    def spy(table: PriceTable, model: str, provider_id: str | None = None) -> Any:
        names.append(model)
        return find(table, model, provider_id)

    monkeypatch.setattr(PriceTable, "find", spy)
    return names


def test_a_model_is_looked_up_once_whether_it_is_found_or_not(looked_up: list[str]) -> None:
    prices = PriceBook()
    for _ in range(3):
        prices.cost(Usage(1, model="gpt-4o"))
        prices.cost(Usage(1, model="unknown-model"))
        prices.is_priced("gpt-4o")
    assert looked_up == ["gpt-4o", "unknown-model"]


def test_only_so_many_look_ups_are_kept(looked_up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.billing.prices.KEPT_LOOK_UPS", 10)
    prices = PriceBook()
    for number in range(30):
        prices.price_of(f"unknown-{number}")
    looked_up.clear()
    for number in (29, 0):
        prices.price_of(f"unknown-{number}")
    assert looked_up == ["unknown-0"]


@pytest.mark.requirement("X-2")
def test_a_price_that_genai_prices_would_calculate_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calculate = genai_prices.types.ModelPrice.calc_price

    def dearer_above_the_threshold(self: Any, usage: Any) -> Any:
        price = calculate(self, usage)
        price["total_price"] += usage.input_tokens > 200_000
        return price

    assert PriceBook().price_of("gemini-2.5-pro") is not None
    monkeypatch.setattr(genai_prices.types.ModelPrice, "calc_price", dearer_above_the_threshold)
    monkeypatch.setattr(prices_module, "_table", PriceTable.read(price_export.lines()))
    assert PriceBook().price_of("gemini-2.5-pro") is None
    assert PriceBook().cost(Usage(1, model="gemini-2.5-pro")) == Cost(0, False, "unknown")


@pytest.mark.requirement("X-2")
def test_without_genai_prices_every_price_that_is_not_registered_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    monkeypatch.setattr(prices_module, "_table", None)
    prices = PriceBook(registered={"m": OURS})
    assert not prices.available
    assert prices.cost(Usage(1, model="gpt-4o")) == Cost(0, False, "unknown")
    assert prices.cost(Usage(1, model="m")) == Cost(2500, True, "registered")
    assert prices.worst_case_nanos("gpt-4o", 1, 1) is None


@pytest.mark.parametrize(("settings", "available"), [({}, True), ({"use_genai_prices": False}, False)])
def test_a_price_book_reports_whether_genai_prices_is_available(settings: Any, available: bool) -> None:
    assert PriceBook(**settings).available is available


def test_genai_prices_is_never_imported_here() -> None:
    code = (
        "import sys; from penstock.runtime.billing.prices import Price, Usage, default_prices\n"
        "prices = default_prices(); prices.register('m', Price(1, 1)); prices.cost(Usage(1, model='m'))\n"
        "assert 'penstock.runtime.billing.price_table' not in sys.modules\n"
        "assert prices.available and prices.cost(Usage(1, model='gpt-4o')).source == 'genai-prices'\n"
        "assert 'genai_prices' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.text(max_size=30), usages())
def test_any_model_name_can_be_looked_up(name: str, usage: Usage) -> None:
    cost = default_prices().cost(usage, name)
    assert cost.nanos >= 0
    assert cost.source in ("genai-prices", "unknown")
