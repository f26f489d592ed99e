"""What a server is given to work with: graphs in files, and models and tools by name from people's own code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.exits import Refused
from penstock.cli.loading.code import load_attribute, made
from penstock.cli.loading.values import read_bytes
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.runtime.billing.prices import Price


@dataclass(frozen=True, slots=True)
class Given:
    """A graph as it stands in a file."""

    id: str
    document: Mapping[str, Any]
    where: str
    name: str
    """What people call it."""


class NotAGraph(Exception):
    """A file that holds no graph: which, and everything that is wrong with it."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        self.problems = problems
        super().__init__(where)


def load_documents(paths: Iterable[str]) -> list[Given]:
    """The graphs in these files, and in the `.json` files of these directories; each id once."""
    found: dict[str, Given] = {}
    for path in _files(paths):
        graph = _read(path)
        if graph.id in found:
            raise Refused(f"{path} and {found[graph.id].where} both have a graph called {graph.id!r}; rename one")
        found[graph.id] = Given(graph.id, graph_to_json(graph), str(path), graph.id)
    return list(found.values())


def _read(path: Path) -> GraphSpec:
    try:
        return parse_graph(read_bytes(path, "GRAPHS"))
    except GraphInvalid as invalid:
        raise NotAGraph(str(path), invalid.problems) from None


def load_offers(option: str, named: Iterable[str]) -> dict[str, Any]:
    """Things by name: each `module:attribute` is a mapping, or a function that returns one."""
    offers: dict[str, Any] = {}
    for name in named:
        module, _, attribute = name.rpartition(":")
        if not (module and attribute):
            raise Refused(f"{option} takes module:attribute or file.py:attribute, not {shown(name)}")
        found = made(load_attribute(module, attribute), f"{option} {name}")
        if not isinstance(found, Mapping):
            raise Refused(f"{option} {name} is of type {type(found).__name__}; it must be a mapping of names")
        offers.update(found)
    return offers


def load_prices(named: Iterable[str]) -> dict[str, Price]:
    """What models cost, by name: each `module:attribute` is a mapping of names to `Price`, or a function for one."""
    prices = load_offers("--prices", named)
    for model, price in prices.items():
        if not isinstance(price, Price):
            found = f"{shown(price)} for {shown(model)}"
            raise Refused(f"--prices: there is {found}; it must be a penstock Price, such as Price('0.15', '0.60')")
    return prices


def _files(paths: Iterable[str]) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.json"))
        if not inside:
            raise Refused(f"there is no .json file in {given!r}")
        yield from inside
