"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Target = Annotated[
    str, typer.Argument(metavar="FILE", help="A graph: file.json, file.py, file.py:name or package.module:name.")
]
Executors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:NAME", help="Executors by node type, a registry or a mapping; may be given several times."
    ),
]
