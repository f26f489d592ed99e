"""Where the verdicts of hooks are recorded: in the pipeline, and in the log of the run they were given in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from penstock import (
    ChainMetadata,
    Decision,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    InvalidValue,
    SafetyEvent,
    ShieldPipeline,
    StopReason,
    ToolCallContext,
    WrapOptions,
)
from penstock.events import SafetyTrace

CALL = ToolCallContext(request_id="direct")


class Says:
    """A hook of every slot that gives one answer, and keeps the contexts it was called with."""

    def __init__(self, answer: Decision) -> None:
        self.answer = answer
        self.contexts: list[ToolCallContext] = []

    def before_llm_call(self, ctx: ToolCallContext) -> Decision:
        self.contexts.append(ctx)
        return self.answer

    before_tool_call = before_llm_call

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision:
        return self.before_llm_call(ctx)

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Decision:
        return self.before_llm_call(ctx)

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Decision:
        return self.before_llm_call(ctx)


def fails() -> None:
    raise ConnectionResetError("gone")


def kinds(events: list[SafetyEvent]) -> list[tuple[str, str, Decision]]:
    return [(event.hook, event.reason, event.decision) for event in events]


CALLS: dict[str, Callable[[ExecutionContext], object]] = {
    "pre_dispatch": lambda run: run.wrap_llm_call(lambda: 1),
    "tool_dispatch": lambda run: run.wrap_tool_call(lambda: 1),
    "egress": lambda run: run.egress("https://x.example.org"),
    "retry": lambda run: run.wrap_tool_call(fails),
    "budget": lambda run: run.wrap_tool_call(lambda: 1),
}


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize("decision", [Decision.HALT, Decision.DEGRADE, Decision.RETRY, Decision.QUARANTINE])
@pytest.mark.parametrize("slot", CALLS)
def test_every_event_of_a_wrapped_call_is_in_the_pipeline_and_in_the_run(slot: str, decision: Decision) -> None:
    pipeline = ShieldPipeline(**{slot: Says(decision)})
    run = ExecutionContext(pipeline=pipeline)
    CALLS[slot](run)
    (event,) = pipeline.get_events()
    assert (event.decision, event.metadata["slot"]) == (decision, slot)
    assert kinds(run.get_snapshot().events) == kinds([event])


@pytest.mark.requirement("C-19")
def test_runs_that_share_a_pipeline_keep_their_own_events_and_the_pipeline_has_all() -> None:
    pipeline = ShieldPipeline(tool_dispatch=Says(Decision.HALT))
    one, two = ExecutionContext(pipeline=pipeline, name="one"), ExecutionContext(pipeline=pipeline, name="two")
    one.wrap_tool_call(lambda: 1)
    two.wrap_tool_call(lambda: 1)
    two.wrap_tool_call(lambda: 1)
    assert [len(run.get_snapshot().events) for run in (one, two)] == [1, 2]
    assert [event.request_id for event in pipeline.get_events()] == [
        one.metadata.request_id,
        two.metadata.request_id,
        two.metadata.request_id,
    ]


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize("slot", CALLS)
def test_a_direct_hook_call_inside_a_run_writes_the_same_event_into_its_log(slot: str) -> None:
    pipeline = ShieldPipeline(**{slot: Says(Decision.HALT)})
    ask: dict[str, Callable[[], Decision]] = {
        "pre_dispatch": lambda: pipeline.before_llm_call(CALL),
        "tool_dispatch": lambda: pipeline.before_tool_call(CALL),
        "egress": lambda: pipeline.before_egress(CALL, "https://x.example.org", "GET"),
        "retry": lambda: pipeline.on_error(CALL, ValueError()),
        "budget": lambda: pipeline.before_charge(CALL, 0.10),
    }
    with ExecutionContext(pipeline=pipeline) as run:
        assert ask[slot]() is Decision.HALT
        assert run.get_snapshot().events == pipeline.get_events()
        assert [event.request_id for event in run.get_snapshot().events] == ["direct"]
        assert [event.request_id for event in run.history() if isinstance(event, SafetyTrace)] == ["direct"]


@pytest.mark.requirement("C-19")
def test_a_direct_hook_call_is_recorded_under_the_call_and_the_context_it_is_made_in() -> None:
    pipeline = ShieldPipeline(pre_dispatch=Says(Decision.HALT))
    standalone = ExecutionContext(pipeline=pipeline)

    def events(run: ExecutionContext) -> list[SafetyTrace]:
        return [event for event in run.history() if isinstance(event, SafetyTrace)]

    outcome = standalone.call_tool(lambda: pipeline.before_llm_call(CALL))  # without `with`: inside the call
    (event,) = events(standalone)
    assert (outcome.value, event.parent_id) == (Decision.HALT, outcome.call.node_id)

    with ExecutionContext(pipeline=pipeline) as run, run.spawn_child("child"):
        pipeline.before_llm_call(CALL)
    assert [event.source for event in events(run)] == ["main/child"]
    assert len(events(standalone)) == 1


@pytest.mark.requirement("C-19")
def test_a_direct_hook_call_elsewhere_reaches_no_run() -> None:
    pipeline, other = (ShieldPipeline(pre_dispatch=Says(Decision.HALT)) for _ in range(2))
    with ExecutionContext(pipeline=pipeline) as run:
        other.before_llm_call(CALL)  # of a pipeline that is not the run's
    pipeline.before_llm_call(CALL)  # after the run
    assert run.get_snapshot().events == []
    assert (len(pipeline.get_events()), len(other.get_events())) == (1, 1)


@pytest.mark.requirement("C-19")
def test_the_charge_hook_knows_the_tokens() -> None:
    hook = Says(Decision.ALLOW)
    run = ExecutionContext(pipeline=ShieldPipeline(hook, budget=hook))
    run.llm(lambda: run.report(cost_usd=0.10, input_tokens=120, output_tokens=80))
    assert [(one.tokens_in, one.tokens_out) for one in hook.contexts] == [(None, None), (120, 80)]


# provider_error where the caller loops.


def loop(run: ExecutionContext, calls: int, options: WrapOptions | None = None) -> list[Decision]:
    return [run.wrap_llm_call(fails, options) for _ in range(calls)]


def types(run: ExecutionContext) -> list[str]:
    return [event.event_type for event in run.get_snapshot().events]


@pytest.mark.requirement("C-11", "C-19")
def test_a_caller_that_loops_gets_a_provider_error_event_once_when_its_retry_is_refused() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, 2))
    assert loop(run, 2, WrapOptions("ask")) == [Decision.RETRY, Decision.RETRY]
    assert types(run) == []
    assert loop(run, 2) == [Decision.HALT, Decision.HALT]
    assert types(run) == ["provider_error", "retry_budget_exceeded", "retry_budget_exceeded"]
    event = run.get_snapshot().events[0]
    assert (event.hook, event.decision, event.metadata["operation_name"]) == ("ExecutionContext", Decision.HALT, "ask")
    assert event.metadata["node_id"] == run.get_snapshot().nodes[1].node_id  # the failure, not the refused call
    assert event.reason.startswith("ConnectionResetError: gone; the retry budget has nothing left")
    assert run.stop is not None
    assert run.stop.reason is StopReason.RETRY_BUDGET_EXCEEDED


@pytest.mark.requirement("C-19")
async def test_a_caller_that_loops_and_awaits_gets_the_event_too() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, 1))
    assert [await run.awrap_tool_call(fails) for _ in range(2)] == [Decision.RETRY, Decision.HALT]
    assert types(run) == ["provider_error", "retry_budget_exceeded"]


@pytest.mark.requirement("C-19")
def test_a_failure_that_was_retried_in_place_has_no_second_event() -> None:
    exhausted = ExecutionContext(ExecutionConfig(None, None, 1))
    loop(exhausted, 2, WrapOptions(retry_policy_override=5))
    assert types(exhausted) == ["provider_error", "retry_budget_exceeded"]

    answers: list[Any] = [ConnectionResetError("gone"), "fine"]

    def recovers() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    recovered = ExecutionContext(ExecutionConfig(None, None, 1))
    assert recovered.wrap_llm_call(recovers, WrapOptions(retry_policy_override=1)) is Decision.ALLOW
    assert recovered.wrap_llm_call(lambda: "never") is Decision.HALT
    assert types(recovered) == ["retry_budget_exceeded"]


@pytest.mark.requirement("C-19")
def test_a_failure_that_a_hook_refused_to_retry_is_not_a_provider_error() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, 1), ShieldPipeline(retry=Says(Decision.HALT)))
    assert loop(run, 2) == [Decision.HALT, Decision.HALT]
    assert types(run) == ["hook_denied", "retry_budget_exceeded"]


@pytest.mark.requirement("C-19")
def test_a_retry_budget_without_a_failure_gives_no_provider_error() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, 0))
    assert run.wrap_llm_call(fails) is Decision.HALT
    assert types(run) == ["retry_budget_exceeded"]


def test_a_step_that_recovers_by_its_policy_leaves_no_provider_error() -> None:
    answers: list[Any] = [ConnectionResetError("gone"), "fine"]

    def step(ctx: ExecutionContext) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> ExecutionContext:
        graph = Graph("g")
        graph.add_step(FunctionNode("n", step), "a", error_policy=ErrorPolicy(on_error="retry", retry_count=1))
        run = ExecutionContext(ExecutionConfig(None, None, 1))
        assert (await graph.execute(run))["a"] == "fine"
        assert await run.awrap_tool_call(fails) is Decision.HALT
        return run

    assert types(asyncio.run(main())) == ["retry_budget_exceeded"]


@pytest.mark.requirement("C-15", "C-19")
def test_the_context_of_hooks_equals_a_constructed_one() -> None:
    hook = Says(Decision.ALLOW)
    run = ExecutionContext(pipeline=ShieldPipeline(hook), metadata=ChainMetadata("r", "c", team="t", tags={"a": "b"}))
    run.wrap_llm_call(lambda: 1, WrapOptions("ask", cost_estimate_hint=0.25, model="m"))
    (received,) = hook.contexts
    made = ToolCallContext(
        "r", "ask", "llm", "m", 0.25, chain_id="c", node_id="n000002", team="t", tags={"a": "b"}, session_id=None
    )
    assert received == made
    assert (repr(received), asdict(received)) == (repr(made), asdict(made))
    assert replace(received, endpoint="e") == replace(made, endpoint="e")
    with pytest.raises(FrozenInstanceError):
        received.tool_name = "another"  # type: ignore[misc]


@pytest.mark.requirement("C-19")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 7),
        ("request_id", None),
        ("tool_name", None),
        ("kind", 1),
        ("model", 5),
        ("team", []),
        ("cost_usd", float("nan")),
        ("cost_usd", -1),
        ("cost_usd", True),
        ("tags", None),
        ("tags", ["env"]),
        ("tags", {"env": 1}),
        ("tags", {1: "prod"}),
        ("metadata", None),
        ("metadata", "text"),
        ("metadata", {1: "one"}),
        ("session_id", 7),
        ("endpoint", b"https://api.example.com"),
        ("tokens_in", -1),
        ("tokens_in", 1.5),
        ("tokens_out", True),
        ("tokens_out", "12"),
    ],
)
def test_a_context_for_hooks_names_the_argument_that_is_wrong(field: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be"):
        ToolCallContext(**{"request_id": "r", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("event_type", None),
        ("decision", "HALT"),
        ("reason", 5),
        ("hook", None),
        ("request_id", 5),
        ("ts", "now"),
        ("metadata", [1]),
        ("metadata", {1: "one"}),
    ],
)
def test_a_safety_event_names_the_argument_that_is_wrong(field: str, value: object) -> None:
    given = {"event_type": "own_rule", "decision": Decision.HALT, "reason": "too many pages", "hook": "MyRule"}
    with pytest.raises(InvalidValue, match=f"^{field} must be"):
        SafetyEvent(**{**given, field: value})  # type: ignore[arg-type]
