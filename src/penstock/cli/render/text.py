"""Values and amounts of money as text for people.

Values without a JSON type are shown by their repr, and oversize values are truncated: see `tracing.jsonable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.cli.render.screen import printable
from penstock.money import format_cost, format_usd, to_nanos
from penstock.tracing.jsonable import jsonable

ONE_LINE = 100
MAX_SHOWN = 4_000
"""Maximum characters of one value shown to people; programs get more."""
MAX_SHORT = 160
"""Maximum characters of a value on one line, unless the caller allows more."""


def titled(name: str, value: Any, hint: str = "") -> list[str]:
    """Render a value after or below its name; `hint` says where to find the truncated part."""
    shown = jsonable(value)
    text = _truncate(_text(shown), hint)
    if shown != value and len(text) <= MAX_SHOWN and isinstance(value, (dict, list)):
        text += f"\n… some of it is left out{hint}"
    lines = [printable(line.expandtabs(4)) for line in text.splitlines()] or [""]
    if len(lines) == 1 and len(name) + len(lines[0]) <= ONE_LINE:
        return [f"{name}: {lines[0]}"]
    return [f"{name}:", *(f"  {line}" for line in lines)]


def short(value: Any, maximum: int = MAX_SHORT) -> str:
    """Render a value on one line, truncated to `maximum` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = printable(" ".join(text.split()))
    return text if len(text) <= maximum else f"{text[: maximum - 1]}…"


def multiline(text: str) -> str:
    """Return the text without terminal control characters; line feeds are kept."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 token`, `1,200 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def dollars(amount: object) -> str:
    """Format an amount of money with at least two decimals, and more if it has more."""
    return format_usd(to_nanos(float(amount or 0)))  # type: ignore[arg-type]  # JSON: a number, or nothing


def spent(usage: Mapping[str, Any], of: str = "") -> str:
    """Return the cost, followed by `of`: a lower bound if the cost of some calls is unknown."""
    known = to_nanos(float(usage.get("cost_usd") or 0))
    return format_cost(known, int(usage.get("unknown_costs") or 0), of)


def cost(usage: Mapping[str, Any]) -> str:
    """Return the cost of a run, and the amount held for unresolved calls."""
    held = float(usage.get("unresolved_usd") or 0)
    return f"{spent(usage)}, {dollars(held)} held" if held else spent(usage)


def bill(usage: Mapping[str, Any]) -> str:
    """Return the cost and the number of tokens of a run or a call."""
    is_call = "unknown_costs" not in usage
    money = "cost unknown" if is_call and usage.get("cost_usd", 0) is None else cost(usage)
    return f"{money} · {counted(tokens(usage), 'token')}"


def tokens(usage: Mapping[str, Any]) -> int:
    """Return the number of input and output tokens."""
    return int(usage.get("tokens_in") or 0) + int(usage.get("tokens_out") or 0)


def _text(data: Any) -> str:
    if isinstance(data, str):
        return data
    flat = json.dumps(data, ensure_ascii=False)
    return flat if len(flat) <= ONE_LINE else json.dumps(data, ensure_ascii=False, indent=2)


def _truncate(text: str, hint: str) -> str:
    more = len(text) - MAX_SHOWN
    return text if more <= 0 else f"{text[:MAX_SHOWN]}\n… {more} more characters{hint}"
