"""Runs code that is quoted from a design document, character by character."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def run(text: str, **names: Any) -> dict[str, Any]:
    """Run the text as a module in which these names are known; return all its names."""
    within = {"__name__": __name__, **names}
    exec(compile(textwrap.dedent(text), "<design document>", "exec", dont_inherit=True), within)
    return within


async def arun(text: str, **names: Any) -> dict[str, Any]:
    """Run the text, which may await, as `run` does."""
    within = {"__name__": __name__, **names}
    code = compile(
        textwrap.dedent(text), "<design document>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
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
