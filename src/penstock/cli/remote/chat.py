"""`penstock chat`: talk to a graph in the terminal.

What is said goes to the server, and the answer is shown as it comes, with what it cost behind it. The run belongs to
the server: a connection that breaks is taken up again where it broke. Ctrl-C stops an answer and keeps what has come of
it; at the prompt it clears the line, and leaves when it comes twice.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, Refused, Waiting
from penstock.cli.options import URL, Token, Url, dollars
from penstock.cli.remote.telling import EXITS, advice_for, bill, instead, matter
from penstock.cli.showing.screen import Line, Screen, complain, encodable, printable, say, write
from penstock.ids import new_run_id
from penstock.kernel.graph import shown

STOPPING_S = 10.0
"""How long an answer may take to stop before the prompt is back all the same."""
LOOK_S = 0.05
ENDS = frozenset(f"run.{status}" for status in EXITS)
PROMPT = "you › "
APPROVE_PROMPT = "  approve? [y/n] "
YES_OR_NO = "  that is no answer; yes or no? "
KEYS = "Ctrl-D leaves, Ctrl-C stops an answer, /help lists what else there is."
TO_LEAVE = "Nothing is being answered; Ctrl-D leaves, and so does Ctrl-C once more."
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
    max_cost: Annotated[str | None, dollars("Spend at most this on each answer.")] = None,
    url: Url = URL,
    token: Token = None,
) -> int:
    """Talk to a graph.

    Ctrl-C stops an answer and keeps what has come of it; Ctrl-D leaves. /help lists what else can be said.

    \b
    Examples:
      penstock chat assistant
      penstock chat assistant -m 'count to 10' --max-cost 0.01
      penstock chat --chat CHAT

    \b
    Exit codes:
      0 ok   4 it waits for an answer, and nobody can be asked here   64 wrong command line; and with -m, as it ends:
      0 completed   2 failed   3 halted by a limit   4 its question is left to others
      75 the server has gone, and not come back   130 cancelled
    """
    from penstock.cli.remote.connection import Connection

    if graph is not None and chat_id is not None:
        raise Refused(f"--chat goes on with a chat, which has its graph; leave {shown(graph)} out, or --chat")
    limits = None if max_cost is None else {"max_cost_usd": max_cost}
    with Connection(url, token) as server:
        talk = Talk(server, _graph(server, graph, chat_id), chat_id, limits)
        if message is not None:
            return talk.say(message)
        talk.look_back()
        return _converse(talk)


class Talk:
    """One chat with one graph, as the terminal has it."""

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

    def look_back(self) -> None:
        """Show what was said in this chat before; an answer that is still being written is followed."""
        if self.chat_id is None:
            return
        chat = self._server.get(f"/api/chats/{_escaped(self.chat_id)}")
        self.graph_id = chat["graph_id"]
        said = {message["id"]: message for message in chat["messages"]}
        for message in (said[id] for id in chat["active"]):
            if message["role"] == "user":
                self._user_message = message["id"]
                self._screen.show([(PROMPT, "bold"), (_plain(message["content"]), "")], whole=True)
            elif message["role"] == "assistant":
                self._answer = message["id"]
                self._recall(message)

    def _recall(self, message: Mapping[str, Any]) -> None:
        state, run_id = message["data"].get("state"), message["data"].get("run_id")
        if state == "writing" and run_id:
            self._heed(run_id)
            return
        self._screen.show([(_plain(message["content"]), "")], whole=True)
        if state not in (None, "complete"):
            self._margin([(str(state), "yellow")])

    def say(self, text: str) -> int:
        """Say something, and show the answer; how it ended, as an exit code."""
        body = {"content": text}
        if self.chat_id is None:
            return self._show(f"/api/agents/{_escaped(str(self.graph_id))}/chat", body)
        return self._show(f"{self._path()}/messages", body)

    def retry(self) -> int:
        """Another answer to what was said last."""
        return self._show(f"{self._path()}/messages/{self._needed(self._answer)}/retry", {})

    def go_on(self) -> int:
        """More of the last answer."""
        return self._show(f"{self._path()}/messages/{self._needed(self._answer)}/continue", {})

    def edit(self, text: str) -> int:
        """Say something else instead of what was said last."""
        path = f"{self._path()}/messages/{self._needed(self._user_message)}/edit"
        return self._show(path, {"content": text})

    def _needed(self, message_id: str | None) -> str:
        if message_id is None:
            raise Failed("nothing has been said yet")
        return message_id

    def _path(self) -> str:
        return f"/api/chats/{_escaped(str(self.chat_id))}"

    def _show(self, path: str, body: dict[str, Any]) -> int:
        # The id is ours: so Ctrl-C stops the run even before the server has answered, and asking twice is asking once.
        body["run_id"] = run_id = new_run_id()
        if self._limits is not None:
            body["limits"] = self._limits
        try:
            turn = self._server.post(path, body, is_named=True)
        except KeyboardInterrupt:
            return self._stop(run_id)
        self.chat_id, self._answer = turn["chat_id"], turn["message_id"]
        self._user_message = turn["user_message_id"] or self._user_message
        return self._heed(turn["run_id"])

    def _heed(self, run_id: str) -> int:
        """Show the answer that a run writes, until it ends or somebody has heard enough."""
        told = Told(self._screen)
        try:
            with closing(self._server.events(run_id, notice=told.trouble)) as events:
                return self._follow(run_id, told, events)
        except KeyboardInterrupt:
            return self._stop(run_id)

    def _stop(self, run_id: str) -> int:
        say("")
        try:
            self._server.post(f"/api/runs/{_escaped(run_id)}/cancel", {"reason": "Ctrl-C in the terminal"})
        except Failed as failed:
            again = f"penstock runs cancel {run_id}{self._server.at} stops it then"
            complain(f"the stop did not arrive: {run_id} goes on when the server is back, and {again}; {failed}")
            return Exit.CANCELLED
        run: Mapping[str, Any] = {}
        with suppress(Failed, KeyboardInterrupt):  # it was stopped before it was there; or nobody wants to wait
            run = self._written(run_id)
        self._margin([("stopped; what had come is kept", "yellow")])
        self._margin(_bill(run, run_id) if run else [(run_id, "")])
        return Exit.CANCELLED

    def _written(self, run_id: str) -> Mapping[str, Any]:
        """The run, when what had come of its answer is kept, on which the next one builds; {} if that takes long."""
        until = time.monotonic() + STOPPING_S
        while time.monotonic() < until:
            run: Mapping[str, Any] = self._server.get(f"/api/runs/{_escaped(run_id)}")
            if run["status"] in EXITS:
                return run
            time.sleep(LOOK_S)
        return {}

    def _follow(self, run_id: str, told: Told, events: Generator[Any, None, None]) -> int:
        for event in events:
            if event.type == "text.delta":
                told.piece(_speaker(event.data), str(event.data["text"]))
            elif event.type == "tool.call":
                told.call(_speaker(event.data), event.data["call"])
            elif event.type == "run.resumed":
                told.begin_again()
            elif event.type == "approval.requested":
                told.aside("")
                if not self._ask(run_id, event.data["approval"]):
                    return Exit.WAITING
            elif event.type in ENDS:
                status = event.type.removeprefix("run.")
                told.end(event.type, event.data)
                self._advise(run_id, status, event.data)
                self._margin(_bill(event.data, run_id))
                return EXITS.get(status, Exit.OK)
        return Exit.FAILED

    def _advise(self, run_id: str, status: str, data: Mapping[str, Any]) -> None:
        """Say what lets a run go on that has not come to its own end: as `penstock runs show` does."""
        if status == "completed":
            return
        with suppress(Failed):  # who has gone since cannot say which graph it was
            run = self._server.get(f"/api/runs/{_escaped(run_id)}")
            # The last event is there before the record says so.
            ended = {"status": status, "stop_reason": data.get("stop_reason"), "halted_by": data}
            advice = advice_for({**run, **ended}, self._server.at)
            self._screen.show([(f"→ {advice}", "cyan")], whole=True)

    def _ask(self, run_id: str, approval: Mapping[str, Any]) -> bool:
        """Put a question of the run to whoever sits here; whether it is answered. Waiting, where nobody does."""
        path = f"/api/approvals/{_escaped(approval['id'])}"
        now = self._server.get(path)
        self._put(now)
        if now["state"] != "waiting":
            self._screen.show([(f"  {now['state']} by {printable(str(now['answered_by']))}", "yellow")], whole=True)
            return True
        from penstock.cli.asking import nobody  # brings agents, which talking to a server can do without

        elsewhere = f"penstock runs answer {run_id} yes{self._server.at} lets it go on, and no does not"
        if why := nobody(sys.stdout, as_json=False):
            raise Waiting(f"{why}, and {run_id} goes on waiting on the server: {elsewhere}")
        edit = f"penstock runs answer {run_id} yes --edit JSON{self._server.at} lets it go on with {instead(now)}"
        self._screen.show([(f"  {edit}", "dim")], whole=True)
        verdict = _verdict()
        if verdict is None:
            again = f"{self.comes_back()} asks again"
            self._screen.show([(f"  it waits: {elsewhere}; {again}", "yellow")], whole=True)
            return False
        self._answer_with(path, verdict)
        return True

    def _answer_with(self, path: str, verdict: bool) -> None:
        try:
            if verdict:
                self._server.post(f"{path}/approve", {})
            else:
                self._server.post(f"{path}/reject", {"reason": "rejected in the terminal"})
        except Failed as failed:  # somebody elsewhere was quicker; the run goes on with what they said
            self._screen.show([(f"  {printable(str(failed))}", "yellow")], whole=True)

    def _put(self, question: Mapping[str, Any]) -> None:
        """Show a question, and what it is about."""
        first, *rest = _plain(str(question["question"])).split("\n")
        more: list[Line] = [[(f"  │ {line}", "")] for line in rest]  # so that none looks like what is ours
        about: list[Line] = [[(f"  {line}", "")] for line in matter(question, self._server.at)]
        self._screen.show([("? ", "yellow"), (first, "")], *more, *about, whole=True)

    def comes_back(self) -> str:
        """How to go on with this chat another time; nothing, if there is none."""
        return "" if self.chat_id is None else f"penstock chat --chat {self.chat_id}{self._server.at}"

    def _margin(self, line: Line) -> None:
        text = "".join(piece for piece, _ in line)
        indent = max(self._screen.width - len(text) - 1, 0) if self._screen.moves else 2
        self._screen.show([(" " * indent, ""), *((piece, colour or "dim") for piece, colour in line)])


Speaker = tuple[str, str]
"""A node, and the agent in it."""


class Told:
    """An answer as it is written: in pieces, those of each agent apart.

    A run that another server goes on with tells from the beginning what was not finished. That is shown as far as it
    goes beyond what stands here already; where it is something else, it is shown whole, and said that it begins again.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._speaker: Speaker | None = None
        self._at_line_start = True
        self._said: dict[Speaker, list[str]] = {}
        self._calls: list[tuple[Speaker, Any]] = []
        self._before: dict[Speaker, str] = {}
        """What everybody had said when the run was taken up again, for as long as it is told again."""
        self._heard: dict[Speaker, int] = {}
        """How many characters of that."""
        self._calls_before: list[tuple[Speaker, Any]] = []

    def begin_again(self) -> None:
        """What comes now may be what was shown before."""
        self._before = {speaker: "".join(pieces) for speaker, pieces in self._said.items()}
        self._heard = {}
        self._calls_before = [*self._calls]

    def piece(self, speaker: Speaker, text: str) -> None:
        """The next piece of text."""
        text = self._beyond(speaker, text)
        if not text:
            return
        if speaker != self._speaker:
            self.aside(self._named(speaker))
        self._speaker = speaker
        self._said.setdefault(speaker, []).append(text)
        self._write(_plain(text))

    def _named(self, speaker: Speaker) -> str:
        """Who speaks after somebody else, by the node, or by the agent in it; whoever is alone needs no name."""
        if self._speaker is None:
            return ""
        (before, _), (node_id, source) = self._speaker, speaker
        return node_id if node_id != before else source.rpartition("/")[2]

    def call(self, speaker: Speaker, call: Mapping[str, Any]) -> None:
        """A tool is called."""
        if (speaker, call) in self._calls_before:
            self._calls_before.remove((speaker, call))
            return
        self._calls.append((speaker, call))
        self.aside(f"calls {call['name']}")

    def _beyond(self, speaker: Speaker, text: str) -> str:
        """What of it is not shown yet: all that its speaker has said since, if that is not what was said before."""
        before, heard = self._before.get(speaker, ""), self._heard.get(speaker, 0)
        left = len(before) - heard
        if not left or not text:
            return text
        if before.startswith(text[:left], heard):
            self._heard[speaker] = heard + min(len(text), left)
            return text[left:]
        self._differ()
        self._said[speaker] = []
        return before[:heard] + text

    def _differ(self) -> None:
        self._before, self._calls_before = {}, []
        self.aside("it begins again")

    def aside(self, text: str) -> None:
        """Something that happens between two pieces, on a line of its own."""
        if not self._at_line_start:
            self._write("\n")
        if text:
            self._screen.show([(f"· {printable(text)}", "dim")])

    def trouble(self, text: str) -> None:
        """What keeps the rest from coming, for whoever looks on."""
        if self._screen.moves:  # elsewhere what is printed is the answer, and that goes on where it was
            self.aside("")
        complain(text)

    def end(self, kind: str, data: Mapping[str, Any]) -> None:
        """The end: what was not streamed is shown whole, and what went wrong is said."""
        self.aside("")
        output = _text_of(data.get("output"))
        said = "".join(self._said.get(self._speaker or ("", ""), ()))
        if kind == "run.completed" and not said.strip().endswith(output.strip()):
            if any(heard < len(self._before.get(speaker, "")) for speaker, heard in self._heard.items()):
                self._differ()  # it was told again, and came to less than before
            self._write(_plain(output))
            self.aside("")
        if kind != "run.completed":
            why = data.get("message") or data.get("reason") or ""
            self._screen.show([(f"{kind.removeprefix('run.')}: ", "red"), (printable(str(why)), "")], whole=True)

    def _write(self, text: str) -> None:
        if text:
            write(text, sys.stdout, end="")
            self._at_line_start = text.endswith("\n")


def _converse(talk: Talk) -> int:
    is_typed = sys.stdin is not None and sys.stdin.isatty()
    if is_typed:
        _learn_to_edit_lines()
        say(f"{printable(str(talk.graph_id))} answers. {KEYS}")
    while True:
        line = _line(PROMPT if is_typed else "")
        if line is None or line.partition(" ")[0] == "/quit":
            return _leave(talk, is_typed and line is None)
        try:
            _obey(talk, line)
        except Failed as failed:
            Screen(sys.stdout).show([(printable(str(failed)), "red")], whole=True)


def _leave(talk: Talk, is_in_line: bool) -> int:
    if is_in_line:
        say("")
    if how := talk.comes_back():
        say(f"{how} goes on with this.")
    return Exit.OK


def _line(prompt: str) -> str | None:
    """What is typed next; None if nothing more is. Ctrl-C gives another line to whoever sees a prompt; twice, none."""
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
            say(f"\n{TO_LEAVE}")
    return None


def _verdict() -> bool | None:
    """What somebody says to a question; None if they leave it to others. Ctrl-C is not an answer: it stops the run.

    What is neither yes nor no is no answer, be it the next message that was typed too early, or nothing at all.
    """
    from penstock.cli.asking import forget_what_was_typed

    forget_what_was_typed(sys.stdin.fileno())
    verdicts = {"y": True, "yes": True, "n": False, "no": False}
    prompt = APPROVE_PROMPT
    try:
        while (typed := input(prompt).strip().lower()) not in verdicts:
            prompt = YES_OR_NO
    except EOFError:
        say("")
        return None
    return verdicts[typed]


def _learn_to_edit_lines() -> None:
    """Arrow keys and earlier lines, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401


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
    """Who answers; a chat that is gone on with knows by itself."""
    if chat_id is not None:
        return None
    ids = [str(graph["id"]) for graph in server.get("/api/graphs")["graphs"]]
    if named is None and not ids:
        raise Refused("the server has no graph to talk to; penstock serve FILE.json gives it one")
    if named is not None and named not in ids:
        server.check_graph(named)
    return named or ids[0]


def _speaker(data: Mapping[str, Any]) -> Speaker:
    return str(data.get("node_id", "")), str(data.get("source", ""))


def _bill(data: Mapping[str, Any], run_id: str) -> Line:
    return [(f"{bill(data)} · {run_id}", "")]


def _escaped(id: str) -> str:
    from penstock.cli.remote.connection import escaped

    return escaped(id)


def _text_of(output: Any) -> str:
    if isinstance(output, Mapping) and len(output) == 1:
        (output,) = output.values()
    if output is None or isinstance(output, str):
        return output or ""
    return json.dumps(output, ensure_ascii=False)


def _plain(text: str) -> str:
    """The text without what could steer a terminal; its lines stay lines."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
