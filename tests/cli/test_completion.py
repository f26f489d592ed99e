"""`penstock completion`: the scripts, and what a shell is told when it asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Penstock

PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def asked(**env: str) -> str:
    ended = subprocess.run(PENSTOCK, capture_output=True, text=True, check=True, env={**os.environ, **env})
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.parametrize(
    ("line", "word", "offered"),
    [
        ("penstock ru", 1, ["run", "runs"]),
        ("penstock runs t", 2, ["tail"]),
        ("penstock completion ", 2, ["bash", "zsh", "fish"]),
        ("penstock serve --unknown-prices ", 3, ["count", "refuse"]),
    ],
)
def test_bash_completes_commands(line: str, word: int, offered: list[str]) -> None:
    told = asked(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(word))
    assert told.split() == offered


def test_zsh_and_fish_complete_commands_with_their_descriptions() -> None:
    zsh = asked(_PENSTOCK_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="penstock ru")
    assert '"runs":"Start, follow and control runs on a server."' in zsh
    fish = asked(
        _PENSTOCK_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", _TYPER_COMPLETE_ARGS="penstock ru"
    )
    assert "runs\tStart, follow and control runs on a server." in fish.splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_by_our_variable(penstock: Penstock, shell: str) -> None:
    ended = penstock("completion", shell)
    assert ended.code == 0
    assert f"_PENSTOCK_COMPLETE=complete_{shell}" in ended.out


def test_a_shell_that_is_not_known_is_a_wrong_command_line(penstock: Penstock) -> None:
    assert penstock("completion", "tcsh").code == 64


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_script(directory: Path, penstock: Penstock) -> None:
    (directory / "script").write_text(penstock("completion", "bash").out)
    (directory / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock.cli "$@"\n')
    (directory / "penstock").chmod(0o755)
    typed = "COMP_WORDS=(./penstock runs f); COMP_CWORD=2; _penstock_completion ./penstock; echo ${COMPREPLY[@]}"
    ended = subprocess.run(["bash", "-c", f"source ./script; {typed}"], capture_output=True, text=True, check=True)
    assert ended.stdout == "fork\n"
