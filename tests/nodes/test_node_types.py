"""The node types as a whole: where they are, what they cost to load, that none runs code of a graph."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from penstock.kernel.executor import GROUP, ExecutorRegistry
from penstock.nodes import NODE_TYPES, executors


def test_every_type_is_an_entry_point_and_every_entry_point_a_type() -> None:
    ours = {one.name: one.value for one in entry_points(group=GROUP) if one.value.startswith("penstock.")}
    assert ours == NODE_TYPES


@pytest.mark.parametrize("node_type", NODE_TYPES)
def test_a_type_can_be_registered_and_looks_at_its_data(node_type: str) -> None:
    registry = ExecutorRegistry.from_entry_points()
    executor = registry[node_type]
    assert registry.handles(node_type, "outputs")
    assert any("no_such_setting" in path for path, _ in executor.check({"no_such_setting": 1}, registry))


def test_an_executor_of_every_type_is_made_for_a_registry() -> None:
    assert set(ExecutorRegistry(executors())) == set(NODE_TYPES)


def test_loading_every_type_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, penstock.nodes as n; before = set(sys.modules); n.executors(); "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) - sys.stdlib_module_names == {"penstock"}


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    import penstock.nodes

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = penstock.nodes.no_such_name
