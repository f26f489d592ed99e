"""`penstock runs …`: list, show, start, follow and control the runs of a server, and compare them."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, NotFound, Refused
from penstock.cli.options import (
    URL,
    ActionOnBill,
    AsJson,
    CallWithBill,
    CostOfBill,
    Token,
    Url,
    check_bill_arguments,
    dollars,
    numeric,
)
from penstock.cli.remote.completions import complete_graph, complete_run
from penstock.cli.remote.render import (
    about,
    advice_for,
    bills_table,
    differences,
    has_ended,
    table,
    unresolved_runs,
    used_by,
)
from penstock.cli.remote.run_page import run_page
from penstock.cli.render.events import EXITS
from penstock.cli.render.renderers import EventLog
from penstock.cli.render.screen import Line, Screen, print_text, printable, reader_is_gone
from penstock.cli.render.text import dollars as shown_dollars
from penstock.cli.render.text import short
from penstock.cli.values import identifier, number, read_input, whole_number
from penstock.ids import new_run_id

app = typer.Typer(rich_markup_mode=None)

CANCELLED = {
    "cancelled": "cancelled",
    "already_cancelled": "already cancelled",
    "remembered": "will be cancelled when it is submitted, or when its server answers",
    "ended": "already ended",
}


class Status(StrEnum):
    """The states a run can be in."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    PARKED = "parked"
    COMPLETED = "completed"
    FAILED = "failed"
    HALTED = "halted"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """Answers to a question of a run."""

    YES = "yes"
    NO = "no"


RUN_HELP = "Id of the run, or a part of it that no other run has."
RunId = Annotated[str, typer.Argument(parser=identifier, metavar="RUN", help=RUN_HELP, autocompletion=complete_run)]
GraphId = Annotated[
    str, typer.Argument(parser=identifier, metavar="GRAPH", help="Id of the graph.", autocompletion=complete_graph)
]
Input = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|JSON|@FILE|-", help="Input of the run: text, JSON, @file.json, or - for JSON from standard input."
    ),
]
Cost = Annotated[str | None, dollars("Cost limit in US dollars.")]
Steps = Annotated[int | None, numeric(whole_number, "N", "Maximum number of successful steps and calls.")]
Tokens = Annotated[int | None, numeric(whole_number, "N", "Maximum number of tokens.")]
ApiCalls = Annotated[int | None, numeric(whole_number, "N", "Maximum number of calls of models and tools.")]
Retries = Annotated[int | None, numeric(whole_number, "N", "Maximum number of failed calls.")]
Timeout = Annotated[float | None, numeric(number, "SECONDS", "Time limit.")]
MoreCost = Annotated[str | None, dollars("US dollars to add.")]
MoreSteps = Annotated[int | None, numeric(whole_number, "N", "Steps to add.")]
MoreTokens = Annotated[int | None, numeric(whole_number, "N", "Tokens to add.")]
MoreApiCalls = Annotated[int | None, numeric(whole_number, "N", "Calls of models and tools to add.")]
MoreRetries = Annotated[int | None, numeric(whole_number, "N", "Failed calls to add.")]
MoreTime = Annotated[float | None, numeric(number, "SECONDS", "Time to add.")]


@app.callback(invoke_without_command=True)
def runs(context: typer.Context) -> int:
    """Start, follow and control runs on a server.

    \b
    Examples:
      penstock runs start pipeline --input 'a dam in winter'
      penstock runs ls --status running
      penstock runs tail RUN
      penstock runs cancel RUN
      penstock runs grant RUN --max-cost 0.50
      penstock runs bills RUN
      penstock runs answer RUN yes
      penstock runs fork RUN --at writer --input 'shorter, please'
      penstock runs diff RUN OTHER

    \b
    Exit codes:
      0 ok   2 the server refused or failed   64 wrong command line
    """
    if context.invoked_subcommand is None:
        print_text(context.get_help())
    return Exit.OK


@app.command()
def start(
    graph: GraphId,
    input: Input = None,
    max_cost: Cost = None,
    max_steps: Steps = None,
    max_tokens: Tokens = None,
    max_api_calls: ApiCalls = None,
    max_retries: Retries = None,
    timeout: Timeout = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Start a run of a graph.

    The run continues on the server after this command exits. The server's defaults apply to limits that you do not
    set; 0 allows nothing.

    \b
    Examples:
      penstock runs start pipeline --input 'a dam in winter' --max-cost 0.50

    \b
    Exit codes:
      0 submitted   2 the server refused or failed   64 wrong command line
    """
    body: dict[str, Any] = {"graph_id": graph, "input": read_input(input), "run_id": new_run_id()}
    if limits := _limits(max_cost, max_steps, max_tokens, max_api_calls, max_retries, timeout):
        body["limits"] = limits
    with _server(url, token) as server:
        try:
            run = server.post("/api/runs", body, idempotent=True)
        except Failed:
            server.check_graph(graph)
            raise
        return _print_run(run, server.at)


@app.command()
def ls(
    status: Annotated[Status | None, typer.Option(help="Only runs with this status.")] = None,
    graph: Annotated[
        str | None, typer.Option(parser=identifier, metavar="GRAPH", help="Only runs of this graph.")
    ] = None,
    limit: Annotated[int, numeric(whole_number, "N", "Maximum number of runs.", minimum=1, maximum=500)] = 20,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """List runs, newest first.

    The cost of a run that has not ended is a lower bound. Admins see the runs of all users, with their owners.

    \b
    Examples:
      penstock runs ls
      penstock runs ls --status halted --graph pipeline --json

    \b
    Exit codes:
      0 ok, also without runs   2 the server refused or failed   64 wrong command line
    """
    with _server(url, token) as server:
        found = server.get("/api/runs", status=status, graph_id=graph, limit=limit)["runs"]
        me = server.get("/api/me")["name"] if found and not as_json else ""
    if as_json:
        return _print_json(found)
    if not found:
        print_text("no runs" if status is None and graph is None else "no matching runs")
        return Exit.OK
    _show(*table(found, has_owners=any(run["owner"] != me for run in found)))
    return Exit.OK


@app.command()
def show(run_id: RunId, url: Url = URL, token: Token = None, as_json: AsJson = False) -> int:
    """Show a run and what to do about it.

    Shows its status, usage and limits, and why it stopped. The usage of a run that has not ended is the sum of its
    calls so far.

    \b
    Examples:
      penstock runs show RUN
      penstock runs show RUN --json

    \b
    Exit codes:
      0 ok, whatever its status   2 no such run, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        run_id = server.find_run(run_id)
        run = server.get(f"/api/runs/{_escaped(run_id)}")
        so_far = (
            None
            if has_ended(run)
            else used_by(event.data for event in server.log(run_id) if event.type == "call.ended")
        )
        questions = _questions(server, run_id) if run["status"] == "waiting" else []
        document = {} if as_json else _document(server, run)
        changes = _program_changes(server, run_id) if document.get("source") == "program" else []
    if as_json:
        return _print_json(run if so_far is None else {**run, "so_far": so_far, "asked": questions})
    nodes = [str(node["id"]) for node in document.get("nodes", ())]
    _show(*about(run, questions, so_far, nodes, changes, at=server.at))
    return Exit.OK


@app.command()
def tail(
    run_id: RunId,
    after: Annotated[int, numeric(whole_number, "N", "Start after this event.", minimum=0)] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every event on its own line, including progress and started calls.")
    ] = False,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Follow a run to its end, and exit with its exit code.

    A broken connection is resumed where it broke, for up to a minute, also across a restart of the server. Ctrl-C stops
    following and does not stop the run.

    \b
    Examples:
      penstock runs tail RUN
      penstock runs tail RUN --json | jq -r 'select(.type == "text.delta") | .data.text'

    \b
    Exit codes:
      0 completed, or stopped following   2 failed, or no such run   3 halted by a limit
      75 connection to the server lost   130 cancelled
    """
    status = ""
    log = EventLog(Screen(sys.stdout), everything)
    with _server(url, token) as server:
        run_id = server.find_run(run_id)
        _check_place(server, run_id, after)
        for event in server.events(run_id, after, wanted=lambda: not reader_is_gone(sys.stdout), notice=log.notice):
            status = event.status
            if as_json:
                print_text(json.dumps({"seq": event.seq, "type": event.type, "data": event.data}))
            else:
                log.add(event)
        if status not in EXITS:  # the final event was before `after`, or the reader has disconnected
            status = server.get(f"/api/runs/{_escaped(run_id)}")["status"]
    return EXITS.get(status, Exit.OK)


@app.command()
def cancel(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Reason, stored with the run.")] = "cancelled",
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Cancel a run that is not submitted yet, as soon as it is.")
    ] = False,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Cancel a run.

    \b
    Examples:
      penstock runs cancel RUN --reason 'wrong question'
      penstock runs cancel nightly-7 --ahead

    \b
    Exit codes:
      0 cancelled, or already ended   2 no such run, or the server refused or failed   64 wrong command line
    """
    with _server(url, token) as server:
        if not ahead:
            run_id = _existing(server, run_id)
        response = server.post(f"/api/runs/{_escaped(run_id)}/cancel", {"reason": reason})
    print_text(f"{run_id}: {CANCELLED[response['result']]}")
    return Exit.OK


@app.command()
def resume(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Resume a failed, halted, cancelled or parked run.

    The run continues from its journal: completed calls are not repeated.

    \b
    Examples:
      penstock runs resume RUN && penstock runs tail RUN

    \b
    Exit codes:
      0 resumed   2 the server refused or failed   64 wrong command line
    """
    return _post(url, token, run_id, "resume", {})


@app.command()
def grant(
    run_id: RunId,
    max_cost: MoreCost = None,
    max_steps: MoreSteps = None,
    max_tokens: MoreTokens = None,
    max_api_calls: MoreApiCalls = None,
    max_retries: MoreRetries = None,
    timeout: MoreTime = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Add to the limits of a halted run, and resume it.

    \b
    Examples:
      penstock runs grant RUN --max-cost 0.50
      penstock runs grant RUN --max-steps 10 --timeout 60

    \b
    Exit codes:
      0 resumed   2 the server refused or failed   64 wrong command line
    """
    limits = _limits(max_cost, max_steps, max_tokens, max_api_calls, max_retries, timeout)
    if not limits:
        raise Refused("name at least one limit to raise, such as --max-cost 0.50")
    return _post(url, token, run_id, "grant", {"limits": limits})


@app.command()
def bills(
    run_id: Annotated[
        str | None,
        typer.Argument(
            parser=identifier, metavar="RUN", help="Id of the run; without it, list runs.", autocompletion=complete_run
        ),
    ] = None,
    action: ActionOnBill = None,
    call: CallWithBill = None,
    cost: CostOfBill = None,
    by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Your name, stored with the run; with a token, the token's name.")
    ] = None,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """List unresolved bills, or resolve one.

    A call that was lost or stopped may have been billed, so the amount held for it stays taken. Look up what it cost,
    for example on the provider's dashboard, and resolve its bill at that amount, or release it if it cost nothing. The
    run must have ended. Without RUN, lists the runs with unresolved bills among the newest 500.

    \b
    Examples:
      penstock runs bills
      penstock runs bills RUN
      penstock runs bills RUN resolve CALL --cost 0.02 --by ann
      penstock runs bills RUN release CALL --by ann

    \b
    Exit codes:
      0 ok, also without bills   2 the server refused or failed   64 wrong command line
    """
    check_bill_arguments("penstock runs bills RUN", action, call, cost)
    if action is None and by is not None:
        raise Refused("--by is for resolve and release")
    with _server(url, token) as server:
        if run_id is None:
            return _list_unresolved(server, as_json)
        run_id = server.find_run(run_id)
        if action is None or call is None:
            return _list_bills(server, run_id, as_json)
        body = {"call_id": call, **({} if cost is None else {"cost_usd": cost}), **({} if by is None else {"by": by})}
        run = server.post(f"/api/runs/{_escaped(run_id)}/bills/{action}", body)
    if as_json:
        return _print_json(run)
    done = "released" if cost is None else f"resolved at {shown_dollars(cost)}"
    left = float(run["unresolved_usd"])
    print_text(f"{run_id}: bill of call {printable(call)} {done}; {shown_dollars(left)} in unresolved bills left")
    if advice := advice_for(run, server.at):
        _show([(f"→ {advice}", "cyan")])
    return Exit.OK


def _list_unresolved(server: Any, as_json: bool) -> int:
    found = [run for run in server.get("/api/runs", limit=500)["runs"] if run["unresolved_usd"]]
    if as_json:
        return _print_json(found)
    if not found:
        print_text("no run has unresolved bills: there is nothing to resolve")
        return Exit.OK
    _show(*unresolved_runs(found), [(f"→ list the bills of one with: penstock runs bills RUN{server.at}", "cyan")])
    return Exit.OK


def _list_bills(server: Any, run_id: str, as_json: bool) -> int:
    found = server.get(f"/api/runs/{_escaped(run_id)}/bills")
    if as_json:
        return _print_json(found)
    if not found["bills"]:
        print_text(f"{run_id} has no unresolved bills: there is nothing to resolve")
        return Exit.OK
    command = f"penstock runs bills {run_id}"
    how = f"resolve one with: {command} resolve CALL --cost USD{server.at}; or release one that cost nothing"
    _show(*bills_table(found["bills"]), [(f"→ {how}: {command} release CALL{server.at}", "cyan")])
    return Exit.OK


@app.command()
def answer(
    run_id: RunId,
    verdict: Annotated[Verdict, typer.Argument(help="Approve or reject.")],
    reason: Annotated[str, typer.Option(help="Reason, stored with the question.")] = "",
    edit: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="Value to continue with, instead of the proposed one.")
    ] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Answer an approval question of a run.

    If there are several, the oldest is answered.

    \b
    Examples:
      penstock runs answer RUN yes
      penstock runs answer RUN yes --edit 'Closed on Monday.'
      penstock runs answer RUN no --reason 'not before Monday'

    \b
    Exit codes:
      0 answered   2 no open question, or no such run   64 wrong command line
    """
    if edit is not None and verdict is Verdict.NO:
        raise Refused("--edit can only be used with yes")
    body: dict[str, Any] = {"reason": reason}
    if edit is not None:
        body["answer"] = read_input(edit, "--edit")
    action = "reject" if verdict is Verdict.NO else "approve" if edit is None else "edit"
    with _server(url, token) as server:
        run_id = server.find_run(run_id)
        server.get(f"/api/runs/{_escaped(run_id)}")
        questions = _questions(server, run_id)
        if not questions:
            raise Failed(f"{run_id} has no open question; see: penstock runs show {run_id}{server.at}")
        answered = server.post(f"/api/approvals/{_escaped(questions[0]['id'])}/{action}", body)
    print_text(f"{run_id}: {answered['state']}: {short(answered['question'])}")
    return Exit.OK


@app.command()
def fork(
    run_id: RunId,
    at: Annotated[str, typer.Option(metavar="NODE", help="First node to run again; the nodes after it run again too.")],
    input: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|JSON|@FILE|-",
            help="New input of the node: text, JSON, @file.json, or - for JSON from standard input.",
        ),
    ] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Start a new run from a node of another run.

    The nodes before it are neither run nor paid again.

    \b
    Examples:
      penstock runs fork RUN --at writer
      penstock runs fork RUN --at writer --input 'shorter, please'

    \b
    Exit codes:
      0 new run submitted   2 the server refused or failed   64 wrong command line
    """
    body: dict[str, Any] = {"at": at}
    if input is not None:
        body["input"] = read_input(input)
    return _post(url, token, run_id, "fork", body)


@app.command()
def replay(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Run again from the journal, without any calls.

    \b
    Examples:
      penstock runs replay RUN

    \b
    Exit codes:
      0 new run submitted   2 the server refused or failed   64 wrong command line
    """
    return _post(url, token, run_id, "replay", {})


@app.command()
def export(
    run_id: RunId,
    html: Annotated[
        bool, typer.Option("--html", help="Print one HTML page with its calls, costs, limits and events.")
    ] = False,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Print a run, its graph and its events as JSON, or as an HTML page that needs nothing else.

    \b
    Examples:
      penstock runs export RUN > run.json
      penstock runs export RUN --html > run.html

    \b
    Exit codes:
      0 ok   2 no such run, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        exported = server.export(server.find_run(run_id))
        if not html:
            return _print_json(exported)
        print_text(run_page(exported))
        return Exit.OK


@app.command()
def diff(
    run_id: RunId,
    other: Annotated[
        str,
        typer.Argument(
            parser=identifier, metavar="OTHER", help="Id of the run to compare with.", autocompletion=complete_run
        ),
    ],
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Show the differences between two runs.

    Compares limits, input, the result of each node, cost and output.

    \b
    Examples:
      penstock runs diff RUN OTHER

    \b
    Exit codes:
      0 ok, also if they differ   2 no such run, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        run_id, other = server.find_run(run_id), server.find_run(other)
        found = list(differences(server.export(run_id), server.export(other)))
    if as_json:
        return _print_json([{"what": what, "one": left, "other": right} for what, left, right in found])
    if not found:
        print_text(f"{run_id} and {other} do not differ")
    for what, left, right in found:
        _show([(printable(what), "")], [(f"  - {short(left)}", "red")], [(f"  + {short(right)}", "green")])
    return Exit.OK


def _check_place(server: Any, run_id: str, after: int) -> None:
    """Raise Failed if `after` is beyond the newest event of the run: no client can have seen it."""
    if after and after > (newest := server.get(f"/api/runs/{_escaped(run_id)}")["last_seq"]):
        raise Failed(f"--after {after}: the newest event of {run_id} is {newest}; use --after {newest} or less")


def _limits(
    max_cost: str | None,
    max_steps: int | None,
    max_tokens: int | None,
    max_api_calls: int | None,
    max_retries: int | None,
    timeout: float | None,
) -> dict[str, Any]:
    named = {
        "max_cost_usd": max_cost,
        "max_steps": max_steps,
        "max_tokens": max_tokens,
        "max_api_calls": max_api_calls,
        "max_retries": max_retries,
        "timeout_s": timeout,
    }
    return {name: value for name, value in named.items() if value is not None}


def _post(url: str, token: str | None, run_id: str, action: str, body: dict[str, Any]) -> int:
    with _server(url, token) as server:
        path = f"/api/runs/{_escaped(server.find_run(run_id))}/{action}"
        return _print_run(server.post(path, body), server.at)


def _print_run(run: dict[str, Any], at: str) -> int:
    print_text(f"{run['id']}: {run['status']}; follow it with: penstock runs tail {run['id']}{at}")
    return Exit.OK


def _existing(server: Any, run_id: str) -> str:
    """Return the id of a run that exists; Failed otherwise, with how to cancel one ahead of its submission."""
    try:
        found: str = server.find_run(run_id)
        server.get(f"/api/runs/{_escaped(found)}")
    except NotFound as missing:
        raise NotFound(f"{missing}; to cancel a run before it is submitted, use --ahead") from None
    return found


def _document(server: Any, run: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a run's graph; empty if the graph is gone."""
    try:
        graph = server.get(f"/api/graphs/{_escaped(run['graph_id'])}", version=run["graph_version"])
    except Failed:
        return {}
    return dict(graph["document"])


def _program_changes(server: Any, run_id: str) -> list[dict[str, Any]]:
    """Return the reports on recorded results after a change of the run's program, without repetitions."""
    found = [dict(event.data) for event in server.log(run_id) if event.type == "program.changed"]
    return [data for at, data in enumerate(found) if data not in found[:at]]


def _questions(server: Any, run_id: str) -> list[dict[str, Any]]:
    questions: list[dict[str, Any]] = server.get("/api/approvals", run_id=run_id)["approvals"]
    return questions


def _server(url: str, token: str | None) -> Any:
    from penstock.cli.remote.connection import Connection

    return Connection(url, token)


def _escaped(id: str) -> str:
    from penstock.cli.remote.connection import escaped

    return escaped(id)


def _print_json(value: Any) -> int:
    print_text(json.dumps(value, indent=2))
    return Exit.OK


def _show(*lines: Line) -> None:
    Screen(sys.stdout).show(*lines, whole=True)
