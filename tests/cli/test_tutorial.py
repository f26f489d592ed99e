"""The tutorial from its first page to its last: every command of its pages, in one folder, in order.

The Python blocks run in `test_docs_cover_the_api`; the steps in the browser in `tests/ui/test_tutorial.py`.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.conftest import Penstock
from tests.cli.service.test_serve import Server, served

PAGES = Path(__file__).parents[2] / "docs" / "tutorial"
ORDER = ("index", "contain", "agent", "graph", "serve", "watch", "approve", "two-machines")
BLOCK = re.compile(r"^(?:`(?P<file>[\w.]+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
pytestmark = pytest.mark.timeout(300)

ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DOCUMENTED = "http://127.0.0.1:8642"


class Reader:
    """A person who does what the pages say: saves the files, starts servers, and types the commands."""

    def __init__(self, penstock: Penstock, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.penstock, self.folder, self.stack, self.monkeypatch = penstock, folder, stack, monkeypatch
        self.server: Server | None = None
        self.run = ""
        self.did: list[tuple[str, int, str]] = []

    def read(self, page: str) -> None:
        for block in BLOCK.finditer((PAGES / f"{page}.md").read_text("utf-8")):
            if block["file"]:
                (self.folder / block["file"]).write_text(block["text"], "utf-8")
            elif block["language"] == "console":
                for command in COMMAND.findall(block["text"]):
                    self.type(command)

    def type(self, command: str) -> None:
        program, *arguments = shlex.split(command.replace("RUN", self.run))
        if program == "pip":
            return
        if (program, arguments[0]) == ("penstock", "serve"):
            self.serve(*arguments[1:])
            return
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

    def serve(self, *programs: str) -> None:
        if self.server is not None:
            assert self.server.stop(signal.SIGINT)[0] == 0
        self.server = self.stack.enter_context(served(*programs, "--db", "sqlite:///penstock.db"))
        self.monkeypatch.setenv("PENSTOCK_URL", self.server.url)


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
        *(("penstock runs start", 0), ("penstock runs show", 0)),
        *(("penstock runs answer", 0), ("penstock runs tail", 0)),
        *(("penstock runs start", 0), ("penstock runs tail", 3), ("penstock runs show", 0)),
        *(("penstock runs grant", 0), ("penstock runs tail", 0)),
    ]
    printed = [text for _, _, text in reader.did]
    for number, text in (
        *((0, "history of dams"), (1, "history of dams"), (2, '"chat.completion"')),
        *((7, "waiting"), (7, "closed on Monday"), (9, "closed on Monday"), (9, "run.completed")),
        *((12, "halted"), (12, "penstock runs grant"), (14, "from the journal")),
    ):
        assert text in printed[number], reader.did[number]
