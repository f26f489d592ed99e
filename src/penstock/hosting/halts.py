"""The owner of the limit that halted a run, the steps that let the run go on, and the grants that can resume it.

Pure. The worker that halts a run stores the owner of the limit in the run's `halt`, where a grant reads it. Without
that record, no grant is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, tzinfo
from typing import Any, Literal, NamedTuple

from penstock.containment.accounts import Account, refusing
from penstock.hosting.durability import RUNS, day_accounts
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import RunRecord
from penstock.money import format_usd, to_nanos, to_usd
from penstock.stops import Stop, StopReason

Whose = Literal["run", "owner", "all", "node"]
"""The run's own limit; the daily budget of its owner or of all owners; or the limit of a node, an agent or a tool."""

RAISED_BY: Mapping[str, str] = {
    StopReason.BUDGET_EXCEEDED: "max_cost_usd",
    StopReason.STEP_LIMIT_EXCEEDED: "max_steps",
    StopReason.TOKEN_LIMIT_EXCEEDED: "max_tokens",
    StopReason.API_CALL_LIMIT_EXCEEDED: "max_api_calls",
    StopReason.RETRY_BUDGET_EXCEEDED: "max_retries",
    StopReason.TIMEOUT: "timeout_s",
}
"""The limit that a grant has to raise, by the stop reason of a run that its own limit halted."""


Step = Literal[
    "resolve_bills", "limit_output", "wait", "grant", "raise_daily_budget", "change_graph", "register_price", "resume"
]


class Advice(NamedTuple):
    """One step that helps a halted run to go on."""

    step: Step
    message: str
    amount_usd: float | None = None
    """The amount held by unresolved bills, or the least amount that a grant has to add; None if unknown."""


RESUME = Advice("resume", "resume it")


def limit_owner(stop: Stop, run: RunRecord, own: Account | None, zone: tzinfo = UTC) -> Whose | None:
    """Return whose limit caused the stop; None if no limit did. `own` is the run's own account, if it has one."""
    if stop.reason not in RAISED_BY or stop.budget is None:
        return None
    all_owners, owner = day_accounts(run, zone)
    at_ledger: dict[str, Whose] = {all_owners: "all", owner: "owner", RUNS + run.id: "run"}
    if stop.budget in at_ledger:
        return at_ledger[stop.budget]
    if own is None:
        return None
    return "node" if refusing(own, stop) is None else "run"


def advice(run: RunRecord) -> list[Advice]:
    """Return the steps that let a halted run go on, the most helpful one first; empty for any other run."""
    if run.status != "halted":
        return []
    if run.stop_reason == StopReason.PRICE_UNKNOWN:
        return [Advice("register_price", "register a price for its model, then resume it")]
    wanted = RAISED_BY.get(str(run.stop_reason))
    if wanted is None:
        return [RESUME]
    halt = run.halt or {}
    whose = halt.get("whose", "run")
    if whose == "node":
        retry = [RESUME] if halt.get("unit") == "seconds" else []
        change = "give the node a larger budget in a new version of the graph, and start a run of it"
        return [*retry, Advice("change_graph", change)]
    steps = _unresolved_steps(run)
    if halt.get("momentary"):
        steps.append(Advice("wait", "calls under way hold what it needs: resume it when they have ended"))
    elif whose == "run" and _is_freed(run, halt):
        steps.append(Advice("resume", "resume it: the bills that held what it needs are resolved"))
    elif whose != "run" and not steps:
        steps += _unresolved_of_day(halt)
    if whose == "run":
        return [*steps, _grant(wanted, run, halt)]
    raising = "raise the daily budget of the server, then resume it; or fork it on another day"
    return [*steps, Advice("raise_daily_budget", raising)]


def _unresolved_steps(run: RunRecord) -> list[Advice]:
    """Return the steps that free the money held by the run's unresolved bills, if its cost halted it and it has any."""
    if run.stop_reason != StopReason.BUDGET_EXCEEDED or not run.unresolved_nanos:
        return []
    held = f"resolve its unresolved bills, which hold {format_usd(run.unresolved_nanos)}, then resume it"
    less = "set max_output_tokens on its models: a call without it may hold the whole budget, and keep it when it fails"
    return [Advice("resolve_bills", held, to_usd(run.unresolved_nanos)), Advice("limit_output", less)]


def _unresolved_of_day(halt: Mapping[str, Any]) -> list[Advice]:
    """Return the steps that free the money that other runs' bills held in a daily budget at the halt; empty if none."""
    held_nanos = to_nanos(halt.get("held") or 0) if halt.get("unit") == "usd" else 0
    if not held_nanos:
        return []
    message = f"resolve the unresolved bills of other runs, which hold {format_usd(held_nanos)} of it, then resume it"
    return [Advice("resolve_bills", message, to_usd(held_nanos))]


def _is_freed(run: RunRecord, halt: Mapping[str, Any]) -> bool:
    """Whether bills that held the missing money have been resolved since the halt."""
    return halt.get("unit") == "usd" and to_nanos(halt.get("held") or 0) > run.unresolved_nanos


def _grant(wanted: str, run: RunRecord, halt: Mapping[str, Any]) -> Advice:
    """Return the grant that the run needs; for money, with the least amount that admits the refused call."""
    limit, amount = halt.get("limit"), halt.get("asked")
    if halt.get("unit") != "usd" or limit is None or not amount:
        return Advice("grant", f"grant it {wanted}")
    least = max(0, run.cost_nanos + run.unresolved_nanos + to_nanos(amount) - to_nanos(limit))
    if not least:
        return Advice("grant", f"grant it {wanted}")
    return Advice("grant", f"grant it {wanted}, at least {format_usd(least)} more", to_usd(least))


def grant_refusal(run: RunRecord, halt: Mapping[str, Any], more: RunLimits) -> str | None:
    """Return why a halted run would halt again after a grant of `more`, with advice; None if the grant helps."""
    what = f"run {run.id!r} was halted by"
    message = halt.get("message")
    if halt["whose"] == "run":
        wanted = RAISED_BY[halt["stop_reason"]]
        if _gives(more, wanted):
            return None
        or_resolve = f", or {steps[0].message}" if (steps := _unresolved_steps(run)) else ""
        return f"{what} its own limit ({message}), and this grant gives it no more of that: grant {wanted}{or_resolve}"
    if halt["whose"] == "node":
        again = "resume it to try again, or " if halt.get("unit") == "seconds" else ""
        helps = f"{again}give that more in a new version of the graph, and start a run of it"
        return f"{what} a budget inside its graph ({message}), which no grant raises: {helps}"
    payer = "its owner" if halt["whose"] == "owner" else "all owners together"
    helps = "resume it when the server allows more a day, or fork it on another day"
    if halt.get("momentary"):
        helps = "calls under way hold it: resume it in a moment, when they have ended"
    elif steps := _unresolved_steps(run):
        helps = f"{steps[0].message}; or {helps}"
    return f"{what} what {payer} may spend in a day ({message}), which no grant raises: {helps}"


def _gives(more: RunLimits, name: str) -> bool:
    """Whether `more` raises this limit by more than zero."""
    given = getattr(more, name)
    return given is not None and (to_nanos(given) if name == "max_cost_usd" else given) > 0
