"""The executors a graph may use: what installed packages offer, and what `--executors` names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from penstock.cli.exits import Broken, Refused
from penstock.cli.loading.code import load_attribute, made
from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutorBroken, ExecutorRegistry
from penstock.kernel.graph import GraphSpec, shown


def load_executors(named: Iterable[str], graph: GraphSpec) -> ExecutorRegistry:
    """Every executor there is for `graph`; those that are named stand before installed ones of the same type.

    One that is broken is in nobody's way unless the graph uses its type.
    """
    used = {node.type for node in graph.nodes}
    registry = ExecutorRegistry.from_entry_points()
    try:
        for name in named:
            for node_type, executor in _named(name, used):
                _register(registry, node_type, executor, name)
        for node_type in used & set(registry):
            registry[node_type]  # loads it, if it is an offer that was not looked at yet
    except ExecutorBroken as broken:
        raise Broken(str(broken)) from broken
    return registry


def _named(name: str, used: set[str]) -> Iterator[tuple[str, Any]]:
    """What one `--executors` has, by type."""
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise Refused(f"--executors takes module:attribute or file.py:attribute, not {shown(name)}")
    found = made(load_attribute(module, attribute), f"--executors {name}")
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
