"""`penstock graph …`: look at graphs without running them.

What a command needs is loaded when it is called, so that help is there at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TextIO

import typer

from penstock.cli.exits import Exit
from penstock.cli.options import Executors, Target
from penstock.cli.showing.screen import complain, printable, say, speaks_unicode, write
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown

app = typer.Typer(rich_markup_mode=None)


class Format(StrEnum):
    """How a graph is shown."""

    TEXT = "text"
    MERMAID = "mermaid"
    JSON = "json"


@app.callback(invoke_without_command=True)
def graph(context: typer.Context) -> int:
    """Check, show and describe graphs without running them.

    \b
    Examples:
      penstock graph validate flow.json --executors nodes:registry
      penstock graph show story.py --format mermaid
      penstock graph schema > graph.schema.json

    \b
    Exit codes:
      0 ok   2 the graph is not valid   64 wrong command line
    """
    if context.invoked_subcommand is None:
        say(context.get_help())
    return Exit.OK


@app.command()
def validate(target: Target, executors: Executors = None) -> int:
    """Say everything that keeps a graph from running.

    Each problem has a code for programs, its place in the JSON, and a sentence. Types and handles are checked against
    the executors that are installed or named.

    \b
    Examples:
      penstock graph validate flow.json
      penstock graph validate flow.json --executors nodes:registry

    \b
    Exit codes:
      0 it can run   2 it cannot   64 wrong command line
    """
    from penstock.cli.loading.executors import load_executors
    from penstock.cli.loading.target import as_spec, load_graph, problems_of, refuse_for_steps

    try:
        graph = load_graph(target)
        if isinstance(graph, GraphSpec):
            registry = load_executors(executors or (), graph)
        else:
            refuse_for_steps(target, ["--executors"] if executors else [])
            registry = None
    except GraphInvalid as invalid:
        return tell_problems(target, invalid.problems, sys.stdout)
    if problems := problems_of(graph, registry or None):
        return tell_problems(target, problems, sys.stdout)
    unchecked = registry is not None and not len(registry)
    note = "; types and handles were not checked, --executors names what runs them" if unchecked else ""
    say(f"{target}: valid, {_counted(as_spec(graph))}{note}")
    return Exit.OK


@app.command()
def show(target: Target, format: Annotated[Format, typer.Option(help="How to show it.")] = Format.TEXT) -> int:
    """Draw a graph; one that cannot run is drawn too.

    \b
    Examples:
      penstock graph show flow.json
      penstock graph show story.py:graph --format mermaid
      penstock graph show flow.json --format json

    \b
    Exit codes:
      0 ok, also if it cannot run   2 it is no graph   64 wrong command line
    """
    from penstock.cli.loading.target import as_spec, load_graph

    try:
        spec = as_spec(load_graph(target))
    except GraphInvalid as invalid:
        return tell_problems(target, invalid.problems, sys.stdout)
    say(_drawn(spec, format))
    return Exit.OK


@app.command()
def schema() -> int:
    """Print the JSON Schema of graph files.

    \b
    Examples:
      penstock graph schema > graph.schema.json

    \b
    Exit codes:
      0 ok   2 it cannot be written
    """
    from penstock.kernel.document import json_schema

    say(json.dumps(json_schema(), indent=2))
    return Exit.OK


def tell_problems(target: str, problems: Iterable[Problem], stream: TextIO | None) -> int:
    """Print every problem: code, path, sentence."""
    found = list(problems)
    for problem in found:
        write(printable(f"{problem.code}  {problem.path}  {problem.detail}"), stream)
    complain(f"{target} is not a valid graph: {len(found)} problem{'' if len(found) == 1 else 's'}")
    return Exit.FAILED


def _drawn(spec: GraphSpec, format: Format) -> str:
    from penstock.kernel.document import graph_to_json
    from penstock.kernel.render import to_mermaid, to_text

    if format is Format.JSON:
        return json.dumps(graph_to_json(spec), indent=2, default=shown, ensure_ascii=not speaks_unicode(sys.stdout))
    return (to_mermaid(spec) if format is Format.MERMAID else to_text(spec)).rstrip("\n")


def _counted(spec: GraphSpec) -> str:
    parts = ((len(spec.nodes), "node"), (len(spec.edges), "edge"))
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in parts)
