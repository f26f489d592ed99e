"""A scripted in-process model provider that bills for everything it generates.

A real provider charges for the output it generated, whether or not the answer arrived, and whatever usage the answer
reports. So does this one. A request is on the invoice, as cut off, the moment generation begins; the line is corrected
when the request ends. A caller that cancels, disconnects or dies in between has been billed already.

It knows nothing of ledgers and budgets: they are checked against it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, repeat
from typing import Any, Literal, TypeAlias, assert_never

from penstock.money import Usd, to_nanos, to_usd
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.testing.provider.behaviours import (
    Answer,
    Behaviour,
    FailAfterBilling,
    LieAboutUsage,
    NoUsage,
    ProviderHTTPError,
    Raise,
    RefuseFree,
    ServerError,
    Stall,
    Throwable,
)
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.invoice import Invoice, InvoiceLine
from penstock.testing.provider.responses import SHAPES, Shape, in_shape

Script: TypeAlias = Iterable[Behaviour] | Callable[[int], Behaviour] | None

TOKENS_PER_PRICE = 1_000_000


class ScriptEnded(AssertionError):
    """More requests were made than the script has behaviours."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The computed outcome of a behaviour: output, reported usage and error. All zeros is a free request."""

    outcome: str
    input_tokens: int = 0
    output_tokens: int = 0
    wait_s: float = 0.0
    cost_nanos: int | None = None  # None: the list price
    text: str = ""
    reports: tuple[int, int] | Literal["truth"] | None = None  # None: usage is not reported
    raises: Throwable | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    plan: _Plan
    line: InvoiceLine

    @property
    def generation(self) -> Generation:
        line, usage = self.line, self.plan.reports
        if usage == "truth":
            usage = (line.input_tokens, line.output_tokens)
        cut_short = line.output_tokens < self.plan.output_tokens
        return Generation(
            self.plan.text, (), line.input_tokens, line.output_tokens, cut_short, usage, line.model, line.number
        )


class FakeProvider:
    """A scripted model provider with an invoice.

    `script` is a list of behaviours, one per request; or a function from a request's index (0, 1, …) to its behaviour;
    or None for a plain answer every time. With `bill_on_start=False` only requests that come to their end are billed.
    """

    def __init__(
        self,
        script: Script = None,
        *,
        model: str = "fake-1",
        input_usd_per_mtok: Usd = 3.0,
        output_usd_per_mtok: Usd = 15.0,
        shape: Shape = "openai",
        latency_s: float = 0.0,
        bill_on_start: bool = True,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape={shape!r}: one of {', '.join(SHAPES)}")
        self.model = model
        self.invoice = Invoice()
        self.prices = PriceBook(registered={model: Price(input_usd_per_mtok, output_usd_per_mtok)})
        """The list prices, to pass to a run."""
        self._input_rate = to_nanos(input_usd_per_mtok, "input_usd_per_mtok")
        self._output_rate = to_nanos(output_usd_per_mtok, "output_usd_per_mtok")
        self._shape: Shape = shape
        self.latency_s = latency_s
        self.has_script = script is not None
        self._bill_on_start = bill_on_start
        self._sleep = sleep
        self._lock = threading.Lock()
        self._script = _behaviours(script)
        self._taken = 0
        self._numbers = count(1)

    def complete(self, prompt: object = "…", *, max_tokens: int | None = None) -> Any:
        """Answer `prompt`, blocking; at most `max_tokens` are generated."""
        request = self._accept(max_tokens)
        if request.plan.wait_s > 0:
            self._sleep(request.plan.wait_s)
        return self._finish(request)

    async def acomplete(self, prompt: object = "…", *, max_tokens: int | None = None) -> Any:
        """Answer `prompt`; other tasks run meanwhile, even at a latency of zero."""
        request = self._accept(max_tokens)
        await asyncio.sleep(request.plan.wait_s)
        return self._finish(request)

    def price_nanos(self, input_tokens: int, output_tokens: int) -> int:
        """Return the list price, rounded down: a sum of lines never exceeds the price of the sum."""
        if input_tokens < 0 or output_tokens < 0:
            raise ValueError(f"{input_tokens} input and {output_tokens} output tokens: neither can be negative")
        return (input_tokens * self._input_rate + output_tokens * self._output_rate) // TOKENS_PER_PRICE

    def worst_case_usd(self, input_tokens: int, max_tokens: int) -> float:
        """Return the most that a request with these tokens can cost at the list price, in US dollars."""
        return to_usd(self.price_nanos(input_tokens, max_tokens))

    def _accept(self, max_tokens: int | None) -> _Request:
        """Take the next behaviour, and write the invoice line that remains if the request never ends."""
        with self._lock:
            behaviour = self._next_behaviour()
            request = self._priced(_plan(behaviour, self.latency_s), next(self._numbers), max_tokens)
            self.invoice.write(self._so_far(request.line))
        return request

    def next_behaviour(self) -> Behaviour:
        """Take one behaviour from the script, to be played outside this process."""
        with self._lock:
            return self._next_behaviour()

    def open_line(self, line: InvoiceLine) -> InvoiceLine:
        """Number `line` and write it to the invoice, where it remains unchanged if the request never ends."""
        with self._lock:
            line = replace(line, number=next(self._numbers))
            self.invoice.write(self._so_far(line))
        return line

    def _next_behaviour(self) -> Behaviour:
        for behaviour in self._script:
            self._taken += 1
            return behaviour
        raise ScriptEnded(f"the script has {self._taken} behaviours, and one more request was made")

    def _priced(self, plan: _Plan, number: int, max_tokens: int | None) -> _Request:
        output_tokens = plan.output_tokens if max_tokens is None else min(plan.output_tokens, max_tokens)
        list_price = self.price_nanos(plan.input_tokens, output_tokens)
        cost = list_price if plan.cost_nanos is None else plan.cost_nanos
        return _Request(plan, InvoiceLine(number, self.model, plan.input_tokens, output_tokens, cost, plan.outcome))

    def _so_far(self, line: InvoiceLine) -> InvoiceLine:
        if self._bill_on_start:
            return replace(line, outcome="cut off")
        return replace(line, input_tokens=0, output_tokens=0, cost_nanos=0, outcome="cut off")

    def _finish(self, request: _Request) -> Any:
        self.invoice.write(request.line)
        if request.plan.raises is not None:
            raise request.plan.raises
        return in_shape(self._shape, request.generation)


def _behaviours(script: Script) -> Iterator[Behaviour]:
    if script is None:
        return repeat(Answer())
    return map(script, count()) if callable(script) else iter(script)


def _plan(behaviour: Behaviour, latency_s: float) -> _Plan:
    match behaviour:
        case Answer(text, taken, given, own_latency_s, cost_usd):
            cost = None if cost_usd is None else to_nanos(cost_usd, "cost_usd")
            wait_s = latency_s if own_latency_s is None else own_latency_s
            return _Plan("answered", taken, given, wait_s, cost, text, "truth")
        case NoUsage(text, taken, given):
            return _Plan("answered without usage", taken, given, latency_s, text=text)
        case LieAboutUsage(reported_input, reported_output, taken, given, text):
            return _Plan("lied about usage", taken, given, latency_s, None, text, (reported_input, reported_output))
        case FailAfterBilling(error, taken, given):
            return _Plan("failed after billing", taken, given, latency_s, raises=error)
        case ServerError(status, True, taken, given):
            return _Plan(f"HTTP {status}, billed", taken, given, latency_s, raises=ProviderHTTPError(status))
        case ServerError(status):
            return _Plan(f"HTTP {status}", wait_s=latency_s, raises=ProviderHTTPError(status))
        case RefuseFree(status, retry_after_s):
            return _Plan(f"HTTP {status}", wait_s=latency_s, raises=_refusal(status, retry_after_s))
        case Raise(exception):
            return _Plan(f"raised {_name(exception)}", wait_s=latency_s, raises=exception)
        case Stall(seconds, then):
            plan = _plan(then, latency_s)
            return replace(plan, wait_s=plan.wait_s + seconds)
        case _:
            assert_never(behaviour)


def _refusal(status: int, retry_after_s: float | None) -> ProviderHTTPError:
    return ProviderHTTPError(status, {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"})


def _name(error: Throwable) -> str:
    return error.__name__ if isinstance(error, type) else type(error).__name__
