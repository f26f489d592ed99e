"""Every command says what it is for, how it is called, and how it leaves."""

from __future__ import annotations

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
