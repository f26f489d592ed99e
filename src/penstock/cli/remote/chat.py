"""`penstock chat`: talk to a graph in the terminal.

Messages go to the server, and the answer is shown as it streams, followed by its cost. The run belongs to the server: a
broken connection is resumed where it broke. Ctrl-C stops an answer and keeps the part that has arrived; at the prompt
it clears the line, and pressed twice it exits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, Refused, Waiting
from penstock.cli.options import URL, Token, Url, dollars
from penstock.cli.remote.completions import complete_graph
from penstock.cli.remote.render import advice_for, replacement, value_lines
from penstock.cli.render.events import EXITS, FINAL, RunEvent
from penstock.cli.render.renderers import Answer
from penstock.cli.render.screen import Line, Screen, encodable, print_error, print_text, printable
from penstock.cli.render.text import bill, multiline
from penstock.ids import new_run_id
from penstock.kernel.graph import shown

STOPPING_S = 10.0
"""Maximum wait for a cancelled answer to stop before the prompt returns."""
POLL_INTERVAL_S = 0.05
PROMPT = "you › "
APPROVE_PROMPT = "  approve? [y/n] "
YES_OR_NO = "  that is not an answer; yes or no? "
KEYS = "Ctrl-C stops an answer, Ctrl-D exits, /help lists the commands."
HOW_TO_EXIT = "There is no answer to stop; press Ctrl-D, or Ctrl-C again, to exit."
HELP = """\
/retry           get another answer to the last message
/continue        continue the last answer
/edit TEXT       replace the last message
/help            show this list
/quit            exit (also Ctrl-D)"""


def chat(
    graph: Annotated[
        str | None,
        typer.Argument(
            metavar="GRAPH",
            help="Id of the graph that answers; default: the first one that can chat.",
            autocompletion=complete_graph,
        ),
    ] = None,
    chat_id: Annotated[str | None, typer.Option("--chat", metavar="ID", help="Chat to continue.")] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send this message, print the answer, and exit.")
    ] = None,
    max_cost: Annotated[str | None, dollars("Cost limit of each answer.")] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Chat with a graph.

    The cost is printed after each answer. Ctrl-C stops an answer and keeps its text so far; Ctrl-D exits. /help lists
    the commands.

    \b
    Examples:
      penstock chat assistant
      penstock chat assistant -m 'count to 10' --max-cost 0.01
      penstock chat --chat CHAT

    \b
    Exit codes:
      0 ok   4 an approval question cannot be answered here   64 wrong command line
    With -m, as the answer ended:
      0 completed   2 failed   3 halted by a limit   4 waiting for approval
      75 connection to the server lost   130 cancelled
    """
    from penstock.cli.remote.connection import Connection

    if graph is not None and chat_id is not None:
        raise Refused(f"a chat has its own graph; use either {shown(graph)} or --chat")
    limits = None if max_cost is None else {"max_cost_usd": max_cost}
    with Connection(url, token) as server:
        talk = Talk(server, _graph(server, graph, chat_id), chat_id, limits)
        if message is not None:
            return talk.send(message)
        talk.show_history()
        return _converse(talk)


class Talk:
    """One chat with one graph in the terminal."""

    def __init__(
        self, server: Any, graph_id: str | None, chat_id: str | None, limits: Mapping[str, Any] | None
    ) -> None:
        self._server = server
        self.graph_id = graph_id
        self.chat_id = chat_id
        self._limits = limits
        self._user_message: str | None = None
        self._answer: str | None = None
        self._screen = Screen(sys.stdout)

    def show_history(self) -> None:
        """Show the earlier messages of this chat, and follow an answer that is still being written."""
        if self.chat_id is None:
            return
        chat = self._server.get(f"/api/chats/{_escaped(self.chat_id)}")
        self.graph_id = chat["graph_id"]
        messages = {message["id"]: message for message in chat["messages"]}
        for message in (messages[id] for id in chat["active"]):
            if message["role"] == "user":
                self._user_message = message["id"]
                self._screen.show([(PROMPT, "bold"), (multiline(message["content"]), "")], whole=True)
            elif message["role"] == "assistant":
                self._answer = message["id"]
                self._show_answer(message)

    def _show_answer(self, message: Mapping[str, Any]) -> None:
        state, run_id = message["data"].get("state"), message["data"].get("run_id")
        if state == "writing" and run_id:
            self._follow(run_id)
            return
        self._screen.show([(multiline(message["content"]), "")], whole=True)
        if state not in (None, "complete"):
            self._margin([(str(state), "yellow")])

    def send(self, text: str) -> int:
        """Send a message, show the answer, and return the exit code of the run."""
        body = {"content": text}
        if self.chat_id is None:
            return self._show(f"/api/agents/{_escaped(str(self.graph_id))}/chat", body)
        return self._show(f"{self._path()}/messages", body)

    def retry(self) -> int:
        """Request another answer to the last message."""
        return self._show(f"{self._path()}/messages/{self._needed(self._answer)}/retry", {})

    def continue_answer(self) -> int:
        """Continue the last answer."""
        return self._show(f"{self._path()}/messages/{self._needed(self._answer)}/continue", {})

    def edit(self, text: str) -> int:
        """Replace the last message."""
        path = f"{self._path()}/messages/{self._needed(self._user_message)}/edit"
        return self._show(path, {"content": text})

    def _needed(self, message_id: str | None) -> str:
        if message_id is None:
            raise Failed("there is no message yet")
        return message_id

    def _path(self) -> str:
        return f"/api/chats/{_escaped(str(self.chat_id))}"

    def _show(self, path: str, body: dict[str, Any]) -> int:
        # The client chooses the id, so Ctrl-C can cancel before the server has answered, and a retry is idempotent.
        body["run_id"] = run_id = new_run_id()
        if self._limits is not None:
            body["limits"] = self._limits
        try:
            turn = self._server.post(path, body, idempotent=True)
        except KeyboardInterrupt:
            return self._stop(run_id)
        self.chat_id, self._answer = turn["chat_id"], turn["message_id"]
        self._user_message = turn["user_message_id"] or self._user_message
        return self._follow(turn["run_id"])

    def _follow(self, run_id: str) -> int:
        """Show the answer that a run writes, until the run ends or Ctrl-C stops it."""
        answer = Answer(self._screen)
        try:
            with closing(self._server.events(run_id, notice=answer.notice)) as events:
                return self._render(run_id, answer, events)
        except KeyboardInterrupt:
            return self._stop(run_id)

    def _stop(self, run_id: str) -> int:
        print_text("")
        try:
            self._server.post(f"/api/runs/{_escaped(run_id)}/cancel", {"reason": "Ctrl-C in the terminal"})
        except Failed as failed:
            command = f"penstock runs cancel {run_id}{self._server.at}"
            print_error(f"the cancel request did not reach the server: {failed}; when it is back, use: {command}")
            return Exit.CANCELLED
        run: Mapping[str, Any] = {}
        with suppress(Failed, KeyboardInterrupt):  # cancelled before the run existed, or Ctrl-C again
            run = self._wait_until_stored(run_id)
        self._margin([("stopped; the text so far is kept", "yellow")])
        self._margin(_bill(run, run_id) if run else [(run_id, "")])
        return Exit.CANCELLED

    def _wait_until_stored(self, run_id: str) -> Mapping[str, Any]:
        """Wait until the partial answer is stored, because the next turn builds on it; {} after `STOPPING_S`."""
        until = time.monotonic() + STOPPING_S
        while time.monotonic() < until:
            run: Mapping[str, Any] = self._server.get(f"/api/runs/{_escaped(run_id)}")
            if run["status"] in EXITS:
                return run
            time.sleep(POLL_INTERVAL_S)
        return {}

    def _render(self, run_id: str, answer: Answer, events: Generator[RunEvent, None, None]) -> int:
        for event in events:
            answer.add(event)
            if event.type == "approval.requested" and not self._ask(run_id, event.data["approval"]):
                return Exit.WAITING
            if event.type in FINAL:
                answer.end(event)
                self._advise(run_id, event.status, event.data)
                self._margin(_bill(event.data, run_id))
                return EXITS[event.status]
        return Exit.FAILED

    def _advise(self, run_id: str, status: str, data: Mapping[str, Any]) -> None:
        """Show how to continue a run that did not complete, as `penstock runs show` does."""
        if status == "completed":
            return
        with suppress(Failed):  # without the server, the graph id is unknown
            run = self._server.get(f"/api/runs/{_escaped(run_id)}")
            # The final event can arrive before the run record is updated.
            ended = {"status": status, "stop_reason": data.get("stop_reason"), "halted_by": data}
            advice = advice_for({**run, **ended}, self._server.at)
            self._screen.show([(f"→ {advice}", "cyan")], whole=True)

    def _ask(self, run_id: str, approval: Mapping[str, Any]) -> bool:
        """Show a question of the run and return whether it was answered; raises Waiting without a terminal."""
        path = f"/api/approvals/{_escaped(approval['id'])}"
        now = self._server.get(path)
        self._show_question(now)
        if now["state"] != "waiting":
            self._screen.show([(f"  {now['state']} by {printable(str(now['answered_by']))}", "yellow")], whole=True)
            return True
        from penstock.cli.approvals import no_terminal  # imports agents, which a chat does not need otherwise

        command = f"penstock runs answer {run_id} yes{self._server.at}"
        if why := no_terminal(sys.stdout, as_json=False):
            raise Waiting(f"{why}; the run waits on the server, answer it with: {command} (or no)")
        edit = f"to continue with {replacement(now)}: penstock runs answer {run_id} yes --edit JSON{self._server.at}"
        self._screen.show([(f"  {edit}", "dim")], whole=True)
        verdict = _verdict()
        if verdict is None:
            later = f"answer later with: {command} (or no), or with: {self.resume_command()}"
            self._screen.show([(f"  the run waits; {later}", "yellow")], whole=True)
            return False
        self._answer_with(path, verdict)
        return True

    def _answer_with(self, path: str, verdict: bool) -> None:
        try:
            if verdict:
                self._server.post(f"{path}/approve", {})
            else:
                self._server.post(f"{path}/reject", {"reason": "rejected in the terminal"})
        except Failed as failed:  # answered elsewhere first; the run continues with that answer
            self._screen.show([(f"  {printable(str(failed))}", "yellow")], whole=True)

    def _show_question(self, question: Mapping[str, Any]) -> None:
        """Show a question and its value."""
        first, *rest = multiline(str(question["question"])).split("\n")
        more: list[Line] = [[(f"  │ {line}", "")] for line in rest]  # so that no line looks like Penstock's own output
        value: list[Line] = [[(f"  {line}", "")] for line in value_lines(question, self._server.at)]
        self._screen.show([("? ", "yellow"), (first, "")], *more, *value, whole=True)

    def resume_command(self) -> str:
        """Return the command that continues this chat; empty if there is no chat yet."""
        return "" if self.chat_id is None else f"penstock chat --chat {self.chat_id}{self._server.at}"

    def _margin(self, line: Line) -> None:
        text = "".join(piece for piece, _ in line)
        indent = max(self._screen.width - len(text) - 1, 0) if self._screen.moves else 2
        self._screen.show([(" " * indent, ""), *((piece, colour or "dim") for piece, colour in line)])


def _converse(talk: Talk) -> int:
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed:
        _enable_line_editing()
        print_text(f"Chat with {printable(str(talk.graph_id))}. {KEYS}")
    while True:
        line = _line(PROMPT if is_typed else "")
        if line is None or line.partition(" ")[0] == "/quit":
            return _exit(talk, is_typed and line is None)
        try:
            _run_command(talk, line)
        except Failed as failed:
            Screen(sys.stdout).show([(printable(str(failed)), "red")], whole=True)


def _exit(talk: Talk, is_in_line: bool) -> int:
    if is_in_line:
        print_text("")
    if command := talk.resume_command():
        print_text(f"Continue this chat with: {command}")
    return Exit.OK


def _line(prompt: str) -> str | None:
    """Return the next line, or None at end of file. With a prompt, Ctrl-C prompts again; a second one gives None."""
    if sys.stdin is None:
        return None
    for is_last in (not prompt, True):
        try:
            return input(encodable(prompt, sys.stdout)).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if is_last:
                return None
            print_text(f"\n{HOW_TO_EXIT}")
    return None


def _verdict() -> bool | None:
    """Return the user's yes or no, or None on Ctrl-D. Ctrl-C is not an answer: it stops the run.

    Any other input, such as an empty line or a message typed too early, is not an answer and prompts again.
    """
    from penstock.cli.approvals import discard_typed_input

    discard_typed_input(sys.stdin.fileno())
    verdicts = {"y": True, "yes": True, "n": False, "no": False}
    prompt = APPROVE_PROMPT
    try:
        while (typed := input(prompt).strip().lower()) not in verdicts:
            prompt = YES_OR_NO
    except EOFError:
        print_text("")
        return None
    return verdicts[typed]


def _enable_line_editing() -> None:
    """Enable line editing and history if Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401


def _run_command(talk: Talk, line: str) -> None:
    word, _, rest = line.partition(" ")
    commands: Mapping[str, Callable[[], Any]] = {
        "/retry": talk.retry,
        "/continue": talk.continue_answer,
        "/edit": lambda: talk.edit(rest) if rest else print_text("/edit needs the new text"),
        "/help": lambda: print_text(HELP),
    }
    if word in commands:
        commands[word]()
    elif word.startswith("/"):
        print_text(f"there is no command {word}\n{HELP}")
    elif line:
        talk.send(line)


def _graph(server: Any, named: str | None, chat_id: str | None) -> str | None:
    """Return the id of the graph that answers; None for an existing chat, which has its own."""
    if chat_id is not None:
        return None
    graphs = server.get("/api/graphs")["graphs"]
    if named is None and not graphs:
        raise Refused("the server has no graphs; start it with: penstock serve FILE.json")
    if named is not None and named not in [graph["id"] for graph in graphs]:
        server.check_graph(named)
    able = [graph for graph in graphs if graph["chat"]]
    first = next((graph for graph in able if graph["made_for_chat"]), next(iter(able or graphs), None))
    return named or (None if first is None else str(first["id"]))


def _bill(data: Mapping[str, Any], run_id: str) -> Line:
    return [(f"{bill(data)} · {run_id}", "")]


def _escaped(id: str) -> str:
    from penstock.cli.remote.connection import escaped

    return escaped(id)
