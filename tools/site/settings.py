"""The reference page of settings: the fields of each settings class, and environment variables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import penstock
from penstock.hosting.limits import HostSettings
from penstock.runtime.run import RunSettings
from penstock.server.settings import ServerSettings

CLASSES = (RunSettings, HostSettings, ServerSettings)
SOURCE = Path(penstock.__file__).parent
VARIABLE = re.compile(r"\bPENSTOCK_[A-Z_]+\b")
NOT_SETTINGS = {"PENSTOCK_COMPLETE"}
"""Variables that other programs set."""


def page() -> str:
    """Return the page."""
    lines = ["# Settings", "", "Settings of runs, of hosts and of servers, with their defaults.", ""]
    for settings in CLASSES:
        lines += [f"## {settings.__name__}", "", inspect.getdoc(settings) or "", ""]
        lines += ["| field | default | |", "|---|---|---|"]
        lines += [f"| `{name}` | `{default}` | {text} |" for name, default, text in fields(settings)]
        lines += [""]
    lines += [
        "## Environment variables",
        "",
        "Each sets what the command-line option of its name sets; the option takes precedence.",
        "",
    ]
    lines += [f"- `{name}`" for name in variables()]
    return "\n".join([*lines, ""])


def fields(settings: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and docstring of each field."""
    documented = dict(_docs(settings))
    for field in dataclasses.fields(settings):
        default: Any = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory() if callable(field.default_factory) else "required"
        text = " ".join(documented.get(field.name, "").split()).replace("|", "\\|")
        yield field.name, str(default).replace("|", "\\|"), text


def variables() -> list[str]:
    """Return the environment variables that the command line and the server read."""
    found = {
        name
        for folder in ("cli", "server")
        for path in (SOURCE / folder).rglob("*.py")
        for name in VARIABLE.findall(path.read_text("utf-8"))
    }
    return sorted(found - NOT_SETTINGS)


def _docs(settings: type) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield ast.unparse(field.target), inspect.cleandoc(str(after.value.value))
