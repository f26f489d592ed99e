"""Executors are known by what they can do; a bad registration is refused where it is made."""

from __future__ import annotations

import types
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle, NodeExecutor
from tests.kernel.graphs import Stub


class Artifact:
    """Something that can be linked to and does not run."""

    def materialize(self, data: Any, output_handle: str, context: Any) -> Any: ...


def test_anything_with_execute_is_an_executor() -> None:
    stub = Stub()
    registry = ExecutorRegistry({"step": stub})
    assert isinstance(stub, NodeExecutor)
    assert registry["step"] is stub
    assert "step" in registry
    assert "other" not in registry
    assert (list(registry), len(registry)) == (["step"], 1)


def test_something_that_only_materializes_can_be_registered() -> None:
    assert "artifact" in ExecutorRegistry({"artifact": Artifact()})


def test_a_module_with_an_execute_function_will_do() -> None:
    module = types.ModuleType("step")
    module.execute = lambda data, inputs, context: None  # type: ignore[attr-defined]
    assert "step" in ExecutorRegistry({"step": module})


def test_a_type_that_is_not_registered_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        ExecutorRegistry()["step"]


@pytest.mark.parametrize(
    ("node_type", "executor", "words"),
    [
        ("", Stub(), "node_type must be a name"),
        (None, Stub(), "node_type must be a name"),
        (["step"], Stub(), "node_type must be a name"),
        ("step", None, "executor of 'step' must be an object with execute"),
        ("step", object(), "executor of 'step' must be an object with execute"),
        ("step", types.SimpleNamespace(execute=5), "executor of 'step' must be an object with execute"),
        ("step", Stub, "executor of 'step' must be an object; this is its class"),
        ("taken", Stub(), "node_type must be a type that is not registered yet, not 'taken'"),
    ],
)
def test_a_bad_registration_is_refused_and_changes_nothing(node_type: Any, executor: Any, words: str) -> None:
    registry = ExecutorRegistry({"taken": Stub()})
    with pytest.raises(InvalidValue, match=words):
        registry.register(node_type, executor)
    assert list(registry) == ["taken"]


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (5, "a list of handles"),
        (["input"], "a list of handles"),
        ({"input": Handle("input")}, "a list of handles"),
        ([Handle("input"), Handle("input", "text")], "handles of different names"),
    ],
)
def test_handles_that_make_no_sense_are_refused_at_registration(side: str, declared: Any, words: str) -> None:
    stub = Stub()
    setattr(stub, side, declared)
    with pytest.raises(InvalidValue, match=f"{side} of the executor of 'step' must be {words}"):
        ExecutorRegistry({"step": stub})


def test_declared_handles_are_found_by_name_and_open_ones_are_none() -> None:
    registry = ExecutorRegistry({"step": Stub(inputs=[Handle("left"), Handle("right")]), "none": Stub(outputs=[])})
    declared = registry.handles("step", "inputs")
    assert declared is not None
    assert list(declared) == ["left", "right"]
    assert registry.handles("step", "outputs") is None
    assert registry.handles("none", "outputs") == {}
    assert registry.handles("unknown", "inputs") is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "name of a handle must be a name"),
        ({"name": 5}, "name of a handle must be a name"),
        ({"type": None}, "type of a handle must be a name"),
        ({"channel": "both"}, "channel of handle 'in' must be flow or link"),
        ({"many": "last"}, "many of handle 'in' must be one, list or first"),
        ({"required": 1}, "required of handle 'in' must be True or False"),
    ],
)
def test_a_handle_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        Handle(**{"name": "in", **fields})


def test_a_result_without_outputs_uses_no_handle() -> None:
    assert ExecutionResult().outputs == {}
    assert ExecutionResult().events == ()
