"""A run as OpenTelemetry spans."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock import (
    Agent,
    ChainMetadata,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    Halted,
    InvalidValue,
    ModelCallTrace,
    Reported,
    RunSettings,
    ToolCall,
    contain,
    tool,
)
from penstock.agents import ScriptedModel
from penstock.telemetry import OtelExport, export_to_otel
from penstock.telemetry.payloads import payload_attributes
from penstock.telemetry.spans import provider_of
from penstock.testing import ManualClock
from penstock.tracing.redaction import Redaction


class Exported:
    """What a provider's spans were when they ended."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> dict[str, str | None]:
        """The name of every span's parent; for names that are there once."""
        names = {span.context.span_id: span.name for span in self.spans}
        return {span.name: names.get(span.parent.span_id) if span.parent else None for span in self.spans}


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.provider.shutdown()


def finish(run: ExecutionContext, export: OtelExport) -> None:
    """End the run, and wait until the export has read all of it."""
    run.end()
    assert export.drain(30.0)
    export._subscription._thread.join(30.0)


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.requirement("T-11")
def test_runs_agents_model_calls_and_tools_are_spans_by_the_genai_conventions(exported: Exported) -> None:
    clock = ManualClock()
    run = ExecutionContext(name="research", clock=clock)
    export = export_to_otel(run, exported.provider)

    def answer() -> None:
        clock.advance(0.25)
        run.report(input_tokens=120, output_tokens=30, cost_usd=0.5, model="claude-3-haiku")

    with run.spawn_child("writer") as child:
        child.llm(answer, name="draft")
        child.tool(lambda: None, name="search")
    finish(run, export)
    assert exported.tree() == {
        "invoke_workflow research": None,
        "invoke_agent writer": "invoke_workflow research",
        "chat claude-3-haiku": "invoke_agent writer",
        "execute_tool search": "invoke_agent writer",
    }
    chat = exported.named("chat claude-3-haiku")
    assert chat.kind is SpanKind.CLIENT
    assert about(chat) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": "claude-3-haiku",
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 30,
        "penstock.call.name": "draft",
        "penstock.call_id": "n000003",
        "penstock.context": "research/writer",
        "penstock.cost.usd": 0.5,
        "penstock.run_id": run.run_id,
        "penstock.status": "success",
    }
    tool = about(exported.named("execute_tool search"))
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "search")
    agent = about(exported.named("invoke_agent writer"))
    assert (agent["gen_ai.operation.name"], agent["gen_ai.agent.name"]) == ("invoke_agent", "writer")
    whole = about(exported.named("invoke_workflow research"))
    assert (whole["gen_ai.operation.name"], whole["gen_ai.workflow.name"]) == ("invoke_workflow", "research")
    assert (whole["penstock.cost.total_usd"], whole["penstock.termination_reason"]) == (0.5, "success")
    assert (export.spans, export.failures, export.dropped) == (4, 0, 0)


def test_a_model_that_only_the_answer_names_names_the_span(exported: Exported) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)

    def answer() -> None:
        assert export.drain(30.0)  # the span has begun, and the model is not known yet
        run.report(cost_usd=0, model="gpt-9")

    run.llm(answer, name="ask")
    finish(run, export)
    attributes = about(exported.named("chat gpt-9"))
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.provider.name"]) == ("gpt-9", "openai")


def test_times_are_those_of_the_records(exported: Exported) -> None:
    clock = ManualClock()
    run = ExecutionContext(clock=clock)
    clock.advance(0.000_000_5)
    run.tool(lambda: clock.advance(0.123_456_789), name="slow")
    clock.advance(60)
    finish(run, export_to_otel(run, exported.provider))
    span = exported.named("execute_tool slow")
    record = run.graph.call("n000002")
    assert span.start_time == record.started_ns + run.graph.wall_offset_ns
    assert span.end_time == record.ended_ns + run.graph.wall_offset_ns
    assert span.end_time - span.start_time == 123_456_789


def test_a_run_that_has_ended_is_exported_all_the_same(exported: Exported) -> None:
    run = ExecutionContext(name="past")
    with run:
        run.tool(lambda: None, name="done")
    finish(run, export_to_otel(run, exported.provider))
    assert exported.tree() == {"invoke_workflow past": None, "execute_tool done": "invoke_workflow past"}


def test_child_context_exports_the_run_it_belongs_to(exported: Exported) -> None:
    run = ExecutionContext(name="whole")
    child = run.spawn_child("part")
    finish(run, export_to_otel(child, exported.provider))
    assert exported.tree() == {"invoke_workflow whole": None, "invoke_agent part": "invoke_workflow whole"}


def test_run_is_a_child_of_the_current_span(exported: Exported) -> None:
    run = ExecutionContext()
    with exported.provider.get_tracer("program").start_as_current_span("request"):
        export = export_to_otel(run, exported.provider)
    finish(run, export)
    assert exported.tree()["invoke_workflow main"] == "request"


def test_calls_of_a_loop_are_children_of_their_iteration(exported: Exported) -> None:
    run = ExecutionContext(name="loop")
    export = export_to_otel(run, exported.provider)
    run.tool(lambda: None, name="before")
    run.start_iteration()
    run.tool(lambda: run.tool(lambda: None, name="inner"), name="outer")
    with run.spawn_child("sub"):
        pass
    run.end_iteration("terminate")
    run.tool(lambda: None, name="after")
    finish(run, export)
    assert exported.tree() == {
        "invoke_workflow loop": None,
        "execute_tool before": "invoke_workflow loop",
        "invoke_agent loop": "invoke_workflow loop",
        "execute_tool outer": "invoke_agent loop",
        "execute_tool inner": "execute_tool outer",
        "invoke_agent sub": "invoke_agent loop",
        "execute_tool after": "invoke_workflow loop",
    }
    iteration = about(exported.named("invoke_agent loop"))
    assert (iteration["penstock.iteration"], iteration["penstock.iteration.action"]) == (1, "terminate")


async def test_steps_of_a_graph_are_internal_spans(exported: Exported) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)
    graph = Graph("g")
    graph.add_step(FunctionNode("a", lambda ctx: ctx.tool(lambda: 1, name="inside")), "first")
    await graph.execute(run)
    await asyncio.to_thread(finish, run, export)
    assert exported.tree()["execute_tool inside"] == "first"
    assert exported.named("first").kind is SpanKind.INTERNAL
    assert "gen_ai.operation.name" not in about(exported.named("first"))


def test_a_failure_is_an_error_with_its_type_and_the_next_attempt_links_to_it(exported: Exported) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)
    outcomes = iter([TimeoutError("no answer, password=hunter2"), OSError("still none"), None])

    def fetch() -> None:
        if (outcome := next(outcomes)) is not None:
            raise outcome

    run.tool(fetch, name="fetch", retries=2)
    finish(run, export)
    first, second, third = [span for span in exported.spans if span.name == "execute_tool fetch"]
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "TimeoutError: no answer, password=[redacted]"
    assert about(first)["error.type"] == "TimeoutError"
    assert [about(span).get("penstock.attempt") for span in (first, second, third)] == [None, 2, 3]
    assert [[link.context for link in span.links] for span in (first, second, third)] == [
        [],
        [first.context],
        [second.context],
    ]
    assert third.status.status_code is StatusCode.UNSET


def test_refusal_has_the_limit_and_its_figures(exported: Exported) -> None:
    run = ExecutionContext(ExecutionConfig(max_cost_usd=0.01, max_steps=5, max_retries_total=None))
    export = export_to_otel(run, exported.provider)
    with pytest.raises(Halted):
        run.llm(lambda: None, name="big", model="gpt-9", cost_hint_usd=1.0)
    finish(run, export)
    chat = exported.named("chat gpt-9")
    assert chat.status.status_code is StatusCode.ERROR
    assert about(chat)["penstock.stop_reason"] == about(chat)["error.type"] == "budget_exceeded"
    root = exported.named("invoke_workflow main")
    (limit,) = [event for event in root.events if event.name == "penstock.limit_reached"]
    attributes = dict(limit.attributes or {})
    assert (attributes["penstock.call_id"], attributes["penstock.budget.unit"]) == ("n000002", "usd")
    assert (attributes["penstock.budget.limit"], attributes["penstock.budget.asked"]) == (0.01, 1.0)
    assert about(root)["penstock.budget.usd.limit"] == 0.01
    assert about(root)["penstock.budget.steps.used"] == 0


def test_abandoned_call_keeps_its_parent_and_its_late_bill_is_exported(exported: Exported) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)
    release, settled = threading.Event(), threading.Event()
    watching = run.observe(lambda events: settled.set() if any(e.kind == "call_settled" for e in events) else None)
    with run.spawn_child("agent") as child, pytest.raises(Halted):
        child.llm(release.wait, 30, name="slow", model="m", cost_hint_usd=0.25, timeout_s=0.01)
    release.set()
    assert settled.wait(30)
    finish(run, export)
    watching._thread.join(30)
    assert about(exported.named("chat m"))["penstock.abandoned"] is True
    assert exported.tree()["chat m"] == "invoke_agent agent"
    root = exported.named("invoke_workflow main")
    (settled,) = [event for event in root.events if event.name == "penstock.call_settled"]
    assert dict(settled.attributes or {})["penstock.cost.usd"] == 0.25
    assert about(root)["penstock.cost.total_usd"] == 0.25


@pytest.mark.parametrize("content", [False, True])
def test_data_of_custom_events_is_exported_only_with_content(exported: Exported, content: bool) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider, content=content)
    run.trace_custom("plan", {"goal": "dam", "api_key": "abc"})
    finish(run, export)
    (event,) = exported.named("invoke_workflow main").events
    expected = {"penstock.event.name": "plan"}
    if content:
        expected["penstock.event.data"] = '{"goal": "dam", "api_key": "[redacted]"}'
    assert dict(event.attributes or {}) == expected


def test_owner_of_the_run_is_an_attribute_of_its_span_only(exported: Exported) -> None:
    metadata = ChainMetadata(request_id="r1", chain_id="c1", team="grid", user_id="u1", tags={"tier": "gold"})
    run = ExecutionContext(metadata=metadata)
    finish(run, export_to_otel(run, exported.provider))
    tags = about(exported.named("invoke_workflow main"))
    assert (tags["penstock.team"], tags["user.id"], tags["penstock.tag.tier"]) == ("grid", "u1", "gold")


def test_a_beginning_that_was_lost_does_not_lose_the_call(exported: Exported) -> None:
    run = ExecutionContext(settings=RunSettings(max_kept_calls=1))
    for _ in range(5_000):
        run.tool(lambda: None, name="again")
    export = export_to_otel(run, exported.provider)
    finish(run, export)
    assert export.dropped == run.graph.dropped_events > 0
    assert export.failures == 0
    assert len(exported.spans) == export.spans > 0
    assert about(exported.named("invoke_workflow main"))["penstock.termination_reason"] == "success"


class Raising(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if span.name == "execute_tool bad":
            raise ValueError("no")


def test_a_tracer_that_raises_is_counted_and_the_rest_is_written(exported: Exported) -> None:
    exported.provider.add_span_processor(Raising())
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)
    for name in ("good", "bad", "better"):
        run.tool(lambda: None, name=name)
    finish(run, export)
    assert export.failures >= 1
    assert isinstance(export.last_error, ValueError)
    assert {"execute_tool good", "execute_tool better", "invoke_workflow main"} <= exported.tree().keys()


def test_the_cost_of_a_run_is_left_out_while_nothing_of_it_is_known(exported: Exported) -> None:
    for known in (False, True):
        run = contain(name=f"known {known}")
        export = export_to_otel(run, exported.provider)
        run.llm(lambda: "an answer without usage")
        if known:
            run.llm(lambda: Reported.of("priced", cost_usd=0.25))
        finish(run, export)
    totals = [about(span) for span in exported.spans if "penstock.termination_reason" in about(span)]
    assert [total.get("penstock.cost.total_usd") for total in totals] == [None, 0.25]
    assert [total["penstock.cost.unknown_calls"] for total in totals] == [1, 1]


def test_without_a_provider_the_programs_own_is_used_which_may_be_none() -> None:
    run = ExecutionContext()
    export = export_to_otel(run)
    run.tool(lambda: None)
    finish(run, export)
    assert (export.spans, export.failures) == (2, 0)
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)


def test_an_export_can_be_closed_before_the_run_ends(exported: Exported) -> None:
    run = ExecutionContext()
    export = export_to_otel(run, exported.provider)
    assert export.drain(30.0)
    export.close()
    export._subscription._thread.join(30.0)
    run.tool(lambda: None, name="unseen")
    run.end()
    assert exported.spans == []


def test_what_is_no_context_is_refused() -> None:
    with pytest.raises(InvalidValue, match="context"):
        export_to_otel("run")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "named", "provider"),
    [
        ("claude-3", None, "anthropic"),
        ("gpt-4o", None, "openai"),
        ("openai/gpt-4o", None, "openai"),
        ("gemini-2", None, "gcp.gemini"),
        ("llama", None, "_OTHER"),
        (None, None, "_OTHER"),
        ("claude-3", "aws.bedrock", "aws.bedrock"),
    ],
)
def test_provider_is_taken_from_metadata_or_the_model_name(model: str | None, named: str | None, provider: str) -> None:
    assert provider_of(model, {} if named is None else {"provider": named}) == provider


# Payloads.


async def converse(exported: Exported, content: bool, mode: Any = "full") -> None:
    """Run an agent whose tool is given a secret, and export it."""

    @tool
    def search(query: str, api_key: str) -> list[str]:
        """Search the web."""
        return [query]

    model = ScriptedModel([ToolCall("c1", "search", {"query": "dams", "api_key": "0123456789ab"}), "done"])
    with ExecutionContext(settings=RunSettings(record_payloads=mode)) as run:
        await Agent(model, "Be brief.", tools=[search]).run("go", run)
        run.llm(lambda prompt: prompt.upper(), "raw", name="raw", model="gpt-raw")
    export = export_to_otel(run, exported.provider, content=content)
    assert await asyncio.to_thread(export.drain, 10.0)


@pytest.mark.requirement("T-12")
async def test_recorded_payloads_have_the_names_of_the_conventions(exported: Exported) -> None:
    await converse(exported, content=True)
    searched = exported.named("execute_tool search").attributes
    assert json.loads(searched["gen_ai.tool.call.arguments"]) == {"query": "dams", "api_key": "[redacted]"}
    assert json.loads(searched["gen_ai.tool.call.result"]) == ["dams"]
    first, second = [span.attributes for span in exported.spans if span.name == "chat scripted"]
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "go"}]},
    ]
    arguments = {"query": "dams", "api_key": "[redacted]"}
    called = {"type": "tool_call", "id": "c1", "name": "search", "arguments": arguments}
    message = {"role": "assistant", "parts": [called], "finish_reason": "tool_calls"}
    assert json.loads(first["gen_ai.output.messages"]) == [message]
    response = {"type": "tool_call_response", "id": "c1", "response": '["dams"]'}
    assert json.loads(second["gen_ai.input.messages"])[-1] == {"role": "tool", "parts": [response]}
    raw = exported.named("chat gpt-raw").attributes
    assert (raw["penstock.call.input"], raw["penstock.call.output"]) == ("raw", "RAW")


@pytest.mark.requirement("T-12")
@pytest.mark.parametrize(("content", "mode"), [(False, "full"), (True, "off")])
async def test_spans_have_no_payload_without_content_or_recording(exported: Exported, content: bool, mode: str) -> None:
    await converse(exported, content, mode)
    names = {name for span in exported.spans for name in span.attributes}
    assert not {name for name in names if "messages" in name or ".tool.call." in name or "penstock.call.input" in name}


@pytest.mark.requirement("T-12")
def test_truncated_messages_and_media_are_exported() -> None:
    recorded = ModelCallTrace(
        input=[
            {"truncated": True, "original_bytes": 9_000, "omitted_messages": 3},
            {"role": "user", "content": ["look", {"media_type": "image/png", "url": "https://host/a.png"}]},
        ],
        output={"truncated": True, "original_bytes": 800, "content": "long"},
    )
    about = payload_attributes(recorded, Redaction())
    assert about["penstock.input.omitted_messages"] == 3
    picture = {"type": "uri", "modality": "image", "mime_type": "image/png", "uri": "https://host/a.png"}
    look = {"role": "user", "parts": [{"type": "text", "content": "look"}, picture]}
    assert json.loads(str(about["gen_ai.input.messages"])) == [look]
    long = {"role": "assistant", "parts": [{"type": "text", "content": "long"}]}
    assert json.loads(str(about["gen_ai.output.messages"])) == [long | {"truncated": True, "original_bytes": 800}]


@pytest.mark.requirement("T-12")
@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ([{"role": "user"}], "text"),
        ([{"role": "user", "content": [{"type": "text", "text": "go"}], "tool_calls": 0}], ["a", 1]),
        ([{"role": "user", "content": 5, "tool_calls": ["odd"]}], {"role": "assistant"}),
        ([1, 2], {"content": "no messages"}),
        ([{"omitted_messages": 2}], None),
        ({"prompt": "go"}, 4.5),
    ],
)
def test_payloads_of_any_shape_are_exported(exported: Exported, given: Any, returned: Any) -> None:
    with ExecutionContext(settings=RunSettings(record_payloads="full")) as run:
        run.record_event(ModelCallTrace(name="own", model="own", input=given, output=returned))
    export = export_to_otel(run, exported.provider, content=True)
    assert export.drain(10.0)
    assert (export.failures, len(exported.spans)) == (0, 2)
