"""Every command says what it is for, how it is called, and how it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from penstock.cli.app import app
from tests.cli.conftest import Penstock


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


def test_every_option_of_the_deployment_page_exists(penstock: Penstock) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text("utf-8")
    blocks = re.findall(r"^```(?:console|ini)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    calls = re.compile(r"^(?:\$ penstock|ExecStart=\S+/penstock) (.*)$", re.MULTILINE)
    called = [command for block in blocks for command in calls.findall(block)]
    assert len(called) >= 4
    for command in called:
        words = command.split()
        name = words[:2] if words[0] in ("db", "runs", "tokens") else words[:1]
        options = [word for word in words if word.startswith("--")]
        known = penstock(*name, "--help").out
        assert [option for option in options if f"{option} " not in known and f"{option}\n" not in known] == [], command
