"""What the pages show runs: every Python block of README.md and docs/, and every example.

The blocks of one page are one program, run from top to bottom. `test_docs_cover_the_api` runs every page inside the
test process and compares what it prints; here README.md, and in a soak every page, is a program of its own.
A block is left out by `<!-- not run: reason -->` on the line above it, and only if NOT_RUN names it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

import pytest

from tests.soak import SOAK

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if path.exists())
EXAMPLES = sorted(ROOT.glob("examples/*.py"))

NOT_RUN: Mapping[str, list[str]] = {
    "docs/gateway.md": [
        "google-genai is not installed",
        "langchain-openai is not installed",
        "litellm is not installed",
    ]
}
"""The reasons of the blocks that are not run, by page."""

SHOWN = {
    "ceiling.py": "the ledger and the invoice are the same",
    "contained_crew.py": "",  # without its framework it says what to install; `make adopt` runs it
    "contained_langgraph.py": "",
    "existing_code.py": "invoice $0.045000 for 10 model calls",
    "map_reduce.py": "read 40 of 40 documents",
    "mcp_tools.py": "stopped $0.01 spent of the $0.01",
    "nightly_batch.py": "night 2 13 of 13 documents",
    "node_program.py": "exit code 3",
    "rag.py": "answer [Columbia 2003] Survey of the Columbia river",
    "replay_evaluation.py": "research paid 10 times for the first writer, 0 for the second",
    "research.py": "check [is this right: [a report from search and archive and interview]]",
    "support_chat.py": "answer Done: $40 paid back for A-17.",
    "temporal_fleet.py": "a fleet needs PostgreSQL and Temporal",  # tests/engines runs it on both
    "tenants.py": "north asks for a run of south: 404",
    "threads.py": "The ceiling held.",
}
"""A part of what each example prints: the point of it, which its output proves."""

FENCE = re.compile(r"^\s*```\s*(\w*)")
LEFT_OUT = re.compile(r"^\s*<!-- not run: (.+) -->\s*$")


@dataclass
class Page:
    """A page as the program its blocks make; prose is blank, so that a traceback's line is the page's line."""

    program: str
    blocks: int = 0
    not_run: list[str] = field(default_factory=list)


def read(text: str) -> Page:
    page = Page("")
    program: list[str] = []
    block: list[str] | None = None
    language = above = ""
    for line in text.splitlines():
        program.append("")
        fence = FENCE.match(line)
        if fence is None and block is not None:
            block.append(line)
        elif fence is not None and block is None:
            block, language = [], fence[1]
            left_out = LEFT_OUT.match(above)
        elif fence is not None and block is not None:
            if language in {"python", "py"} and left_out:
                page.not_run.append(left_out[1])
            elif language in {"python", "py"}:
                page.blocks += 1
                program[-1 - len(block) : -1] = dedent("\n".join(block)).split("\n")
            block = None
        above = line
    page.program = "\n".join(program) + "\n"
    return page


def run(program: Path, cwd: Path) -> str:
    """Return what the program prints; fails if it does."""
    env = os.environ | {"PENSTOCK_EXAMPLE_FAST": "1"}
    ended = subprocess.run(
        [sys.executable, str(program)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    if ended.returncode != 0:
        pytest.fail(f"{program.name} exited {ended.returncode}\n{ended.stdout}{ended.stderr}", pytrace=False)
    return ended.stdout


def test_only_blocks_with_a_known_reason_are_not_run() -> None:
    left_out = {str(path.relative_to(ROOT)): read(path.read_text()).not_run for path in PAGES}
    assert {page: reasons for page, reasons in left_out.items() if reasons} == NOT_RUN


@pytest.mark.reliability
@pytest.mark.parametrize("path", PAGES if SOAK else [ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path) -> None:
    page = read(path.read_text())
    program = tmp_path / f"{path.stem}.py"
    program.write_text(page.program)
    run(program, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_shows_what_it_is_for(path: Path, tmp_path: Path) -> None:
    printed = run(path, tmp_path)
    assert SHOWN[path.name] in " ".join(printed.split())


def test_blocks_keep_the_line_numbers_of_their_page() -> None:
    page = read("# Title\n\n```python\nx = 1\n```\n\nmore\n\n- item\n  ```python\n  if x:\n      x = 2\n  ```\n")
    assert page.program.splitlines()[3] == "x = 1"
    assert page.program.splitlines()[10:12] == ["if x:", "    x = 2"]
    assert page.blocks == 2


def test_a_block_is_left_out_only_by_the_comment_above_it() -> None:
    page = read("<!-- not run: needs a key -->\n```python\nboom\n```\n```console\n$ boom\n```\n```python\nx = 1\n```\n")
    assert page.program.split() == ["x", "=", "1"]
    assert page.not_run == ["needs a key"]
