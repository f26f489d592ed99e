"""A value as people read it: on one line where it fits, below its name where it does not, cut where nobody reads on.

Values that JSON has no type for are shown by their repr, and whatever is oversize is cut: see `tracing.jsonable`.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.cli.showing.screen import printable
from penstock.tracing.jsonable import jsonable

ONE_LINE = 100
MAX_SHOWN = 4_000
"""Characters of one value that people are shown; programs get more."""


def titled(name: str, value: Any, hint: str = "") -> list[str]:
    """A value behind its name or below; `hint` says where to find what is too long to be shown."""
    shown = jsonable(value)
    text = _cut(_text(shown), hint)
    if shown != value and len(text) <= MAX_SHOWN and isinstance(value, (dict, list)):
        text += f"\n… some of it is left out{hint}"
    lines = [printable(line.expandtabs(4)) for line in text.splitlines()] or [""]
    if len(lines) == 1 and len(name) + len(lines[0]) <= ONE_LINE:
        return [f"{name}: {lines[0]}"]
    return [f"{name}:", *(f"  {line}" for line in lines)]


def _text(data: Any) -> str:
    if isinstance(data, str):
        return data
    short = json.dumps(data, ensure_ascii=False)
    return short if len(short) <= ONE_LINE else json.dumps(data, ensure_ascii=False, indent=2)


def _cut(text: str, hint: str) -> str:
    more = len(text) - MAX_SHOWN
    return text if more <= 0 else f"{text[:MAX_SHOWN]}\n… {more} more characters{hint}"
