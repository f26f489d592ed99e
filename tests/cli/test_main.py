"""The command itself: its version, its help, what it says of a wrong command line, and what loading it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import penstock as package
from tests.cli.conftest import Penstock


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_version_is_that_of_the_package(penstock: Penstock) -> None:
    assert penstock("--version") == (0, f"penstock {package.__version__}\n", "")


def test_version_option_prints_only_the_version(penstock: Penstock) -> None:
    assert penstock("--version", "graph", "schema").out == f"penstock {package.__version__}\n"


def test_the_version_loads_neither_typer_nor_rich_nor_the_runtime() -> None:
    code = """
import json, sys
from penstock.cli import main
main(["--version"])
print(json.dumps(list(sys.modules)))
"""
    loaded = json.loads(run_python(code).stdout.splitlines()[1])
    assert not {"typer", "rich", "pydantic", "asyncio"} & set(loaded)
    assert [name for name in loaded if name.startswith("penstock.")] == ["penstock.cli", "penstock.cli.version"]


def test_missing_extra_is_reported_with_how_to_install_it() -> None:
    code = """
import sys
sys.modules["typer"] = sys.modules["rich"] = None
from penstock.cli import main
sys.exit(main(["graph", "schema"]))
"""
    ended = run_python(code)
    assert ended.returncode == 64
    assert ended.stderr == "penstock: the command line needs typer and rich: pip install 'penstock[cli]'\n"
    assert ended.stdout == ""


def test_version_is_printed_without_the_extra() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom penstock.cli import main\nsys.exit(main(['--version']))"
    assert run_python(code).returncode == 0


def test_graphs_are_looked_at_without_loading_rich() -> None:
    code = """
import sys
from penstock.cli import main
main(["graph", "schema"])
assert not [name for name in sys.modules if name.partition(".")[0] == "rich"]
"""
    assert run_python(code).stderr == ""


@pytest.mark.parametrize(
    "command",
    [["--help"], ["run", "--help"], ["graph", "--help"], ["graph", "validate", "-h"], ["graph", "show", "--help"]],
    ids=" ".join,
)
def test_help_has_examples(penstock: Penstock, command: list[str]) -> None:
    ended = penstock(*command)
    assert (ended.code, ended.err) == (0, "")
    assert "Examples:\n    penstock " in ended.out


@pytest.mark.parametrize("command", [[], ["graph"]], ids=str)
def test_without_a_command_there_is_help(penstock: Penstock, command: list[str]) -> None:
    ended = penstock(*command)
    assert ended.code == 0
    assert ended.out.startswith("Usage: penstock")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["frobnicate"], "penstock: no such command 'frobnicate'; see penstock --help\n"),
        (["runs", "list"], "penstock: no such command 'list'. Did you mean 'ls'? See penstock runs --help\n"),
        (["--nope"], "penstock: no such option: --nope; see penstock --help\n"),
        (["run"], "penstock: missing argument 'FILE'; see penstock run --help\n"),
        (
            ["graph", "show", "x", "--format", "svg"],
            "not one of 'text', 'mermaid', 'json'; see penstock graph show --help",
        ),
    ],
)
def test_a_wrong_command_line_is_64_and_one_sentence(penstock: Penstock, command: list[str], expected: str) -> None:
    ended = penstock(*command)
    assert (ended.code, ended.out) == (64, "")
    assert expected in ended.err
    assert len(ended.err.splitlines()) == 1
