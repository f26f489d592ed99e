"""`penstock completion`: the completion script for a shell, and the completions that the script requests."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from typer import completion as typers

from penstock.cli.exits import Exit
from penstock.cli.render.screen import print_text

VARIABLE = "_PENSTOCK_COMPLETE"
"""Environment variable with which the shell requests completions."""


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> int:
    """Print the script with which a shell completes commands and options of penstock.

    \b
    Examples:
      penstock completion bash >> ~/.bashrc
      penstock completion zsh > ~/.zfunc/_penstock
      penstock completion fish > ~/.config/fish/completions/penstock.fish

    \b
    Exit codes:
      0 ok   64 unknown shell
    """
    script = typers.get_completion_script  # type: ignore[attr-defined]  # typer's own, which it does not list
    print_text(script(prog_name="penstock", complete_var=VARIABLE, shell=shell.value))
    return Exit.OK


def register_shells() -> None:
    """Enable answers to completion requests: typer registers its shell classes only when initialised."""
    if VARIABLE in os.environ:
        typers.completion_init()  # type: ignore[attr-defined]  # typer's own, which it does not list
