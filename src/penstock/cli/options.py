"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

URL = "http://127.0.0.1:8642"

Target = Annotated[
    str, typer.Argument(metavar="FILE", help="A graph: file.json, file.py, file.py:name or package.module:name.")
]
Executors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:NAME", help="Executors by node type, a registry or a mapping; may be given several times."
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        envvar="PENSTOCK_DB",
        help="Where things are kept: sqlite:///file.db, postgresql://…, or memory:.",
    ),
]
Url = Annotated[str, typer.Option("--url", metavar="URL", envvar="PENSTOCK_URL", help="The server.")]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", envvar="PENSTOCK_TOKEN", help="Who is asking; better in PENSTOCK_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]
