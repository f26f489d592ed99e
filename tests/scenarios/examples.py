"""Runs code that is quoted from a design document, character by character, with other import lines and nothing else.

The digest of each document's code blocks is written beside them in its test, so that a quotation cannot drift.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

IMPORTED_FROM = {
    "veronica_core.containment": "penstock.containment",
    "veronica_core.containment.execution_graph": "penstock",
    "veronica_core.shield.pipeline": "penstock",
    "veronica_core.shield.types": "penstock",
}
"""The modules that the documents import from, and those of the library that have the same names."""

_IMPORT = re.compile(r"^from ([\w.]+) import", re.MULTILINE)


def digest(*blocks: str) -> str:
    """The SHA-256 of the code blocks of a document, one after the other."""
    return hashlib.sha256("".join(blocks).encode()).hexdigest()


def ported(text: str) -> str:
    """The text with its import lines changed."""
    return _IMPORT.sub(lambda found: f"from {IMPORTED_FROM.get(found[1], found[1])} import", textwrap.dedent(text))


def filled_in(text: str, left_out: Mapping[str, str]) -> str:
    """The text with what the document leaves out, each at the one place where it does."""
    for mark, filling in left_out.items():
        assert text.count(mark) == 1, mark
        text = text.replace(mark, filling)
    return text


def run(text: str, **names: Any) -> dict[str, Any]:
    """Run the text as a module in which these names are known; return all its names."""
    within = {"__name__": __name__, **names}
    exec(compile(ported(text), "<design document>", "exec", dont_inherit=True), within)
    return within


async def arun(text: str, **names: Any) -> dict[str, Any]:
    """Run the text, which may await, as `run` does."""
    within = {"__name__": __name__, **names}
    code = compile(ported(text), "<design document>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaited = eval(code, within)
    if inspect.isawaitable(awaited):
        await awaited
    return within


def takes_what_is_declared(ours: Callable[..., Any], declared: Callable[..., Any]) -> bool:
    """Whether `ours` has each parameter of the declaration, in its order and with its default, before any other."""
    here, there = (list(inspect.signature(one).parameters.values()) for one in (ours, declared))
    return all(
        a.name == b.name and (b.default is b.empty or a.default == b.default) for a, b in zip(here, there, strict=False)
    ) and len(here) >= len(there)
