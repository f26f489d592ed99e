"""The fenced blocks of the project's pages: where each stands, of which kind it is, and what is written around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [path for folder in (".", "docs", "examples") for path in sorted((ROOT / folder).glob("*.md"))] + [
    *sorted(ROOT.glob("docs/*/**/*.md"))
]
FENCE = re.compile(r"^(\s*)```\s*(\w*)")
LEFT_OUT = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")
FILE = re.compile(r"^`([\w./-]+)`:$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Line of the page with the first line of the text."""
    kind: str
    text: str
    file: str
    """File that the line above names, such as `app.py`."""
    not_run: str | None
    """Reason of the comment above: `<!-- not run: reason -->`."""
    follows: str
    """Kind of the block right above, with nothing between."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line - 1} ({self.kind}: {self.text.partition(chr(10))[0]})"


def blocks(text: str, page: str = "page.md") -> Iterator[Block]:
    """Yield the blocks of a page's text, in order."""
    lines: list[str] | None = None
    indent = kind = above = follows = ""
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence is None and lines is not None:
            lines.append(line.removeprefix(indent))
        elif fence is not None and lines is None:
            lines, indent, kind, start = [], fence[1], fence[2], number + 1
        elif lines is not None:
            left_out, file = LEFT_OUT.match(above), FILE.match(above)
            content = "".join(f"{one}\n" for one in lines)
            not_run = left_out[1] if left_out else None
            yield Block(page, start, kind, content, file[1] if file else "", not_run, follows)
            lines, above, follows = None, "", kind
        elif line.strip():
            above, follows = line, ""
    assert lines is None, f"{page}: the block of line {start - 1} has no end"


@cache
def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page."""
    return list(blocks(path.read_text("utf-8"), str(path.relative_to(ROOT))))


def program_of(text: str) -> str:
    """Return the program that the Python blocks of a page make; prose is blank, so that lines keep their numbers."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text):
        if block.kind == "python" and block.not_run is None:
            content = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(content)] = content
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the output that is shown below it."""

    line: str
    shown: str


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console block; a line that ends in a backslash continues."""
    found = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert found[0] == "", f"{block}: begin the line of a command with '$ '"
    for part in found[1:]:
        match = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n", part)
        assert match is not None
        yield Command(match[0].rstrip("\n"), part[match.end() :])
