"""The judge of the matrix: a cell is an HTTP library, a way to call it, and the shape of its requests.

Every call costs the same, and five of them fit under the ceiling. The invoice of the provider decides: a cell holds if
the invoice is within the ceiling and the ledger has all of it; it is reported if the run itself says which requests it
could not limit or price; otherwise money left silently.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock import ExecutionContext, PenstockError, Price, contain
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer
from tests.providers.shapes import MEDIA, Shape

CALL_USD = 0.05
CEILING_USD = 0.25
PAID = 5
"""Calls under the ceiling."""
MANY = 20
OUTPUT_TOKENS = 8


class Verdict(StrEnum):
    """What became of the money in one cell."""

    HELD = "held"
    REPORTED = "reported"
    SILENT = "silent"


@dataclass(frozen=True)
class Cell:
    """One combination that was tried, and what came of it."""

    stack: str
    way: str
    shape: str
    invoice_usd: float
    ledger_usd: float
    requests: int
    """Number of requests that the provider billed."""
    counted: int
    """Number of calls that the run sent, as it says, and of requests that it reported as uncontained."""
    reported: int
    """Number of requests that the run reports as uncontained, or as of unknown cost."""

    @property
    def verdict(self) -> Verdict:
        """Judge the cell by the invoice. A request that is counted twice, or not at all, is never fine."""
        holds = self.invoice_usd <= CEILING_USD and self.ledger_usd >= self.invoice_usd
        if self.counted != self.requests or self.requests == 0:
            return Verdict.SILENT
        if holds:
            return Verdict.HELD
        return Verdict.REPORTED if self.reported >= self.requests else Verdict.SILENT


def provider() -> FakeProviderServer:
    """Return a server whose calls cost the same, whatever their shape."""
    server = FakeProviderServer.flat(CALL_USD, output_tokens=OUTPUT_TOKENS)
    speech = MEDIA["speech"].body  # billed by its characters: the answer reports no usage
    server.provider.prices.register(speech["model"], Price(CALL_USD * 1e6 / len(speech["input"]), None))
    return server


def address(server: FakeProviderServer, shape: Shape) -> str:
    """Return where the request goes; the name of a provider's host has to lead to the server."""
    url = server.url.replace("127.0.0.1", shape.host) if shape.host else server.url
    return url + shape.path


class Trial:
    """One cell while it is tried."""

    def __init__(self, server: FakeProviderServer, stack: str, way: str, shape: str) -> None:
        self.run: ExecutionContext = contain(max_cost_usd=CEILING_USD, prices=server.provider.prices)
        self.outcomes: list[Any] = []
        """What each request came to: its body, or an error."""
        self._names = (stack, way, shape)
        self._server = server
        self._lines_before = len(server.invoice.lines)

    def block(self) -> contained:
        """Return a block of the run; the outcomes show what was refused."""
        return contained(self.run, on_stop="ignore")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the run and a block of it."""
        with self.run, self.block():
            yield

    @contextmanager
    def warned(self) -> Iterator[None]:
        """Expect warnings about requests that no scope reaches."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a model request to .* belongs to no run", RuntimeWarning)
            yield

    @property
    def answers(self) -> int:
        """Number of requests that were answered."""
        return sum(isinstance(found, bytes) for found in self.outcomes)

    @property
    def errors(self) -> Counter[str]:
        """The errors, by the names of their classes."""
        return Counter(type(found).__name__ for found in self.outcomes if not isinstance(found, bytes))

    @property
    def foreign_errors(self) -> list[Any]:
        """Errors that are none of ours: a library failed, or wrapped a refusal."""
        return [found for found in self.outcomes if not isinstance(found, bytes | PenstockError)]

    def judged(self) -> Cell:
        """Return what the invoice and the ledger say."""
        lines, balance = self._server.invoice.lines[self._lines_before :], self.run.balance
        uncontained = self.run.uncontained_requests
        return Cell(
            *self._names,
            invoice_usd=round(sum(line.cost_nanos for line in lines) / 1e9, 6),
            ledger_usd=round(balance.spent_usd + balance.unresolved_usd, 6),
            requests=len(lines),
            counted=balance.attempts + uncontained,
            reported=uncontained + self.run.get_snapshot().unknown_costs,
        )


class Tally:
    """The verdicts of all cells that were tried so far."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str], Cell] = {}

    def add(self, cells: Iterable[Cell]) -> None:
        """Note what came of these cells."""
        self.cells |= {(cell.stack, cell.way, cell.shape): cell for cell in cells}

    def count(self, verdict: Verdict) -> int:
        """Return the number of cells with that verdict."""
        return sum(cell.verdict is verdict for cell in self.cells.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in Verdict)
        return f"{len(self.cells)} cells tried: {counts}"
