"""Questions of a run, and who answers them: whoever sits at this terminal, or `--approve` for them.

One question stands on the terminal at a time, and the others wait for their turn. The event loop reads the terminal, so
that whatever else runs goes on, and a question that is taken back, by Ctrl-C or by a time limit, is not read for any
more. What was typed before a question could be seen answers nothing, and neither does Ctrl-D.
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
from penstock.cli.loading.values import parsed, read_bytes
from penstock.cli.options import Approve
from penstock.cli.showing.screen import Line, Screen, printable, write
from penstock.cli.showing.value import titled
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorBroken, ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec
from penstock.nodes.approval import Answer, ApprovalNode, ApprovalRequest, as_edited

CHOICES = "  approve, edit or reject › "
INSTEAD = "  what goes on instead: JSON, text or @file › "
WHY = "  why › "
APPROVE = ("a", "approve", "y", "yes")
EDIT = ("e", "edit")
REJECT = ("r", "reject", "n", "no")
MAX_ENDS = 3
"""So often in a row a terminal may say that nothing more comes; then nobody is there."""
MAX_LINE = 4096
"""Bytes of a line, its end included, that a terminal takes; it drops what goes beyond, and says nothing."""

Answering = Callable[[ApprovalRequest], Awaitable[Answer]]


class Unanswered(PenstockError):
    """Somebody was asked, and the terminal was closed without an answer."""

    def __init__(self, question: str) -> None:
        super().__init__(f"nobody answered {question!r}: the terminal was closed")


class Questions:
    """Where a run's nodes and agents put their questions; `services["approvals"]` of the run."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._numbers = count(1)

    @asynccontextmanager
    async def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Put]:
        """A question; it is asked when its answer is waited for."""
        id = f"{run_id}/{node_id}/{next(self._numbers)}"
        yield Put(ApprovalRequest(id, run_id, node_id, question, value, expects), self._answer)


@dataclass(slots=True)
class Put:
    """A question that was put."""

    request: ApprovalRequest
    _answer: Answering

    async def answer(self) -> Answer:
        """Wait for it."""
        return await self._answer(self.request)

    async def at_last(self) -> Answer | None:
        """Nobody has answered at the terminal, and nobody else can."""
        return None


def by_rule(approve: Approve, screen: Screen) -> Answering:
    """The same answer to every question; each is shown with it, and with what is asked about."""

    async def answer(request: ApprovalRequest) -> Answer:
        is_approved = approve is Approve.ALL
        said = f"  {'approved' if is_approved else 'rejected'}: --approve {approve}"
        question = printable(" ".join(request.question.split()))
        screen.show([("? ", "yellow"), (question, ""), (said, "yellow")], *_matter(request), whole=True)
        return Answer(True) if is_approved else Answer(False, reason=f"--approve {approve}")

    return answer


def nobody(out: TextIO | None, as_json: bool) -> str:
    """Why nobody can be asked here; nothing, if somebody can."""
    if as_json:
        return "with --json nobody is asked"
    streams = {"standard input": sys.stdin, "standard output": out, "standard error": sys.stderr}
    missing = [name for name, stream in streams.items() if stream is None or stream.closed or not stream.isatty()]
    return f"{missing[0]} is no terminal to ask at" if missing else ""


def who_asks(graph: GraphSpec, executors: ExecutorRegistry) -> Iterator[str]:
    """The nodes that ask, those of graphs inside by their path."""
    for node in graph.nodes:
        if node.type in executors and isinstance(executors[node.type], ApprovalNode):
            yield node.id
        inner = node.data.get("graph")
        if isinstance(inner, Mapping):
            with suppress(GraphInvalid, ExecutorBroken):  # to its executor it may be something else
                yield from (f"{node.id}/{one}" for one in who_asks(parse_graph(inner), executors))


class _NoAnswer(Exception):
    """Ctrl-D, or a terminal that is gone."""


class Terminal:
    """Somebody at a terminal, who is asked one question after the other."""

    def __init__(self, screen: Screen, descriptor: int) -> None:
        self._screen = screen
        self._descriptor = descriptor
        self._turn = asyncio.Lock()

    async def answer(self, request: ApprovalRequest) -> Answer:
        """What somebody says to the question."""
        async with self._turn:
            with self._screen.still():
                self._show(request)
                try:
                    return await self._heard(request)
                except asyncio.CancelledError:
                    write("", self._screen.stream)  # what comes next begins on a line of its own
                    raise

    def _show(self, request: ApprovalRequest) -> None:
        first, *rest = request.question.splitlines() or [""]
        lines: list[Line] = [[("? ", "yellow"), (printable(first), ""), (f"  ({printable(request.node_id)})", "dim")]]
        lines += [[(f"  │ {printable(line)}", "")] for line in rest]
        self._screen.show(*lines, *_matter(request), whole=True)
        forget_what_was_typed(self._descriptor)

    async def _heard(self, request: ApprovalRequest) -> Answer:
        ends = 0
        while ends < MAX_ENDS:
            try:
                answer = await self._verdict(request)
                ends = 0
            except _NoAnswer:
                answer, ends = None, ends + 1
                self._tell("that is no answer; Ctrl-C ends the run")
            except (Refused, InvalidValue) as refused:
                answer = None
                self._tell(str(refused))
            if answer is not None:
                return answer
        raise Unanswered(request.question)

    async def _verdict(self, request: ApprovalRequest) -> Answer | None:
        """What was said; None if it is neither of the three, InvalidValue if it is nothing that can go on instead."""
        word, _, rest = (await self._line(CHOICES)).partition(" ")
        if word in APPROVE and not rest:
            return Answer(True)
        if word in EDIT:
            given = rest.strip() or await self._line(INSTEAD)
            if not given:
                return None
            return Answer(True, as_edited(request.expects, await asyncio.to_thread(_value, given)), edited=True)
        if word in REJECT:
            return Answer(False, reason=rest.strip() or await self._line(WHY) or "rejected")
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
            raise Refused("a terminal cuts lines as long as this one; write it to a file, and say: edit @file")
        return typed.decode("utf-8", "replace").strip()

    async def _piece(self) -> bytes:
        """The next line, or what there is of it; nothing, if nothing more comes."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)
        try:
            return await asyncio.to_thread(os.read, self._descriptor, MAX_LINE)  # it is there: no thread is kept
        except OSError:  # how a terminal says that it is gone
            return b""

    def _tell(self, text: str) -> None:
        self._screen.show([(f"  {printable(text)}", "yellow")], whole=True)


def _matter(request: ApprovalRequest) -> list[Line]:
    """What is asked about."""
    return [[(f"  {line}", "")] for line in titled("value", request.value)]


def _value(given: str) -> Any:
    """What somebody wrote, or the file they named: JSON, or the text it is."""
    text = read_bytes(Path(given[1:]), "edit").decode("utf-8", "replace") if given.startswith("@") else given
    try:
        return parsed(text, "what goes on")
    except Refused:
        return text


def forget_what_was_typed(descriptor: int) -> None:
    """Drop what nobody has read yet: it was typed before the question could be seen."""
    import termios

    with suppress(termios.error):
        termios.tcflush(descriptor, termios.TCIFLUSH)
