"""`penstock graph …`: check, show and describe graphs without running them.

A command imports what it needs when it is called, so that help is fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TextIO

import typer

from penstock.cli.exits import Exit
from penstock.cli.options import Executors, Models, Target, Tools
from penstock.cli.render.screen import encodes_unicode, print_error, print_text, printable, write
from penstock.cli.render.text import counted
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown

app = typer.Typer(rich_markup_mode=None)

ADVICE = {
    "unknown_type": "name the executors of these types with --executors module:name",
    "unknown_model": "add models with --models module:name",
    "model_not_allowed": "allow it with --allow-model, or offer it under a name with --models",
    "unknown_tool": "add tools with --tools module:name",
}
"""Advice by problem code, for every command that loads graphs."""


class Format(StrEnum):
    """Output formats of a graph."""

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
        print_text(context.get_help())
    return Exit.OK


@app.command()
def validate(target: Target, models: Models = None, tools: Tools = None, executors: Executors = None) -> int:
    """List all problems that keep a graph from running.

    Each problem has a code, its path in the JSON, and a description. Types and handles are checked against the
    installed executors and those named with --executors, models and tools against those named with --models and
    --tools. A model of a provider, such as openai:gpt-4o, is accepted. run, serve and the server's API list the same.

    \b
    Examples:
      penstock graph validate flow.json
      penstock graph validate flow.json --models my_models.py:models --tools my_tools.py:tools
      penstock graph validate flow.json --executors nodes:registry

    \b
    Exit codes:
      0 valid   2 not valid   64 wrong command line
    """
    from penstock.cli.loading.graphs import GraphSource, load_target, problems_of, refuse_node_options
    from penstock.cli.loading.services import ServiceOptions, load_executors, load_services

    options = ServiceOptions(models, tools)
    registry: ExecutorRegistry | None = None
    try:
        graph = load_target(target)
        if isinstance(graph, GraphSource):
            registry = load_executors(executors or (), graph.node_types)
            problems = graph.problems(registry or None, load_services(options).services)
        else:
            refuse_node_options(target, [*options.given(), *(["--executors"] if executors else [])])
            problems = problems_of(graph)
    except GraphInvalid as invalid:
        return print_problems(target, invalid.problems, sys.stdout)
    if problems:
        return print_problems(target, problems, sys.stdout)
    unchecked = registry is not None and not len(registry)
    note = "; types and handles were not checked: name the executors with --executors" if unchecked else ""
    spec = graph.graph() if isinstance(graph, GraphSource) else graph.to_spec()
    print_text(f"{target}: valid, {counted(len(spec.nodes), 'node')}, {counted(len(spec.edges), 'edge')}{note}")
    return Exit.OK


@app.command()
def show(target: Target, format: Annotated[Format, typer.Option(help="Output format.")] = Format.TEXT) -> int:
    """Draw a graph, valid or not.

    \b
    Examples:
      penstock graph show flow.json
      penstock graph show story.py:graph --format mermaid
      penstock graph show flow.json --format json

    \b
    Exit codes:
      0 ok, also if it is not valid   2 not a graph   64 wrong command line
    """
    from penstock.cli.loading.graphs import as_spec, load_graph

    try:
        spec = as_spec(load_graph(target))
    except GraphInvalid as invalid:
        return print_problems(target, invalid.problems, sys.stdout)
    print_text(_render(spec, format))
    return Exit.OK


@app.command()
def schema() -> int:
    """Print the JSON Schema of graph files.

    \b
    Examples:
      penstock graph schema > graph.schema.json

    \b
    Exit codes:
      0 ok   2 the output cannot be written
    """
    from penstock.runtime.graphs.document_schema import json_schema

    print_text(json.dumps(json_schema(), indent=2))
    return Exit.OK


def print_problems(target: str, problems: Iterable[Problem], stream: TextIO | None) -> int:
    """Print every problem: code, path, sentence; then the options that add missing parts."""
    listed = list(problems)
    for problem in listed:
        write(printable(f"{problem.code}  {problem.path}  {problem.detail}"), stream)
    print_error(f"{target} is not a valid graph: {counted(len(listed), 'problem')}")
    codes = {problem.code for problem in listed}
    for code, advice in ADVICE.items():
        if code in codes:
            print_error(advice)
    return Exit.FAILED


def _render(spec: GraphSpec, format: Format) -> str:
    from penstock.kernel.document import graph_to_json
    from penstock.kernel.render import to_mermaid, to_text

    if format is Format.JSON:
        return json.dumps(graph_to_json(spec), indent=2, default=shown, ensure_ascii=not encodes_unicode(sys.stdout))
    return (to_mermaid(spec) if format is Format.MERMAID else to_text(spec)).rstrip("\n")
