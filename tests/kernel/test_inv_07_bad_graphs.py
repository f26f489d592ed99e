"""INV 7: a broken graph is a typed error with a code and a path, or a graph that runs; never a hang or a traceback.

Valid documents are broken at random places, several times over, then read, validated, compiled and run through.
"""

from __future__ import annotations

import asyncio
import copy
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import ConversionFailed, DataValue, ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.frontier import Frontier
from penstock.kernel.graph import EdgeSpec, GraphInvalid, GraphSpec, NodeSpec, Problem
from penstock.kernel.plan import Plan
from penstock.kernel.render import to_mermaid, to_text
from penstock.kernel.routing import RoutingFailed
from penstock.kernel.validate import compile_graph, validate
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from tests.kernel.graphs import Stub
from tests.soak import scaled

parse_graph({"nodes": [], "edges": []})  # whatever is loaded once is loaded now, and not on an event loop

MUTANTS = scaled(1_250, soak=100_000)
HANDLES = ("output", "yes", "no")
REGISTRY = ExecutorRegistry(
    {
        "open": Stub(),
        "many": Stub(inputs=[Handle("input", "number", many="list"), Handle("parts", channel="link", many="list")]),
        "text": Stub(outputs=[Handle(name, "text") for name in HANDLES]),
    }
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        2**63,
        10**5_000,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "n0",
        "n1",
        "\ud800",
        "\x00",
        "flow",
    ),
    *("link", "FLOW", [], {}, [[]], {"": None}, {"channel": "flow"}, b"n0", object(), {5: 5}, "é" * 600, [None] * 50),
)


def valid(chance: random.Random) -> GraphSpec:
    size = chance.randint(1, 8)
    types = [chance.choice(["open", "many", "text"]) for _ in range(size)]
    nodes = tuple(NodeSpec(f"n{at}", one, {"a": [at]}, (at, 0)) for at, one in enumerate(types))
    edges = []
    for at in range(chance.randint(0, 12) if size > 1 else 0):
        source, target = sorted(chance.sample(range(size), 2))
        edges.append(EdgeSpec(f"e{at}", f"n{source}", f"n{target}", "flow", chance.choice(HANDLES)))
    return GraphSpec(nodes, tuple(edges))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, all the way down."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    return found


def broken(document: dict[str, Any], chance: random.Random) -> Any:
    """The document with one thing changed, deleted, doubled, swapped or nested."""
    spots = places(document)
    if not spots:
        return chance.choice(ODD)
    container, key = chance.choice(spots)
    other_container, other_key = chance.choice(spots)
    match chance.randrange(6):
        case 0:
            container[key] = copy.copy(chance.choice(ODD))
        case 1:
            del container[key]
        case 2 if isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        case 3:
            taken = copy.deepcopy(other_container[other_key])
            container[key] = taken
        case 4:
            value: Any = container[key]
            for _ in range(chance.choice([1, 3, 70])):
                value = [value]
            container[key] = value
        case _ if isinstance(document.get("edges"), list):
            ends = [f"n{chance.randrange(9)}" for _ in range(2)]
            edge = {"id": f"m{chance.random()}", "source": ends[0], "target": ends[1]}
            document["edges"].append({**edge, "data": {"channel": chance.choice(["flow", "flow", "link", "none"])}})
        case _:
            document["extra"] = chance.choice(ODD)
    return document


def run_through(plan: Plan, chance: random.Random) -> None:
    """To the end, in any order, with any handles used."""
    frontier = Frontier(plan)
    ready, ran = frontier.start(), set[int]()
    while ready:
        node = ready.pop(chance.randrange(len(ready)))
        assert node not in ran
        ran.add(node)
        used = chance.choice([None, (), ("output",), ("yes", "no")])
        ready += frontier.finish(node, used)
    assert frontier.remaining == 0
    assert len(ran) + len(frontier.skipped) == plan.size


def are_typed(problems: Sequence[Problem]) -> bool:
    """Whether there are problems, each with a code, a path into the JSON and a sentence."""
    return bool(problems) and all(one.code and one.path.startswith("$") and one.detail for one in problems)


def outcome(document: Any, chance: random.Random) -> str:
    """What became of a document: `unreadable`, `invalid` or `ran`; anything else is raised."""
    try:
        graph = parse_graph(document)
    except GraphInvalid as error:
        found = error.problems
        assert are_typed(found)
        return "unreadable"
    to_mermaid(graph), to_text(graph)
    registry = chance.choice([None, REGISTRY])
    entries = chance.choice([None, None, ["n0"], ["n0", "n3"]])
    problems = validate(graph, registry, entries=entries)
    if problems:
        assert are_typed(problems)
        with pytest.raises(GraphInvalid) as caught:
            compile_graph(graph, registry, entries=entries)
        assert list(caught.value.problems) == problems
        return "invalid"
    run_through(compile_graph(graph, registry, entries=entries), chance)
    return "ran"


@pytest.mark.reliability
def test_every_mutant_is_a_typed_problem_or_runs_to_its_end() -> None:
    outcomes = {"unreadable": 0, "invalid": 0, "ran": 0}
    for seed in range(MUTANTS):
        try:
            outcomes[outcome(*mutant(seed))] += 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(outcomes.values()) > MUTANTS / 20, "each outcome is really tried"


@pytest.mark.reliability
def test_every_mutant_written_in_python_is_a_typed_problem_or_runs_to_its_end() -> None:
    """The same for graphs that were never JSON: any field may hold anything."""
    for seed in range(MUTANTS // 4):
        chance = random.Random(seed)
        graph = valid(chance)
        for _ in range(chance.choice([0, 1, 2])):
            what = chance.choice(["nodes", "edges"])
            listed = list(getattr(graph, what))
            if listed:
                at = chance.randrange(len(listed))
                field = chance.choice(["id", "type", "data"] if what == "nodes" else EdgeSpec.__match_args__)
                odd = copy.copy(listed[at])
                object.__setattr__(odd, field, chance.choice(ODD))
                listed[at] = odd
                graph = GraphSpec(**{"nodes": graph.nodes, "edges": graph.edges, what: tuple(listed)})
        try:
            problems = validate(graph, chance.choice([None, REGISTRY]), entries=chance.choice([None, ["n0"]]))
            assert not problems or are_typed(problems)
            if not validate(graph):
                run_through(compile_graph(graph), chance)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def mutant(seed: int) -> tuple[Any, random.Random]:
    """A document that was valid and is broken in one to four places."""
    chance = random.Random(seed)
    document: Any = graph_to_json(valid(chance))
    for _ in range(chance.choice([1, 1, 2, 4])):
        if isinstance(document, dict):
            document = broken(document, chance)
    return document, chance


class Answers:
    """Answers at random, in every way an executor may; its values fit some handles and not others."""

    def __init__(self, chance: random.Random, inputs: list[Handle] | None = None, outputs: bool = False) -> None:
        self.inputs = inputs
        self.outputs = [Handle(name, "text") for name in HANDLES] if outputs else None
        self._chance = chance

    def execute(self, data: Any, inputs: Any, context: FlowContext) -> Any:
        given = {name: DataValue("text", "5") for name in HANDLES if self._chance.random() < 0.8}
        result = ExecutionResult(given)
        match self._chance.randrange(6):
            case 0:
                return None
            case 1:
                return DataValue("text", "x")
            case 2:
                return self._later(result)
            case 3:
                return iter([result])
        return result

    async def _later(self, result: ExecutionResult) -> ExecutionResult:
        await asyncio.sleep(0)
        return result

    def materialize(self, data: Any, output_handle: str, context: FlowContext) -> None: ...


def answering(chance: random.Random) -> ExecutorRegistry:
    takes = [Handle("input", "number", many="list"), Handle("parts", channel="link", many="list")]
    return ExecutorRegistry(
        {"open": Answers(chance), "many": Answers(chance, takes), "text": Answers(chance, outputs=True)}
    )


async def run_outcome(document: Any, chance: random.Random) -> str:
    """What became of a document that was run: `invalid` exactly if `validate` finds something, `ran` or `failed`."""
    executors = answering(chance)
    entries = chance.choice([None, None, ["n0"], ["n0", "n3"]])
    try:
        problems = validate(parse_graph(document), executors, entries=entries)
    except GraphInvalid as error:
        problems = list(error.problems)
    context = FlowContext(services={"execution": {"entry_node_ids": entries}})
    started, ended = set[str](), set[str]()
    try:
        async for event in run_flow(document, context, executors):
            if isinstance(event, NodeEvent) and event.event_type in ("started", "completed", "error", "cancelled"):
                assert event.node_id not in (started if event.event_type == "started" else ended)
                (started if event.event_type == "started" else ended).add(event.node_id)
    except GraphInvalid as invalid:
        found = list(invalid.problems)
        assert found == problems != []
        assert not started
        return "invalid"
    except (ConversionFailed, RoutingFailed):
        assert ended == started
        return "failed"
    assert problems == []
    assert ended == started
    return "ran"


@pytest.mark.reliability
@pytest.mark.filterwarnings("ignore:step .* kept the event loop:RuntimeWarning")  # a busy machine may stall anywhere
async def test_every_mutant_is_refused_before_anything_runs_or_runs_to_its_end() -> None:
    outcomes = {"invalid": 0, "ran": 0, "failed": 0}
    for seed in range(MUTANTS):
        try:
            outcomes[await run_outcome(*mutant(seed))] += 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(outcomes.values()) > MUTANTS / 50, outcomes


WATCHED = ("open", "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "exec", "compile")
SEEN: list[str] = []
WATCHING = [False]


def watch(event: str, args: tuple[Any, ...]) -> None:
    if WATCHING[0] and event.startswith(WATCHED):
        SEEN.append(event)


def test_reading_and_validating_a_graph_touches_nothing_outside() -> None:
    hostile = {"command": "touch /tmp/x", "url": "http://localhost", "code": "__import__('os')", "__class__": "os"}
    nodes = [{"id": "a", "type": "open", "data": hostile}, {"id": "os.system", "type": "text", "data": hostile}]
    edges = [{"id": "e", "source": "a", "target": "os.system", "data": {"channel": "flow"}}]
    document = {"nodes": nodes, "edges": edges, "$ref": "file:///etc/passwd"}
    parse_graph(document)  # whatever is loaded once is loaded now
    sys.addaudithook(watch)
    WATCHING[0] = True
    try:
        validate(parse_graph(document), REGISTRY)
        compile_graph(parse_graph(document))
    finally:
        WATCHING[0] = False
    assert SEEN == []
