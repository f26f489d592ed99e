"""Accept a request, decide its fate, and put it on the invoice.

The rule is the provider's own: generated output is billed, whether or not the answer arrives. A request is on the
invoice as cut off from the moment it is accepted; the line is corrected before the last byte of the answer is sent, so
that a caller that has the answer finds the bill. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.money import to_nanos
from penstock.runtime.billing.prices import Price
from penstock.runtime.billing.usage import Usage
from penstock.testing.provider.fake import FakeProvider, ScriptEnded
from penstock.testing.provider.fates import (
    ECHO,
    Cut,
    Endless,
    Fail,
    Fate,
    Garble,
    Hang,
    Refusal,
    Say,
    Script,
    Truncate,
    on_the_wire,
)
from penstock.testing.provider.generation import Generation, generate
from penstock.testing.provider.invoice import InvoiceLine
from penstock.testing.provider.request import WireRequest


class Order:
    """An accepted request: its fate, and its line on the invoice."""

    def __init__(
        self, fate: Say | Refusal, generation: Generation | None, line: InvoiceLine, desk: Desk, *, stops: bool = False
    ) -> None:
        self.fate = fate
        self.generation = generation
        self.pieces_sent = 0
        self._line = line
        self._desk = desk
        self._stops = stops
        self._settled = False

    @property
    def number(self) -> int:
        """Its number on the invoice."""
        return self._line.number

    def settle(self) -> None:
        """Make the line final at the end of the request."""
        self._settled = True
        self._desk.provider.invoice.write(self._line)

    def leave(self) -> None:
        """Handle a disconnect; a stream that stops because of it is billed as far as it was sent."""
        if self._settled or not self._stops or not isinstance(self.fate, Say) or self.generation is None:
            return
        pieces = self.generation.piece_count
        given = -(-self._line.output_tokens * self.pieces_sent // pieces) if pieces else 0
        line = replace(self._line, output_tokens=given, outcome="cut off")
        if self.fate.cost_usd is None:
            line = replace(line, cost_nanos=self._desk.list_price_nanos(line))
        self._desk.provider.invoice.write(line)


class Desk:
    """Accepts requests, one after the other."""

    def __init__(self, provider: FakeProvider, script: Script, output_tokens: int, keeps_generating: bool) -> None:
        self.provider = provider
        self._keeps_generating = keeps_generating
        self._output_tokens = output_tokens
        self._next_fate = _fates(script, provider)

    def take(self, request: WireRequest, created_s: int) -> Order:
        """Decide the fate of `request`, and open its line on the invoice."""
        fate = on_the_wire(self._next_fate(request), self.provider.latency_s)
        if isinstance(fate, Refusal):
            free = InvoiceLine(0, request.model, 0, 0, 0, fate.outcome)
            return Order(fate, None, self.provider.open_line(free), self)
        generation = generate(fate, request, self._output_tokens)
        line = self.provider.open_line(self._priced(fate, generation))
        stops = request.streams and not self._keeps_generating
        return Order(fate, generation.numbered(line.number, created_s), line, self, stops=stops)

    def list_price_nanos(self, line: InvoiceLine) -> int:
        """Return the price of the tokens of `line`; a model without a price costs what the provider's own does."""
        prices = self.provider.prices
        price = prices.price_of(line.model) or prices.price_of(self.provider.model)
        assert isinstance(price, Price), "the provider's own model has a price"
        return price.cost_nanos(Usage(line.input_tokens, line.output_tokens))

    def _priced(self, say: Say, generation: Generation) -> InvoiceLine:
        tokens = (generation.input_tokens, generation.output_tokens)
        line = InvoiceLine(0, generation.model, *tokens, 0, _outcome(say))
        cost = self.list_price_nanos(line) if say.cost_usd is None else to_nanos(say.cost_usd, "cost_usd")
        return replace(line, cost_nanos=cost)


def _fates(script: Script, provider: FakeProvider) -> Callable[[WireRequest], Fate]:
    if callable(script):
        return script
    if script is None:
        return (lambda _: provider.next_behaviour()) if provider.has_script else (lambda _: ECHO)
    return _one_by_one(iter(script))


def _one_by_one(script: Iterator[Fate]) -> Callable[[WireRequest], Fate]:
    taken = 0

    def following(_: WireRequest) -> Fate:
        nonlocal taken
        for fate in script:
            taken += 1
            return fate
        raise ScriptEnded(f"the script has {taken} fates, and one more request was made")

    return following


def _outcome(say: Say) -> str:
    """Return the invoice's outcome for a request that ends; one that hangs or is endless never ends."""
    match say.then:
        case Fail(status):
            return f"HTTP {status}, billed"
        case Cut():
            return "failed after billing"
        case Truncate():
            return "truncated"
        case Garble():
            return "garbled"
        case None | Hang() | Endless():
            return {"true": "answered", "absent": "answered without usage"}.get(str(say.usage), "lied about usage")
