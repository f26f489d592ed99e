"""`penstock runs …`: what a server runs, has run, and should start, stop, resume, fork, be told or be granted."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.loading.values import an_id, number, read_input, whole_number
from penstock.cli.options import URL, AsJson, Token, Url, dollars, numeric
from penstock.cli.remote.telling import EXITS, about, differing, event_line, has_ended, short, table, used_by
from penstock.cli.showing.screen import Line, Screen, complain, is_left, printable, say, write
from penstock.ids import new_run_id

app = typer.Typer(rich_markup_mode=None)

QUIET = frozenset({"call.started", "node.progress"})
"""What `tail` leaves out unless everything is asked for."""
ON_ONE_LINE = str.maketrans("\r\n\t", "   ")
CANCELLED = {
    "cancelled": "cancelled",
    "already_cancelled": "was cancelled before",
    "remembered": "will be stopped when it comes, or when the server that works on it answers",
    "ended": "had ended before",
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
    """What can be said to a run that asks."""

    YES = "yes"
    NO = "no"


RunId = Annotated[str, typer.Argument(parser=an_id, metavar="RUN", help="The id of a run.")]
GraphId = Annotated[str, typer.Argument(parser=an_id, metavar="GRAPH", help="The id of a graph.")]
Input = Annotated[str | None, typer.Option(metavar="JSON|@FILE|-", help="JSON, @file, or - for standard input.")]
Cost = Annotated[str | None, dollars("So many US dollars; for a grant, more.")]
Steps = Annotated[int | None, numeric(whole_number, "N", "So many steps.")]
Tokens = Annotated[int | None, numeric(whole_number, "N", "So many tokens.")]
ApiCalls = Annotated[int | None, numeric(whole_number, "N", "So many calls of models and tools.")]
Retries = Annotated[int | None, numeric(whole_number, "N", "So many failures.")]
Timeout = Annotated[float | None, numeric(number, "SECONDS", "So many seconds.")]


@app.callback(invoke_without_command=True)
def runs(context: typer.Context) -> int:
    """See and steer the runs of a server.

    \b
    Examples:
      penstock runs start pipeline --input '"a dam in winter"'
      penstock runs ls --status running
      penstock runs tail RUN
      penstock runs cancel RUN
      penstock runs grant RUN --max-cost 0.50
      penstock runs answer RUN yes
      penstock runs fork RUN --at writer --input '"shorter, please"'
      penstock runs diff RUN OTHER

    \b
    Exit codes:
      0 ok   2 the server could not, or would not   64 wrong command line
    """
    if context.invoked_subcommand is None:
        say(context.get_help())
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
    """Start a run of a graph; it goes on whether or not anybody watches.

    A limit that is not given is as the server says; 0 is nothing.

    \b
    Examples:
      penstock runs start pipeline --input '"a dam in winter"' --max-cost 0.50

    \b
    Exit codes:
      0 it is taken on   2 the server could not, or would not   64 wrong command line
    """
    body: dict[str, Any] = {"graph_id": graph, "input": read_input(input), "run_id": new_run_id()}
    if limits := _limits(max_cost, max_steps, max_tokens, max_api_calls, max_retries, timeout):
        body["limits"] = limits
    with _server(url, token) as server:
        try:
            taken = server.post("/api/runs", body, is_named=True)
        except Failed:
            server.check_graph(graph)
            raise
        return _tell_of(taken, server.at)


@app.command()
def ls(
    status: Annotated[Status | None, typer.Option(help="Only those in this state.")] = None,
    graph: Annotated[str | None, typer.Option(parser=an_id, metavar="GRAPH", help="Only those of this graph.")] = None,
    limit: Annotated[int, numeric(whole_number, "N", "At most so many.", least=1, most=500)] = 20,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """List runs, the newest first; one that has not ended has cost at least what is shown.

    Who may see the runs of others is told whose they are.

    \b
    Examples:
      penstock runs ls
      penstock runs ls --status halted --graph pipeline --json

    \b
    Exit codes:
      0 ok, also if there are none   2 the server could not, or would not   64 wrong command line
    """
    with _server(url, token) as server:
        found = server.get("/api/runs", status=status, graph_id=graph, limit=limit)["runs"]
        me = server.get("/api/me")["name"] if found and not as_json else ""
    if as_json:
        return _print_json(found)
    if not found:
        say("no runs" if status is None and graph is None else "no such runs")
        return Exit.OK
    _show(*table(found, has_owners=any(run["owner"] != me for run in found)))
    return Exit.OK


@app.command()
def show(run_id: RunId, url: Url = URL, token: Token = None, as_json: AsJson = False) -> int:
    """Show a run: how it stands, what it has used of what it may, why it stopped, and what to do about it.

    What a run has used that has not ended yet is what its calls so far have cost, by its log.

    \b
    Examples:
      penstock runs show RUN
      penstock runs show RUN --json

    \b
    Exit codes:
      0 ok, however the run stands   2 there is no such run, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        run = server.get(f"/api/runs/{_escaped(run_id)}")
        so_far = None if has_ended(run) else used_by(one.data for one in server.log(run_id) if one.type == "call.ended")
        questions = _questions(server, run_id) if run["status"] == "waiting" else []
    if as_json:
        return _print_json(run if so_far is None else {**run, "so_far": so_far, "asked": questions})
    _show(*about(run, questions, so_far, at=server.at))
    return Exit.OK


@app.command()
def tail(
    run_id: RunId,
    after: Annotated[int, numeric(whole_number, "N", "Begin behind this event.", least=0)] = 0,
    everything: Annotated[bool, typer.Option("--all", help="Every event, one a line: progress and calls too.")] = False,
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Follow a run to its end, and leave with its exit code.

    A connection that breaks, or a server that is started again, is no end: it is taken up where it broke, and tried for
    a minute. Ctrl-C stops the following, and not the run; so does a reader that leaves, as in `| head`.

    \b
    Examples:
      penstock runs tail RUN
      penstock runs tail RUN --json | jq -r 'select(.type == "text.delta") | .data.text'

    \b
    Exit codes:
      0 completed, or left before the end   2 failed, or there is no such run   3 halted by a limit
      75 the server has gone, and not come back   130 cancelled
    """
    status = ""
    lines = Tail(everything)
    with _server(url, token) as server:
        _check_place(server, run_id, after)
        for event in server.events(run_id, after, wanted=lambda: not is_left(sys.stdout), notice=lines.aside):
            status = event.type.removeprefix("run.")
            if as_json:
                say(json.dumps({"seq": event.seq, "type": event.type, "data": event.data}))
            else:
                lines.add(event.seq, event.type, event.data)
        if status not in EXITS:  # the end was told before, or nobody reads on
            status = server.get(f"/api/runs/{_escaped(run_id)}")["status"]
    return EXITS.get(status, Exit.OK)


@app.command()
def cancel(
    run_id: RunId,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the run.")] = "cancelled",
    url: Url = URL,
    token: Token = None,
) -> int:
    """Stop a run; one that is not there yet is stopped when it comes.

    \b
    Examples:
      penstock runs cancel RUN --reason 'wrong question'

    \b
    Exit codes:
      0 it is stopped, or had ended before   2 the server could not, or would not   64 wrong command line
    """
    with _server(url, token) as server:
        answer = server.post(f"/api/runs/{_escaped(run_id)}/cancel", {"reason": reason})
    say(f"{run_id}: {CANCELLED[answer['result']]}")
    return Exit.OK


@app.command()
def resume(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Let a run that failed, was halted, cancelled or parked go on from what it has recorded.

    \b
    Examples:
      penstock runs resume RUN && penstock runs tail RUN

    \b
    Exit codes:
      0 it goes on   2 the server could not, or would not   64 wrong command line
    """
    return _act(url, token, run_id, "resume", {})


@app.command()
def grant(
    run_id: RunId,
    max_cost: Cost = None,
    max_steps: Steps = None,
    max_tokens: Tokens = None,
    max_api_calls: ApiCalls = None,
    max_retries: Retries = None,
    timeout: Timeout = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Raise the limits of a run that was halted by so much; it goes on.

    \b
    Examples:
      penstock runs grant RUN --max-cost 0.50
      penstock runs grant RUN --max-steps 10 --timeout 60

    \b
    Exit codes:
      0 it goes on   2 the server could not, or would not   64 wrong command line
    """
    given = _limits(max_cost, max_steps, max_tokens, max_api_calls, max_retries, timeout)
    if not given:
        raise Refused("a grant has to say what is granted, such as --max-cost 0.50")
    return _act(url, token, run_id, "grant", {"limits": given})


@app.command()
def answer(
    run_id: RunId,
    verdict: Annotated[Verdict, typer.Argument(help="Whether it may go on.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept with the question.")] = "",
    edit: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE|-", help="Go on with this, instead of what was asked about.")
    ] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Answer what a run asks: whether it may go on.

    Where it asks several things at once, the oldest is answered.

    \b
    Examples:
      penstock runs answer RUN yes
      penstock runs answer RUN yes --edit '"Closed on Monday."'
      penstock runs answer RUN no --reason 'not before Monday'

    \b
    Exit codes:
      0 answered   2 it asks nothing, or there is no such run   64 wrong command line
    """
    if edit is not None and verdict is Verdict.NO:
        raise Refused("--edit says what to go on with, and no says that it may not")
    said: dict[str, Any] = (
        {"reason": reason} if edit is None else {"reason": reason, "answer": read_input(edit, "--edit")}
    )
    act = "reject" if verdict is Verdict.NO else "approve" if edit is None else "edit"
    with _server(url, token) as server:
        server.get(f"/api/runs/{_escaped(run_id)}")
        asked = _questions(server, run_id)
        if not asked:
            raise Failed(f"{run_id} asks nothing now; penstock runs show {run_id}{server.at} says how it stands")
        given = server.post(f"/api/approvals/{_escaped(asked[0]['id'])}/{act}", said)
    say(f"{run_id}: {given['state']}: {short(given['question'])}")
    return Exit.OK


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
    """Begin a new run from the middle of another; what stands before the node is not run, or paid, again.

    \b
    Examples:
      penstock runs fork RUN --at writer
      penstock runs fork RUN --at writer --input '"shorter, please"'

    \b
    Exit codes:
      0 the new run is taken on   2 the server could not, or would not   64 wrong command line
    """
    body: dict[str, Any] = {"at": at}
    if input is not None:
        body["input"] = read_input(input)
    return _act(url, token, run_id, "fork", body)


@app.command()
def replay(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Go through a run again from its journal, without a single call.

    \b
    Examples:
      penstock runs replay RUN

    \b
    Exit codes:
      0 the new run is taken on   2 the server could not, or would not   64 wrong command line
    """
    return _act(url, token, run_id, "replay", {})


@app.command()
def export(run_id: RunId, url: Url = URL, token: Token = None) -> int:
    """Print everything that is kept of a run, as JSON: `run`, `graph` and `events`.

    \b
    Examples:
      penstock runs export RUN > run.json

    \b
    Exit codes:
      0 ok   2 there is no such run, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        return _print_json(server.export(run_id))


@app.command()
def diff(
    run_id: RunId,
    other: Annotated[str, typer.Argument(parser=an_id, metavar="OTHER", help="The run to compare it with.")],
    url: Url = URL,
    token: Token = None,
    as_json: AsJson = False,
) -> int:
    """Show where two runs differ: limits, input, what became of each node, cost, output.

    \b
    Examples:
      penstock runs diff RUN OTHER

    \b
    Exit codes:
      0 ok, also if they differ   2 one of them is not there, or no server   64 wrong command line
    """
    with _server(url, token) as server:
        one, two = server.export(run_id), server.export(other)
    differences = list(differing(one, two))
    if as_json:
        return _print_json([{"what": what, "one": left, "other": right} for what, left, right in differences])
    if not differences:
        say(f"{run_id} and {other} do not differ")
    for what, left, right in differences:
        _show([(printable(what), "")], [(f"  - {short(left)}", "red")], [(f"  + {short(right)}", "green")])
    return Exit.OK


class Tail:
    """Events as they come, one a line; the text of a node flows on one line for as long as nobody else says something.

    With `everything`, each event has a line of its own.
    """

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._speaker: str | None = None
        self._held: list[Line] = []

    def add(self, seq: int, kind: str, data: dict[str, Any]) -> None:
        """The next event."""
        if kind == "text.delta" and not self._everything:
            self._flow(seq, kind, data)
        elif kind in ("call.ended", "limit") and self._speaker is not None:
            # A model's call ends just before the last of what it said is told; the sentence is let finish.
            self._held.append(event_line(seq, kind, data))
        elif self._everything or kind not in QUIET:
            self._end_line()
            _show(event_line(seq, kind, data))

    def aside(self, text: str) -> None:
        """Something that is no event, for whoever looks on."""
        self._end_line()
        complain(text)

    def _flow(self, seq: int, kind: str, data: dict[str, Any]) -> None:
        speaker = str(data.get("node_id", ""))
        if speaker != self._speaker:
            self._end_line()
            write(f"{seq:>6}  {kind:<18} {printable(speaker)} ", sys.stdout, end="")
            self._speaker = speaker
        write(printable(str(data["text"]).translate(ON_ONE_LINE)), sys.stdout, end="")

    def _end_line(self) -> None:
        if self._speaker is not None:
            say("")
            self._speaker = None
        if self._held:
            _show(*self._held)
            self._held = []


def _check_place(server: Any, run_id: str, after: int) -> None:
    """Failed, if the run has not told so many events: nobody can have seen them."""
    if after and after > (newest := server.get(f"/api/runs/{_escaped(run_id)}")["last_seq"]):
        follow = f"--after {newest} shows what comes next; without --after, everything is shown"
        raise Failed(f"{run_id} has told {newest:,} events so far, and there is no event {after}: {follow}")


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


def _act(url: str, token: str | None, run_id: str, act: str, body: dict[str, Any]) -> int:
    with _server(url, token) as server:
        return _tell_of(server.post(f"/api/runs/{_escaped(run_id)}/{act}", body), server.at)


def _tell_of(run: dict[str, Any], at: str) -> int:
    say(f"{run['id']}: {run['status']}; penstock runs tail {run['id']}{at} follows it")
    return Exit.OK


def _questions(server: Any, run_id: str) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = server.get("/api/approvals", run_id=run_id)["approvals"]
    return asked


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
