"""Every command says what it is for, how it is called, and how it leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from penstock.cli.app import app
from tests.cli.conftest import Penstock

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])


def commands() -> list[str]:
    found: list[str] = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        found += [name, *(f"{name} {one}" for one in inner)]
    return found


@pytest.mark.parametrize("command", commands())
def test_help_has_examples_and_exit_codes(penstock: Penstock, command: str) -> None:
    ended = penstock(*command.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    assert "\n  Examples:\n" in ended.out
    assert f"    penstock {command}" in ended.out
    assert "\n  Exit codes:\n" in ended.out
    assert max(len(line) for line in ended.out.splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_that_a_page_shows_exists(page: Path) -> None:
    unknown = [line for line in command_lines(page.read_text("utf-8")) if not exists(line)]
    assert unknown == []


def test_command_lines_are_found_in_blocks_services_and_sentences() -> None:
    service, console = "ExecStart=/opt/penstock serve \\\n  --reload", "$ penstock ls --no"
    text = f"`penstock init`\n```ini\n{service}\n```\n```console\n{console}\n```\n"
    assert list(command_lines(text)) == ["serve --reload", "ls --no", "init"]
    lines = ("serve --reload", "ls --no", "init --no", "run app.py -- --any")
    assert [exists(line) for line in lines] == [True, False, False, True]


def command_lines(text: str) -> Iterator[str]:
    """Yield what follows `penstock` in the blocks of a page, then in its sentences."""
    blocks = r"^ *```(?:console|text|sh|ini|dockerfile|yaml)\n(.*?)^ *```"
    calls = re.compile(r"(?:\$ |^|ExecStart=\S*/)penstock ((?:\\\n|[^\n#|&])+)", re.MULTILINE)
    for block in re.findall(blocks, text, re.DOTALL | re.MULTILINE):
        yield from (re.sub(r"\s*\\\n\s*", " ", line).strip() for line in calls.findall(block))
    yield from re.findall(r"`penstock ([^`|]+)`", text)


def exists(line: str) -> bool:
    """Say whether a command has all options of a line; what follows `--` belongs to another program."""
    command: Any = typer.main.get_command(app)
    words = line.split(" -- ")[0].split()
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "--version"}
    shown = [word.partition("=")[0].strip("[],") for word in words if word.lstrip("[").startswith("--")]
    is_group = hasattr(command, "commands") and bool(words) and not words[0].startswith(("-", "…", "COMMAND"))
    return not is_group and all(option in options for option in shown if len(option) > 2)
