"""`penstock runs …`: what a server runs, has run, and should stop, resume, fork or be granted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Refused
from penstock.cli.options import URL, AsJson, Token, Url
from penstock.cli.showing.screen import Line, Screen, printable, say

app = typer.Typer(rich_markup_mode=None)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]

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
QUIET = frozenset({"call.started", "node.progress"})
"""What `tail` leaves out unless everything is asked for."""


@app.callback(invoke_without_command=True)
def runs(context: typer.Context) -> int:
    """See and steer the runs of a server.

    \b
    Examples:
      penstock runs ls --status running
      penstock runs tail RUN
      penstock runs cancel RUN
      penstock runs grant RUN --max-cost 0.50
      penstock runs fork RUN --at writer --input '"shorter, please"'
      penstock runs diff RUN OTHER
    """
    if context.invoked_subcommand is None:
        say(context.get_help())
    return Exit.OK


@app.command()
def ls(
    status: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    graph: Annotated[str | None, typer.Option(help="Only those of this graph.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most so many.")] = 20,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """List runs, the newest first."""
    with _server(url, token) as server:
        found = server.get("/api/runs", status=status, graph_id=graph, limit=limit)["runs"]
    if as_json:
        return _print_json(found)
    if not found:
        say("no runs" if status is None and graph is None else "no such runs")
        return Exit.OK
    _show(*_table(found))
    return Exit.OK


@app.command()
def show(run_id: RunId, url: Url = URL, token: Token = None, as_json: AsJson = False) -> int:
    """Show a run: how it stands, what it has used of what it may, and why it stopped."""
    with _server(url, token) as server:
        run = server.get(f"/api/runs/{_escaped(run_id)}")
    if as_json:
        return _print_json(run)
    _show(*_about(run))
    return Exit.OK


@app.command()
def tail(
    run_id: RunId,
    after: Annotated[int, typer.Option(min=0, help="Begin behind this event.")] = 0,
    everything: Annotated[bool, typer.Option("--all", help="Every event, progress of nodes and calls too.")] = False,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Follow a run to its end, and leave with its exit code.

    \b
    Exit codes:
      0 completed   2 failed   3 halted by a limit   130 cancelled
    """
    status = ""
    with _server(url, token) as server:
        for event in server.events(run_id, after):
            if event.type.startswith("run."):
                status = event.type.removeprefix("run.")
            if as_json:
                say(json.dumps({"seq": event.seq, "type": event.type, "data": event.data}))
            elif everything or event.type not in QUIET:
                _show(_event_line(event.seq, event.type, event.data))
    return EXITS.get(status, Exit.OK)


@app.command()
def cancel(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the run.")] = "cancelled",
    url: Url = URL,
    token: Token = None,
) -> int:
    """Stop a run; one that is not there yet is stopped when it comes."""
    with _server(url, token) as server:
        answer = server.post(f"/api/runs/{_escaped(run_id)}/cancel", {"reason": reason})
    say(f"{run_id}: {answer['result'].replace('_', ' ')}")
    return Exit.OK


@app.command()
def resume(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Let a run that failed, was halted, cancelled or parked go on from what it has recorded."""
    return _act(url, token, run_id, "resume", {})


@app.command()
def grant(
    run_id: RunId,
    max_cost: Annotated[str | None, typer.Option(metavar="USD", help="So many dollars more.")] = None,
    max_steps: Annotated[int | None, typer.Option(metavar="N", help="So many steps more.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="So many tokens more.")] = None,
    max_retries: Annotated[int | None, typer.Option(metavar="N", help="So many failures more.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="So many seconds more.")] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Raise the limits of a run; one that was halted goes on."""
    more = {
        "max_cost_usd": max_cost,
        "max_steps": max_steps,
        "max_tokens": max_tokens,
        "max_retries": max_retries,
        "timeout_s": timeout,
    }
    given = {name: value for name, value in more.items() if value is not None}
    if not given:
        raise Refused("a grant has to say what is granted, such as --max-cost 0.50")
    return _act(url, token, run_id, "grant", {"limits": given})


@app.command()
def fork(
    run_id: RunId,
    at: Annotated[str, typer.Option(metavar="NODE", help="This node, and all behind it, run again.")],
    input: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="What comes into the node, instead of what came.")
    ] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Begin a new run from the middle of another; what stands before the node is not run, or paid, again."""
    from penstock.cli.loading.values import read_input

    body: dict[str, Any] = {"at": at}
    if input is not None:
        body["input"] = read_input(input)
    return _act(url, token, run_id, "fork", body)


@app.command()
def replay(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Go through a run again from its journal, without a single call."""
    return _act(url, token, run_id, "replay", {})


@app.command()
def export(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Print everything that is kept of a run, as JSON."""
    with _server(url, token) as server:
        return _print_json(server.export(run_id))


@app.command()
def diff(
    run_id: RunId,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The run to compare it with.")],
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Show where two runs differ: limits, input, what became of each node, cost, output."""
    with _server(url, token) as server:
        one, two = server.export(run_id), server.export(other)
    differences = list(differing(one, two))
    if as_json:
        return _print_json([{"what": what, run_id: left, other: right} for what, left, right in differences])
    if not differences:
        say(f"{run_id} and {other} do not differ")
    for what, left, right in differences:
        _show([(what, "")], [(f"  - {_short(left)}", "red")], [(f"  + {_short(right)}", "green")])
    return Exit.OK


def differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    """What two exported runs do not have in common: what it is, and how it stands in each."""
    compared = ("graph_id", "graph_version", "input", "limits", "status", "stop_reason", "error", "cost_usd", "output")
    for field in compared:
        left, right = one["run"].get(field), two["run"].get(field)
        if left != right:
            yield field, left, right
    first, second = _nodes(one["events"]), _nodes(two["events"])
    for node in dict.fromkeys([*first, *second]):
        if first.get(node) != second.get(node):
            yield f"node {node}", first.get(node, "did not run"), second.get(node, "did not run")


def _nodes(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of each node."""
    ends = {"node.completed", "node.error", "node.cancelled", "node.skipped"}
    return {
        event["data"]["node_id"]: {name: one for name, one in event["data"].items() if name not in ("node_type",)}
        | {"became": event["type"].removeprefix("node.")}
        for event in events
        if event["type"] in ends
    }


def _act(url: str, token: str | None, run_id: str, act: str, body: Mapping[str, Any]) -> int:
    with _server(url, token) as server:
        run = server.post(f"/api/runs/{_escaped(run_id)}/{act}", body)
    say(f"{run['id']}: {run['status']}; penstock runs tail {run['id']} follows it")
    return Exit.OK


def _server(url: str, token: str | None) -> Any:
    from penstock.cli.remote.connection import Connection

    return Connection(url, token)


def _escaped(id: str) -> str:
    from penstock.cli.remote.connection import escaped

    return escaped(id)


def _print_json(value: Any) -> int:
    say(json.dumps(value, indent=2))
    return Exit.OK


def _show(*lines: Line) -> None:
    Screen(sys.stdout).show(*lines, whole=True)


def _table(found: Iterable[Mapping[str, Any]]) -> Iterable[Line]:
    rows = [
        (run["id"], run["status"], f"{run['graph_id']}@{run['graph_version']}", money(run), took(run)) for run in found
    ]
    heads = ("RUN", "STATUS", "GRAPH", "COST", "TOOK")
    widths = [max(len(str(row[at])) for row in [heads, *rows]) for at in range(len(heads))]
    yield [("  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True)).rstrip(), "bold")]
    for row in rows:
        cells = [printable(str(cell)).ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield [(f"{cells[0]}  ", ""), (f"{cells[1]}  ", COLOURS.get(row[1], "")), ("  ".join(cells[2:]).rstrip(), "")]


def _about(run: Mapping[str, Any]) -> Iterable[Line]:
    yield [(f"{run['id']}  ", "bold"), (run["status"], COLOURS.get(run["status"], ""))]
    yield [(f"graph    {run['graph_id']}, version {run['graph_version']}", "")]
    yield [(f"owner    {printable(str(run.get('owner', '')))}", "")]
    yield [(f"took     {took(run)}", "")]
    yield [(f"cost     {money(run)}{_of(run, 'max_cost_usd', '$')}{_unresolved(run)}", "")]
    yield [(f"tokens   {run['tokens_in']:,} in, {run['tokens_out']:,} out{_of(run, 'max_tokens')}", "")]
    if run.get("stop_reason"):
        yield [(f"stopped  {run['stop_reason']}: {printable(str(run.get('error') or ''))}", "red")]
    elif run.get("error"):
        yield [(f"error    {printable(str(run['error']))}", "red")]
    if run.get("output") is not None:
        yield [(f"output   {_short(run['output'])}", "")]
    if advice := ADVICE.get(run["status"]):
        yield [(f"→ {advice.format(id=run['id'])}", "cyan")]


ADVICE = {
    "queued": "penstock runs tail {id} follows it",
    "running": "penstock runs tail {id} follows it; penstock runs cancel {id} stops it",
    "waiting": "somebody is asked; GET /api/approvals lists the questions",
    "halted": "penstock runs grant {id} --max-cost USD lets it go on",
    "failed": "penstock runs resume {id} tries again from what it has recorded",
    "cancelled": "penstock runs resume {id} lets it go on after all",
}


def money(run: Mapping[str, Any]) -> str:
    """What it has cost, as people read it."""
    return f"${float(run.get('cost_usd') or 0):.4f}"


def _unresolved(run: Mapping[str, Any]) -> str:
    held = float(run.get("unresolved_usd") or 0)
    return f", and ${held:.4f} held for calls whose bill nobody knows" if held else ""


def took(run: Mapping[str, Any]) -> str:
    """How long it took, or has taken so far."""
    begin, end = run.get("started_ms"), run.get("ended_ms")
    if begin is None:
        return "not started"
    if end is None:
        return "running"
    return f"{(end - begin) / 1_000:.1f} s"


def _of(run: Mapping[str, Any], limit: str, unit: str = "") -> str:
    ceiling = (run.get("limits") or {}).get(limit)
    return "" if ceiling is None else f" of {unit}{ceiling}"


def _event_line(seq: int, kind: str, data: Mapping[str, Any]) -> Line:
    colour = COLOURS.get(kind.removeprefix("run."), "red" if kind in ("node.error", "limit") else "")
    about = {name: one for name, one in data.items() if name != "node_type"}
    node = about.pop("node_id", "")
    said = " ".join(part for part in (str(node), _short(about) if about else "") if part)
    return [(f"{seq:>6}  ", "dim"), (f"{kind:<18} ", colour), (printable(said), "")]


def _short(value: Any, most: int = 160) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"
