"""What `penstock run` does: load, run under limits, show, report.

Progress goes to standard error, results to standard output, so that either can be piped. Whatever the graph's own code
prints goes to standard error too: standard output has the results and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

from penstock.cli.execution import execute, interruptible
from penstock.cli.exits import Refused
from penstock.cli.graph import tell_problems
from penstock.cli.loading.executors import load_executors
from penstock.cli.loading.offers import Named, load_offers
from penstock.cli.loading.target import Runnable, as_spec, load_graph, problems_of, refuse_for_steps
from penstock.cli.loading.values import number, read_input, whole_number
from penstock.cli.options import Approve
from penstock.cli.showing.live import watched
from penstock.cli.showing.outcome import Outcome, document, results, summary
from penstock.cli.showing.screen import Line, Screen, complain, speaks_unicode, write
from penstock.containment.limits import Budget, ExecutionConfig
from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, shown
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.context import ExecutionContext


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for, as it was written."""

    target: str
    input: str | None
    limits: Mapping[str, str | None]
    """By the option that sets them."""
    max_parallel: str | None
    executors: tuple[str, ...]
    named: Named
    approve: Approve | None
    as_json: bool

    def of_nodes(self) -> list[str]:
        """The options that are about the nodes of a graph in JSON."""
        said = {"--executors": self.executors, "--approve": self.approve}
        return [*self.named.options(), *(option for option, given in said.items() if given)]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What there is to run, and what its nodes may use; a Graph in Python has its own."""

    graph: Runnable
    executors: ExecutorRegistry = field(default_factory=ExecutorRegistry)
    services: Mapping[str, Any] = field(default_factory=dict)
    prices: PriceBook | None = None


def run_graph(asked: Asked) -> int:
    """Run the graph and report; the exit code."""
    config, budget = _budget(asked.limits)
    max_parallel = _at_once(asked.max_parallel)
    with results_apart() as out:
        screen = Screen(sys.stderr)
        try:
            loaded = _loaded(asked, max_parallel, screen, out)
        except GraphInvalid as invalid:
            return _not_valid(asked.target, invalid, out if asked.as_json else None)
        run = ExecutionContext(
            config, name=loaded.graph.id, input=read_input(asked.input), budget=budget, prices=loaded.prices
        )
        ended = _run(loaded, run, max_parallel, screen)
        _report(ended, run, screen, out, asked.as_json)
    return ended.exit


@dataclass(frozen=True, slots=True)
class Limit:
    """How one limit is read, and what it is called in a Budget."""

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


def _budget(asked: Mapping[str, str | None]) -> tuple[ExecutionConfig, Budget]:
    given = {LIMITS[option].field: _read(option, text) for option, text in asked.items()}
    try:
        retries = given.pop("max_retries_total", None)
        return ExecutionConfig(None, None, retries), Budget(**given)
    except InvalidValue as invalid:
        (option,) = (option for option, limit in LIMITS.items() if limit.field == invalid.field)
        raise Refused(f"{option} must be {invalid.expected}, not {shown(invalid.value)}") from None


def _at_once(given: str | None) -> int | None:
    with suppress(ValueError):
        if given is None or whole_number(given) >= 1:
            return None if given is None else whole_number(given)
    raise Refused(f"--max-parallel must be a whole number, one or more, not {shown(given)}")


def _read(option: str, text: str | None) -> Any:
    limit = LIMITS[option]
    try:
        return None if text is None else limit.read(text)
    except ValueError:
        raise Refused(f"{option} must be {limit.what}, not {shown(text)}") from None


def _loaded(asked: Asked, max_parallel: int | None, screen: Screen, out: TextIO | None) -> Loaded:
    graph = load_graph(asked.target)
    if isinstance(graph, GraphSpec):
        return _with_nodes(graph, asked, screen, out)
    refuse_for_steps(asked.target, asked.of_nodes())
    graph.max_parallel = max_parallel or graph.max_parallel
    _check(graph, None)
    return Loaded(graph)


def _with_nodes(graph: GraphSpec, asked: Asked, screen: Screen, out: TextIO | None) -> Loaded:
    from penstock.storage.memory import InProcessMemory  # brings the stores, which a Graph can do without

    registry = load_executors(asked.executors, graph)
    _check(graph, registry)
    offers = load_offers(asked.named)
    kept = {"memory": InProcessMemory()}  # for as long as the run lasts
    services = {**kept, **offers.services, **_answering(graph, registry, asked, screen, out)}
    return Loaded(graph, registry, services, offers.prices)


def _answering(
    graph: GraphSpec, registry: ExecutorRegistry, asked: Asked, screen: Screen, out: TextIO | None
) -> dict[str, Any]:
    """Who answers what the graph asks; Refused, before anything is spent, if it asks and nobody can."""
    from penstock.cli import asking  # brings agents, which a Graph can do without

    if asked.approve is not None:
        return {"approvals": asking.Questions(asking.by_rule(asked.approve, screen))}
    why = asking.nobody(out, asked.as_json)
    if not why:
        return {"approvals": asking.Questions(asking.Terminal(screen, sys.stdin.fileno()).answer)}
    if nodes := list(asking.who_asks(graph, registry)):
        listed = ", ".join(map(shown, nodes[:10]))
        answers = "--approve all lets it go on, --approve none does not"
        raise Refused(f"{asked.target} asks for approval at {listed}, and {why}; {answers}")
    return {}


def _check(graph: Runnable, executors: ExecutorRegistry | None) -> None:
    if problems := problems_of(graph, executors):
        raise GraphInvalid(problems)


def _not_valid(target: str, invalid: GraphInvalid, out: TextIO | None) -> int:
    if out is not None:
        _print_document(document(Outcome("failed", error=invalid), None), out)
    code = tell_problems(target, invalid.problems, sys.stderr)
    if any(problem.code == "unknown_type" for problem in invalid.problems):
        complain("--executors module:name says what runs the nodes of a type")
    return code


def _run(loaded: Loaded, context: ExecutionContext, max_parallel: int | None, screen: Screen) -> Outcome:
    with (
        interruptible(context, screen.restore),
        watched(context, screen, planned=[node.id for node in as_spec(loaded.graph).nodes]),
    ):
        return asyncio.run(execute(loaded.graph, context, loaded.executors, loaded.services, max_parallel))


def _report(ended: Outcome, context: ExecutionContext, screen: Screen, out: TextIO | None, as_json: bool) -> None:
    apart: list[Line] = [[]] if screen.moves else []
    screen.show(*apart, *summary(ended, context), whole=True)
    if as_json:
        _print_document(document(ended, context), out)
        return
    if screen.moves and out is not None and out.isatty():
        write("", out)
    for result in results(ended):
        write(result, out)


def _print_document(content: dict[str, Any], out: TextIO | None) -> None:
    write(json.dumps(content, indent=2, ensure_ascii=not speaks_unicode(out)), out)


@contextmanager
def results_apart() -> Iterator[TextIO | None]:
    """Standard output for the results alone: what else is printed goes to standard error, by programs started too."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        if out is not sys.__stdout__ or out is None or sys.stderr is None:  # somebody else has taken it already
            yield out
            return
        kept = os.dup(1)
        try:
            with suppress(OSError):
                os.dup2(2, 1)
            with os.fdopen(os.dup(kept), "w", encoding=out.encoding, errors=out.errors) as own:
                yield own
        finally:
            os.dup2(kept, 1)
            os.close(kept)
