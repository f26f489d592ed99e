"""The pages show every public name running, and what they say a block prints is what it prints."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.testing
from penstock import adapters, agents, containment, events, executors, export, providers, stores, telemetry
from penstock.tracing import lifecycle
from tests.test_docs import read

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
FACADES = (adapters, agents, containment, events, executors, export, providers, stores, telemetry)
MODULES = (penstock, *FACADES, penstock.testing)
PUBLIC = sorted({name for module in MODULES for name in module.__all__})


def blocks(path: Path) -> Iterator[tuple[str, str, bool]]:
    """The blocks of a page that are run or shown: language, text, and whether it stands right below the one before."""
    text, end = path.read_text(), -1
    for block in BLOCK.finditer(text):
        between = text[max(end, 0) : block.start()]
        if "<!-- not run:" not in between[between.rstrip().rfind("\n") + 1 :]:
            yield block[1], block[2], end >= 0 and not between.strip()
        end = block.end()


def used(program: str) -> Iterator[str]:
    """The names a program uses; importing one does not show it running."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


SHOWN = {name for path in PAGES for language, text, _ in blocks(path) if language == "python" for name in used(text)}


def test_every_public_name_is_shown_running() -> None:
    missing = [name for name in PUBLIC if name not in SHOWN]
    assert not missing, "no python block of README.md or docs/ uses these"


@pytest.mark.requirement("X-16")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_and_print_the_output_shown_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_EXAMPLE_FAST", "1")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed, ran = "", 0
    for language, text, follows in blocks(path):
        if language == "python":
            ran += 1
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(text, str(path), "exec"), namespace)
            printed = out.getvalue()
        elif language == "text" and follows:
            assert printed == text
    assert ran == read(path.read_text()).blocks
    namespace.clear()
    gc.collect()  # report here what a page leaves open, not in whichever test runs when it is collected


def test_the_lifecycle_diagram_is_drawn_from_its_table() -> None:
    diagrams = [text for language, text, _ in blocks(ROOT / "docs/call-tree.md") if language == "mermaid"]
    assert diagrams == [lifecycle.mermaid() + "\n"]
