"""The pages show every public name running, and what they say a block prints is what it prints."""

from __future__ import annotations

import ast
import gc
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
from tools.blocks import blocks_of

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FACADES = (adapters, agents, containment, events, executors, export, providers, stores, telemetry)
MODULES = (penstock, *FACADES, penstock.testing)
PUBLIC = sorted({name for module in MODULES for name in module.__all__})


def used(program: str) -> Iterator[str]:
    """The names a program uses; importing one does not show it running."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


BLOCKS = {path: blocks_of(path) for path in PAGES}
PROGRAMS = [block for found in BLOCKS.values() for block in found if block.kind == "python" and block.not_run is None]
SHOWN = {name for block in PROGRAMS for name in used(block.text)}


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
    printed = ""
    for block in BLOCKS[path]:
        if block.kind == "python" and block.not_run is None:
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(block.text, str(path), "exec"), namespace)
            printed = out.getvalue()
        elif block.kind == "text" and block.follows == "python":
            assert printed == block.text
    namespace.clear()
    gc.collect()  # report here what a page leaves open, not in whichever test runs when it is collected


def test_the_lifecycle_diagram_is_drawn_from_its_table() -> None:
    diagrams = [(block.page, block.text) for found in BLOCKS.values() for block in found if block.kind == "mermaid"]
    assert diagrams == [("docs/call-tree.md", lifecycle.mermaid() + "\n")]
