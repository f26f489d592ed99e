"""Loads the services that the nodes of a graph may use: executors, models, tools and prices.

Executors come from installed packages and from `--executors`; the rest only from the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from penstock.cli.exits import Broken, Refused
from penstock.cli.loading.code import load_attribute, resolve
from penstock.cli.options import UnknownPrices
from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutorBroken, ExecutorRegistry
from penstock.kernel.graph import shown
from penstock.runtime.billing.prices import Price, PriceBook


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Models, tools and prices that the command line names for graph nodes, unparsed."""

    models: Sequence[str] | None = None
    tools: Sequence[str] | None = None
    prices: Sequence[str] | None = None
    unknown_prices: UnknownPrices | None = None
    allowed_models: Sequence[str] | None = None

    def given(self) -> list[str]:
        """Return the options that were given."""
        values = {
            "--models": self.models,
            "--tools": self.tools,
            "--prices": self.prices,
            "--unknown-prices": self.unknown_prices,
        }
        return [option for option, value in values.items() if value]


@dataclass(frozen=True, slots=True)
class NodeServices:
    """Services that graph nodes may use, and their prices."""

    services: Mapping[str, Any]
    prices: PriceBook
    """For priced models, the cost is held before a call is sent."""


def load_services(options: ServiceOptions) -> NodeServices:
    """Load the named models, tools and prices, and add the built-in model with its price."""
    from penstock.nodes.parts.services import ALLOWED_MODELS  # imports agents, which a Graph does not need
    from penstock.server.examples import EXAMPLE_PRICE, ExampleModel

    models = {"example": ExampleModel(), **_by_name("--models", options.models)}
    known = {model.name: EXAMPLE_PRICE for model in models.values() if isinstance(model, ExampleModel)}
    services: dict[str, Any] = {"models": models, "tools": _by_name("--tools", options.tools)}
    if options.allowed_models:
        services[ALLOWED_MODELS] = _patterns(options.allowed_models)
    return NodeServices(services, _price_book(known, options))


def _patterns(allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of providers' models; no model matches the pattern `none`."""
    for pattern in allowed:
        if pattern != "none" and not all(pattern.partition(":")):
            expected = "a provider and a model, such as 'openai:gpt-4o*' or 'openai:*', or none"
            raise Refused(f"--allow-model takes {expected}, not {shown(pattern)}")
    return tuple(allowed)


def load_price_book(options: ServiceOptions) -> PriceBook:
    """Load only the named prices."""
    return _price_book({}, options)


def _by_name(option: str, named: Sequence[str] | None) -> dict[str, Any]:
    """Load objects by name; each `module:attribute` is a mapping, or a function that returns one."""
    objects: dict[str, Any] = {}
    for name in named or ():
        found = _load_named(option, name)
        if not isinstance(found, Mapping):
            raise Refused(f"{option} {name} is of type {type(found).__name__}; it must be a mapping of names")
        objects.update(found)
    return objects


def _price_book(known: Mapping[str, Price], options: ServiceOptions) -> PriceBook:
    unknown: Literal["refuse", "count"] = "refuse" if options.unknown_prices is UnknownPrices.REFUSE else "count"
    prices = _by_name("--prices", options.prices)
    for model, price in prices.items():
        if not isinstance(price, Price):
            expected = "a penstock Price, such as Price('0.15', '0.60')"
            raise Refused(f"--prices: the price of {shown(model)} must be {expected}, not {shown(price)}")
    try:
        return PriceBook(registered={**known, **prices}, unknown=unknown)
    except InvalidValue as invalid:
        raise Refused(f"--prices: {invalid}") from None


def load_executors(named: Iterable[str], used: set[str]) -> ExecutorRegistry:
    """Return all executors; named ones take precedence over installed ones of the same type.

    A broken executor is an error only if its type is among those that are `used`.
    """
    registry = ExecutorRegistry.from_entry_points()
    try:
        for name in named:
            for node_type, executor in _named_executors(name, used):
                _register(registry, node_type, executor, name)
        for node_type in used & set(registry):
            registry[node_type]  # loads an entry point that was not loaded yet
    except ExecutorBroken as broken:
        raise Broken(str(broken)) from broken
    return registry


def _named_executors(name: str, used: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the executors of one `--executors` option, with their types."""
    found = _load_named("--executors", name)
    if isinstance(found, Mapping):
        yield from found.items()
    elif isinstance(found, ExecutorRegistry):
        for node_type in found:
            with suppress(*() if node_type in used else (ExecutorBroken,)):
                yield node_type, found[node_type]
    else:
        wanted = "an ExecutorRegistry or a mapping of types to executors"
        raise Refused(f"--executors {name} is of type {type(found).__name__}; it must be {wanted}")


def _register(registry: ExecutorRegistry, node_type: str, executor: Any, name: str) -> None:
    try:
        registry.register(node_type, executor)
    except InvalidValue as invalid:
        raise Refused(f"--executors {name}: {invalid}") from None


def _load_named(option: str, name: str) -> Any:
    """Load the object that an option names as `module:attribute`; a function is called."""
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise Refused(f"{option} takes module:attribute or file.py:attribute, not {shown(name)}")
    return resolve(load_attribute(module, attribute), f"{option} {name}")
