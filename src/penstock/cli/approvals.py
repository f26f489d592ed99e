"""Approval questions of a run, answered by the user at this terminal or by `--approve`.

The terminal shows one question at a time; the others wait for their turn. The event loop reads the terminal, so other
work continues, and reading stops when a question is cancelled by Ctrl-C or by a time limit. Input typed before a
question was shown is discarded, and Ctrl-D is not an answer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.exits import Refused
from penstock.cli.options import Approve
from penstock.cli.render.screen import Line, Screen, printable, write
from penstock.cli.render.text import titled
from penstock.cli.values import parse_json, read_bytes
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorBroken, ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec
from penstock.nodes.approval import Answer, ApprovalNode, ApprovalRequest, as_edited

CHOICES = "  approve, edit or reject › "
EDIT_PROMPT = "  new value: JSON, text or @file › "
REASON_PROMPT = "  reason › "
APPROVE = ("a", "approve", "y", "yes")
EDIT = ("e", "edit")
REJECT = ("r", "reject", "n", "no")
MAX_EOF = 3
"""Consecutive end-of-file reads after which the terminal counts as closed."""
MAX_LINE = 4096
"""Maximum bytes of a terminal line, including its end; the terminal silently drops the rest."""

Answering = Callable[[ApprovalRequest], Awaitable[Answer]]


class Unanswered(PenstockError):
    """A question was shown, and the terminal was closed without an answer."""

    def __init__(self, question: str) -> None:
        super().__init__(f"no answer to {question!r}: the terminal was closed")


class Questions:
    """Receives the questions of a run's nodes and agents; `services["approvals"]` of the run."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._numbers = count(1)

    @asynccontextmanager
    async def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> AsyncIterator[OpenQuestion]:
        """Open a question; it is shown when its answer is awaited."""
        id = f"{run_id}/{node_id}/{next(self._numbers)}"
        yield OpenQuestion(ApprovalRequest(id, run_id, node_id, question, value, expects), self._answer)


@dataclass(slots=True)
class OpenQuestion:
    """An open question."""

    request: ApprovalRequest
    _answer: Answering

    async def answer(self) -> Answer:
        """Wait for the answer."""
        return await self._answer(self.request)

    async def at_last(self) -> Answer | None:
        """Return None: the terminal gave no answer, and there is no other source of answers."""
        return None


def by_rule(approve: Approve, screen: Screen) -> Answering:
    """Give every question the same answer; each question is shown with its value and the answer."""

    async def answer(request: ApprovalRequest) -> Answer:
        is_approved = approve is Approve.ALL
        verdict = f"  {'approved' if is_approved else 'rejected'}: --approve {approve}"
        question = printable(" ".join(request.question.split()))
        screen.show([("? ", "yellow"), (question, ""), (verdict, "yellow")], *_value_lines(request), whole=True)
        return Answer(True) if is_approved else Answer(False, reason=f"--approve {approve}")

    return answer


def no_terminal(out: TextIO | None, as_json: bool) -> str:
    """Return why questions cannot be shown here, or an empty string if they can."""
    if as_json:
        return "--json does not prompt"
    streams = {"standard input": sys.stdin, "standard output": out, "standard error": sys.stderr}
    missing = [name for name, stream in streams.items() if stream is None or stream.closed or not stream.isatty()]
    return f"{missing[0]} is not a terminal" if missing else ""


def approval_nodes(graph: GraphSpec, executors: ExecutorRegistry) -> Iterator[str]:
    """Yield the ids of approval nodes; those in nested graphs are given by path."""
    for node in graph.nodes:
        if node.type in executors and isinstance(executors[node.type], ApprovalNode):
            yield node.id
        inner = node.data.get("graph")
        if isinstance(inner, Mapping):
            with suppress(GraphInvalid, ExecutorBroken):  # its executor may give "graph" another meaning
                yield from (f"{node.id}/{id}" for id in approval_nodes(parse_graph(inner), executors))


class _NoAnswer(Exception):
    """Ctrl-D, or a terminal that was closed."""


class Terminal:
    """Shows questions on a terminal, one after the other, and reads the answers."""

    def __init__(self, screen: Screen, descriptor: int) -> None:
        self._screen = screen
        self._descriptor = descriptor
        self._turn = asyncio.Lock()

    async def answer(self, request: ApprovalRequest) -> Answer:
        """Show the question and return the user's answer."""
        async with self._turn:
            with self._screen.still():
                self._show(request)
                try:
                    return await self._prompt(request)
                except asyncio.CancelledError:
                    write("", self._screen.stream)  # start the next output on a new line
                    raise

    def _show(self, request: ApprovalRequest) -> None:
        first, *rest = request.question.splitlines() or [""]
        lines: list[Line] = [[("? ", "yellow"), (printable(first), ""), (f"  ({printable(request.node_id)})", "dim")]]
        lines += [[(f"  │ {printable(line)}", "")] for line in rest]
        self._screen.show(*lines, *_value_lines(request), whole=True)
        discard_typed_input(self._descriptor)

    async def _prompt(self, request: ApprovalRequest) -> Answer:
        eofs = 0
        while eofs < MAX_EOF:
            try:
                answer = await self._verdict(request)
                eofs = 0
            except _NoAnswer:
                answer, eofs = None, eofs + 1
                self._note("that is not an answer; Ctrl-C ends the run")
            except (Refused, InvalidValue) as refused:
                answer = None
                self._note(str(refused))
            if answer is not None:
                return answer
        raise Unanswered(request.question)

    async def _verdict(self, request: ApprovalRequest) -> Answer | None:
        """Return the answer, or None if it is none of the choices; InvalidValue if the edited value is not valid."""
        word, _, rest = (await self._line(CHOICES)).partition(" ")
        if word in APPROVE and not rest:
            return Answer(True)
        if word in EDIT:
            typed = rest.strip() or await self._line(EDIT_PROMPT)
            if not typed:
                return None
            return Answer(True, as_edited(request.expects, await asyncio.to_thread(_value, typed)), edited=True)
        if word in REJECT:
            return Answer(False, reason=rest.strip() or await self._line(REASON_PROMPT) or "rejected")
        return None

    async def _line(self, prompt: str) -> str:
        write(prompt, self._screen.stream, end="")
        typed = b""
        while not typed.endswith(b"\n"):
            piece = await self._piece()
            if not piece:
                write("", self._screen.stream)
                if typed:
                    break
                raise _NoAnswer
            typed += piece
        if len(typed) >= MAX_LINE:
            raise Refused("this line is too long for the terminal; write it to a file, and answer: edit @file")
        return typed.decode("utf-8", "replace").strip()

    async def _piece(self) -> bytes:
        """Return the next line or the available part of it; empty at end of file."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)
        try:
            return await asyncio.to_thread(os.read, self._descriptor, MAX_LINE)  # data is ready: does not block
        except OSError:  # the terminal was closed
            return b""

    def _note(self, text: str) -> None:
        self._screen.show([(f"  {printable(text)}", "yellow")], whole=True)


def _value_lines(request: ApprovalRequest) -> list[Line]:
    """Render the value that the question is about."""
    return [[(f"  {line}", "")] for line in titled("value", request.value)]


def _value(typed: str) -> Any:
    """Return the typed text or the content of the `@file`, parsed as JSON if it is JSON."""
    text = read_bytes(Path(typed[1:]), "edit").decode("utf-8", "replace") if typed.startswith("@") else typed
    try:
        return parse_json(text, "the new value")
    except Refused:
        return text


def discard_typed_input(descriptor: int) -> None:
    """Discard unread terminal input: it was typed before the question was shown."""
    import termios

    with suppress(termios.error):
        termios.tcflush(descriptor, termios.TCIFLUSH)
