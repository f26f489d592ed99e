"""The code examples of the design document on containment, quoted as written there and run.

Only the import lines are changed (`tests/scenarios/examples.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import pytest

import penstock
from penstock import (
    BudgetWindowHook,
    ChainMetadata,
    CircuitBreaker,
    ContextSnapshot,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    NodeRecord,
    PolicyContext,
    SafetyEvent,
    ShieldPipeline,
    ToolCallContext,
    WrapOptions,
)
from penstock.testing import ManualClock
from tests.scenarios.examples import digest, run, takes_what_is_declared

IMPORTS = """\
from veronica_core.containment import ExecutionContext, ExecutionConfig
from veronica_core.containment import ChainMetadata, WrapOptions, ContextSnapshot
"""
CHAIN_METADATA = """\
@dataclass(frozen=True)
class ChainMetadata:
    request_id: str           # Unique ID for this specific request
    chain_id: str             # Logical grouping ID (agent run, job, user action)
    org_id: str               # Organisation identifier (for multi-tenant deployments)
    team: str                 # Team or cost-centre name
    service: str              # Service or agent name
    user_id: str | None       # End-user ID, if known
    model: str | None         # Primary model name (e.g. "gpt-4o"), if known
    tags: dict[str, str]      # Arbitrary key/value labels (e.g. {"env": "prod"})
"""
EXECUTION_CONFIG = """\
@dataclass(frozen=True)
class ExecutionConfig:
    max_cost_usd: float        # Chain-level USD spending ceiling (hard stop)
    max_steps: int             # Maximum number of wrap calls before HALT
    max_retries_total: int     # Chain-wide retry budget across all nodes
    timeout_ms: int            # Wall-clock timeout in milliseconds (0 = disabled)
"""
WRAP_OPTIONS = """\
@dataclass(frozen=True)
class WrapOptions:
    operation_name: str              # Human-readable label for this node (default: "")
    cost_estimate_hint: float        # Estimated cost in USD; used for pre-flight check
    timeout_ms: int | None           # Per-call timeout; overrides config.timeout_ms
    retry_policy_override: int | None  # Max retries for this call only; overrides chain default
"""
EXECUTION_CONTEXT = """\
class ExecutionContext:
    def __init__(
        self,
        config: ExecutionConfig,
        pipeline: ShieldPipeline | None = None,
        metadata: ChainMetadata | None = None,
    ) -> None: ...

    # Context manager
    def __enter__(self) -> ExecutionContext: ...
    def __exit__(self, exc_type, exc_val, exc_tb) -> None: ...

    def wrap_llm_call(
        self,
        fn: Callable[[], Any],
        options: WrapOptions | None = None,
    ) -> Decision: ...

    def wrap_tool_call(
        self,
        fn: Callable[[], Any],
        options: WrapOptions | None = None,
    ) -> Decision: ...

    def record_event(self, event: SafetyEvent) -> None: ...

    def get_snapshot(self) -> ContextSnapshot: ...

    def abort(self, reason: str) -> None: ...
"""
NODE_RECORD = """\
@dataclass
class NodeRecord:
    node_id: str                        # UUID for this node
    parent_id: str | None               # Parent node_id, or None at chain root
    kind: Literal["llm", "tool"]        # Call type
    operation_name: str                 # From WrapOptions.operation_name
    start_ts: datetime                  # UTC timestamp when wrap was entered
    end_ts: datetime | None             # UTC timestamp when wrap exited (None if in-flight)
    status: Literal[                    # Terminal status
        "ok",
        "halted",
        "aborted",
        "timeout",
        "error",
    ]
    cost_usd: float                     # Actual cost charged (0.0 if not known)
    retries_used: int                   # Retries consumed by this node
"""
CONTEXT_SNAPSHOT = """\
@dataclass(frozen=True)
class ContextSnapshot:
    chain_id: str
    request_id: str
    step_count: int
    cost_usd_accumulated: float
    retries_used: int
    aborted: bool
    abort_reason: str | None
    elapsed_ms: float
    nodes: list[NodeRecord]
    events: list[SafetyEvent]
"""
EXAMPLE_1 = """\
from veronica_core.containment import (
    ExecutionContext,
    ExecutionConfig,
    ChainMetadata,
    WrapOptions,
)
from veronica_core.shield.pipeline import ShieldPipeline
from veronica_core.shield.types import Decision

config = ExecutionConfig(
    max_cost_usd=0.50,
    max_steps=10,
    max_retries_total=3,
    timeout_ms=15_000,
)

meta = ChainMetadata(
    request_id="req-001",
    chain_id="chain-001",
    org_id="acme",
    team="ml-platform",
    service="summariser",
    user_id="user-42",
    model="gpt-4o",
    tags={"env": "prod"},
)

pipeline = ShieldPipeline()  # configure hooks as needed

with ExecutionContext(config=config, pipeline=pipeline, metadata=meta) as ctx:
    decision = ctx.wrap_llm_call(
        fn=lambda: call_llm(prompt="Summarise this document."),
        options=WrapOptions(operation_name="summarise", cost_estimate_hint=0.02),
    )
    if decision != Decision.ALLOW:
        print(f"Call blocked: {decision}")

snap = ctx.get_snapshot()
print(f"Total cost: ${snap.cost_usd_accumulated:.4f}, steps: {snap.step_count}")
"""
EXAMPLE_2 = """\
from veronica_core.containment import ExecutionContext, ExecutionConfig, WrapOptions
from veronica_core.shield.types import Decision

config = ExecutionConfig(
    max_cost_usd=2.00,
    max_steps=20,
    max_retries_total=5,
    timeout_ms=60_000,
)

ctx = ExecutionContext(config=config)

try:
    for step in range(100):  # Loop is bounded by ExecutionConfig, not the range
        decision = ctx.wrap_llm_call(
            fn=lambda: agent_step(step),
            options=WrapOptions(operation_name=f"agent_step_{step}"),
        )
        if decision == Decision.HALT:
            snap = ctx.get_snapshot()
            print(
                f"Chain halted at step {snap.step_count}: "
                f"last event={snap.events[-1].event_type if snap.events else 'none'}"
            )
            break
        process_result(step)
finally:
    snap = ctx.get_snapshot()
    print(f"Final: steps={snap.step_count}, cost=${snap.cost_usd_accumulated:.4f}")
"""
BLOCKS = (
    IMPORTS,
    CHAIN_METADATA,
    EXECUTION_CONFIG,
    WRAP_OPTIONS,
    EXECUTION_CONTEXT,
    NODE_RECORD,
    CONTEXT_SNAPSHOT,
    EXAMPLE_1,
    EXAMPLE_2,
)


def test_the_quotations_are_the_code_blocks_of_the_document() -> None:
    assert digest(*BLOCKS) == "b57fb6385475b25542f11650d25f3712114ba41f9b99685a076d0917cb8d1a54"


def limited(max_steps: int | None = None, max_retries_total: int | None = None, **options: Any) -> ExecutionContext:
    return ExecutionContext(
        ExecutionConfig(max_cost_usd=None, max_steps=max_steps, max_retries_total=max_retries_total), **options
    )


class Deny:
    """A hook that halts each model call."""

    def before_llm_call(self, ctx: ToolCallContext) -> Decision:
        return Decision.HALT


# Section 1, the problem.


@pytest.mark.requirement("C-2")
def test_ten_calls_of_nine_cents_stop_at_the_ceiling_of_the_chain() -> None:
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=0.10, max_steps=100, max_retries_total=3, timeout_ms=0))
    options = WrapOptions(cost_estimate_hint=0.09)
    assert [ctx.wrap_llm_call(lambda: "text", options) for _ in range(10)] == [Decision.ALLOW] + [Decision.HALT] * 9
    assert ctx.get_snapshot().cost_usd_accumulated == 0.09


# Section 3, the invariants.


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("stopped_by", ["steps", "abort"])
def test_every_subsequent_wrap_call_of_a_stopped_chain_returns_halt(stopped_by: str) -> None:
    ran: list[int] = []
    with limited(max_steps=1) as ctx:
        assert ctx.wrap_llm_call(lambda: "text") is Decision.ALLOW
        if stopped_by == "abort":
            ctx.abort("the user left")
        assert ctx.wrap_llm_call(lambda: ran.append(1)) is Decision.HALT
    assert ctx.wrap_llm_call(lambda: ran.append(2)) is Decision.HALT
    assert ctx.wrap_tool_call(lambda: ran.append(3)) is Decision.HALT
    assert ran == []


@pytest.mark.requirement("C-12")
def test_the_results_before_a_forced_stop_are_kept() -> None:
    ctx = limited(max_steps=1)
    ctx.wrap_tool_call(lambda: "page", WrapOptions(operation_name="fetch"))
    assert ctx.wrap_tool_call(lambda: "more") is Decision.HALT
    assert ctx.partial_results == {"fetch": "page"}
    assert [node.status for node in ctx.get_snapshot().nodes] == ["ok", "halted"]


# Section 4, the API.


def test_the_import_path_of_the_document() -> None:
    imported = run(IMPORTS)
    for name in ("ExecutionContext", "ExecutionConfig", "ChainMetadata", "WrapOptions", "ContextSnapshot"):
        assert imported[name] is getattr(penstock, name)


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


DECLARED = {
    CHAIN_METADATA: ChainMetadata,
    EXECUTION_CONFIG: ExecutionConfig,
    WRAP_OPTIONS: WrapOptions,
    NODE_RECORD: NodeRecord,
    CONTEXT_SNAPSHOT: ContextSnapshot,
}
KNOWN = {
    "dataclass": dataclass,
    "datetime": datetime,
    "Any": Any,
    "Literal": Literal,
    "Callable": Callable,
    "Decision": Decision,
    "ShieldPipeline": ShieldPipeline,
    "SafetyEvent": SafetyEvent,
}
"""The names that the declarations of the document use and do not import."""


@pytest.mark.parametrize("text", DECLARED, ids=lambda text: DECLARED[text].__name__)
def test_a_dataclass_begins_with_the_fields_of_the_document(text: str) -> None:
    kind = DECLARED[text]
    declared = run(text, **KNOWN, NodeRecord=NodeRecord)[kind.__name__]
    names = fields_of(declared)
    assert fields_of(kind)[: len(names)] == names
    assert kind.__dataclass_params__.frozen >= declared.__dataclass_params__.frozen


@pytest.mark.requirement("C-1", "C-8")
def test_the_context_has_the_methods_of_the_document() -> None:
    text = f"from __future__ import annotations\n{EXECUTION_CONTEXT}"  # its methods return the class itself
    names = {**KNOWN, "ExecutionConfig": ExecutionConfig, "ChainMetadata": ChainMetadata, "WrapOptions": WrapOptions}
    declared = run(text, **names)["ExecutionContext"]
    methods = [name for name, value in vars(declared).items() if callable(value)]
    assert methods == [
        "__init__",
        "__enter__",
        "__exit__",
        "wrap_llm_call",
        "wrap_tool_call",
        "record_event",
        "get_snapshot",
        "abort",
    ]
    for name in methods:
        assert takes_what_is_declared(getattr(ExecutionContext, name), getattr(declared, name)), name


@pytest.mark.requirement("C-7", "C-15")
def test_only_the_ids_of_chain_metadata_are_required_and_no_option_is() -> None:
    meta = ChainMetadata(request_id="req-001", chain_id="chain-001")
    assert (meta.user_id, meta.model, meta.tags) == (None, None, {})
    options = WrapOptions()
    assert (options.operation_name, options.timeout_ms, options.retry_policy_override) == ("", None, None)
    for frozen in (meta, options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.model = "gpt-4o"  # type: ignore[union-attr,misc]


class Recording:
    """A hook in every slot that records its calls and abstains."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_llm_call(self, ctx: ToolCallContext) -> None:
        self.calls.append(("before_llm_call", ctx.tool_name))

    def before_tool_call(self, ctx: ToolCallContext) -> None:
        self.calls.append(("before_tool_call", ctx.tool_name))

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> None:
        self.calls.append(("before_charge", cost_usd))

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> None:
        self.calls.append(("on_error", type(err).__name__))


@pytest.mark.requirement("C-5", "C-6", "C-8")
def test_a_wrapped_call_goes_through_the_steps_of_the_method_reference() -> None:
    hook = Recording()
    pipeline = ShieldPipeline(pre_dispatch=hook, tool_dispatch=hook, retry=hook, budget=hook)
    breaker = CircuitBreaker(failure_threshold=2)
    ctx = limited(max_retries_total=5, pipeline=pipeline, breaker=breaker)
    options = WrapOptions(operation_name="plan", cost_estimate_hint=0.02)

    assert ctx.wrap_llm_call(lambda: "text", options) is Decision.ALLOW
    assert hook.calls == [("before_llm_call", "plan"), ("before_charge", 0.02)]
    snap = ctx.get_snapshot()
    assert (snap.step_count, snap.cost_usd_accumulated, snap.retries_used) == (1, 0.02, 0)

    hook.calls.clear()
    for _ in range(2):
        assert ctx.wrap_tool_call(lambda: 1 / 0, WrapOptions(operation_name="search")) is Decision.RETRY
    assert hook.calls == [("before_tool_call", "search"), ("on_error", "ZeroDivisionError")] * 2
    assert ctx.get_snapshot().retries_used == 2

    hook.calls.clear()
    assert breaker.check(PolicyContext(cost_usd=0.02, step_count=1)).allowed is False
    assert ctx.wrap_llm_call(lambda: "never", options) is Decision.HALT
    assert ctx.get_snapshot().events[-1].event_type == "circuit_open"


@pytest.mark.requirement("C-13")
def test_record_event_appends_to_the_log_of_the_chain() -> None:
    event = SafetyEvent("own_rule", Decision.HALT, "too many pages", "MyRule")
    with ExecutionContext() as ctx:
        ctx.record_event(event)
    assert ctx.get_snapshot().events == [event]


@pytest.mark.requirement("C-4")
def test_abort_halts_and_raises_nothing() -> None:
    ctx = ExecutionContext()
    ctx.abort("the user left")
    assert ctx.cancellation.is_cancelled
    assert ctx.wrap_llm_call(lambda: "never") is Decision.HALT
    snap = ctx.get_snapshot()
    assert (snap.aborted, snap.abort_reason) == (True, "the user left")


# Section 6, the stop reasons.


def of_budget() -> ExecutionContext:
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=0.05, max_steps=None, max_retries_total=None))
    ctx.wrap_llm_call(lambda: "text", WrapOptions(cost_estimate_hint=0.05))
    return ctx


def of_retries() -> ExecutionContext:
    ctx = limited(max_retries_total=1)
    ctx.wrap_tool_call(lambda: 1 / 0)
    return ctx


def of_circuit() -> ExecutionContext:
    breaker = CircuitBreaker(failure_threshold=1)
    breaker.record_failure()
    return ExecutionContext(breaker=breaker)


def of_steps() -> ExecutionContext:
    ctx = limited(max_steps=1)
    ctx.wrap_tool_call(lambda: "page")
    return ctx


def of_timeout() -> ExecutionContext:
    clock = ManualClock()
    config = ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=None, timeout_ms=100)
    ctx = ExecutionContext(config, clock=clock)
    clock.advance(0.2)
    return ctx


def of_abort() -> ExecutionContext:
    ctx = ExecutionContext()
    ctx.abort("the user left")
    return ctx


def of_window() -> ExecutionContext:
    hook = BudgetWindowHook(max_calls=1)
    ctx = ExecutionContext(pipeline=ShieldPipeline(pre_dispatch=hook))
    ctx.wrap_llm_call(lambda: "text")
    return ctx


STOPS = {
    "budget_exceeded": of_budget,
    "retry_budget_exceeded": of_retries,
    "circuit_open": of_circuit,
    "step_limit_exceeded": of_steps,
    "timeout": of_timeout,
    "aborted": of_abort,
    "provider_rate_limit": of_window,
}


@pytest.mark.requirement("C-11")
@pytest.mark.parametrize("reason", STOPS)
def test_a_stop_of_the_chain_is_an_event_of_the_context(reason: str) -> None:
    ctx = STOPS[reason]()
    assert ctx.wrap_llm_call(lambda: "never") is Decision.HALT
    stops = [event for event in ctx.get_snapshot().events if event.event_type == reason]
    assert {(event.hook, event.decision) for event in stops} == {("ExecutionContext", Decision.HALT)}


@pytest.mark.requirement("C-11")
def test_provider_error_is_the_reason_where_the_call_retries_in_place() -> None:
    ctx = limited(max_retries_total=1)
    assert ctx.wrap_llm_call(lambda: 1 / 0, WrapOptions(retry_policy_override=3)) is Decision.HALT
    assert "provider_error" in [event.event_type for event in ctx.get_snapshot().events]


@pytest.mark.requirement("C-19")
def test_provider_error_is_the_reason_where_the_caller_loops() -> None:
    ctx = limited(max_retries_total=2)
    decisions = []
    for _ in range(5):
        decisions.append(ctx.wrap_llm_call(lambda: 1 / 0))
        if decisions[-1] is Decision.HALT:
            break
    assert decisions[-1] is Decision.HALT
    assert "provider_error" in [event.event_type for event in ctx.get_snapshot().events]


# Section 7, the pipeline.


@pytest.mark.requirement("C-19")
def test_a_tool_call_context_needs_a_request_id_only() -> None:
    pipeline = ShieldPipeline(pre_dispatch=Deny())
    assert pipeline.before_llm_call(ToolCallContext(request_id="req-001")) is Decision.HALT
    assert [event.request_id for event in pipeline.get_events()] == ["req-001"]


@pytest.mark.requirement("C-19")
def test_the_events_of_the_pipeline_are_in_the_log_of_the_chain() -> None:
    pipeline = ShieldPipeline(pre_dispatch=Deny())
    ctx = ExecutionContext(pipeline=pipeline)
    assert ctx.wrap_llm_call(lambda: "never") is Decision.HALT
    (event,) = pipeline.get_events()
    assert (event.hook, event.decision) == ("Deny", Decision.HALT)
    (logged,) = ctx.get_snapshot().events
    assert (logged.event_type, logged.hook, logged.reason) == (event.event_type, event.hook, event.reason)


@pytest.mark.requirement("C-16")
def test_a_pipeline_alone_and_a_context_alone_work() -> None:
    context = ToolCallContext(request_id="req-001", tool_name="summarise")
    assert ShieldPipeline().before_llm_call(context) is Decision.ALLOW
    assert limited().wrap_llm_call(lambda: "text") is Decision.ALLOW
    assert limited(pipeline=ShieldPipeline()).wrap_llm_call(lambda: "text") is Decision.ALLOW


# Section 9, the examples.


@pytest.mark.requirement("C-6", "C-15")
def test_example_1_single_request_chain(capsys: pytest.CaptureFixture[str]) -> None:
    def call_llm(prompt: str) -> str:
        return f"summary of {prompt!r}"

    snap = run(EXAMPLE_1, call_llm=call_llm)["snap"]
    assert capsys.readouterr().out == "Total cost: $0.0200, steps: 1\n"
    assert (snap.chain_id, snap.request_id) == ("chain-001", "req-001")


@pytest.mark.requirement("C-3", "C-11")
def test_example_2_agent_loop_with_step_limit(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []
    processed: list[int] = []
    run(EXAMPLE_2, agent_step=ran.append, process_result=processed.append)
    assert capsys.readouterr().out == (
        "Chain halted at step 20: last event=step_limit_exceeded\nFinal: steps=20, cost=$0.0000\n"
    )
    assert ran == processed == list(range(20))
