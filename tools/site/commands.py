"""The reference page of the command line: what `--help` prints for each command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from penstock.cli.app import app

WIDTH = 100


def page() -> str:
    """Return the page."""
    lines = ["# Command line", "", "What `penstock COMMAND --help` prints.", ""]
    for path, text in helps(typer.main.get_command(app), "penstock"):
        lines += [f"{'#' * min(path.count(' ') + 2, 4)} {path}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def helps(command: Any, path: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Yield the path and the help of a command, and of its commands."""
    context = command.context_class(command, info_name=path.split()[-1], parent=parent, terminal_width=WIDTH)
    yield path, command.get_help(context)
    for name, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from helps(child, f"{path} {name}", context)
