"""What docs/cli.md shows as the output of a command is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.forked import Program

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
FILES = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CONSOLE = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [part.partition("\n")[::2] for block in CONSOLE for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]


def without_times(text: str) -> str:
    return re.sub(r" *\d+\.\d+ s", " N s", text)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_prints_what_the_page_says(command: str, shown: str) -> None:
    for name, content in FILES:
        Path(name).write_text(content)
    program, *arguments = shlex.split(command)
    assert program == "penstock"
    with Program(["-m", "penstock.cli", *arguments], is_merged=True) as ended:
        printed, _ = ended.communicate()
    assert without_times(printed) == without_times(shown)


def test_the_page_names_every_option_and_exit_code() -> None:
    from penstock.cli.exits import Exit
    from penstock.cli.run_command import LIMITS

    offered = ("--models", "--tools", "--executors", "--prices", "--unknown-prices")
    for option in (*LIMITS, "--input", "--max-parallel", *offered, "--approve", "--json"):
        assert f"| `{option}" in PAGE
    for code in Exit:
        assert f"| {int(code)} | " in PAGE
