"""`penstock chat`: talk to a graph in the terminal.

What is said goes to the server, and the answer is shown as it comes, with what it cost behind it. The run belongs to
the server: a connection that breaks is taken up again where it broke. Ctrl-C stops an answer and keeps what has come of
it; at the prompt it leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.options import URL, Token, Url
from penstock.cli.remote.runs import EXITS
from penstock.cli.showing.screen import Line, Screen, encodable, printable, say

ENDS = {"run.completed", "run.failed", "run.halted", "run.cancelled", "run.parked"}
HELP = """\
/retry           another answer to the last message
/continue        go on with the last answer
/edit TEXT       say TEXT instead of the last message
/help            this list
/quit            leave (so does Ctrl-D)"""


def chat(
    graph: Annotated[
        str | None, typer.Argument(metavar="GRAPH", help="Who answers: the id of a graph; the first one, if left out.")
    ] = None,
    chat_id: Annotated[str | None, typer.Option("--chat", metavar="ID", help="Go on with this chat.")] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this, print the answer, and leave.")
    ] = None,
    max_cost: Annotated[str | None, typer.Option(metavar="USD", help="Spend at most this on each answer.")] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Talk to a graph.

    \b
    Examples:
      penstock chat assistant
      penstock chat assistant -m 'count to 10'
      penstock chat --chat CHAT

    \b
    Exit codes of -m:
      0 ok   2 failed   3 halted by a limit   130 cancelled
    """
    from penstock.cli.remote.connection import Connection

    limits = None if max_cost is None else {"max_cost_usd": max_cost}
    with Connection(url, token) as server:
        talk = Talk(server, _graph(server, graph, chat_id), chat_id, limits)
        if message is not None:
            return talk.say(message)
        return _converse(talk)


class Talk:
    """One chat with one graph, as the terminal has it."""

    def __init__(
        self, server: Any, graph_id: str | None, chat_id: str | None, limits: Mapping[str, Any] | None
    ) -> None:
        self._server = server
        self._graph_id = graph_id
        self.chat_id = chat_id
        self._limits = limits
        self._user_message: str | None = None
        self._answer: str | None = None
        self._screen = Screen(sys.stdout)
        if chat_id is not None:
            self._look_back(chat_id)

    def say(self, text: str) -> int:
        """Say something, and show the answer; how it ended, as an exit code."""
        body = {"content": text}
        if self.chat_id is None:
            return self._show(f"/api/agents/{self._graph_id}/chat", body)
        return self._show(f"/api/chats/{self.chat_id}/messages", body)

    def retry(self) -> int:
        """Another answer to what was said last."""
        return self._show(f"/api/chats/{self.chat_id}/messages/{self._needed(self._answer)}/retry", {})

    def go_on(self) -> int:
        """More of the last answer."""
        return self._show(f"/api/chats/{self.chat_id}/messages/{self._needed(self._answer)}/continue", {})

    def edit(self, text: str) -> int:
        """Say something else instead of what was said last."""
        path = f"/api/chats/{self.chat_id}/messages/{self._needed(self._user_message)}/edit"
        return self._show(path, {"content": text})

    def _needed(self, message_id: str | None) -> str:
        if message_id is None:
            raise Failed("nothing has been said yet")
        return message_id

    def _look_back(self, chat_id: str) -> None:
        from penstock.cli.remote.connection import escaped

        chat = self._server.get(f"/api/chats/{escaped(chat_id)}")
        said = {message["id"]: message for message in chat["messages"]}
        for id in chat["active"]:
            message = said[id]
            if message["role"] == "user":
                self._user_message = message["id"]
                self._screen.show([("you › ", "bold"), (_plain(message["content"]), "")], whole=True)
            elif message["role"] == "assistant":
                self._answer = message["id"]
                self._screen.show([(_plain(message["content"]), "")], whole=True)

    def _show(self, path: str, body: dict[str, Any]) -> int:
        if self._limits is not None:
            body["limits"] = self._limits
        turn = self._server.post(path, body)
        self.chat_id, self._answer = turn["chat_id"], turn["message_id"]
        self._user_message = turn["user_message_id"] or self._user_message
        try:
            return self._follow(turn["run_id"], self._server.events(turn["run_id"]))
        except KeyboardInterrupt:
            self._server.post(f"/api/runs/{turn['run_id']}/cancel", {"reason": "Ctrl-C in the terminal"})
            self._margin([("stopped; what had come is kept", "yellow")])
            return Exit.CANCELLED

    def _follow(self, run_id: str, events: Iterator[Any]) -> int:
        told = Told(self._screen)
        for event in events:
            if event.type == "text.delta":
                told.piece(str(event.data.get("source", "")), str(event.data["text"]))
            elif event.type == "tool.call":
                told.aside(f"calls {event.data['call']['name']}")
            elif event.type == "approval.requested":
                told.aside("")
                self._ask(event.data["approval"])
            elif event.type in ENDS:
                told.end(event.type, event.data)
                self._margin(_bill(event.data, run_id))
                return EXITS.get(event.type.removeprefix("run."), Exit.OK)
        return Exit.FAILED

    def _ask(self, approval: Mapping[str, Any]) -> None:
        """Put a question of the run to whoever sits here; where nobody does, it waits for somebody elsewhere."""
        self._screen.show([("? ", "yellow"), (_plain(str(approval["question"])), "")], whole=True)
        path = f"/api/approvals/{approval['id']}"
        if not sys.stdin.isatty():
            self._screen.show([(f"  it waits for an answer at {path}", "yellow")])
            return
        answer = input("  approve? [y/N] ").strip().lower()
        if answer in ("y", "yes"):
            self._server.post(f"{path}/approve", {})
        else:
            self._server.post(f"{path}/reject", {"reason": "rejected in the terminal"})

    def _margin(self, line: Line) -> None:
        text = "".join(piece for piece, _ in line)
        indent = max(self._screen.width - len(text) - 1, 0) if self._screen.moves else 2
        self._screen.show([(" " * indent, ""), *((piece, colour or "dim") for piece, colour in line)])


class Told:
    """An answer as it is written: in pieces, those of each agent apart."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._source: str | None = None
        self._at_line_start = True
        self._any = False

    def piece(self, source: str, text: str) -> None:
        """The next piece of text."""
        if self._source is not None and source != self._source:
            self.aside("")
        self._source = source
        self._any = True
        self._write(_plain(text))

    def aside(self, text: str) -> None:
        """Something that happens between two pieces, on a line of its own."""
        if not self._at_line_start:
            self._write("\n")
        if text:
            self._screen.show([(f"· {printable(text)}", "dim")])

    def end(self, kind: str, data: Mapping[str, Any]) -> None:
        """The end: what was not streamed is shown whole, and what went wrong is said."""
        output = data.get("output")
        if kind == "run.completed" and output is not None and not self._any:
            self._write(_plain(output if isinstance(output, str) else _text_of(output)))
        self.aside("")
        if kind != "run.completed":
            why = data.get("message") or data.get("reason") or ""
            self._screen.show([(f"{kind.removeprefix('run.')}: ", "red"), (printable(str(why)), "")], whole=True)

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(encodable(text, sys.stdout))
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")


def _converse(talk: Talk) -> int:
    if sys.stdin.isatty():
        say("Ctrl-D leaves, Ctrl-C stops an answer, /help lists what else there is.")
    while True:
        try:
            line = input("you › " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            say("" if talk.chat_id is None else f"\npenstock chat --chat {talk.chat_id} goes on with this.")
            return Exit.OK
        if line == "/quit":
            return Exit.OK
        try:
            _obey(talk, line)
        except Failed as failed:
            Screen(sys.stdout).show([(str(failed), "red")], whole=True)


def _obey(talk: Talk, line: str) -> None:
    word, _, rest = line.partition(" ")
    commands: Mapping[str, Callable[[], Any]] = {
        "/retry": talk.retry,
        "/continue": talk.go_on,
        "/edit": lambda: talk.edit(rest) if rest else say("/edit needs the text to say instead"),
        "/help": lambda: say(HELP),
    }
    if word in commands:
        commands[word]()
    elif word.startswith("/"):
        say(f"there is no {word}\n{HELP}")
    elif line:
        talk.say(line)


def _graph(server: Any, named: str | None, chat_id: str | None) -> str | None:
    if named is not None or chat_id is not None:
        return named
    graphs = server.get("/api/graphs")["graphs"]
    if not graphs:
        raise Refused("the server has no graph to talk to; penstock serve FILE.json gives it one")
    return str(graphs[0]["id"])


def _bill(data: Mapping[str, Any], run_id: str) -> Line:
    tokens = int(data.get("tokens_in") or 0) + int(data.get("tokens_out") or 0)
    return [(f"${float(data.get('cost_usd') or 0):.5f} · {tokens:,} tokens · {run_id}", "")]


def _text_of(output: Any) -> str:
    if isinstance(output, Mapping) and len(output) == 1:
        (only,) = output.values()
        return only if isinstance(only, str) else str(only)
    return str(output)


def _plain(text: str) -> str:
    """The text without what could steer a terminal; its lines stay lines."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
