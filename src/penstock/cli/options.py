"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeVar

import typer
from typer.models import OptionInfo

from penstock.cli.loading.values import amount

N = TypeVar("N", int, float)

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
Models = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Models by name, for graphs to use; may be given several times."),
]
Tools = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Tools by name, for graphs to use; may be given several times."),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE:NAME", help="Prices by model, over those that are known; may be given several times."),
]


class UnknownPrices(StrEnum):
    """What becomes of calls of a model whose price nobody knows."""

    COUNT = "count"
    REFUSE = "refuse"


Unpriced = Annotated[
    UnknownPrices | None,
    typer.Option(
        "--unknown-prices",
        help="Calls of a model without a price: let through and counted as unknown, if nothing is said, or refused.",
    ),
]


class Approve(StrEnum):
    """What is said to everything that a run asks."""

    ALL = "all"
    NONE = "none"


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
TokensFile = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        envvar="PENSTOCK_TOKENS_FILE",
        help="Who may come in: name:role:secret, one a line; until=2026-12-31 behind a space ends it.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]


def dollars(help: str, envvar: str | None = None) -> OptionInfo:
    """An option that is an amount of US dollars; what is none is refused."""
    option: OptionInfo = typer.Option(parser=amount, metavar="USD", envvar=envvar, help=help)
    return option


MaxCost = Annotated[str, dollars("What a run may spend where nobody says otherwise.")]
MostCost = Annotated[str | None, dollars("What a run may be given at most, whoever asks for it.", "PENSTOCK_MOST_COST")]
UserDaily = Annotated[str | None, dollars("What one user may spend in a day.", "PENSTOCK_USER_DAILY")]


def numeric(
    read: Callable[[str], N], metavar: str, help: str, *, least: N | None = None, most: N | None = None
) -> OptionInfo:
    """An option that `read` makes a number of; what is out of bounds is refused."""

    def parse(text: str) -> N:
        found = read(str(text))  # a default comes as the number it is
        if least is not None and found < least:
            raise ValueError(f"it must be {least} or more, not {found}")
        if most is not None and found > most:
            raise ValueError(f"it must be {most} or less, not {found}")
        return found

    # Beside a parser typer only shows the bounds.
    option: OptionInfo = typer.Option(parser=parse, min=least, max=most, metavar=metavar, help=help)
    return option
