"""What graphs are run with: models, tools and prices from people's own code; and the graphs in a server's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.cli.exits import Refused
from penstock.cli.loading.code import load_attribute, made
from penstock.cli.loading.target import read_graph
from penstock.cli.options import UnknownPrices
from penstock.errors import InvalidValue
from penstock.ids import AN_ID, ID
from penstock.kernel.document import graph_to_json
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.runtime.billing.prices import Price, PriceBook


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
        if ID.fullmatch(graph.id) is None:
            mend = 'rename the file, or give the graph another "id"'
            raise Refused(f"{path}: a graph cannot be called {shown(graph.id)} here; {mend}: {AN_ID}")
        if graph.id in found:
            raise Refused(f"{path} and {found[graph.id].where} both have a graph called {graph.id!r}; rename one")
        found[graph.id] = Given(graph.id, graph_to_json(graph), str(path), graph.id)
    return list(found.values())


def _read(path: Path) -> GraphSpec:
    if path.suffix == ".py" and path.is_file():
        why = "its steps are functions, and stay in its process"
        raise Refused(f"{path}: a graph in Python cannot be served, for {why}; serve graphs in JSON")
    try:
        return read_graph(path, "GRAPHS")
    except GraphInvalid as invalid:
        raise NotAGraph(str(path), invalid.problems) from None


@dataclass(frozen=True, slots=True)
class Named:
    """What a command line names for the nodes of graphs to use, as it was written."""

    models: Sequence[str] | None = None
    tools: Sequence[str] | None = None
    prices: Sequence[str] | None = None
    unknown_prices: UnknownPrices | None = None

    def options(self) -> list[str]:
        """The options that ask for something."""
        said = {
            "--models": self.models,
            "--tools": self.tools,
            "--prices": self.prices,
            "--unknown-prices": self.unknown_prices,
        }
        return [option for option, given in said.items() if given]


@dataclass(frozen=True, slots=True)
class Offers:
    """What the nodes of graphs may use, and what it costs."""

    services: Mapping[str, Any]
    prices: PriceBook
    """What is priced is held before a call leaves."""


def load_offers(named: Named) -> Offers:
    """What is named, and the built-in model with its price."""
    from penstock.server.examples import EXAMPLE_PRICE, ExampleModel  # brings agents, which a Graph can do without

    models = {"example": ExampleModel(), **_by_name("--models", named.models)}
    known = {model.name: EXAMPLE_PRICE for model in models.values() if isinstance(model, ExampleModel)}
    services = {"models": models, "tools": _by_name("--tools", named.tools)}
    return Offers(services, _price_book(known, named))


def _by_name(option: str, named: Sequence[str] | None) -> dict[str, Any]:
    """Things by name: each `module:attribute` is a mapping, or a function that returns one."""
    offers: dict[str, Any] = {}
    for name in named or ():
        module, _, attribute = name.rpartition(":")
        if not (module and attribute):
            raise Refused(f"{option} takes module:attribute or file.py:attribute, not {shown(name)}")
        found = made(load_attribute(module, attribute), f"{option} {name}")
        if not isinstance(found, Mapping):
            raise Refused(f"{option} {name} is of type {type(found).__name__}; it must be a mapping of names")
        offers.update(found)
    return offers


def _price_book(known: Mapping[str, Price], named: Named) -> PriceBook:
    unknown: Literal["refuse", "count"] = "refuse" if named.unknown_prices is UnknownPrices.REFUSE else "count"
    prices = _by_name("--prices", named.prices)
    for model, price in prices.items():
        if not isinstance(price, Price):
            found = f"{shown(price)} for {shown(model)}"
            raise Refused(f"--prices: there is {found}; it must be a penstock Price, such as Price('0.15', '0.60')")
    try:
        return PriceBook(registered={**known, **prices}, unknown=unknown)
    except InvalidValue as invalid:
        raise Refused(f"--prices: {invalid}") from None


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
