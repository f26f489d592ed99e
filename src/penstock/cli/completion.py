"""`penstock completion`: the script that teaches a shell to complete our commands, and the answers it asks for."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as typers

from penstock.cli.exits import Exit
from penstock.cli.showing.screen import say

VARIABLE = "_PENSTOCK_COMPLETE"
"""By this the shell asks what could come next."""


class Shell(StrEnum):
    """The shells that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Which shell.")]) -> int:
    """Print a script that lets your shell complete penstock's commands and options.

    \b
    Examples:
      penstock completion bash >> ~/.bashrc
      penstock completion zsh > ~/.zfunc/_penstock
      penstock completion fish > ~/.config/fish/completions/penstock.fish

    \b
    Exit codes:
      0 ok   64 a shell that is not known
    """
    script = typers.get_completion_script  # type: ignore[attr-defined]  # typer's own, which it does not list
    say(script(prog_name="penstock", complete_var=VARIABLE, shell=shell.value))
    return Exit.OK


def know_the_shells() -> None:
    """Let a shell that asks be answered: typer knows how each one asks only after it was told to."""
    if VARIABLE in os.environ:
        typers.completion_init()  # type: ignore[attr-defined]  # typer's own, which it does not list
