"""The provider's invoice.

The reference for costs in every test: only the fake provider writes it, and no ledger under test can change it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.money import format_usd, to_usd


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """One request that reached the provider; free ones have no tokens and no cost."""

    number: int
    model: str
    input_tokens: int
    output_tokens: int
    cost_nanos: int
    outcome: str

    @property
    def billed(self) -> bool:
        """Whether anything was generated or charged, even at a price of zero."""
        return bool(self.cost_nanos or self.input_tokens or self.output_tokens)


class Invoice:
    """The lines and their sum; safe to read from any thread at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[int, InvoiceLine] = {}
        self._total_nanos = 0

    def write(self, line: InvoiceLine) -> None:
        """Add `line`, or replace the one with its number: a request is never on the invoice twice."""
        with self._lock:
            before = self._lines.get(line.number)
            self._total_nanos += line.cost_nanos - (before.cost_nanos if before else 0)
            self._lines[line.number] = line

    @property
    def lines(self) -> tuple[InvoiceLine, ...]:
        """All lines, in the order in which the requests arrived."""
        with self._lock:
            return tuple(self._lines[number] for number in sorted(self._lines))

    @property
    def total_nanos(self) -> int:
        """The sum owed so far."""
        return self._total_nanos

    @property
    def total_usd(self) -> float:
        """The sum owed so far, in US dollars."""
        return to_usd(self._total_nanos)

    @property
    def calls(self) -> int:
        """Number of requests that reached the provider, including free ones."""
        return len(self._lines)

    @property
    def billed_calls(self) -> int:
        """Number of requests that were charged for."""
        return sum(line.billed for line in self.lines)

    def __str__(self) -> str:
        lines = self.lines
        rows = [_row(line) for line in lines]
        total = ("", f"{self.calls} calls", "", "", format_usd(sum(line.cost_nanos for line in lines)), "total")
        return _table(("#", "model", "input", "output", "cost", "outcome"), rows, total)


def _row(line: InvoiceLine) -> tuple[str, ...]:
    cost = format_usd(line.cost_nanos) if line.billed else "free"
    return str(line.number), line.model, str(line.input_tokens), str(line.output_tokens), cost, line.outcome


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], foot: tuple[str, ...]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, foot, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    head_line, *lines, foot_line = (_aligned(row, widths) for row in (head, *rows, foot))
    return "\n".join([head_line, rule, *lines, rule, foot_line])


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    # Text is left-aligned, numbers right-aligned.
    cells = [
        text.ljust(width) if column in (1, 5) else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
