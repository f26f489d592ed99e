"""`penstock completion`: the scripts, and the completions that a shell gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Penstock
from tests.cli.remote.live import serving

PENSTOCK = [sys.executable, "-m", "penstock.cli"]


def completions(**env: str) -> str:
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
    printed = completions(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(word))
    assert printed.split() == offered


def test_zsh_and_fish_complete_commands_with_their_descriptions() -> None:
    zsh = completions(_PENSTOCK_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="penstock ru")
    assert '"runs":"Start, follow and control runs on a server."' in zsh
    fish = completions(
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


def test_ids_of_runs_and_graphs_are_completed_from_the_server() -> None:
    with serving() as live:
        run_id = live.start("pipeline", "hello")
        live.ended(run_id)
        where = {"_PENSTOCK_COMPLETE": "complete_bash", "PENSTOCK_URL": live.url}
        line = f"penstock runs show {run_id[:8]}"
        assert completions(**where, COMP_WORDS=line, COMP_CWORD="3").split() == [run_id]
        assert completions(**where, COMP_WORDS="penstock runs start pip", COMP_CWORD="3").split() == ["pipeline"]


def test_a_server_that_does_not_answer_completes_nothing() -> None:
    where = {"_PENSTOCK_COMPLETE": "complete_bash", "PENSTOCK_URL": "http://127.0.0.1:9"}
    assert completions(**where, COMP_WORDS="penstock runs show 0", COMP_CWORD="3").split() == []
