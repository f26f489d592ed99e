"""The same place has the same key, whatever order things happen in; and from any part of a journal a run goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.runtime.durable.keys import (
    MAX_KEY,
    Scope,
    display_id,
    enter_scope,
    entry_node,
    idempotency_key,
    scope,
)
from penstock.testing import SimLoop, sim_run
from tests.nodes.graphs import Json, graph, node
from tests.runtime.durable.journalled import MANY_PARTS, JsonJournals, Log, run

NAMES = st.text(min_size=0, max_size=300) | st.text(
    st.characters(categories=("Cs", "Cc", "Po", "Sm")), min_size=1, max_size=40
)


def a_graph(chance: random.Random, depth: int = 0) -> Json:
    """A forest of nodes that ask models, each of which may hold another graph."""
    size = chance.randint(1, 5 if depth == 0 else 3)
    nodes, flow = [node("in", "input")], []
    for number in range(size):
        nodes.append(_a_node(chance, f"n{number}", depth))
        above = chance.choice(["in", *(f"n{one}" for one in range(number))])
        flow.append(f"{above} > n{number}")
    return graph(nodes, flow)


def _a_node(chance: random.Random, name: str, depth: int) -> Json:
    kinds = ["llm-completion", "agent", "agent"] + (["map", "loop", "subgraph"] if depth < 2 else [])
    kind = chance.choice(kinds)
    if kind == "llm-completion":
        return node(name, kind, model="thinker", stream=chance.random() < 0.3)
    if kind == "agent":
        return node(name, kind, model="thinker", tools=["look", "count"], stream=chance.random() < 0.3)
    inside = a_graph(chance, depth + 1)
    if kind == "loop":
        return node(name, kind, graph=inside, max_iterations=2)
    if kind == "subgraph":
        return node(name, kind, graph=inside)
    sub = graph([node("list", "constant", value=["a", "b"]), node("each", "map", graph=inside)], ["list > each"])
    return node(name, "subgraph", graph=sub)


def passed(document: Json, store: JsonJournals, seed: int, **options: Any) -> tuple[Any, Log]:
    """One pass in one simulated schedule, in which every answer takes another time."""
    log, chance = Log(), random.Random(seed)

    async def wait() -> None:
        await asyncio.sleep(chance.random())

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        return (await run(store, document, log, wait=wait, clock=loop.clock, **options))[0]

    return sim_run(main, seed=seed), log


@pytest.mark.parametrize("shape", range(12))
def test_every_schedule_of_a_graph_records_under_the_same_keys(shape: int) -> None:
    document = a_graph(random.Random(shape))
    first, others = JsonJournals(), [JsonJournals() for _ in range(4)]
    came_to, log = passed(document, first, 0)
    assert len(set(log.lines)) == len(log), "two calls had one key"
    for seed, store in enumerate(others, 1):
        again, its_log = passed(document, store, seed)
        assert again == came_to
        assert set(store.keys_of()) == set(first.keys_of())
        assert sorted(its_log.lines) == sorted(log.lines)
        assert store.kept == {"r": {key: first.kept["r"][key] for key in store.keys_of()}}


@pytest.mark.parametrize("shape", range(12))
def test_from_any_part_of_its_journal_a_run_has_the_same_result_and_repeats_nothing(shape: int) -> None:
    chance = random.Random(shape)
    document = MANY_PARTS if shape == 0 else a_graph(chance)
    whole = JsonJournals()
    came_to, log = passed(document, whole, shape)
    keys = whole.keys_of()
    for cut in sorted({0, 1, len(keys) - 1, len(keys), *(chance.randrange(len(keys)) for _ in range(4))}):
        part = JsonJournals()
        part.kept["r"] = {key: whole.kept["r"][key] for key in keys[:cut]}
        part.figures = dict(whole.figures)
        again, ran = passed(document, part, seed=cut + 1)
        assert again == came_to
        assert set(part.keys_of()) == set(keys)
        recorded = {f"r/{key}" for key in keys[:cut]}
        assert recorded.isdisjoint(ran.lines), "something recorded ran again"
        assert set(log.lines) - recorded == set(ran.lines), "something was lost, or ran that did not have to"
        assert passed(document, part, seed=99, replay_only=True) == (came_to, Lines())


class Lines(Log):
    """An empty log that equals another one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Log) and other.lines == self.lines

    __hash__ = None  # type: ignore[assignment]


@given(NAMES, NAMES)
def test_different_names_have_different_keys_and_a_key_identifies_its_node(one: str, other: str) -> None:
    root = Scope(None, "r")
    assert (root.node(one).path == root.node(other).path) == (one == other)
    assert (root.child("tool", 0, one).path == root.child("tool", 0, other).path) == (one == other)
    inside = root.node(one, 3).child("turn", 2).next("llm", other)
    assert entry_node(inside.path) == display_id(one)
    assert entry_node(root.node(one).path) == display_id(one)
    inside.path.encode("ascii")
    assert len(one) > 60 or display_id(one) == one or not one.isascii()


@settings(max_examples=50)
@given(st.lists(NAMES, min_size=20, max_size=60))
def test_a_key_fits_into_a_store_and_names_its_node(names: list[str]) -> None:
    place = Scope(None, "r").node("first")
    seen = set()
    for name in names:
        place = place.child("tool", name)
        seen.add(place.path)
        assert len(place.path) <= MAX_KEY
        assert entry_node(place.path) == "first"
    assert len(seen) == len(names)


def test_no_name_looks_like_a_mark() -> None:
    root = Scope(None, "r")
    assert root.node("a~2").path != root.node("a", 2).path
    assert root.node("a/b").path != root.node("a").node("b").path
    assert root.node("llm:m").path != root.child("llm", "m").path
    assert root.child("tool", "0:c").path != root.child("tool", 0, "c").path
    assert root.node("#2").path != "#2"


def test_things_of_one_name_at_one_place_are_counted() -> None:
    place = Scope(None, "r").node("a")
    assert [place.next("llm", "m").path for _ in range(3)] == ["a/llm:m", "a/llm:m#2", "a/llm:m#3"]
    assert place.next("llm", "m#2").path == "a/llm:m%232"
    assert place.graph().path == "a"
    assert place.graph().path == "a/#2"


@pytest.mark.parametrize(
    ("key", "node_id"),
    [
        ("a", "a"),
        ("a/b/llm:m", "a"),
        ("a~2/llm:m", "a"),
        ("#2/a/llm:m", "a"),
        ("a%2Fb/link:tool/llm:m", "a/b"),
        ("llm:m", None),
        ("agent:x/turn:1/llm:m", None),
        ("value:now", None),
        ("", None),
        ("#2", None),
        ("%", ""),
    ],
)
def test_the_node_an_entry_belongs_to_is_the_outermost(key: str, node_id: str | None) -> None:
    assert entry_node(key) == node_id


def test_outside_of_a_journal_there_is_no_key_and_a_scope_does_nothing() -> None:
    with scope("one"):
        assert idempotency_key() is None


def test_branches_with_scopes_of_their_own_have_places_of_their_own() -> None:
    with enter_scope(Scope(None, "r").node("a")):
        with scope("page 1"):
            assert idempotency_key() == "r/a/scope:page 1"
        assert idempotency_key() == "r/a"
    assert idempotency_key() is None


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_scope_has_a_name(name: Any) -> None:
    with pytest.raises(InvalidValue, match="name of a scope"), scope(name):
        pass
