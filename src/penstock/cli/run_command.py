"""Implementation of `penstock run`: load, run under limits, show progress, report.

Progress goes to standard error, results to standard output, so that either can be piped. Output that the graph's own
code prints goes to standard error too: standard output has only the results.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from penstock.cli.execution import Outcome, document, execute, final_event, interruptible, result_lines
from penstock.cli.exits import Refused
from penstock.cli.graph import print_problems
from penstock.cli.loading.graphs import (
    GraphSource,
    Runnable,
    as_spec,
    has_agents,
    load_target,
    problems_of,
    refuse_node_options,
)
from penstock.cli.loading.services import ServiceOptions, load_executors, load_services
from penstock.cli.options import Approve
from penstock.cli.render.events import ending
from penstock.cli.render.local import watched
from penstock.cli.render.screen import Line, Screen, encodes_unicode, write
from penstock.cli.values import number, read_input, whole_number
from penstock.containment.limits import Budget, ExecutionConfig
from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.context import ExecutionContext


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The unparsed command line of `penstock run`."""

    target: str
    input: str | None
    limits: Mapping[str, str | None]
    """Limits by the option that sets them."""
    max_parallel: str | None
    executors: tuple[str, ...]
    services: ServiceOptions
    approve: Approve | None
    as_json: bool

    def node_options(self) -> list[str]:
        """Return the given options that apply only to the nodes of a graph in JSON."""
        others = {"--executors": self.executors, "--approve": self.approve}
        return [*self.services.given(), *(option for option, value in others.items() if value)]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The graph, and the services of its nodes; of these, a Graph in Python uses only the approvals."""

    graph: Runnable
    executors: ExecutorRegistry = field(default_factory=ExecutorRegistry)
    services: Mapping[str, Any] = field(default_factory=dict)
    prices: PriceBook | None = None


def run_graph(arguments: RunArguments) -> int:
    """Run the graph, report the result and return the exit code."""
    config, budget = _budget(arguments.limits)
    max_parallel = _max_parallel(arguments.max_parallel)
    with results_only() as out:
        screen = Screen(sys.stderr)
        try:
            loaded = _load(arguments, max_parallel, screen, out)
        except GraphInvalid as invalid:
            return _not_valid(arguments.target, invalid, out if arguments.as_json else None)
        run = ExecutionContext(
            config, name=loaded.graph.id, input=read_input(arguments.input), budget=budget, prices=loaded.prices
        )
        outcome = _run(loaded, run, max_parallel, screen)
        _report(outcome, run, screen, out, arguments.as_json)
    return outcome.exit


@dataclass(frozen=True, slots=True)
class Limit:
    """The parser of one limit, and its field name in Budget or ExecutionConfig."""

    field: str
    read: Callable[[str], Any]
    what: str


LIMITS: Mapping[str, Limit] = {
    "--max-cost": Limit("max_cost_dollars", str, "an amount"),
    "--max-steps": Limit("max_steps", whole_number, "a whole number"),
    "--max-tokens": Limit("max_tokens", whole_number, "a whole number"),
    "--max-retries": Limit("max_retries_total", whole_number, "a whole number"),
    "--timeout": Limit("max_time_seconds", number, "a number"),
}


def _budget(options: Mapping[str, str | None]) -> tuple[ExecutionConfig, Budget]:
    values = {LIMITS[option].field: _read(option, text) for option, text in options.items()}
    try:
        retries = values.pop("max_retries_total", None)
        return ExecutionConfig(None, None, retries), Budget(**values)
    except InvalidValue as invalid:
        (option,) = (option for option, limit in LIMITS.items() if limit.field == invalid.field)
        raise Refused(f"{option} must be {invalid.expected}, not {shown(invalid.value)}") from None


def _max_parallel(text: str | None) -> int | None:
    with suppress(ValueError):
        if text is None or whole_number(text) >= 1:
            return None if text is None else whole_number(text)
    raise Refused(f"--max-parallel must be a whole number, one or more, not {shown(text)}")


def _read(option: str, text: str | None) -> Any:
    limit = LIMITS[option]
    try:
        return None if text is None else limit.read(text)
    except ValueError:
        raise Refused(f"{option} must be {limit.what}, not {shown(text)}") from None


def _load(arguments: RunArguments, max_parallel: int | None, screen: Screen, out: TextIO | None) -> Loaded:
    graph = load_target(arguments.target)
    if isinstance(graph, GraphSource):
        return _load_nodes(graph, arguments, screen, out)
    options, approvals = arguments.node_options(), dict[str, Any]()
    if has_agents(graph):  # their tools may need approval
        options = [option for option in options if option != "--approve"]
        approvals, _ = _approvals(arguments, screen, out)
    refuse_node_options(arguments.target, options)
    graph.max_parallel = max_parallel or graph.max_parallel
    _raise_any(problems_of(graph))
    return Loaded(graph, services=approvals)


def _load_nodes(source: GraphSource, arguments: RunArguments, screen: Screen, out: TextIO | None) -> Loaded:
    from penstock.storage.memory import InProcessMemory  # imports the stores, which a Graph does not need

    registry = load_executors(arguments.executors, source.node_types)
    loaded = load_services(arguments.services)
    _raise_any(source.problems(registry, loaded.services))
    graph = source.graph()
    memory = {"memory": InProcessMemory()}  # lasts only for this run
    services = {**memory, **loaded.services, **_node_approvals(graph, registry, arguments, screen, out)}
    return Loaded(graph, registry, services, loaded.prices)


def _approvals(arguments: RunArguments, screen: Screen, out: TextIO | None) -> tuple[dict[str, Any], str]:
    """Return the approvals service; without one, why questions cannot be answered here."""
    from penstock.cli import approvals  # imports agents, which a Graph does not need

    if arguments.approve is not None:
        return {"approvals": approvals.Questions(approvals.by_rule(arguments.approve, screen))}, ""
    if why := approvals.no_terminal(out, arguments.as_json):
        return {}, why
    return {"approvals": approvals.Questions(approvals.Terminal(screen, sys.stdin.fileno()).answer)}, ""


def _node_approvals(
    graph: GraphSpec, registry: ExecutorRegistry, arguments: RunArguments, screen: Screen, out: TextIO | None
) -> dict[str, Any]:
    """Return the approvals service; Refused, before any cost, if the graph needs approval and cannot get it here."""
    from penstock.cli.approvals import approval_nodes

    services, why = _approvals(arguments, screen, out)
    if why and (nodes := list(approval_nodes(graph, registry))):
        listed = ", ".join(map(shown, nodes[:10]))
        answers = "use --approve all to approve, or --approve none to reject"
        raise Refused(f"{arguments.target} needs approval at {listed}, and {why}; {answers}")
    return services


def _raise_any(problems: Sequence[Problem]) -> None:
    if problems:
        raise GraphInvalid(problems)


def _not_valid(target: str, invalid: GraphInvalid, out: TextIO | None) -> int:
    if out is not None:
        _print_document(document(Outcome("failed", error=invalid), None), out)
    return print_problems(target, invalid.problems, sys.stderr)


def _run(loaded: Loaded, run: ExecutionContext, max_parallel: int | None, screen: Screen) -> Outcome:
    with (
        interruptible(run, screen.restore),
        watched(run, screen, planned=[node.id for node in as_spec(loaded.graph).nodes]),
    ):
        return asyncio.run(execute(loaded.graph, run, loaded.executors, loaded.services, max_parallel))


def _report(outcome: Outcome, run: ExecutionContext, screen: Screen, out: TextIO | None, as_json: bool) -> None:
    final, gap = final_event(outcome, run), list[Line]([[]] if screen.moves else [])
    screen.show(*gap, *ending(final), [(f"  {final.data['usage']}", "dim")], whole=True)
    if as_json:
        _print_document(document(outcome, run), out)
        return
    if screen.moves and out is not None and out.isatty():
        write("", out)
    for lines in result_lines(outcome):
        write(lines, out)


def _print_document(content: dict[str, Any], out: TextIO | None) -> None:
    write(json.dumps(content, indent=2, ensure_ascii=not encodes_unicode(out)), out)


@contextmanager
def results_only() -> Iterator[TextIO | None]:
    """Reserve standard output for results; other output goes to standard error, including that of child processes."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        if out is not sys.__stdout__ or out is None or sys.stderr is None:  # already redirected
            yield out
            return
        saved = os.dup(1)
        try:
            with suppress(OSError):
                os.dup2(2, 1)
            with os.fdopen(os.dup(saved), "w", encoding=out.encoding, errors=out.errors) as own:
                yield own
        finally:
            os.dup2(saved, 1)
            os.close(saved)
