"""The tutorial from its first page to its last: every file and every command of its pages, in one folder, in order.

What a page shows below a command or a block has to be what the command or the program prints; numbers, times and ids
may differ. `test_docs_cover_the_api` compares the blocks exactly; `tests/ui/test_tutorial.py` has the steps in the
browser.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.cli.remote.connection import Connection
from tests.cli.conftest import Penstock
from tests.cli.service.test_serve import Server, served

PAGES = Path(__file__).parents[2] / "docs" / "tutorial"
ORDER = ("index", "contain", "agent", "graph", "serve", "watch", "approve")
BLOCK = re.compile(r"^(?:`(?P<file>[\w.]+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ (?P<command>.+)\n(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE)
pytestmark = pytest.mark.timeout(300)

ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DOCUMENTED = "http://127.0.0.1:8642"
DIFFERS = (
    (ID, "ID"),
    (re.compile(r"sqlite:\S+"), "DB"),
    (re.compile(r"\d+(?:\.\d+)?"), "#"),
    (re.compile(r"\s+"), " "),
)
"""What is not the same each time, and what it is compared as."""


def comparable(text: str) -> str:
    """Return a text without what differs from one reader to the next."""
    for pattern, replacement in DIFFERS:
        text = pattern.sub(replacement, text)
    return text.strip()


def missing(shown: str, printed: str) -> Iterator[str]:
    """Yield the lines of a page that were not printed."""
    found = comparable(printed)
    return (line for line in shown.splitlines() if comparable(line) not in found)


class Reader:
    """A person who does what the pages say: saves the files, starts servers, and types the commands."""

    def __init__(self, penstock: Penstock, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.penstock, self.folder, self.stack, self.monkeypatch = penstock, folder, stack, monkeypatch
        self.server: Server | None = None
        self.run = ""
        self.did: list[tuple[str, int, str]] = []

    def read(self, page: str) -> None:
        """Do what a page says: a block of Python without a name goes below the one before it, in the same file."""
        file, printed = Path(), ""
        for block in BLOCK.finditer((PAGES / f"{page}.md").read_text("utf-8")):
            if block["language"] == "python":
                file = self.folder / block["file"] if block["file"] else file
                before = "" if block["file"] else file.read_text("utf-8") + "\n\n"
                file.write_text(before + block["text"], "utf-8")
                printed = self.python(file.name) if file.name not in {"app.py", "desk.py"} else ""
            elif block["language"] == "text":
                assert printed, f"no program printed this: {block['text']}"
                assert list(missing(block["text"], printed)) == []
            elif block["language"] == "console":
                for found in COMMAND.finditer(block["text"]):
                    output = self.type(found["command"])
                    assert list(missing(found["output"], output)) == [], output

    def python(self, file: str) -> str:
        """Run a program of the reader; it must not fail."""
        ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def type(self, command: str) -> str:
        """Type a command; returns what it prints."""
        program, *arguments = shlex.split(command.replace("RUN", self.run))
        if program in {"python3", ".", "pip"}:
            return ""
        if program == "python":
            return self.python(*arguments)
        if program == "kill":
            self.kill()
            return ""
        if (program, arguments[0]) == ("penstock", "serve"):
            return self.serve(*arguments[1:])
        if program == "penstock":
            ended = self.penstock(*arguments)
            code, printed = ended.code, ended.out + ended.err
        else:
            assert self.server is not None
            line = [part.replace(DOCUMENTED, self.server.url) for part in (program, *arguments)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            code, printed = done.returncode, done.stdout + done.stderr
        if arguments[1:2] == ["start"]:
            self.run = ID.findall(printed)[0]
        self.did.append((" ".join([program, *arguments[:2]] if program == "penstock" else [program]), code, printed))
        return printed

    def serve(self, *programs: str) -> str:
        """Start a server, after stopping the one before; a short lease saves the wait after a kill."""
        if self.server is not None:
            assert self.server.stop(signal.SIGINT)[0] == 0
        self.server = self.stack.enter_context(served(*programs, "--db", "sqlite:///penstock.db", "--lease", "2"))
        self.monkeypatch.setenv("PENSTOCK_URL", self.server.url)
        return self.server.greeting

    def kill(self) -> None:
        """Kill the server when the first model call of the run has ended, as a person does after a few seconds."""
        assert self.server is not None
        with Connection(self.server.url) as connection:
            events = connection.events(self.run)
            next(event for event in events if event.type == "call.ended" and event.data["kind"] == "llm")
        self.server.process.kill()
        self.server.process.wait()
        self.server = None


@pytest.mark.usefixtures("forks")
def test_every_command_of_the_tutorial_does_what_its_page_says(
    penstock: Penstock, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        reader = Reader(penstock, directory, stack, monkeypatch)
        for page in ORDER:
            reader.read(page)
    assert [(command, code) for command, code, _ in reader.did] == [
        ("penstock run app.py", 0),
        ("penstock chat briefing", 0),
        ("curl", 0),
        *(("penstock runs start", 0), ("penstock runs tail", 0), ("penstock runs show", 0)),
        *(("penstock runs start", 0), ("penstock runs tail", 0)),
        *(("penstock runs start", 0), ("penstock runs show", 0)),
        *(("penstock runs answer", 0), ("penstock runs tail", 0)),
        *(("penstock runs start", 0), ("penstock runs tail", 3), ("penstock runs show", 0)),
        *(("penstock runs grant", 0), ("penstock runs tail", 0)),
    ]
    printed = [text for _, _, text in reader.did]
    for number, text in (
        *((0, "history of dams"), (1, "history of dams"), (2, '"chat.completion"')),
        *((7, "run.resumed"), (7, "from the journal"), (7, "held · ")),
        *((9, "waiting"), (9, "closed on Monday"), (11, "closed on Monday"), (11, "run.completed")),
        *((14, "halted"), (14, "penstock runs grant"), (16, "from the journal")),
    ):
        assert text in printed[number], reader.did[number]
