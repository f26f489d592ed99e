"""Executors from installed packages and from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.exits import Broken, Refused
from penstock.cli.loading.services import ServiceOptions, load_executors, load_services
from penstock.kernel.executor import _installed
from penstock.kernel.graph import GraphSpec, NodeSpec

EXECUTORS = """
from penstock.kernel.executor import ExecutorRegistry

class Speaks:
    def __init__(self, name="offered"):
        self.name = name
    def execute(self, data, inputs, context):
        return None

mapping = {"text": Speaks("named")}
registry = ExecutorRegistry({"shout": Speaks("named")})
everything = ExecutorRegistry.from_entry_points()
def build():
    return mapping
offered = Speaks()
nothing = object()
"""

TEXT = GraphSpec((NodeSpec("a", "text"),))


@pytest.fixture(autouse=True)
def nodes(directory: Path) -> None:
    (directory / "nodes.py").write_text(EXECUTORS)


def install(entries: str) -> None:
    """A package in this directory that offers these entry points."""
    package = Path("offers-1.0.dist-info")
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[penstock.executors]\n{entries}\n")


@pytest.fixture
def importable(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is installed in the directory counts; a process looks once, so it is made to look again."""
    monkeypatch.syspath_prepend(str(directory))
    _installed.cache_clear()
    yield
    _installed.cache_clear()


def test_mappings_registries_and_functions_that_return_one_are_put_together() -> None:
    assert sorted(load_executors(["nodes:mapping", "nodes.py:registry"], {"text"})) == ["shout", "text"]
    assert list(load_executors(["nodes:build"], {"text"})) == ["text"]


@pytest.mark.usefixtures("importable")
def test_named_executors_take_precedence_over_installed_ones() -> None:
    install("text = nodes:offered\nshout = nodes:Speaks")
    assert load_executors([], {"text"})["text"].name == "offered"
    assert load_executors([], {"text"})["shout"].name == "offered"
    assert load_executors(["nodes:mapping"], {"text"})["text"].name == "named"


@pytest.mark.usefixtures("importable")
def test_broken_executor_is_an_error_only_if_its_type_is_used() -> None:
    install("text = nowhere:thing\nshout = nodes:nothing")
    assert "text" in load_executors([], set())
    for named in ([], ["nodes:everything"]):
        with pytest.raises(Broken, match="type 'text' that is installed as 'nowhere:thing' cannot be used: ModuleNotF"):
            load_executors(named, {"text"})
    with pytest.raises(Broken, match=r"of 'shout' must be an object with execute\(\)"):
        load_executors(["nodes:mapping"], {"shout"})
    assert "text" in load_executors(["nodes:everything"], set())


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["nodes"], "--executors takes module:attribute or file.py:attribute, not 'nodes'"),
        (["nodes:nothing"], "--executors nodes:nothing is of type object; it must be an ExecutorRegistry or a mapping"),
        (["nodes:mapping", "nodes:mapping"], "must be a type that is not registered yet, not 'text'"),
        (["nowhere:x"], "there is no module 'nowhere'"),
        (["nodes:missing"], "nodes has no attribute 'missing'"),
    ],
)
def test_what_is_no_set_of_executors_is_refused(named: list[str], expected: str) -> None:
    with pytest.raises(Refused) as refused:
        load_executors(named, {"text"})
    assert expected in str(refused.value)


def test_allowed_models_are_patterns_of_a_provider_and_a_model() -> None:
    assert "allowed_models" not in load_services(ServiceOptions()).services
    for allowed in (["openai:gpt-4o*", "ollama:llama3:8b"], ["none"], ["*:*"]):
        found = load_services(ServiceOptions(allowed_models=allowed)).services
        assert found["allowed_models"] == tuple(allowed)
    for wrong in ("gpt-4o", "openai:", ":gpt-4o", ""):
        with pytest.raises(Refused, match="--allow-model takes a provider and a model, such as"):
            load_services(ServiceOptions(allowed_models=["openai:*", wrong]))
