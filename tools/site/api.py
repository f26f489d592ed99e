"""Reference pages of the Python API, one for each public module. mkdocstrings reads the docstrings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

MODULES = (
    "penstock",
    "penstock.agents",
    "penstock.events",
    "penstock.executors",
    "penstock.export",
    "penstock.stores",
    "penstock.providers",
    "penstock.adapters",
    "penstock.telemetry",
    "penstock.containment",
    "penstock.testing",
)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of each module's page."""
    for module in MODULES:
        yield f"reference/python/{module}.md", page(module)


def page(module: str) -> str:
    """Return a page with every public name of a module; a name that the root exports too is on the root's page."""
    names = sorted(public(module), key=str.lower)
    at_root = set() if module == "penstock" else set(public("penstock"))
    own = [name for name in names if name not in at_root]
    shared = [name for name in names if name in at_root]
    lines = [f"# {module}", "", *_first_lines(module), ""]
    if shared:
        links = ", ".join(f"[`{name}`][penstock.{name}]" for name in shared)
        lines += [f"Also in [`penstock`](penstock.md): {links}.", ""]
    for name in own:
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def public(module: str) -> list[str]:
    """Return the public names of a module."""
    return list(importlib.import_module(module).__all__)


def _first_lines(module: str) -> list[str]:
    doc = (importlib.import_module(module).__doc__ or "").strip()
    return doc.split("\n\n")[:1]
