"""What docs/cli-service.md shows as the output of a command is what the command prints, one after the other."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from penstock.cli.service import serve
from penstock.storage import newest_version
from tests.cli.conftest import Penstock
from tests.cli.service.test_serve import served

PAGE = (Path(__file__).parents[3] / "docs" / "cli-service.md").read_text()
CONSOLE = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [part.partition("\n")[::2] for block in CONSOLE for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def without_what_varies(text: str) -> str:
    """Without times, ids, sizes and versions of files, and numbers of events: text comes in any number of pieces."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00", "TIME", text)
    text = re.sub(r"^ *\d+  (?=\w+(\.\w+)? )", "N  ", ID.sub("ID", text), flags=re.MULTILINE)
    text = re.sub(r"\bof version \d+$", "of version N", text, flags=re.MULTILINE)
    return re.sub(r"\d+\.\d s\b", "N s", re.sub(r"[\d,]+ bytes\b", "N bytes", text))


@pytest.mark.usefixtures("forks")
def test_commands_print_what_the_page_says(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: dict[str, str] = {}
    with served("--db", "sqlite:///penstock.db") as server:
        monkeypatch.setenv("PENSTOCK_URL", server.url)
        for command, shown in COMMANDS:
            program, *arguments = shlex.split(ID.sub(lambda id: ids.get(id[0], id[0]), command))
            assert program == "penstock"
            printed = penstock(*arguments)
            for theirs, ours in zip(ID.findall(shown), ID.findall(printed.out), strict=False):
                ids.setdefault(theirs, ours)
            assert without_what_varies(printed.out + printed.err) == without_what_varies(shown), command
        assert server.stop(signal.SIGTERM) == (0, "")


def test_the_page_names_every_option_of_serve() -> None:
    for parameter in serve.serve.__annotations__:
        option = "GRAPHS" if parameter == "graphs" else f"--{parameter.replace('_', '-')}"
        if parameter != "return":
            assert f"`{option}" in PAGE, option


def test_the_page_shows_the_version_that_databases_have() -> None:
    shown = re.findall(r"^(?:sqlite\S+|✓ database) +version (\d+), ", PAGE, re.MULTILINE)
    assert shown == [str(newest_version())] * 2
