"""A person who reads a page at a terminal: saves its files, types its commands, and compares what is printed.

The commands of a page are one session in an empty folder, in a real shell, with a real `penstock`; servers listen on
free ports of this machine. A story (`stories.py`) does what a page leaves to its reader, such as a file of tokens.

Shown output is what is printed, except for what differs each time: times, dates, sizes, ids, and what a page writes
as `…`. Ids are remembered: the id that a page shows stands for the one that was printed in its place.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.testing.provider import FakeProviderServer
from tests.cli.remote.live import Terminal
from tools.blocks import ROOT, Block, blocks_of, commands

PATIENCE_S = 20
"""After so long what a server has not printed is taken to be never printed."""
SERVER = re.compile(r"^(?:\w+=\S+ )*penstock (?:serve|gateway)\b")
READY = re.compile(r"  (?:try it|keys) .*\n")
"""The last line of a greeting."""
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
TOKEN = r"(?:day:\d{4}-\d\d-\d\d/)?(?:\b(?:\d+-)?|(?<=pen_)|(?<=erased-))[0-9a-f]{12}(?:-[0-9a-f]{8})?(?![0-9a-f])"
ID = rf"{UUID}|{TOKEN}"
VARIES = re.compile(
    rf"(?P<id>{ID})"
    r"|(?P<time>\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?)?)"
    r"|(?P<duration>\b[\d,]+(?:\.\d+)? (?:s|ms)\b)"
    r"|(?P<size>\b[\d,]+ (?:bytes|kB|MB)\b)"
    r"|(?P<version>\b\d+\.\d+\.\d+\b)"
    r"|(?P<figure>(?<=--after )\d+|(?<=_ms\": )[\d.]+)"
    r"|(?P<any>…)"
    r"|(?P<space>[ ]+)"
)
PATTERNS = {
    "id": rf"({ID})",
    "time": r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?)?",
    "duration": r"[\d,]+(?:\.\d+)? m?s",
    "size": r"[\d,]+ (?:bytes|kB|MB)",
    "version": r"\d+\.\d+\.\d+",
    "figure": r"[\d.]+",
    "any": r".*?",
    "space": r" +",
}
COLOUR = re.compile(r"\x1b\[\d*m")
NUMBERED = re.compile(r"^ *\d+  (?=[a-z]+(?:\.[a-z]+)? )")
"""The number of an event: text comes in any number of pieces."""


@dataclass(frozen=True)
class Item:
    """A thing that a page has its reader do or look at."""

    line: int
    kind: str
    """`file`, `command`, or `text` that shows something."""
    text: str
    shown: str = ""
    file: str = ""
    not_run: str | None = None


def items(page: str) -> Iterator[Item]:
    """Yield what the reader of a page has to do, in order; what `test_docs_cover_the_api` compares is not in it."""
    for block in blocks_of(ROOT / page):
        if block.file:
            yield Item(block.line, "file", block.text, file=block.file)
        elif block.kind == "console":
            yield from (Item(block.line, "command", c.line, c.shown, not_run=block.not_run) for c in commands(block))
        elif is_left_to_stories(block):
            yield Item(block.line, "text", block.text)


def is_left_to_stories(block: Block) -> bool:
    """Whether a block shows what no other test compares: text that is not the output of the Python above it."""
    return block.kind == "text" and block.follows != "python"


@dataclass
class Running:
    """A server that the reader started: its shell, and what it printed so far."""

    process: subprocess.Popen[bytes]
    printed: str = ""

    def until(self, is_there: Callable[[str], bool]) -> None:
        """Read until that is printed; what is missing shows in the comparison."""
        assert self.process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        while not is_there(self.printed) and select.select([self.process.stdout], [], [], end - time.monotonic())[0]:
            piece = os.read(self.process.stdout.fileno(), 65_536)
            if not piece:
                return
            self.printed += piece.decode()


@dataclass
class Reader:
    """Reads one page; `do` does it up to a command or text, and a story has the rest."""

    page: str
    folder: Path
    """Its home, in which it works."""
    env: Mapping[str, str]
    database: Callable[[], str]
    """Makes a PostgreSQL database; returns its URL."""
    replaced: dict[str, str] = field(default_factory=dict)
    """What a page shows of other machines, and what is there in the test."""
    ids: dict[str, str] = field(default_factory=dict)
    server: Running | None = None
    url: str = ""
    """Address of the server that was started last."""
    shown_url: str = ""
    """Its address on a page."""

    printed: str = ""
    """What the last command printed."""
    started: ExitStack = field(default_factory=ExitStack)
    """Other programs that it started."""

    def __post_init__(self) -> None:
        self.left = list(items(self.page))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.started.close()
        if self.server is not None:
            self.kill()

    def set(self, **env: str) -> None:
        """Set environment variables."""
        self.env = {**self.env, **env}

    def do(self, until: str | None = None) -> None:
        """Do what the page says, up to the first command or text that begins so; without one, to the end."""
        while self.left and not (until is not None and self.left[0].text.startswith(until)):
            self.step()
        assert until is None or self.left, f"{self.page} has no command or text that begins with {until!r} here"

    def step(self) -> None:
        """Do what comes next."""
        item = self.left.pop(0)
        if item.kind == "file":
            path = self.folder / item.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(item.text, "utf-8")
        elif item.kind == "text":
            raise AssertionError(
                f"{self.page}:{item.line} shows a text that nothing compares: make it the output of a console block, "
                f"or have the page's story in tests/docs/stories.py compare it with `compare`:\n{item.text}"
            )
        elif item.not_run is None:
            self._type(item)

    def compare(self, printed: str) -> None:
        """Compare the text that comes next with what was printed."""
        item = self.left.pop(0)
        assert item.kind == "text", item
        self._compare(item.line, item.text, printed)

    def next_text(self) -> str:
        """Take the text that comes next, for a check of its own."""
        item = self.left.pop(0)
        assert item.kind == "text", item
        return item.text

    def write(self, **files: str) -> None:
        """Save files that the page leaves to its reader; `__` stands for the dot of a name."""
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text, "utf-8")

    def penstock(self, *arguments: str, code: int = 0) -> str:
        """Run a command that the page does not show; return what it prints."""
        process = self.start("penstock", *arguments)
        printed, _ = process.communicate()
        assert process.returncode == code, printed
        return printed

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a program that the page does not show."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **self._around())
        self.started.enter_context(process)
        self.started.callback(process.kill)
        return process

    def begin(self) -> subprocess.Popen[str]:
        """Start the command that comes next, which goes on beside the others."""
        item = self.left.pop(0)
        assert item.kind == "command", item
        return self.start("bash", "-c", f"exec {self._here(item.text)}")

    def provider(self, script: list[Any] | None = None) -> FakeProviderServer:
        """Start a model provider; without a script it repeats what it reads."""
        return self.started.enter_context(FakeProviderServer(script=script, keeps_generating=False))

    def terminal(self, *arguments: str) -> Terminal:
        """Start `penstock` on a terminal."""
        return Terminal(*arguments, columns=800, NO_COLOR="1", PENSTOCK_URL=self.url)

    def run(self, graph: str, *options: str, code: int = 0) -> str:
        """Start a run and follow it to its end; return its id."""
        run_id = self.penstock("runs", "start", graph, *options).partition(":")[0]
        self.penstock("runs", "tail", run_id, code=code)
        return run_id

    def serve(self, line: str, shown: str = "", at: int = 0) -> None:
        """Start a server in place of the one before, and compare its greeting."""
        if self.server is not None:
            self.kill()
        command = re.sub(r"\bpenstock (serve|gateway)\b", r"penstock \1 --port 0", line.removesuffix("&"), count=1)
        process = subprocess.Popen(
            ["bash", "-c", command], stdout=subprocess.PIPE, start_new_session=True, **self._around()
        )
        self.server = Running(process)
        self.server.until(lambda printed: READY.search(printed) is not None)
        address = re.search(r"listening on (\S+)", self.server.printed)
        assert address is not None, self.server.printed
        is_gateway = "gateway is listening" in self.server.printed
        self.url, self.shown_url = address[1], f"http://127.0.0.1:{8643 if is_gateway else 8642}"
        self.env = {**self.env, "PENSTOCK_URL": self.url}
        if shown:
            self.server.until(lambda printed: not missing(shown, self._as_shown(printed), {}))
            self._compare(at, shown, self.server.printed)

    def signal(self, number: signal.Signals | None, text: str) -> None:
        """Send the server a signal, if one is given, and wait until it has printed the text."""
        assert self.server is not None
        if number is not None:
            os.killpg(self.server.process.pid, number)
        self.server.until(lambda printed: text in printed)
        assert text in self.server.printed, self.server.printed

    def stop(self) -> str:
        """Stop the server with Ctrl-C; return what it printed after its greeting."""
        if self.server is None:
            return ""
        server, self.server = self.server, None
        os.killpg(server.process.pid, signal.SIGINT)
        self._end(server)
        assert server.process.returncode == 0, server.printed
        return READY.split(server.printed)[1]

    def kill(self) -> None:
        """Kill the server."""
        assert self.server is not None
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self._end(self.server)
        self.server = None

    def _end(self, server: Running) -> None:
        with server.process as process:
            assert process.stdout is not None
            server.printed += process.stdout.read().decode()

    def _type(self, item: Item) -> None:
        line = self._here(item.text)
        if line.startswith("export "):
            self.env = {**self.env, **dict(one.split("=", 1) for one in shlex.split(line)[1:])}
            return
        if SERVER.match(line):
            self.serve(line, item.shown, item.line)
            return
        ended = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, check=False, timeout=60, **self._around())
        printed = self.printed = ended.stdout.decode()
        assert item.shown or ended.returncode == 0, f"{self.page}:{item.line}: $ {item.text}\n{printed}"
        if item.shown:
            self._compare(item.line, item.shown, printed, f"$ {item.text}\n")

    def _around(self) -> dict[str, Any]:
        """Return where a program starts: in the reader's home, with both of its outputs on one stream."""
        environment = {"cwd": self.folder, "env": dict(self.env)}
        return {**environment, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}

    def _here(self, text: str) -> str:
        """Return a command of the page with the ids and addresses of this session."""
        for theirs, ours in {**self.ids, **self.replaced}.items():
            text = text.replace(theirs, ours)
        if self.url:
            text = re.sub(r"(?:http://)?(?:127\.0\.0\.1|localhost|gateway):864[23]", self.url, text)
        return text

    def _as_shown(self, text: str) -> str:
        """Return what was printed as the page would show it."""
        text = COLOUR.sub("", text).replace("\r", "").replace(str(self.folder), "/home/ann")
        if self.url:
            text = text.replace(f" --url {self.url}", "").replace(self.url, self.shown_url)
        for theirs, ours in self.replaced.items():
            text = text.replace(ours, theirs)
        return text

    def _compare(self, line: int, shown: str, printed: str, command: str = "") -> None:
        printed = self._as_shown(printed)
        lacking = missing(shown, printed, self.ids)
        assert not lacking, f"{self.page}:{line}\n{command}does not print: {lacking[0]}\nbut:\n{printed}"


def missing(shown: str, printed: str, ids: dict[str, str]) -> list[str]:
    """Return the lines that are shown and not printed in this order; a line of `…` stands for any lines.

    Lines that are printed and not shown are missing from the page.
    """
    left = printed.splitlines()
    is_gap = False
    for number, line in enumerate(lines := shown.splitlines()):
        if line.strip() == "…":
            is_gap = True
            continue
        while left and (found := _matches(line, left[0], ids)) is None and is_gap:
            left.pop(0)
        if not left or found is None:
            return lines[number:]
        ids.update(found)
        left.pop(0)
        is_gap = False
    return [] if is_gap or not left else [f"(the page lacks: {left[0]})"]


def _matches(shown: str, printed: str, ids: Mapping[str, str]) -> dict[str, str] | None:
    """Return the ids of a shown line with those that were printed, None if the lines differ."""
    pattern, named = "", []
    if NUMBERED.match(shown):
        shown, pattern = NUMBERED.sub("", shown), r" *\d+  "
    at = 0
    for varying in VARIES.finditer(shown):
        pattern += re.escape(shown[at : varying.start()]) + PATTERNS[str(varying.lastgroup)]
        named += [varying[0]] if varying.lastgroup == "id" else []
        at = varying.end()
    match = re.fullmatch(pattern + re.escape(shown[at:]), printed.rstrip())
    if match is None:
        return None
    found = dict(zip(named, match.groups(), strict=True))
    return found if all(ids.get(one, other) == other for one, other in found.items()) else None
