"""Renders the records of runs on a server as lines for people.

Pure: turns server responses into lines. Prints nothing and sends no requests.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.render.events import EXITS, MAX_QUESTION, STATUS_COLOURS
from penstock.cli.render.screen import Line, printable
from penstock.cli.render.text import cost, counted, dollars, short, spent, titled
from penstock.clock import utc_from_ns
from penstock.hosting.run_diff import COMPARED, field_differences, node_differences, node_ends
from penstock.money import known_usd, to_nanos

ADVICE = {
    "queued": "follow it with: penstock runs tail {id}{at}",
    "running": "follow it with: penstock runs tail {id}{at}; stop it with: penstock runs cancel {id}{at}",
    "waiting": "approve with: penstock runs answer {id} yes{at}; reject with no",
    "parked": "it resumes when a server starts with its database",
    "failed": "resume it from its journal with: penstock runs resume {id}{at}",
    "cancelled": "resume it from its journal with: penstock runs resume {id}{at}",
}
ANSWERED = "it is answered, and resumes when a server claims it"
"""For a waiting run without open questions: its worker is gone, and the lease has to expire first."""
NOT_RECORDED = (
    "a replay makes no calls, and a result is missing from the journal; start a new run with: "
    "penstock runs start {graph_id}{at}"
)
PRICE_UNKNOWN = (
    "restart the server with --prices that include its model, then resume it with: penstock runs resume {id}{at}"
)
GRANTS = {
    "budget_exceeded": "--max-cost USD",
    "step_limit_exceeded": "--max-steps N",
    "token_limit_exceeded": "--max-tokens N",
    "api_call_limit_exceeded": "--max-api-calls N",
    "retry_budget_exceeded": "--max-retries N",
    "timeout": "--timeout SECONDS",
}
"""Options of `runs grant` for a run halted by its own limit, by stop reason."""
MAX_NODES = 30
"""Maximum number of node ids shown for a run."""
DAILY = {"owner": "--user-daily", "all": "--daily"}
"""Server options that raise the daily budget, by its scope."""


def table(found: Iterable[Mapping[str, Any]], *, has_owners: bool = False) -> Iterator[Line]:
    """Yield a header and one line per run; with `has_owners`, also the owner."""
    owned = [("OWNER", lambda run: str(run.get("owner", "")))] if has_owners else []
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("RUN", lambda run: str(run["id"])),
        ("STATUS", lambda run: str(run["status"])),
        *owned,
        ("GRAPH", _graph),
        ("COST", _cost),
        ("TOOK", took),
    ]
    yield from _aligned([head for head, _ in columns], [[cell(run) for _, cell in columns] for run in found])


def unresolved_runs(found: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield a header and one line per run with unresolved bills."""
    rows = [[str(run["id"]), str(run["status"]), dollars(run["unresolved_usd"]), _graph(run)] for run in found]
    yield from _aligned(["RUN", "STATUS", "UNRESOLVED", "GRAPH"], rows)


def bills_table(bills: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """Yield a header and one line per unresolved bill."""
    rows = [
        [
            str(bill["call_id"]),
            dollars(bill["held_usd"]),
            _moment(bill.get("at_ms")),
            str(bill.get("model") or bill.get("name") or "unknown"),
            short(bill["reason"]),
        ]
        for bill in bills
    ]
    yield from _aligned(["CALL", "HELD", "WHEN", "MODEL", "WHY"], rows)


def _aligned(heads: list[str], rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Yield a header and the rows in columns; a status in the second column has its colour."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    yield [("  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip(), "bold")]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield [
            (f"{cells[0]}  ", ""),
            (f"{cells[1]}  ", STATUS_COLOURS.get(row[1], "")),
            ("  ".join(cells[2:]).rstrip(), ""),
        ]


def _moment(at_ms: int | None) -> str:
    """Format a time in UTC, to the second."""
    if at_ms is None:
        return "unknown"
    return utc_from_ns(at_ms * 1_000_000).strftime("%Y-%m-%d %H:%M:%SZ")


def about(
    run: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]] = (),
    so_far: Mapping[str, Any] | None = None,
    nodes: Sequence[str] = (),
    changes: Iterable[Mapping[str, Any]] = (),
    *,
    at: str = "",
) -> Iterator[Line]:
    """Yield lines about a run: status, nodes, usage, why it stopped, open questions, and what to do about it."""
    usage, yet = (run, "") if so_far is None else (so_far, " so far")
    yield [(f"{run['id']}  ", "bold"), (run["status"], STATUS_COLOURS.get(run["status"], ""))]
    yield [(f"graph    {run['graph_id']}, version {run['graph_version']}", "")]
    if nodes:
        more = f" and {len(nodes) - MAX_NODES} more" if len(nodes) > MAX_NODES else ""
        yield [(f"nodes    {printable(', '.join(nodes[:MAX_NODES]))}{more}", "")]
    yield [(f"owner    {printable(str(run.get('owner', '')))}", "")]
    yield [(f"took     {took(run)}", "")]
    yield [(f"cost     {spent(usage, yet + _of(run, 'max_cost_usd', '$'))}{_unresolved(run)}", "")]
    if unknown := _unknown(usage):
        yield [(f"warning  the cost of {counted(unknown, 'call')} is unknown and not limited", "yellow")]
    yield [(f"tokens   {usage['tokens_in']:,} in, {usage['tokens_out']:,} out{yet}{_of(run, 'max_tokens')}", "")]
    for change in changes:
        yield from _change_lines(change)
    if run.get("stop_reason"):
        yield [(f"stopped  {run['stop_reason']}: {printable(str(run.get('error') or ''))}", "red")]
    elif run.get("error"):
        yield [(f"error    {printable(str(run['error']))}", "red")]
    if run.get("output") is not None:
        yield [(f"output   {short(run['output'])}", "")]
    for question in questions:
        yield [(f"question {short(question['question'], MAX_QUESTION)}", "yellow")]
        yield from ([(f"         {line}", "yellow")] for line in value_lines(question, at))
    if advice := advice_for(run, at, questions):
        yield [(f"→ {advice}", "cyan")]


def _change_lines(change: Mapping[str, Any]) -> Iterator[Line]:
    """Yield lines about a changed program: recorded results of the run that it used, ran again or did not use."""
    yield [(f"program  {printable(str(change.get('message', '')))}", "yellow")]
    for title, name in (("used", "reused"), ("run again", "again"), ("not used", "ignored")):
        listed = change.get(name) or ()
        for one in listed[:MAX_NODES]:
            text = f"{one['name']}: {one['why']}" if isinstance(one, Mapping) else str(one)
            yield [(f"           {title:<9}  {printable(text)}", "yellow")]
        if len(listed) > MAX_NODES:
            yield [(f"           {title:<9}  and {len(listed) - MAX_NODES} more", "yellow")]


def value_lines(question: Mapping[str, Any], at: str = "") -> list[str]:
    """Render a question's value: the arguments of a tool call, or the value to continue with; empty if it is None."""
    value = question.get("value")
    hint = f"; shown by: penstock runs show {question['run_id']}{at} --json"
    return [] if value is None else titled("value", value, hint)


def replacement(question: Mapping[str, Any]) -> str:
    """Describe the value that an edited answer provides to the run."""
    value = question.get("value")
    is_call = isinstance(value, Mapping) and value.keys() == {"tool", "arguments"}
    return "other arguments" if is_call else "another value"


def used_by(calls: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the usage of ended calls; replayed calls are excluded, because they were paid before."""
    paid = [call for call in calls if not call.get("replayed")]
    used: dict[str, Any] = {
        name: sum(int(call.get(name) or 0) for call in paid) for name in ("tokens_in", "tokens_out")
    }
    used["unknown_costs"] = sum(call.get("cost_usd", 0) is None for call in paid)
    known = sum(to_nanos(float(call.get("cost_usd") or 0)) for call in paid)
    return {"cost_usd": known_usd(known, used["unknown_costs"]), **used}


def has_ended(run: Mapping[str, Any]) -> bool:
    """Whether the run has ended, and so its record has its usage, which is written at the end."""
    return run["status"] in EXITS


def advice_for(run: Mapping[str, Any], at: str = "", questions: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return what to do with a run that has these open questions; `at` names its server. Empty if it completed."""
    if run["status"] == "halted":
        return _advice_for_halted(run, run.get("halted_by") or {}, at)
    advice = ADVICE.get(run["status"], "")
    if run["status"] == "waiting":
        advice = (
            f"{advice}; use yes --edit JSON to continue with {replacement(questions[0])}" if questions else ANSWERED
        )
    elif run["status"] == "failed" and str(run.get("error")).startswith("JournalMissing:"):
        advice = NOT_RECORDED
    return advice.format(id=run["id"], graph_id=run["graph_id"], at=at)


def _advice_for_halted(run: Mapping[str, Any], halt: Mapping[str, Any], at: str) -> str:
    """Return how to continue a halted run; without `whose`, the limit is taken to be the run's own."""
    option, resume = GRANTS.get(str(run.get("stop_reason"))), f"penstock runs resume {run['id']}{at}"
    if run.get("stop_reason") == "price_unknown":
        return PRICE_UNKNOWN.format(id=run["id"], at=at)
    if option is None:
        return f"resume it from its journal with: {resume}"
    whose, node = halt.get("whose", "run"), halt.get("node_id")
    steps = {step["step"]: step for step in run.get("advice") or ()}
    resolving = f"its bills are resolved, so resume it with: {resume}; or " if "resume" in steps else ""
    if "resolve_bills" in steps:
        step = steps["resolve_bills"]
        is_own = bool(run.get("unresolved_usd"))
        resolving = _resolving(step, f"{run['id']}{at}", resume) if is_own else _resolving_others(step, at, resume)
    if whose in DAILY:
        start = "NODE" if node is None else shlex.quote(printable(str(node)))
        fork = f"penstock runs fork {run['id']} --at {start}{at}"
        raising = f"restart the server with a higher {DAILY[whose]}, then: {resume}; or fork it on another day: {fork}"
        waiting = f"calls under way hold what it needs: {resume} when they have ended; or " if "wait" in steps else ""
        return f"{resolving}{waiting}{raising}"
    if whose == "node":
        retry = f"try again with: {resume}; or " if halt.get("unit") == "seconds" else ""
        return f"{retry}raise {_inside(halt)} in graph {run['graph_id']} and start a new run; a grant cannot raise it"
    least = steps.get("grant", {}).get("amount_usd")
    by = f" (at least {dollars(least)} more)" if least else ""
    return f"{resolving}raise the limit with: penstock runs grant {run['id']} {option}{at}{by}"


def _resolving(step: Mapping[str, Any], run: str, resume: str) -> str:
    """Return how to free the holds of unresolved bills; other advice follows."""
    held = f"unresolved bills hold {dollars(step['amount_usd'])}"
    less = "set max_output_tokens on its models so that a failed call holds less"
    return f"{held}: resolve them with: penstock runs bills {run}, then: {resume}; {less}; or "


def _resolving_others(step: Mapping[str, Any], at: str, resume: str) -> str:
    """Return how to free the holds that bills of other runs have on a daily budget; other advice follows."""
    held = f"unresolved bills of other runs hold {dollars(step['amount_usd'])} of it"
    return f"{held} (GET /api/bills lists them): resolve them with: penstock runs bills RUN{at}, then: {resume}; or "


def took(run: Mapping[str, Any]) -> str:
    """Return how long the run took, if it has ended."""
    begin, end = run.get("started_ms"), run.get("ended_ms")
    if begin is None:
        return "not started"
    return "not ended" if end is None else f"{max(end - begin, 0) / 1_000:.1f} s"


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between two exported runs: name, and the value in each."""
    left, right = ({**run["run"], "cost": cost(run["run"])} for run in (first, second))
    yield from field_differences(left, right, [*("cost" if name == "cost_usd" else name for name in COMPARED)])
    nodes, other_nodes = (
        node_ends((event["type"], event["data"]) for event in run["events"]) for run in (first, second)
    )
    yield from node_differences(nodes, other_nodes)


def _cost(run: Mapping[str, Any]) -> str:
    return cost(run) if has_ended(run) or _unknown(run) else f"≥ {cost(run)}"


def _graph(run: Mapping[str, Any]) -> str:
    return f"{run['graph_id']}@{run['graph_version']}"


def _unknown(usage: Mapping[str, Any]) -> int:
    return int(usage.get("unknown_costs") or 0)


def _unresolved(run: Mapping[str, Any]) -> str:
    held = float(run.get("unresolved_usd") or 0)
    return f", and {dollars(held)} held for unresolved calls" if held else ""


def _inside(halt: Mapping[str, Any]) -> str:
    """Describe a budget inside a run: limit, name, and the node if its name differs."""
    budget, node = halt.get("budget"), halt.get("node_id")
    where = "" if node in (None, budget) else f" (node {printable(repr(node))})"
    return f"the {_figure(halt)} of {printable(repr(budget))}{where}"


def _figure(halt: Mapping[str, Any]) -> str:
    """Format a limit with its unit."""
    limit, unit = halt.get("limit"), str(halt.get("unit") or "")
    if not isinstance(limit, int | float):
        return "limit"
    if unit == "usd":
        return dollars(limit)
    return f"{limit:g} s" if unit == "seconds" else f"{limit:,.0f} {unit}"


def _of(run: Mapping[str, Any], limit: str, unit: str = "") -> str:
    ceiling = (run.get("limits") or {}).get(limit)
    return "" if ceiling is None else f" of {unit}{ceiling}"
