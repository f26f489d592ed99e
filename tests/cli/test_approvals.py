"""Approval questions of a run: shown at the terminal, answered by `--approve`, refused without a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.approvals import CHOICES, EDIT_PROMPT, MAX_LINE, REASON_PROMPT, Questions, Unanswered
from penstock.cli.approvals import Terminal as Asking
from penstock.cli.render.screen import Screen
from penstock.nodes.approval import Answer, ApprovalService
from tests.cli.conftest import Penstock
from tests.cli.remote.live import PATIENCE_S, PENSTOCK, Terminal

STANDARD = ("--executors", "penstock.nodes:executors")
VALUE = {"where": "the south face"}


# one question


class Person:
    """A user at a terminal in this process: what they are shown, and what they type."""

    def __init__(self) -> None:
        self._ours, self.descriptor = pty.openpty()
        self._theirs = os.fdopen(os.dup(self.descriptor), "w", encoding="utf-8")
        self.questions = Questions(Asking(Screen(self._theirs), self.descriptor).answer)
        self.shown = ""
        self._seen = 0

    async def until(self, text: str) -> str:
        """Wait until that is shown, after what was waited for before; what was shown up to there."""
        loop = asyncio.get_running_loop()
        while (at := self.shown.find(text, self._seen)) < 0:
            ready = asyncio.Event()
            loop.add_reader(self._ours, ready.set)
            try:
                await asyncio.wait_for(ready.wait(), PATIENCE_S)
            except TimeoutError:
                raise AssertionError(f"{text!r} was never shown: {self.shown[self._seen :]!r}") from None
            finally:
                loop.remove_reader(self._ours)
            self.shown += os.read(self._ours, 65_536).decode()
        before = self.shown[self._seen : at]
        self._seen = at + len(text)
        return before

    def type(self, keys: str | bytes) -> None:
        os.write(self._ours, keys if isinstance(keys, bytes) else keys.encode())

    async def answer(self, question: str = "Blast?", value: Any = VALUE, expects: Any = None) -> Answer:
        async with self.questions.ask("r", "ok", question, value, expects) as put:
            assert (put.request.question, put.request.value) == (question, value)
            return await put.answer()

    def close(self) -> None:
        self._theirs.close()
        os.close(self.descriptor)
        os.close(self._ours)


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Iterator[Person]:
    monkeypatch.setenv("TERM", "dumb")
    with closing(Person()) as user:
        yield user


@pytest.fixture
def drafts(directory: Path) -> None:
    (directory / "draft.txt").write_text("two\nlines\n")
    (directory / "draft.json").write_text("[1]")


@asynccontextmanager
async def asking(person: Person, *question: Any) -> AsyncIterator[asyncio.Task[Answer]]:
    """A question that waits; it is taken back when the block is left."""
    task = asyncio.create_task(person.answer(*question))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_question_its_node_and_the_value_are_shown(person: Person) -> None:
    assert isinstance(person.questions, ApprovalService)
    async with asking(person, "Blast?\nReally\x1b[31m?", {"text": "ä\tb"}) as task:
        shown = await person.until(CHOICES)
        assert shown.splitlines() == [
            "? Blast?  (ok)",
            "  │ Really\N{REPLACEMENT CHARACTER}[31m?",
            '  value: {"text": "ä\\tb"}',
        ]
        person.type("approve\n")
        assert await task == Answer(True)


async def test_long_value_is_shown_below_its_name_and_truncated(person: Person) -> None:
    async with asking(person, "Blast?", "one\ntwo\n" + "x" * 9_000):
        shown = (await person.until(CHOICES)).splitlines()
        assert shown[1:4] == ["  value:", "    one", "    two"]
        assert shown[-1] == "    … 5008 more characters"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("a", Answer(True)),
        (" yes ", Answer(True)),
        ('edit {"where": "north"}', Answer(True, {"where": "north"}, edited=True)),
        ("e not today, nor NaN", Answer(True, "not today, nor NaN", edited=True)),
        ("e NaN", Answer(True, "NaN", edited=True)),
        ('e ""', Answer(True, "", edited=True)),
        ("e null", Answer(True, None, edited=True)),
        ("e 5", Answer(True, 5, edited=True)),
        ("e ✓ ünï", Answer(True, "✓ ünï", edited=True)),
        ("e @draft.txt", Answer(True, "two\nlines\n", edited=True)),
        ("e @draft.json", Answer(True, [1], edited=True)),
        ("reject not before Monday", Answer(False, reason="not before Monday")),
        ("n  no", Answer(False, reason="no")),
    ],
)
async def test_answer_and_its_value_may_be_on_one_line(
    person: Person, drafts: None, typed: str, answer: Answer
) -> None:
    async with asking(person) as task:
        await person.until(CHOICES)
        person.type(f"{typed}\n")
        assert await task == answer


@pytest.mark.parametrize(
    ("word", "prompt", "typed", "answer"),
    [
        ("edit", EDIT_PROMPT, "[1, 2]", Answer(True, [1, 2], edited=True)),
        ("reject", REASON_PROMPT, "too steep", Answer(False, reason="too steep")),
        ("no", REASON_PROMPT, "", Answer(False, reason="rejected")),
    ],
)
async def test_missing_part_of_an_answer_is_prompted_for(
    person: Person, word: str, prompt: str, typed: str, answer: Answer
) -> None:
    async with asking(person) as task:
        await person.until(CHOICES)
        person.type(f"{word}\n")
        await person.until(prompt)
        person.type(f"{typed}\n")
        assert await task == answer


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", ""),
        ("maybe", ""),
        ("yes, but shorter", ""),
        ("e @nothing.txt", "there is no file 'nothing.txt'"),
        ("e @.", "'.' is a directory"),
    ],
)
async def test_invalid_answer_is_prompted_for_again(person: Person, typed: str, expected: str) -> None:
    async with asking(person) as task:
        await person.until(CHOICES)
        person.type(f"{typed}\n")
        assert expected in await person.until(CHOICES)
        assert not task.done()


async def test_edit_with_invalid_arguments_is_reported_and_prompted_for_again(person: Person) -> None:
    expects = {"tool": "pay", "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}}}
    async with asking(person, "May pay run?", {"tool": "pay", "arguments": {"amount": 5}}, expects) as task:
        await person.until(CHOICES)
        person.type('edit {"amount": "seven"}\n')
        assert "amount: expected integer, not string" in " ".join((await person.until(CHOICES)).split())
        person.type('edit {"amount": 7}\n')
        assert await task == Answer(True, {"amount": 7}, edited=True)


async def test_nothing_to_go_on_with_is_no_edit(person: Person) -> None:
    async with asking(person):
        await person.until(CHOICES)
        person.type("edit\n")
        await person.until(EDIT_PROMPT)
        person.type("\n")
        await person.until(CHOICES)


async def test_ctrl_d_is_no_answer_wherever_it_is_pressed(person: Person) -> None:
    async with asking(person) as task:
        await person.until(CHOICES)
        for keys, prompt in (
            ("\x04", CHOICES),
            ("no\n", REASON_PROMPT),
            ("\x04", CHOICES),
            ("maybe\n", CHOICES),
            ("\x04", CHOICES),
        ):
            person.type(keys)
            await person.until(prompt)
        assert person.shown.count("that is not an answer; Ctrl-C ends the run") == 3
        person.type("y\x04es\x04\x04")  # typed in pieces, and ended without a line's end
        assert await task == Answer(True)


async def test_a_terminal_that_only_ends_is_given_up(person: Person) -> None:
    async with asking(person) as task:
        for _ in range(3):
            await person.until(CHOICES)
            person.type("\x04")
        with pytest.raises(Unanswered, match="no answer to 'Blast\\?': the terminal was closed"):
            await task


async def test_a_line_that_the_terminal_has_cut_is_not_taken_for_whole(person: Person) -> None:
    async with asking(person) as task:
        await person.until(CHOICES)
        person.type("e " + "x" * MAX_LINE + "\n")
        await person.until("write it to a file, and answer: edit @file")
        await person.until(CHOICES)
        person.type(b"e \xff\xc3\n")
        assert await task == Answer(True, "\N{REPLACEMENT CHARACTER}" * 2, edited=True)


async def test_what_was_typed_before_the_question_answers_nothing(person: Person) -> None:
    person.type("approve\n")
    await person.until("approve")
    async with asking(person) as task:
        await person.until(CHOICES)
        person.type("reject unseen\n")
        assert await task == Answer(False, reason="unseen")


async def test_questions_are_shown_one_at_a_time(person: Person) -> None:
    async with asking(person, "First?") as first, asking(person, "Second?") as second:
        assert "Second" not in await person.until(CHOICES)
        person.type("no 1\n")
        assert "? Second?" in await person.until(CHOICES)
        person.type("no 2\n")
        assert [(await first).reason, (await second).reason] == ["1", "2"]


async def test_a_question_that_is_taken_back_makes_room_for_the_next(person: Person) -> None:
    async with asking(person, "First?") as first, asking(person, "Second?") as second:
        await person.until(CHOICES)
        first.cancel()
        assert (await person.until(CHOICES)).startswith("\r\n? Second?")
        person.type("yes\n")
        assert await second == Answer(True)
        assert first.cancelled()


# a run


def asks(**data: Any) -> dict[str, Any]:
    nodes = [
        {"id": "start", "type": "input"},
        {"id": "ok", "type": "approval", "data": {"question": "Blast at {{ input }}?", **data}},
        {"id": "done", "type": "prompt-template", "data": {"template": "boom at {{ input }}"}},
        {"id": "not", "type": "prompt-template", "data": {"template": "no: {{ input.reason }}"}},
    ]
    edges = [("start", "output", "ok"), ("ok", "approved", "done"), ("ok", "rejected", "not")]
    return {
        "id": "flow",
        "nodes": nodes,
        "edges": [
            {"id": str(at), "source": a, "sourceHandle": handle, "target": b, "data": {"channel": "flow"}}
            for at, (a, handle, b) in enumerate(edges)
        ],
    }


def write_flow(document: dict[str, Any]) -> None:
    Path("flow.json").write_text(json.dumps(document))


@pytest.mark.parametrize(("env", "typed"), [({}, "approve"), ({"TERM": "dumb"}, "edit the south")])
def test_run_prompts_at_the_terminal_and_continues(env: dict[str, str], typed: str) -> None:
    write_flow(asks())
    with Terminal("run", "flow.json", "--input", '"the north"', **env) as terminal:
        shown = terminal.until(CHOICES)
        assert "Blast at the north?" in shown
        assert "value: the north" in shown
        terminal.type(f"{typed}\n")
        assert terminal.end() == 0
    assert f"done: boom at the {'south' if 'south' in typed else 'north'}" in terminal.shown
    if not env:
        assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l"), "the cursor is back"


def test_ctrl_c_while_it_asks_ends_the_run_as_elsewhere() -> None:
    write_flow(asks())
    with Terminal("run", "flow.json", "--input", "1") as terminal:
        terminal.until(CHOICES)
        terminal.type("\x03")
        assert terminal.end() == 130
    assert ": aborted: Ctrl-C" in terminal.shown
    assert "Traceback" not in terminal.shown


def test_question_without_an_answer_in_time_is_rejected() -> None:
    write_flow(asks(timeout_s=0.05))
    with Terminal("run", "flow.json", "--input", "1") as terminal:
        terminal.until(CHOICES)
        assert terminal.end() == 0
    assert "not: no: not answered within 0.05 s" in terminal.shown


def test_json_output_does_not_prompt() -> None:
    write_flow(asks())
    with Terminal("run", "flow.json", "--input", "1", "--json") as terminal:
        assert terminal.end() == 64
    assert "needs approval at 'ok', and --json does not prompt;" in " ".join(terminal.shown.split())


@pytest.mark.parametrize("name", ["input", "output", "error"])
def test_without_a_terminal_it_is_refused_before_anything_is_done(name: str) -> None:
    write_flow(asks())
    ours, theirs = pty.openpty()
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    streams[{"input": "stdin", "output": "stdout", "error": "stderr"}[name]] = subprocess.PIPE
    with subprocess.Popen([*PENSTOCK, "run", "flow.json"], **streams) as process:
        os.close(theirs)
        err = process.stderr.read() if process.stderr is not None else os.read(ours, 65_536)
        assert process.wait() == 64
    os.close(ours)
    assert " ".join(err.decode().split()) == (
        f"penstock: flow.json needs approval at 'ok', and standard {name} is not a terminal; "
        "use --approve all to approve, or --approve none to reject"
    )


def test_questions_of_graphs_inside_are_found_too(penstock: Penstock) -> None:
    node = {"id": "outer", "type": "subgraph", "data": {"graph": asks()}}
    write_flow({"id": "flow", "nodes": [node], "edges": []})
    ended = penstock("run", "flow.json", *STANDARD)
    assert (ended.code, "needs approval at 'outer/ok'" in ended.err) == (64, True)
    assert penstock("run", "flow.json", *STANDARD, "--approve", "all", "--input", "1").code == 0


@pytest.mark.parametrize(
    ("approve", "result", "expected"),
    [
        ("all", {"done": "boom at 1"}, "? Blast at 1?  approved: --approve all"),
        ("none", {"not": "no: --approve none"}, "? Blast at 1?  rejected: --approve none"),
    ],
)
def test_approve_option_answers_and_shows_every_question(
    penstock: Penstock, approve: str, result: dict[str, str], expected: str
) -> None:
    write_flow(asks())
    ended = penstock("run", "flow.json", *STANDARD, "--input", "1", "--approve", approve, "--json")
    assert ended.code == 0
    assert result.items() <= json.loads(ended.out)["results"].items()
    assert f"{expected}\n  value: 1\n" in ended.err


TOOLS = """
from penstock.agents.tools import Tool

tools = {"dig": Tool(lambda: print("DUG"), name="dig", description="Dig.", needs_approval=True)}
"""


@pytest.mark.parametrize(
    ("approve", "runs"), [(["--approve", "all"], True), (["--approve", "none"], False), ([], False)], ids=str
)
def test_tools_that_need_approval_are_answered_for_too(penstock: Penstock, approve: list[str], runs: bool) -> None:
    Path("my_tools.py").write_text(TOOLS)
    model = {"script": [{"tool": "dig", "arguments": {}}, "done"]}
    agent = {"id": "a", "type": "agent", "data": {"model": model, "tools": ["dig"]}}
    write_flow({"id": "flow", "nodes": [agent], "edges": []})
    ended = penstock("run", "flow.json", *STANDARD, "--tools", "my_tools.py:tools", *approve, "--json")
    assert (ended.code, "DUG" in ended.err) == (0, runs)
    assert ("? May dig run?" in ended.err) == bool(approve)


def test_a_word_that_is_neither_all_nor_none_is_a_wrong_command_line(penstock: Penstock) -> None:
    write_flow(asks())
    ended = penstock("run", "flow.json", "--approve", "some")
    assert (ended.code, "'all', 'none'" in ended.err) == (64, True)
