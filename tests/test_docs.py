"""What the pages show runs: every Python block of README.md and docs/, and every example.

The blocks of one page are one program, run from top to bottom. `test_docs_cover_the_api` runs every page inside the
test process and compares what it prints; here README.md, and in a soak every page, is a program of its own.
A block is left out by `<!-- not run: reason -->` on the line above it, and only if `tests/docs/test_accounts.py` names
it, where all kinds of blocks have their account.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import SOAK
from tools.blocks import blocks, program_of

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if path.exists())
EXAMPLES = sorted(ROOT.glob("examples/*.py"))

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


def run(program: Path, cwd: Path) -> str:
    """Return what the program prints; fails if it does."""
    env = os.environ | {"PENSTOCK_EXAMPLE_FAST": "1"}
    ended = subprocess.run(
        [sys.executable, str(program)], cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    if ended.returncode != 0:
        pytest.fail(f"{program.name} exited {ended.returncode}\n{ended.stdout}{ended.stderr}", pytrace=False)
    return ended.stdout


@pytest.mark.reliability
@pytest.mark.parametrize("path", PAGES if SOAK else [ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{path.stem}.py"
    program.write_text(program_of(path.read_text()))
    run(program, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_shows_what_it_is_for(path: Path, tmp_path: Path) -> None:
    printed = run(path, tmp_path)
    assert SHOWN[path.name] in " ".join(printed.split())


def test_blocks_keep_the_line_numbers_of_their_page() -> None:
    program = program_of(
        "# Title\n\n```python\nx = 1\n```\n\nmore\n\n- item\n  ```python\n  if x:\n      x = 2\n  ```\n"
    )
    assert program.splitlines()[3] == "x = 1"
    assert program.splitlines()[10:12] == ["if x:", "    x = 2"]


def test_a_block_is_left_out_only_by_the_comment_above_it() -> None:
    text = "<!-- not run: needs a key -->\n```python\nboom\n```\n```console\n$ boom\n```\n```python\nx = 1\n```\n"
    assert program_of(text).split() == ["x", "=", "1"]
    assert [block.not_run for block in blocks(text)] == ["needs a key", None, None]
