"""Lines with colours: with rich where it is installed, plain where it is not or where nobody is looking."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

try:
    import rich
except ImportError:
    HAS_RICH = False
else:
    HAS_RICH = True

Line = list[tuple[str, str]]
"""Pieces of text, each with the name of its colour; "" is the terminal's own."""

MARKS = {"created": "·", "running": "●", "success": "✓", "fail": "✗", "halt": "■"}
COLOURS = {"created": "dim", "running": "cyan", "success": "green", "fail": "red", "halt": "yellow"}

if hasattr(sys.stdout, "reconfigure"):
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a mark shows another one


def is_terminal() -> bool:
    """Whether a person is looking, and rich is there to draw for them."""
    return HAS_RICH and sys.stdout.isatty() and not rich.get_console().is_dumb_terminal


def show(*lines: Line) -> None:
    """Print the lines."""
    if is_terminal():
        rich.get_console().print(styled(lines))
    else:
        for line in lines:
            print("".join(text for text, _ in line).rstrip(), flush=True)


def styled(lines: Iterable[Line]) -> Text:
    """The lines for rich to draw; one that is too long ends in an ellipsis instead of wrapping."""
    from rich.text import Text  # here, because it may not be installed

    width = rich.get_console().width
    texts = [Text.assemble(*line) for line in lines]
    for text in texts:
        text.truncate(width, overflow="ellipsis")
    return Text("\n").join(texts)
