"""What came of a run: one JSON document for programs, a few lines for people.

Values that JSON has no type for are shown by their repr, and whatever is oversize is cut: see `tracing.jsonable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.cli.exits import Exit
from penstock.cli.loading.code import told
from penstock.cli.showing.picture import COLOURS, MARKS
from penstock.cli.showing.screen import Line, printable
from penstock.cli.showing.value import titled
from penstock.containment.limits import UNLIMITED, Limits
from penstock.kernel.graph import GraphInvalid
from penstock.money import to_usd
from penstock.runtime.context import ExecutionContext
from penstock.stops import Stop
from penstock.tracing.jsonable import jsonable

Status = Literal["ok", "failed", "halted", "cancelled"]

EXITS: Mapping[Status, Exit] = {
    "ok": Exit.OK,
    "failed": Exit.FAILED,
    "halted": Exit.HALTED,
    "cancelled": Exit.CANCELLED,
}
MARK_OF: Mapping[Status, str] = {"ok": "success", "failed": "fail", "halted": "halt", "cancelled": "halt"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, with the results that were complete by then."""

    status: Status
    results: Mapping[str, Any] = field(default_factory=dict)
    stop: Stop | None = None
    error: BaseException | None = None
    errors: Mapping[str, BaseException] = field(default_factory=dict)
    """What went wrong in steps whose failure did not end the run."""
    skipped: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        """The exit code that says so."""
        return EXITS[self.status]


def document(outcome: Outcome, run: ExecutionContext | None) -> dict[str, Any]:
    """The outcome as one JSON document; `run` is None if it never began."""
    return {
        "status": outcome.status,
        "results": {name: jsonable(value) for name, value in outcome.results.items()},
        "stop": None if outcome.stop is None else asdict(outcome.stop),
        "error": None if outcome.error is None else _described(outcome.error),
        "errors": {step: _described(error) for step, error in outcome.errors.items()},
        "skipped": list(outcome.skipped),
        "usage": None if run is None else usage(run),
        "trace": None if run is None else run.graph.snapshot(),
        "run_id": None if run is None else run.run_id,
    }


def usage(run: ExecutionContext) -> dict[str, Any]:
    """What the run used, and what it was allowed."""
    balance, snapshot = run.balance, run.get_snapshot()
    return {
        "cost_usd": balance.spent_usd,
        "held_usd": balance.held_usd,
        "unresolved_usd": balance.unresolved_usd,
        "unknown_costs": snapshot.unknown_costs,
        "steps": balance.steps,
        "attempts": balance.attempts,
        "retries": balance.retries,
        "api_calls": balance.api_calls,
        "tokens_in": balance.tokens_in,
        "tokens_out": balance.tokens_out,
        "elapsed_s": round(snapshot.elapsed_ms / 1_000, 3),
        "limits": _limits(balance.limits),
    }


def _limits(limits: Limits) -> dict[str, Any]:
    def given(limit: int) -> int | None:
        return None if limit == UNLIMITED else limit

    return {
        "cost_usd": None if limits.cost_nanos == UNLIMITED else to_usd(limits.cost_nanos),
        "steps": given(limits.steps),
        "tokens": given(limits.tokens),
        "api_calls": given(limits.api_calls),
        "retries": given(limits.retries),
        "time_s": limits.time_s,
    }


def _described(error: BaseException) -> dict[str, Any]:
    described: dict[str, Any] = {"type": type(error).__name__, "message": told(error)}
    if isinstance(error, GraphInvalid):
        described["message"] = f"the graph has {len(error.problems)} problem(s)"
        described["problems"] = [asdict(problem) for problem in error.problems]
    return described


# For people.


def summary(outcome: Outcome, run: ExecutionContext) -> list[Line]:
    """How it ended and what it used."""
    mark = MARK_OF[outcome.status]
    lines: list[Line] = [
        [(f"✗ {printable(step)}: {printable(told(error))}", COLOURS["fail"])] for step, error in outcome.errors.items()
    ]
    if outcome.skipped:
        lines.append([(f"  skipped: {printable(', '.join(outcome.skipped))}", "dim")])
    ended: Line = [(f"{MARKS[mark]} {outcome.status}", COLOURS[mark])]
    if why := _why(outcome):
        ended.append((f": {printable(why)}", ""))
    elif outcome.stop is not None:
        lines.append([(f"■ on the way: {printable(str(outcome.stop))}", COLOURS["halt"])])
    figures = f"  {run.explain().rpartition(chr(10))[2]} · {run.usage.time_elapsed_seconds:.1f} s"
    return [*lines, ended, [(figures, "dim")]]


def _why(outcome: Outcome) -> str:
    if outcome.stop is not None and outcome.status in ("halted", "cancelled"):
        return str(outcome.stop)
    return "" if outcome.error is None else told(outcome.error)


def results(outcome: Outcome) -> Iterator[str]:
    """The results: one on a line where it fits, and below its name where it does not."""
    for name, value in outcome.results.items():
        yield "\n".join(titled(printable(name), value, "; --json shows them"))
