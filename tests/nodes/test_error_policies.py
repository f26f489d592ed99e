"""Error policies, timeouts and budgets of the nodes of graphs in JSON: plain nodes, agents and containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType
from typing import Any

import pytest

from penstock import Budget, BudgetExceededError, CancelledError, ExecutionConfig, ExecutionContext, StepTimeout
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import run_flow
from penstock.runtime.graphs.validation import validate
from penstock.testing import sim_run
from tests.flow.steps import sim_loop
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems, registry

SCRIPT = {"script": ["fine"]}


class Flaky:
    """Fails the first times it runs, and then gives the settings it was given."""

    def __init__(self, failures: int = 10**9, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or ValueError("no luck")
        self.ran = 0

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        self.ran += 1
        if self.ran <= self.failures:
            raise self.error
        return DataValue("object", dict(data))


class Show:
    """Gives what came, as JSON."""

    def execute(self, data: Any, inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        return DataValue("text", json.dumps({name: one.value for name, one in inputs.items()}))


class Stuck:
    async def execute(self, data: Any, inputs: Any, context: FlowContext) -> None:
        await asyncio.sleep(3_600)


class Calls:
    """Makes one call that costs a cent."""

    async def execute(self, data: Any, inputs: Any, context: FlowContext) -> DataValue:
        async def work() -> int:
            return 1

        return DataValue("number", await context.execution.atool(work, cost_hint_usd="0.01"))


def before_show(type: str = "flaky", **data: Any) -> Json:
    """A node that may fail, and one that shows what came of it."""
    return graph([node("f", type, **data), node("s", "show")], ["f > s"])


def policy(on_error: str, **fields: Any) -> Json:
    return {"on_error": on_error, "retry_delay_ms": 0, **fields}


async def events_in(document: Json, more: Json, **options: Any) -> list[tuple[str, str]]:
    events, _ = await events_of(document, more={"show": Show(), **more}, **options)
    return [(one.node_id, one.event_type) for one in events]


# What each policy gives.


@pytest.mark.requirement("P-E5")
async def test_a_node_that_fails_is_tried_again_and_its_executor_sees_its_own_settings_only() -> None:
    flaky = Flaky(2)
    document = before_show(color="red", error_policy=policy("retry", retry_count=2), budget={"max_steps": 3})
    value = json.loads(await output_of(document, more={"flaky": flaky, "show": Show()}))
    assert (value, flaky.ran) == ({"input": {"color": "red"}}, 3)


@pytest.mark.requirement("P-E5")
async def test_retries_are_in_the_events_and_each_attempt_is_in_the_trace() -> None:
    with ExecutionContext() as run:
        document = before_show(error_policy=policy("retry", retry_count=2))
        events, _ = await events_of(document, run=run, more={"flaky": Flaky(2), "show": Show()})
        calls = [(one.name, one.status, (one.metadata or {}).get("attempt", 1)) for one in nodes_in(run)]
    assert [(one.node_id, one.event_type) for one in events] == [
        ("f", "started"),
        ("f", "retry"),
        ("f", "retry"),
        ("f", "completed"),
        ("s", "started"),
        ("s", "completed"),
    ]
    assert events[2].data == {"attempt": 2, "delay_s": 0.0, "error": "ValueError", "message": "no luck"}
    assert calls == [("f", "fail", 1), ("f", "fail", 2), ("f", "success", 3), ("s", "success", 1)]


def nodes_in(run: ExecutionContext) -> list[Any]:
    return [one for one in run.graph.calls()[1] if one.name in ("f", "s")]


@pytest.mark.requirement("P-E5")
async def test_retries_draw_on_the_runs_retry_budget() -> None:
    flaky = Flaky()
    with ExecutionContext(ExecutionConfig(None, None, 1)) as run, pytest.raises(Exception, match="no luck") as raised:
        document = before_show(error_policy=policy("fallback", fallback_value=1, retry_count=5))
        await events_of(document, run=run, more={"flaky": flaky, "show": Show()})
    assert "retry budget" in str(raised.value)
    assert flaky.ran == 2


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (policy("fallback", fallback_value="none"), {"input": "none"}),
        (policy("fallback", fallback_value={"a": [1]}), {"input": {"a": [1]}}),
        (policy("fallback", fallback_value=False), {"input": False}),
        (policy("skip", fallback_value=0), {"input": 0}),
        (policy("continue"), {"input": {"error": "ValueError", "message": "no luck"}}),
    ],
)
async def test_a_policy_replaces_a_failure_by_a_value(settings: Json, shown: Json) -> None:
    document, more = before_show(error_policy=settings), {"flaky": Flaky(), "show": Show()}
    assert json.loads(await output_of(document, more=more)) == shown


@pytest.mark.requirement("P-E5")
async def test_a_skipped_node_has_no_output_and_nodes_that_depend_on_it_alone_do_not_run() -> None:
    document = graph(
        [
            node("f", "flaky", error_policy=policy("skip")),
            node("s", "show"),
            node("c", "constant", value=2),
            node("m", "merge"),
        ],
        ["f > s", "f > m", "c > m"],
    )
    events = await events_in(document, {"flaky": Flaky()})
    assert [what for id, what in events if id == "f"] == ["started", "recovered", "completed"]
    assert [what for id, what in events if id == "s"] == ["skipped"]
    _, result = await events_of(document, more={"flaky": Flaky(), "show": Show()})
    assert {name: one.value for name, one in result.outputs.items()} == {"m.output": [2]}


@pytest.mark.requirement("P-E5")
async def test_the_events_show_the_actions_of_a_policy() -> None:
    for on_error, more in (("skip", {}), ("fallback", {"fallback_value": 1}), ("continue", {})):
        document = before_show(error_policy=policy(on_error, **more))
        events, _ = await events_of(document, more={"flaky": Flaky(), "show": Show()})
        (recovered,) = [one.data for one in events if one.event_type == "recovered"]
        assert recovered == {"on_error": on_error, "error": "ValueError", "message": "no luck"}
        assert not any(one.event_type == "error" for one in events)


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("failures", [0, 1])
async def test_a_failure_takes_the_branch_of_the_fallback_handle(failures: int) -> None:
    document = graph(
        [
            node("f", "prompt-template", template="hi", error_policy=policy("continue", fallback_handle="failed")),
            node("good", "show"),
            node("bad", "show"),
        ],
        ["f > good", "f.failed > bad"],
    )
    template = registry()["prompt-template"]

    class Sometimes(type(template)):  # type: ignore[misc]  # a type whose handles are declared
        def execute(self, data: Any, inputs: Any, context: Any) -> Any:
            if failures:
                raise KeyError("gone")
            return super().execute(data, inputs, context)

    document["nodes"][0]["type"] = "sometimes"
    events = await events_in(document, {"sometimes": Sometimes()})
    ran = {id for id, what in events if what == "completed"} - {"f"}
    assert ran == ({"bad"} if failures else {"good"})


async def test_an_edge_leaves_an_undeclared_handle_only_at_the_node_whose_policy_has_it() -> None:
    both = graph(
        [
            node("a", "prompt-template", template="x", error_policy=policy("continue", fallback_handle="failed")),
            node("b", "prompt-template", template="x"),
            node("s", "merge"),
        ],
        ["a.failed > s", "b.failed > s"],
    )
    assert problems(both) == [("$.edges[1].sourceHandle", "'b' has no handle 'failed'; it has: output")]
    both["edges"] = [{**both["edges"][0], "data": {"channel": "link"}}]
    assert "$.edges[0].sourceHandle" in [path for path, _ in problems(both)]


@pytest.mark.requirement("P-E5")
async def test_a_message_that_looks_like_a_secret_is_not_given_on() -> None:
    secret = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"
    document = before_show(error_policy=policy("continue", retry_count=1))
    events, result = await events_of(
        document, more={"flaky": Flaky(error=ValueError(f"bad key {secret}")), "show": Show()}
    )
    assert secret not in json.dumps([one.to_dict() for one in events])
    assert secret not in str(result.outputs)


# Time and budgets.


@pytest.mark.requirement("P-E5")
def test_a_timeout_ends_each_attempt() -> None:
    document = before_show("stuck", error_policy=policy("retry", retry_count=1, timeout_ms=500))

    async def run() -> None:
        loop, more = sim_loop(), {"stuck": Stuck(), "show": Show()}
        with ExecutionContext(clock=loop.clock) as context, pytest.raises(StepTimeout, match="'f'"):
            await output_of(document, run=context, more=more)
        assert loop.time() == pytest.approx(1)
        document["nodes"][0]["data"]["error_policy"] = policy("fallback", fallback_value=7, timeout_ms=500)
        with ExecutionContext(clock=loop.clock) as context:
            assert json.loads(await output_of(document, run=context, more=more)) == {"input": 7}

    sim_run(run, seed=0)


@pytest.mark.requirement("P-E5")
async def test_a_blocking_executor_has_a_policy_too() -> None:
    flaky = Flaky(1)
    flaky.blocking = True  # type: ignore[attr-defined]
    document = before_show(error_policy=policy("retry", retry_count=1))
    assert json.loads(await output_of(document, more={"flaky": flaky, "show": Show()})) == {"input": {}}


@pytest.mark.requirement("P-E5")
async def test_a_node_of_any_type_has_a_budget_over_all_its_attempts() -> None:
    ran = count(1)

    class Spends(Calls):
        async def execute(self, data: Any, inputs: Any, context: FlowContext) -> DataValue:
            await super().execute(data, inputs, context)
            raise ValueError(f"attempt {next(ran)}")

    document = before_show("spends", error_policy=policy("retry", retry_count=9), budget={"max_cost_usd": 0.025})
    with pytest.raises(BudgetExceededError) as raised:
        await output_of(document, more={"spends": Spends(), "show": Show()})
    assert raised.value.budget == Budget(max_cost_dollars=0.025)
    assert next(ran) == 3


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("on_error", ["retry", "skip", "fallback", "continue"])
async def test_limits_and_cancels_pass_through_every_policy(on_error: str) -> None:
    values = {"retry": {"retry_count": 3}, "fallback": {"fallback_value": 1}}.get(on_error, {})
    document = before_show("calls", error_policy=policy(on_error, **values), budget={"max_api_calls": 0})
    with pytest.raises(BudgetExceededError):
        await output_of(document, more={"calls": Calls(), "show": Show()})
    del document["nodes"][0]["data"]["budget"]
    with ExecutionContext(ExecutionConfig(0.005, None, 9)) as run, pytest.raises(BudgetExceededError):
        await output_of(document, run=run, more={"calls": Calls(), "show": Show()})
    assert [one.name for one in nodes_in(run)] == ["f"]
    with ExecutionContext() as run, pytest.raises(CancelledError):
        run.abort("enough")
        await output_of(document, run=run, more={"calls": Calls(), "show": Show()})


@pytest.mark.requirement("P-E5")
def test_a_cancel_ends_the_wait_before_a_retry() -> None:
    flaky = Flaky()
    document = before_show(error_policy=policy("fallback", fallback_value=1, retry_count=3, retry_delay_ms=60_000))

    async def run() -> None:
        with ExecutionContext(clock=sim_loop().clock) as context:
            asyncio.get_running_loop().call_later(1, context.cancellation.cancel, "enough")
            with pytest.raises(CancelledError):
                await output_of(document, run=context, more={"flaky": flaky, "show": Show()})

    sim_run(run, seed=0)
    assert flaky.ran == 1


# Agents and containers.


@pytest.mark.requirement("P-E5")
async def test_an_agent_is_tried_again() -> None:
    calls = count(1)

    def answer(request: Any) -> str:
        if next(calls) == 1:
            raise ConnectionError("reset")
        return "hello"

    from penstock.agents.scripted import ScriptedModel

    document = graph([node("a", "agent", model="m", error_policy=policy("retry", retry_count=1))])
    services = {"models": {"m": ScriptedModel(answer)}}
    assert await output_of(document, "hi", services=services) == "hello"


INNER = graph([node("f", "flaky")])
CONTAINERS = [("subgraph", {}, None), ("loop", {"max_iterations": 1}, None), ("map", {}, [1])]


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(("type", "data", "given"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
async def test_a_container_has_a_policy(type: str, data: Json, given: Any) -> None:
    flaky = Flaky(1)
    settings = policy("fallback", fallback_value="none", retry_count=0)
    document = graph(
        [node("c", "constant", value=given or 1), node("n", type, graph=INNER, error_policy=settings, **data)],
        ["c > n"],
    )
    assert await output_of(document, more={"flaky": flaky}) == "none"
    flaky.ran, flaky.failures = 0, 1
    document["nodes"][1]["data"]["error_policy"] = policy("retry", retry_count=1)
    assert await output_of(document, more={"flaky": flaky}) in ({}, [{}])
    assert flaky.ran == 2


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(("type", "data", "given"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
async def test_nodes_inside_a_container_have_policies(type: str, data: Json, given: Any) -> None:
    inner = graph([node("f", "flaky", error_policy=policy("fallback", fallback_value="inside", retry_count=1))])
    document = graph(
        [node("c", "constant", value=given or 1), node("n", type, graph=inner, **data)],
        ["c > n"],
    )
    events, result = await events_of(document, more={"flaky": Flaky()})
    assert result.outputs["output"].value in ("inside", ["inside"])
    inside = json.dumps([one.data for one in events if one.event_type == "inside"])
    assert '"event": "retry"' in inside
    assert '"event": "recovered"' in inside


# What is refused.


def wrong(error_policy: Any = None, type: str = "flaky", **data: Any) -> list[tuple[str, str]]:
    given = {"error_policy": error_policy} if error_policy is not None else {}
    document = graph([node("c", "constant", value=1), node("f", type, **given, **data)])
    return problems(document, {"flaky": Flaky()})


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(
    ("settings", "field", "sentence"),
    [
        ({"max_retries": 3}, ".max_retries", "there is no such setting"),
        ({"on_error": "explode"}, ".on_error", "input should be 'fail', 'retry', 'skip', 'fallback' or 'continue'"),
        ({"retry_count": -1}, ".retry_count", "input should be greater than or equal to 0"),
        ({"retry_count": True}, ".retry_count", "input should be a valid integer"),
        ({"retry_count": "3"}, ".retry_count", "input should be a valid integer"),
        ({"retry_backoff": 0.5}, ".retry_backoff", "input should be greater than or equal to 1"),
        ({"retry_jitter": 2}, ".retry_jitter", "input should be less than or equal to 1"),
        ({"timeout_ms": 0}, ".timeout_ms", "input should be greater than or equal to 1"),
        ({"on_error": "retry"}, ".retry_count", "must be at least 1 with on_error='retry'"),
        ({"on_error": "fallback"}, ".fallback_value", "with on_error 'fallback' this is needed, and it is not there"),
        ({"fallback_value": 1}, ".fallback_value", "must be None unless on_error is 'skip' or 'fallback'"),
        ({"on_error": "skip", "fallback_handle": "x"}, ".fallback_handle", "must be left out where on_error gives no"),
        ({"fallback_node": "c"}, ".fallback_node", "there is no such setting"),
        ([], "", "input should be an object"),
    ],
)
def test_a_wrong_error_policy_is_refused_with_its_path(settings: Any, field: str, sentence: str) -> None:
    ((path, found),) = wrong(settings)
    assert path == f"$.nodes[1].data.error_policy{field}"
    assert found.startswith(sentence)


@pytest.mark.requirement("P-E5")
def test_every_wrong_option_is_listed_also_for_types_without_settings_of_their_own() -> None:
    found = wrong({"retry_count": -1, "retry_delay_ms": 1.5}, budget={"max_steps": -1, "max_cost": 1})
    assert [path.removeprefix("$.nodes[1].data") for path, _ in found] == [
        ".error_policy.retry_count",
        ".error_policy.retry_delay_ms",
        ".budget.max_steps",
        ".budget.max_cost",
    ]


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_values_that_are_not_numbers_are_refused_in_graphs_made_by_programs(number: float) -> None:
    data = MappingProxyType({"error_policy": MappingProxyType({"retry_backoff": number})})
    (problem,) = validate(GraphSpec((NodeSpec("f", "flaky", data),)), registry({"flaky": Flaky()}))
    assert (problem.code, problem.path) == ("bad_data", "$.nodes[0].data.error_policy.retry_backoff")


@pytest.mark.requirement("P-E5")
def test_options_inside_containers_are_refused_with_the_whole_path() -> None:
    inner = graph([node("f", "flaky", error_policy={"retry_count": -1})])
    document = graph([node("n", "subgraph", graph=graph([node("m", "subgraph", graph=inner)]))])
    ((path, _),) = problems(document, {"flaky": Flaky()})
    assert path == "$.nodes[0].data.graph.nodes[0].data.graph.nodes[0].data.error_policy.retry_count"


def test_a_node_without_the_usual_output_names_the_handle() -> None:
    settings = policy("fallback", fallback_value=1)
    (path, sentence) = wrong(settings, "conditional", when="true")[-1]
    assert path == "$.nodes[1].data.error_policy.fallback_handle"
    assert sentence == "this is needed: the node has no handle 'output'; it has: true, false"
    assert len(wrong({**settings, "fallback_handle": "false"}, "conditional", when="true")) == 1  # no edge leads to it
    ((_, sentence),) = wrong({**settings, "fallback_handle": "tool"}, "agent", model=SCRIPT)
    assert sentence == "handle 'tool' is for links"


def test_a_node_that_does_not_run_has_no_error_policy() -> None:
    document = graph(
        [
            node("a", "agent", model=SCRIPT),
            node("helper", "agent", model=SCRIPT, error_policy=policy("skip"), budget={"max_steps": 3}),
        ],
        link=["helper.tool > a.tools"],
    )
    ((path, sentence),) = problems(document)
    assert path == "$.nodes[1].data.error_policy"
    assert sentence.startswith("the node does not run: it is only linked to")
    ((path, sentence),) = wrong(policy("skip"), "toolset", tools=["x"])
    assert path == "$.nodes[1].data.error_policy"


async def test_options_of_a_graph_made_by_a_program_hold() -> None:
    data = {"error_policy": {"on_error": "fallback", "fallback_value": 3}}
    spec = GraphSpec((NodeSpec("f", "flaky", data), NodeSpec("s", "show")), (EdgeSpec("e", "f", "s", "flow"),))
    run = run_flow(spec, FlowContext(), {"flaky": Flaky(), "show": Show()})
    *_, result = [one async for one in run]
    assert isinstance(result, ExecutionResult)
    assert json.loads(result.outputs["output"].value) == {"input": 3}


async def test_a_linked_node_keeps_its_budget_and_not_its_policy() -> None:
    seen: list[Json] = []

    class Lent:
        outputs = (Handle("output"), Handle("part", channel="link"))

        def execute(self, data: Json, inputs: Any, context: FlowContext) -> DataValue:
            seen.append(data)
            return DataValue("text", "x")

        def materialize(self, data: Json, output_handle: str, context: FlowContext) -> None:
            seen.append(data)

    class Uses:
        async def execute(self, data: Json, inputs: Any, context: FlowContext) -> None:
            assert context.runtime is not None
            await context.runtime.resolve_links("u", "part")

    data: Json = {"budget": {"max_steps": 4}, "error_policy": policy("skip"), "own": 1}
    document = graph([node("l", "lent", **data), node("u", "uses")], ["l > u"], ["l.part > u.part"])
    await events_of(document, more={"lent": Lent(), "uses": Uses()})
    assert seen == [{"own": 1}, {"own": 1, "budget": {"max_steps": 4}}]
