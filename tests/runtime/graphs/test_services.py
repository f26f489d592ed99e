"""Services by name and by attribute, from a mapping or from an object."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from penstock.errors import InvalidValue
from penstock.hosting.host import RunHost
from penstock.kernel.executor import DataValue, ExecutionResult
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphRuntime, Services, as_services
from penstock.runtime.graphs.node_execution import run_flow
from penstock.storage.memory import MemoryStores
from tests.nodes.graphs import executors as node_executors
from tests.nodes.graphs import graph as document
from tests.nodes.graphs import node

TWO = GraphSpec((NodeSpec("a", "look"), NodeSpec("b", "look")), ())


class Look:
    """Records the services that its node gets."""

    def __init__(self) -> None:
        self.seen: dict[str, Services] = {}

    def execute(self, data: Any, inputs: Any, context: FlowContext) -> DataValue:
        self.seen[str(context.node_id)] = context.services
        return DataValue("text", context.services.greeting)


async def looked(services: Any, graph: Any = TWO, more: Mapping[str, Any] | None = None) -> dict[str, Services]:
    look = Look()
    emitted = [one async for one in run_flow(graph, FlowContext(services=services), {"look": look, **(more or {})})]
    assert isinstance(emitted[-1], ExecutionResult)
    return look.seen


@dataclass
class Plain:
    greeting: str
    execution: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    greeting: str
    execution: Any = None


class Named(NamedTuple):
    greeting: str
    execution: Any = None


class WithMembers:
    """Services as a property, a method and a value of the class; what begins with `_` is not one."""

    limit = 5
    _hidden = "x"

    def __init__(self, greeting: str, execution: Any = None) -> None:
        self.execution = execution
        self._greeting = greeting

    @property
    def greeting(self) -> str:
        return self._greeting

    def load(self, name: str) -> str:
        return f"{self._greeting} {name}"


FORMS: dict[str, Any] = {
    "dict": lambda **services: services,
    "frozen mapping": lambda **services: MappingProxyType(services),
    "chain of mappings": lambda **services: ChainMap({}, services),
    "namespace": SimpleNamespace,
    "dataclass": Plain,
    "slotted dataclass": Slotted,
    "named tuple": Named,
    "object": WithMembers,
}
SCOPES: dict[str, Any] = {
    "mapping": {"entry_node_ids": ["b"]},
    "object": SimpleNamespace(entry_node_ids=["b"]),
}


@pytest.mark.requirement("K-17")
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_a_service_is_an_item_and_an_attribute_in_whatever_form_it_was_given(form: Any, scope: Any) -> None:
    (services,) = (await looked(form(greeting="hello", execution=scope))).values()
    assert services["greeting"] == services.greeting == services.get("greeting") == "hello"
    assert services.execution.entry_node_ids == ["b"]
    assert "nothing" not in services


async def test_an_object_gives_its_public_attributes() -> None:
    services = (await looked(WithMembers("hello")))["a"]
    assert services.keys() == {"greeting", "execution", "limit", "load"}
    assert (services.limit, services.load("Ann")) == (5, "hello Ann")


@pytest.mark.parametrize("form", [FORMS["dict"], FORMS["namespace"]], ids=["dict", "namespace"])
async def test_nodes_of_nested_graphs_get_the_same_services(form: Any) -> None:
    inside = document([node("in", "look")])
    nested = document([node("s", "subgraph", graph=inside)])
    seen = await looked(form(greeting="hello", execution={"entry_node_ids": ["s"]}), nested, node_executors())
    assert seen["in"].greeting == "hello"
    assert "execution" not in seen["in"]


def test_a_service_that_is_not_there_is_named_with_those_that_are() -> None:
    services = Services(models={}, tools={})
    with pytest.raises(AttributeError, match="there is no service 'mcp'; there are: models, tools"):
        _ = services.mcp
    with pytest.raises(AttributeError, match="there are: none"):
        _ = Services().mcp
    assert not hasattr(services, "mcp")


def test_a_service_with_the_name_of_a_method_is_an_item() -> None:
    services = Services(get="x")
    assert services["get"] == "x"
    assert services.get("get") == "x"


BAD: dict[str, Any] = {
    "text": "x",
    "bytes": b"x",
    "number": 5,
    "true": True,
    "list": [],
    "tuple": (("a", 1),),
    "set": {"a"},
    "function": lambda: None,
    "class": SimpleNamespace,
    "class with another metaclass": Mapping,
    "module": pytest,
    "nothing in particular": object(),
    "run": ExecutionContext(),
    "names that are not text": {1: "x"},
}


@pytest.mark.parametrize("services", BAD.values(), ids=BAD)
def test_services_that_are_neither_a_mapping_nor_an_object_are_refused(services: Any) -> None:
    with pytest.raises(InvalidValue, match="services must be a mapping"):
        FlowContext(services=services)
    with pytest.raises(InvalidValue, match="services must be a mapping"):
        GraphRuntime(GraphSpec(), run_id="r", services=services, executors={})
    with pytest.raises(InvalidValue, match="services must be a mapping"):
        RunHost(MemoryStores(), services=services)


@pytest.mark.parametrize("execution", ["b", 5, ["b"], lambda: None])
def test_an_execution_that_can_have_no_entries_is_refused(execution: Any) -> None:
    with pytest.raises(InvalidValue, match=r"services\['execution'\] must be a mapping or an object"):
        FlowContext(services={"execution": execution})


@pytest.mark.parametrize("entries", ["b", 5])
@pytest.mark.parametrize("form", [dict, SimpleNamespace], ids=["mapping", "object"])
async def test_entries_that_are_no_list_are_refused(form: Any, entries: Any) -> None:
    with pytest.raises(InvalidValue, match="entry_node_ids must be a list of node ids"):
        await looked({"greeting": "", "execution": form(entry_node_ids=entries)})


def test_services_are_converted_once_and_the_caller_keeps_its_own() -> None:
    given = {"execution": {"entry_node_ids": ["a"]}}
    services = as_services(given)
    assert as_services(services) is services
    services["more"] = 1
    assert given == {"execution": {"entry_node_ids": ["a"]}}
    assert type(given["execution"]) is dict


async def test_a_runtime_that_is_given_more_services_has_both() -> None:
    look = Look()
    chain = GraphSpec((NodeSpec("a", "look"), NodeSpec("b", "look")), (EdgeSpec("e", "a", "b", "flow"),))
    runtime = GraphRuntime(chain, run_id="r", services=Plain("hello"), executors={"look": look})
    context = FlowContext(services=SimpleNamespace(more=1, execution={"entry_node_ids": ["b"]}))
    async for _ in run_flow(runtime, context):
        pass
    assert {id: (services.greeting, services.more) for id, services in look.seen.items()} == {"b": ("hello", 1)}


def test_a_host_takes_an_object() -> None:
    host = RunHost(MemoryStores(), services=SimpleNamespace(models={"m": 1}))
    assert host.services["models"] == host.services.models == {"m": 1}
    assert host.services.memory is host.stores.memories
    own = RunHost(MemoryStores(), services=SimpleNamespace(memory="mine"))
    assert own.services.memory == "mine"
