"""Runs and their events as lines that people read.

Pure: given what a server answered, says how it looks. Prints nothing and asks nobody.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.exits import Exit
from penstock.cli.showing.screen import Line, printable
from penstock.cli.showing.value import titled
from penstock.money import format_usd, to_nanos, to_usd

COLOURS = {
    "queued": "cyan",
    "running": "cyan",
    "waiting": "yellow",
    "parked": "yellow",
    "completed": "green",
    "failed": "red",
    "halted": "red",
    "cancelled": "yellow",
}
EXITS = {"completed": Exit.OK, "failed": Exit.FAILED, "halted": Exit.HALTED, "cancelled": Exit.CANCELLED}
"""How a command leaves that has followed a run to its end."""
ADVICE = {
    "queued": "penstock runs tail {id}{at} follows it",
    "running": "penstock runs tail {id}{at} follows it; penstock runs cancel {id}{at} stops it",
    "waiting": "penstock runs answer {id} yes{at} lets it go on, and no does not",
    "parked": "it goes on when a server starts that has its database",
    "failed": "penstock runs resume {id}{at} tries again from what it has recorded",
    "cancelled": "penstock runs resume {id}{at} lets it go on after all",
}
ANSWERED = "it is answered, and goes on as soon as a server takes it up"
"""Of a run that waits and asks nothing: whoever worked on it is gone, and its lease has to run out."""
NOT_RECORDED = (
    "a replay calls nothing, and what is missing was never recorded: penstock runs start {graph_id}{at} runs it anew"
)
PRICELESS = (
    "penstock runs resume {id}{at} lets it go on when the server is started with --prices that have one for its model"
)
GRANTS = {
    "budget_exceeded": "--max-cost USD",
    "step_limit_exceeded": "--max-steps N",
    "token_limit_exceeded": "--max-tokens N",
    "api_call_limit_exceeded": "--max-api-calls N",
    "retry_budget_exceeded": "--max-retries N",
    "timeout": "--timeout SECONDS",
}
"""What to grant a run that its own limit has halted for this."""
DAILY = {"owner": "--user-daily", "all": "--daily"}
"""What a server is started with, to allow more a day."""
SHOWN_CHARACTERS = 160
ASKED_CHARACTERS = 1_000
"""So much of a question, and of what it is about, stands on one line: whoever answers has to know it."""


def table(found: Iterable[Mapping[str, Any]], *, has_owners: bool = False) -> Iterator[Line]:
    """Runs, one a line, under a head; with whose they are, where that is not clear."""
    owned = [("OWNER", lambda run: str(run.get("owner", "")))] if has_owners else []
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("RUN", lambda run: str(run["id"])),
        ("STATUS", lambda run: str(run["status"])),
        *owned,
        ("GRAPH", _graph),
        ("COST", _cost),
        ("TOOK", took),
    ]
    heads = [head for head, _ in columns]
    rows = [[printable(cell(run)) for _, cell in columns] for run in found]
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    yield [("  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip(), "bold")]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield [(f"{cells[0]}  ", ""), (f"{cells[1]}  ", COLOURS.get(row[1], "")), ("  ".join(cells[2:]).rstrip(), "")]


def about(
    run: Mapping[str, Any],
    questions: Sequence[Mapping[str, Any]] = (),
    so_far: Mapping[str, Any] | None = None,
    *,
    at: str = "",
) -> Iterator[Line]:
    """A run: how it stands, what it has used of what it may, why it stopped, and what to do about it."""
    used, yet = (run, "") if so_far is None else (so_far, " so far")
    yield [(f"{run['id']}  ", "bold"), (run["status"], COLOURS.get(run["status"], ""))]
    yield [(f"graph    {run['graph_id']}, version {run['graph_version']}", "")]
    yield [(f"owner    {printable(str(run.get('owner', '')))}", "")]
    yield [(f"took     {took(run)}", "")]
    yield [(f"cost     {_spent(used, yet + _of(run, 'max_cost_usd', '$'))}{_unresolved(run)}", "")]
    if unknown := _unknown(used):
        yield [(f"beware   no ceiling on money has seen what {_calls(unknown)} cost", "yellow")]
    yield [(f"tokens   {used['tokens_in']:,} in, {used['tokens_out']:,} out{yet}{_of(run, 'max_tokens')}", "")]
    if run.get("stop_reason"):
        yield [(f"stopped  {run['stop_reason']}: {printable(str(run.get('error') or ''))}", "red")]
    elif run.get("error"):
        yield [(f"error    {printable(str(run['error']))}", "red")]
    if run.get("output") is not None:
        yield [(f"output   {short(run['output'])}", "")]
    for one in questions:
        yield [(f"asked    {short(one['question'], ASKED_CHARACTERS)}", "yellow")]
        yield from ([(f"         {line}", "yellow")] for line in matter(one, at))
    if advice := advice_for(run, at, questions):
        yield [(f"→ {advice}", "cyan")]


def matter(question: Mapping[str, Any], at: str = "") -> list[str]:
    """What a question is about, in lines: the arguments of a tool call, or what goes on; nothing, if it is nothing."""
    value = question.get("value")
    hint = f"; penstock runs show {question['run_id']}{at} --json has them"
    return [] if value is None else titled("value", value, hint)


def instead(question: Mapping[str, Any]) -> str:
    """What a run goes on with if the answer is edited."""
    value = question.get("value")
    is_call = isinstance(value, Mapping) and value.keys() == {"tool", "arguments"}
    return "other arguments" if is_call else "something else"


def used_by(calls: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What calls that have ended cost together; what was found in a journal was paid before."""
    paid = [call for call in calls if not call.get("replayed")]
    used: dict[str, Any] = {
        name: sum(int(call.get(name) or 0) for call in paid) for name in ("tokens_in", "tokens_out")
    }
    used["unknown_costs"] = sum(call.get("cost_usd", 0) is None for call in paid)
    return {"cost_usd": to_usd(sum(to_nanos(float(call.get("cost_usd") or 0)) for call in paid)), **used}


def has_ended(run: Mapping[str, Any]) -> bool:
    """Whether the record of a run says what it has used: that is written at its end."""
    return run["status"] in EXITS


def advice_for(run: Mapping[str, Any], at: str = "", asked: Sequence[Mapping[str, Any]] = ()) -> str:
    """What can be done with a run that has `asked` this, `at` its server; nothing, if it is complete."""
    if run["status"] == "halted":
        return _advice_for_halted(run, run.get("halted_by") or {}, at)
    advice = ADVICE.get(run["status"], "")
    if run["status"] == "waiting":
        advice = f"{advice}; yes --edit JSON lets it go on with {instead(asked[0])}" if asked else ANSWERED
    elif run["status"] == "failed" and str(run.get("error")).startswith("JournalMissing:"):
        advice = NOT_RECORDED
    return advice.format(id=run["id"], graph_id=run["graph_id"], at=at)


def _advice_for_halted(run: Mapping[str, Any], halt: Mapping[str, Any], at: str) -> str:
    """What lets it go on; a server that does not say whose limit it was means the run's own."""
    granted, again = GRANTS.get(str(run.get("stop_reason"))), f"penstock runs resume {run['id']}{at}"
    if run.get("stop_reason") == "price_unknown":
        return PRICELESS.format(id=run["id"], at=at)
    if granted is None:
        return f"{again} tries again from what it has recorded"
    whose, node = halt.get("whose", "run"), halt.get("node_id")
    if whose in DAILY:
        begin = "NODE" if node is None else shlex.quote(printable(str(node)))
        fork = f"penstock runs fork {run['id']} --at {begin}{at}"
        return f"{again} lets it go on when the server is started with more {DAILY[whose]}; or, on another day, {fork}"
    if whose == "node":
        retry = f"{again} tries again; " if halt.get("unit") == "seconds" else ""
        return f"{retry}no grant raises {_inside(halt)}: give it more in graph {run['graph_id']}, and start a new run"
    return f"penstock runs grant {run['id']} {granted}{at} lets it go on"


def event_line(seq: int, kind: str, data: Mapping[str, Any]) -> Line:
    """One event: its number, its type, whom it is about, and what it says."""
    return [(f"{seq:>6}  ", "dim"), (f"{kind:<18} ", _colour(kind)), (printable(_said(kind, data)), "")]


def dollars(amount: object) -> str:
    """An amount of money as people read it: cents at least, and as many digits more as it has."""
    return format_usd(to_nanos(float(amount or 0)))  # type: ignore[arg-type]  # JSON: a number, or nothing


def cost(data: Mapping[str, Any]) -> str:
    """What a run has cost, and what is held for calls whose bill nobody knows."""
    held = float(data.get("unresolved_usd") or 0)
    return f"{_spent(data)}, {dollars(held)} held" if held else _spent(data)


def bill(data: Mapping[str, Any]) -> str:
    """What a run or a call has cost, and how many tokens it took."""
    tokens = int(data.get("tokens_in") or 0) + int(data.get("tokens_out") or 0)
    money = "cost unknown" if data.get("cost_usd", 0) is None else cost(data)
    return f"{money} · {tokens:,} token{'' if tokens == 1 else 's'}"


def took(run: Mapping[str, Any]) -> str:
    """How long it took, if it has come to its end."""
    begin, end = run.get("started_ms"), run.get("ended_ms")
    if begin is None:
        return "not started"
    return "not ended" if end is None else f"{max(end - begin, 0) / 1_000:.1f} s"


def short(value: Any, most: int = SHOWN_CHARACTERS) -> str:
    """A value on one line, cut where it gets long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What two exported runs do not have in common: what it is, and how it stands in each."""
    compared = ("graph_id", "graph_version", "input", "limits", "status", "stop_reason", "error", "cost", "output")
    for field in compared:
        left, right = ((cost(run) if field == "cost" else run.get(field)) for run in (one["run"], two["run"]))
        if left != right:
            yield field, left, right
    first, second = _nodes(one["events"]), _nodes(two["events"])
    for node in dict.fromkeys([*first, *second]):
        if first.get(node) != second.get(node):
            yield f"node {node}", first.get(node, "did not run"), second.get(node, "did not run")


def _nodes(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of each node."""
    ends = {"node.completed", "node.error", "node.cancelled", "node.skipped"}
    hidden = ("node_id", "node_type", "replayed")  # where it came from is no difference in what it is
    return {
        event["data"]["node_id"]: {"became": event["type"].removeprefix("node.")}
        | {name: one for name, one in event["data"].items() if name not in hidden}
        for event in events
        if event["type"] in ends
    }


def _colour(kind: str) -> str:
    return COLOURS.get(kind.removeprefix("run."), "red" if kind in ("node.error", "limit") else "")


def _said(kind: str, data: Mapping[str, Any]) -> str:
    if kind == "call.ended":
        again = " · from the journal" if data.get("replayed") else ""
        why = f" ({data['stop_reason']})" if data.get("stop_reason") else ""
        return f"{data['kind']} {data['name']}: {data['status']}{why} · {bill(data)}{again}"
    if kind == "approval.requested":
        return _asked(data["approval"])
    if kind == "text.delta":
        return f"{data.get('node_id', '')} {short(data.get('text', ''))}"
    is_replayed = data.get("replayed") is True  # a run that is resumed says how many of its calls are
    hidden = ("node_id", "node_type", *(["replayed"] if is_replayed else []))
    rest = {name: one for name, one in data.items() if name not in hidden}
    if "message" in rest or "reason" in rest:
        fault = rest.get("stop_reason") or rest.get("error")
        text = ": ".join(str(part) for part in (fault, rest.get("message") or rest.get("reason")) if part)
    elif "output" in rest or "outputs" in rest:
        text = short(rest.get("output", rest.get("outputs")))
    else:
        text = short(rest) if rest else ""
    spent = f"· {bill(data)}" if kind.startswith("run.") and "cost_usd" in data else ""
    again = "· from the journal" if is_replayed else ""
    node = str(data.get("node_id", ""))
    return " ".join(part for part in (node, text, spent, again) if part)


def _asked(question: Mapping[str, Any]) -> str:
    """A question on one line, with what it is about."""
    about = [] if question.get("value") is None else [short(question["value"], ASKED_CHARACTERS)]
    return " · ".join([short(question["question"], ASKED_CHARACTERS), *about])


def _cost(run: Mapping[str, Any]) -> str:
    return cost(run) if has_ended(run) or _unknown(run) else f"≥ {cost(run)}"


def _graph(run: Mapping[str, Any]) -> str:
    return f"{run['graph_id']}@{run['graph_version']}"


def _spent(data: Mapping[str, Any], of: str = "") -> str:
    """What was paid, as `penstock run` says it: if nobody can tell of some calls, the rest is a lower bound."""
    known, unknown = f"{dollars(data.get('cost_usd'))}{of}", _unknown(data)
    return f"known ≥ {known}, unknown {_calls(unknown)}" if unknown else known


def _unknown(used: Mapping[str, Any]) -> int:
    return int(used.get("unknown_costs") or 0)


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"


def _unresolved(run: Mapping[str, Any]) -> str:
    held = float(run.get("unresolved_usd") or 0)
    return f", and {dollars(held)} held for calls whose bill nobody knows" if held else ""


def _inside(halt: Mapping[str, Any]) -> str:
    """A budget inside a run: how high, whose, and at which node of the graph, if that is called otherwise."""
    budget, node = halt.get("budget"), halt.get("node_id")
    where = "" if node in (None, budget) else f" (node {printable(repr(node))})"
    return f"the {_figure(halt)} of {printable(repr(budget))}{where}"


def _figure(halt: Mapping[str, Any]) -> str:
    """How high a limit is, in its unit."""
    limit, unit = halt.get("limit"), str(halt.get("unit") or "")
    if not isinstance(limit, int | float):
        return "limit"
    if unit == "usd":
        return dollars(limit)
    return f"{limit:g} s" if unit == "seconds" else f"{limit:,.0f} {unit}"


def _of(run: Mapping[str, Any], limit: str, unit: str = "") -> str:
    ceiling = (run.get("limits") or {}).get(limit)
    return "" if ceiling is None else f" of {unit}{ceiling}"
