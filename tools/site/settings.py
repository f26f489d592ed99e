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

import typer

import penstock
from penstock.cli.app import app
from penstock.hosting.limits import HostSettings
from penstock.runtime.run import RunSettings
from penstock.server.settings import ServerSettings

CLASSES = (RunSettings, HostSettings, ServerSettings)
SOURCE = Path(penstock.__file__).parent
VARIABLE = re.compile(r"\bPENSTOCK_[A-Z_]+\b")
PREFIX = "PENSTOCK_"
NOT_SETTINGS = {"PENSTOCK_COMPLETE", "PENSTOCK_CRASH_AT"}
"""Variables of shells and of tests."""
EXPLAINED = {
    "PENSTOCK_GATEWAY_KEY": "Set by `penstock exec` for its program: the key of the run.",
    "PENSTOCK_GATEWAY_URL": "Set by `penstock exec` for its program: the address of the gateway.",
    "PENSTOCK_TEMPORAL_API_KEY": "API key of a Temporal namespace; sent over TLS only.",
    "PENSTOCK_TEMPORAL_CA": "PEM file with the certificate authority of the Temporal server.",
    "PENSTOCK_TEMPORAL_CERT": "PEM file with the client certificate for Temporal.",
    "PENSTOCK_TEMPORAL_KEY": "PEM file with the key of the client certificate.",
    "PENSTOCK_TEMPORAL_SERVER_NAME": "Name in the certificate of the Temporal server, if it is not its host.",
}
"""Variables that set neither an option nor a field."""


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
        "An option on the command line takes precedence over its variable.",
        "",
        "| variable | option | |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {f'`{option}`' if option else ''} | {text} |" for name, option, text in variables()]
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


def variables() -> Iterator[tuple[str, str, str]]:
    """Yield each environment variable, the option that it stands for, if there is one, and what it sets."""
    options = dict(_options(typer.main.get_command(app)))
    server = {f"{PREFIX}{name.upper()}": text for name, _, text in fields(ServerSettings)}
    read = {name for path in SOURCE.rglob("*.py") for name in VARIABLE.findall(path.read_text("utf-8"))}
    for name in sorted(read - NOT_SETTINGS):
        option, text = options.get(name, ("", ""))
        yield name, option, " ".join((text or EXPLAINED.get(name) or server.get(name, "")).split()).replace("|", "\\|")


def _options(command: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    for option in command.params:
        if option.envvar:
            yield str(option.envvar), (option.opts[0], option.help or "")
    for child in getattr(command, "commands", {}).values():
        yield from _options(child)


def _docs(settings: type) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(dedent(inspect.getsource(settings))).body
    assert isinstance(tree, ast.ClassDef)
    for field, after in pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield ast.unparse(field.target), inspect.cleandoc(str(after.value.value))
