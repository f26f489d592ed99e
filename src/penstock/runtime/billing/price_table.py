"""The prices of genai-prices, without genai-prices in the process.

The table comes from the cache (`price_cache`) or else from a short-lived process (`price_export`), so that no other
thread waits for the interpreter lock meanwhile, and is read in slices that give the lock up in between. The process can
be started before the table is needed. Where it cannot be started, or fails, the table is made in place. Models are
found by the rules of genai-prices: the provider first, by its id or by the name of the model, then the first model of
that provider that matches, or of a provider whose models it also offers.

Knows nothing of registered prices or of how models are spelled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from datetime import time as time_of_day
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from penstock.runtime.billing import price_export
from penstock.runtime.billing.price_cache import Cache
from penstock.runtime.billing.rates import Price

EXPORT_TIMEOUT_S = 60.0
YIELD_EVERY = 32
"""Lines that are read before the thread gives up the interpreter lock."""
_EXPORT = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); import {price_export.__name__} as e; e.main()"


class Quote:
    """The price of a model, which may depend on the date and the hour."""

    __slots__ = ("_prices", "_rates")

    def __init__(self, rates: Sequence[Any]) -> None:
        self._rates = rates
        self._prices: dict[int, Price | None] = {}

    def at(self, moment: datetime) -> Price | None:
        """Return the price at `moment`, in UTC; None if it is not known."""
        index = self._index(moment)
        if index not in self._prices:
            fields = self._rates[index][1]
            self._prices[index] = None if fields is None else _price(fields)
        return self._prices[index]

    def _index(self, moment: datetime) -> int:
        """The last price whose condition is met; the first one if none is."""
        for index in range(len(self._rates) - 1, -1, -1):
            if _applies(self._rates[index][0], moment):
                return index
        return 0


@dataclass(slots=True)
class _Provider:
    id: str
    model_match: list[Any] | None
    provider_match: list[Any] | None
    fallbacks: list[str]
    models: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    """The matcher and the prices of each model."""


class PriceTable:
    """Providers, their models, and the prices of these."""

    def __init__(self) -> None:
        self._providers: list[_Provider] = []

    @classmethod
    def read(cls, lines: Iterable[str | bytes]) -> PriceTable:
        """Read the lines of `price_export`; ValueError if they are truncated."""
        table, last = cls(), None
        for number, line in enumerate(lines, 1):
            last = json.loads(line)
            if last[:1] == ["provider"]:
                table._providers.append(_Provider(*last[1:]))
            elif last[:1] == ["model"]:
                table._providers[-1].models.append((last[1], last[2]))
            if number % YIELD_EVERY == 0:
                time.sleep(0)  # another thread, such as an event loop's, may have the interpreter lock
        if last != [price_export.END]:
            raise ValueError("the table of prices is truncated")
        return table

    def find(self, model: str, provider_id: str | None = None) -> Quote | None:
        """Return the prices of `model`; None if it is unknown."""
        model = model.lower()
        if provider_id is not None and provider_id.lower() == "litellm" and "/" in model:
            first, rest = model.split("/", 1)
            if first and self._by_id(first) is not None:
                provider_id, model = first, rest
        provider = self._provider(model, provider_id)
        if provider is None:
            return None
        return self._model(provider, model) or self._model(provider, _with_dashed_dates(model))

    def _provider(self, model: str, provider_id: str | None) -> _Provider | None:
        if provider_id is not None:
            found = self._by_id(provider_id)
            if found is not None or provider_id.lower() != "litellm":
                return found
        return next((one for one in self._providers if model and _matches(one.model_match, model)), None)

    def _by_id(self, provider_id: str) -> _Provider | None:
        wanted = provider_id.lower().strip()
        for provider in self._providers:
            if provider.id == wanted:
                return provider
        return next((one for one in self._providers if _matches(one.provider_match, wanted)), None)

    def _model(self, provider: _Provider, model: str) -> Quote | None:
        offered = [provider]
        for fallback in provider.fallbacks:
            offered += [one for one in self._providers if one.id == fallback][:1]
        for one in offered:
            for matcher, prices in one.models:
                if _matches(matcher, model):
                    return Quote(prices)
        return None


def load_table(export: Export | None = None) -> PriceTable:
    """Load the table from the cache, or else make it, in a process of its own or in place; empty without genai-prices.

    `export` is a process that was started before. Blocks.
    """
    if not is_installed():
        return PriceTable()
    if export is None and (kept := kept_table()) is not None:
        return kept
    export = export or start_export()
    if export is not None and not _is_customized() and (output := export.wait()) is not None:
        try:
            return PriceTable.read(output.splitlines())
        except (IndexError, TypeError, ValueError):  # the process died, or something else wrote to its stdout
            pass
    try:
        return PriceTable.read(price_export.lines())
    except Exception:  # an incompatible version of genai-prices: no price is known
        return PriceTable()


def kept_table() -> PriceTable | None:
    """Return the table kept by an earlier process; None without one, or if it would not contain all prices."""
    cache = None if _is_customized() else Cache.find()
    lines = None if cache is None else cache.read()
    try:
        return None if lines is None else PriceTable.read(lines)
    except (IndexError, TypeError, ValueError):  # it was damaged
        return None


def is_installed() -> bool:
    """Whether genai-prices is installed; does not import it."""
    try:
        return find_spec("genai_prices") is not None
    except (ImportError, ValueError):
        return False


def _is_customized() -> bool:
    """Whether this process has prices of its own in genai-prices, which another process does not know."""
    snapshot = sys.modules.get("genai_prices.data_snapshot")
    return getattr(snapshot, "_custom_snapshot", None) is not None


@dataclass(slots=True)
class Export:
    """A process that exports the table into a file, which never blocks it, as a pipe without a reader would."""

    _process: subprocess.Popen[bytes]
    _output: IO[bytes]

    def wait(self) -> bytes | None:
        """Wait for the process, and return its output; None if it takes too long."""
        with self._output:
            try:
                self._process.wait(EXPORT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                return None
            self._output.seek(0)
            return self._output.read()


def start_export() -> Export | None:
    """Start the process that exports the table; None if it cannot be started, or would not export all prices."""
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.startswith(("python", "pypy")):
        return None  # the executable is not an interpreter
    if not is_installed() or _is_customized():
        return None
    command = [sys.executable, "-c", _EXPORT, json.dumps(sys.path)]
    try:
        output = tempfile.TemporaryFile()  # noqa: SIM115  it is closed when it has been read
    except OSError:
        return None
    try:
        quiet = subprocess.DEVNULL
        return Export(subprocess.Popen(command, stdin=quiet, stdout=output, stderr=quiet), output)
    except (OSError, TypeError, ValueError, subprocess.SubprocessError):
        output.close()
        return None


def _matches(matcher: list[Any] | None, text: str) -> bool:
    if matcher is None:
        return False
    kind, value = matcher
    if kind == "equals":  # most of them: first, and without a call
        return bool(text == value)
    if kind == "or":
        return any(_matches(one, text) for one in value)
    if kind == "and":
        return all(_matches(one, text) for one in value)
    return _TEXT_MATCHERS[kind](value, text)


_TEXT_MATCHERS: dict[str, Callable[[str, str], bool]] = {
    "contains": lambda value, text: value in text,
    "starts_with": lambda value, text: text.startswith(value),
    "ends_with": lambda value, text: text.endswith(value),
    "regex": lambda value, text: re.search(value, text) is not None,
}


def _applies(condition: list[str] | None, moment: datetime) -> bool:
    match condition:
        case None:
            return True
        case ["from", day]:
            return moment.date() >= date.fromisoformat(day)
        case ["between", start, end]:
            begin, until, now = time_of_day.fromisoformat(start), time_of_day.fromisoformat(end), moment.time()
            return begin <= now < until if begin <= until else now >= begin or now < until
        case _:
            raise AssertionError(f"no such condition: {condition!r}")


def _price(fields: list[Any]) -> Price:
    plain, output, cached, written, request, tiers = fields
    return Price(plain, output, cached, written, request, tuple((start, _price(tier)) for start, tier in tiers))


_COMPACT_DATE = re.compile(r"-(20\d{2})(\d{2})(\d{2})(?=-|:|$)")


def _with_dashed_dates(model: str) -> str:
    """Spell dates like -20251211 as -2025-12-11."""

    def dashed(found: re.Match[str]) -> str:
        try:
            return f"-{date(*map(int, found.groups())).isoformat()}"
        except ValueError:
            return found.group()

    return _COMPACT_DATE.sub(dashed, model)
