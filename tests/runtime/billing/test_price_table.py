"""The table that another process exports has the prices of genai-prices; without that process it is made in place."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import genai_prices
import pytest
from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot
from genai_prices.types import ClauseEquals, ConditionalPrice, ModelInfo, ModelPrice, Provider

from penstock.runtime.billing import price_export, price_table
from penstock.runtime.billing.price_table import PriceTable, load_table
from penstock.runtime.billing.rates import Price

MOMENTS = [
    datetime(2025, 1, 1, tzinfo=UTC),
    datetime(2025, 6, 1, 16, 29, tzinfo=UTC),
    datetime(2025, 6, 1, 16, 30, tzinfo=UTC),
    datetime(2025, 6, 2, 0, 30, tzinfo=UTC),
    datetime(2026, 11, 5, 12, tzinfo=UTC),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PriceTable:
    """The table of another process: none is kept from an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_table()


def looked_up() -> Iterator[tuple[str, str | None]]:
    """Names of models as callers spell them, with and without a provider."""
    models = [(provider.id, model.id) for provider in get_snapshot().providers for model in provider.models]
    for provider, model in random.Random(16).sample(models, 200):
        yield model, None
        yield model.upper(), provider
        yield model, f" {provider.upper()} "
        yield f"{provider}/{model}", "litellm"
        yield model, "litellm"
        yield f"{model}-20251211", None
        yield model.replace("-", ""), "azure"
    for date in ("20240806", "20241345", "20240806-preview"):
        yield f"gpt-4o-{date}", None
    yield from (("", None), ("", "openai"), ("/", "litellm"), ("gpt-4o", "unknown"), ("unknown-model", None))


@pytest.mark.requirement("X-2")
def test_a_model_is_found_and_costs_the_same_as_in_genai_prices(table: PriceTable) -> None:
    found = 0
    for model, provider in looked_up():
        try:
            theirs = genai_prices.calc_price(genai_prices.Usage(), model, provider_id=provider).model
        except LookupError:
            assert table.find(model, provider) is None, (model, provider)
            continue
        ours = table.find(model, provider)
        assert ours is not None, (model, provider)
        for moment in MOMENTS:
            assert ours.at(moment) == price_export._price_from(theirs.get_prices(moment)), (model, provider, moment)
            found += 1
    assert found > 1_000


def priced(rate: int) -> Provider:
    """A provider with one model, `own`, at that price."""
    prices = ModelPrice(input_mtok=Decimal(rate), output_mtok=Decimal(rate))
    model = ModelInfo(id="own", match=ClauseEquals(equals="own"), prices=prices)
    return Provider(id="mine", name="Mine", api_pattern="mine", model_match=ClauseEquals(equals="own"), models=[model])


@pytest.fixture
def customized() -> Iterator[None]:
    set_custom_snapshot(DataSnapshot(providers=[priced(7)], from_auto_update=False))
    yield
    set_custom_snapshot(None)


@pytest.mark.usefixtures("customized")
def test_prices_that_this_process_has_set_in_genai_prices_are_used() -> None:
    own = load_table().find("own")
    assert own is not None
    assert own.at(MOMENTS[0]) == Price(7, 7)


def interpreter(tmp_path: Path, name: str, script: str) -> str:
    file = tmp_path / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


INTERPRETERS = {
    "is missing": lambda tmp_path: str(tmp_path / "python-gone"),
    "is not known": lambda tmp_path: "",
    "is not an interpreter": lambda tmp_path: interpreter(tmp_path, "uwsgi", "kill -9 $PPID"),
    "fails": lambda tmp_path: interpreter(tmp_path, "python3", "exit 1"),
    "writes something else": lambda tmp_path: interpreter(tmp_path, "python3", "echo hello"),
    "dies in the middle": lambda tmp_path: interpreter(
        tmp_path, "python3", """echo '["provider", "mine", null, null, []]'"""
    ),
}


@pytest.mark.parametrize("case", INTERPRETERS)
def test_the_table_is_made_in_place_if_the_interpreter(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", INTERPRETERS[case](tmp_path))
    monkeypatch.setattr(price_export, "get_providers", lambda: [priced(7)])
    own = load_table().find("own")
    assert own is not None
    assert own.at(MOMENTS[0]) == Price(7, 7)


@pytest.mark.parametrize("part", ["model", "provider", "condition"])
@pytest.mark.usefixtures("customized")
def test_no_price_is_known_if_genai_prices_has_something_that_is_not_known_here(part: str) -> None:
    """A model behind an unknown matcher might be taken for another one."""
    unknown: Any = SimpleNamespace(is_match=lambda text: False, active=lambda moment: False)
    provider = get_snapshot().providers[0]
    (model,) = provider.models
    if part == "model":
        model.match = unknown
    elif part == "provider":
        provider.provider_match = unknown
    else:
        model.prices = [ConditionalPrice(unknown, prices=ModelPrice(input_mtok=Decimal(7), output_mtok=Decimal(7)))]
    assert load_table().find("own") is None


def test_the_table_is_read_in_slices_that_give_up_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(price_export.lines())
    read, slices = 0, []

    def counted() -> Iterator[str]:
        nonlocal read
        for line in lines:
            read += 1
            yield line

    def yields(seconds: float) -> None:
        nonlocal read
        slices.append(read)
        read = 0

    monkeypatch.setattr(price_table.time, "sleep", yields)
    PriceTable.read(counted())
    assert sum(slices) + read == len(lines) > 1_000
    assert max(*slices, read) <= 64


@pytest.mark.parametrize("lines", [[], ["[]"], ['["provider", "mine", null, null, []]']], ids=["none", "empty", "one"])
def test_a_truncated_table_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="truncated"):
        PriceTable.read(lines)
