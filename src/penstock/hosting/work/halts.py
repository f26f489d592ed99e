"""Whose limit has halted a run, and which grants can let it go on.

Pure. The worker that sees a run halt says whose limit it was in the run's last event, and whoever wants to grant more
reads it there. Where the event does not say so, as those of older runs, nothing is known and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from penstock.containment.accounts import Account, refusing
from penstock.hosting.limits import RunLimits
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.hosting.work.durable import RUNS, day_accounts
from penstock.hosting.work.told import ENDINGS
from penstock.money import to_nanos
from penstock.stops import Stop, StopReason

Whose = Literal["run", "owner", "all", "node"]
"""The run's own; what its owner, or everybody, may spend in a day; or one inside: of a node, an agent, a tool."""

RAISED_BY: Mapping[str, str] = {
    StopReason.BUDGET_EXCEEDED: "max_cost_usd",
    StopReason.STEP_LIMIT_EXCEEDED: "max_steps",
    StopReason.TOKEN_LIMIT_EXCEEDED: "max_tokens",
    StopReason.API_CALL_LIMIT_EXCEEDED: "max_api_calls",
    StopReason.RETRY_BUDGET_EXCEEDED: "max_retries",
    StopReason.TIMEOUT: "timeout_s",
}
"""What a grant has to give to a run that its own limit has halted for this."""


def whose_limit(stop: Stop, run: RunRecord, own: Account | None) -> Whose | None:
    """Whose limit the stop is of; None if it is of none. `own` is the run's own account, where there is one."""
    if stop.reason not in RAISED_BY or stop.budget is None:
        return None
    everybody, owner = day_accounts(run)
    at_ledger: dict[str, Whose] = {everybody: "all", owner: "owner", RUNS + run.id: "run"}
    if stop.budget in at_ledger:
        return at_ledger[stop.budget]
    if own is None:
        return None
    return "node" if refusing(own, stop) is None else "run"


def halt_of(last: HostedEvent | None) -> Mapping[str, Any] | None:
    """What is known of the limit that has halted a run, by its newest event; None if that tells of none."""
    if last is None or last.type != ENDINGS["halted"] or "whose" not in last.data:
        return None
    return last.data


def why_no_grant(run: RunRecord, halt: Mapping[str, Any], more: RunLimits) -> str | None:
    """Why a run that was halted so would halt again although it is granted `more`, and what would help; or None."""
    what = f"run {run.id!r} was halted by"
    told = halt.get("message")
    if halt["whose"] == "run":
        wanted = RAISED_BY[halt["stop_reason"]]
        if _gives(more, wanted):
            return None
        return f"{what} its own limit ({told}), and this grant gives it no more of that: grant {wanted}"
    if halt["whose"] == "node":
        again = "resume it to try again, or " if halt.get("unit") == "seconds" else ""
        helps = f"{again}give that more in a new version of the graph, and start a run of it"
        return f"{what} a budget inside its graph ({told}), which no grant raises: {helps}"
    payer = "its owner" if halt["whose"] == "owner" else "everybody together"
    helps = "resume it when the server allows more a day, or fork it on another day"
    if halt.get("momentary"):
        helps = "calls under way hold it: resume it in a moment, when they have ended"
    return f"{what} what {payer} may spend in a day ({told}), which no grant raises: {helps}"


def _gives(more: RunLimits, name: str) -> bool:
    """Whether there is more than nothing of it."""
    given = getattr(more, name)
    return given is not None and (to_nanos(given) if name == "max_cost_usd" else given) > 0
