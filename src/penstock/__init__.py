"""Penstock: an agent-graph runtime whose limits hold.

The public API: the names of everyday use. Names are loaded when they are first used, so that `import penstock` costs
next to nothing. The rest of the API is in modules by subject:

penstock.agents      models, tools, formats and loops        penstock.stores      ledgers, journals and databases
penstock.events      events of runs, and watching runs       penstock.providers   clients of model APIs
penstock.export      runs as text, JSON, Mermaid and HTML    penstock.telemetry   runs as OpenTelemetry spans
penstock.executors   node types for JSON graphs              penstock.testing     tools for tests
penstock.adapters    tools of other frameworks               penstock.containment the names of a contained run
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.agents.agent import Agent as Agent
    from penstock.agents.compaction import Compaction as Compaction
    from penstock.agents.executor import Executor as Executor
    from penstock.agents.formats import TextOutputFormat as TextOutputFormat
    from penstock.agents.hooks import AfterExecutionEvent as AfterExecutionEvent
    from penstock.agents.hooks import AfterIterationEvent as AfterIterationEvent
    from penstock.agents.hooks import BeforeExecutionEvent as BeforeExecutionEvent
    from penstock.agents.hooks import BeforeIterationEvent as BeforeIterationEvent
    from penstock.agents.hooks import Hook as Hook
    from penstock.agents.hooks import HookEvent as HookEvent
    from penstock.agents.loop import AgentLoop as AgentLoop
    from penstock.agents.loop import AgentLoopResult as AgentLoopResult
    from penstock.agents.loop import Iteration as Iteration
    from penstock.agents.loop import LoopAction as LoopAction
    from penstock.agents.loop import LoopData as LoopData
    from penstock.agents.messages import ToolCall as ToolCall
    from penstock.agents.messages import ToolResult as ToolResult
    from penstock.agents.model import Model as Model
    from penstock.agents.model import ModelResponse as ModelResponse
    from penstock.agents.react import ReActLoop as ReActLoop
    from penstock.agents.tools import ToolChain as ToolChain
    from penstock.agents.tools import tool as tool
    from penstock.containment.breaker import CircuitBreaker as CircuitBreaker
    from penstock.containment.breaker import PolicyContext as PolicyContext
    from penstock.containment.breaker import PolicyDecision as PolicyDecision
    from penstock.containment.limits import Budget as Budget
    from penstock.containment.limits import BudgetExceededError as BudgetExceededError
    from penstock.containment.limits import ExecutionConfig as ExecutionConfig
    from penstock.containment.limits import Limits as Limits
    from penstock.containment.limits import ResourceUsage as ResourceUsage
    from penstock.containment.safety import ChainMetadata as ChainMetadata
    from penstock.containment.safety import Decision as Decision
    from penstock.containment.safety import SafetyEvent as SafetyEvent
    from penstock.containment.safety import ToolCallContext as ToolCallContext
    from penstock.containment.shield import ShieldPipeline as ShieldPipeline
    from penstock.containment.shield import Verdict as Verdict
    from penstock.containment.window import BudgetWindowHook as BudgetWindowHook
    from penstock.errors import CancelledError as CancelledError
    from penstock.errors import DeadlockError as DeadlockError
    from penstock.errors import Halted as Halted
    from penstock.errors import InvalidValue as InvalidValue
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import RunEnded as RunEnded
    from penstock.errors import StepTimeout as StepTimeout
    from penstock.flow.execution import Results as Results
    from penstock.flow.graph import Graph as Graph
    from penstock.flow.history import History as History
    from penstock.flow.history import read_history as read_history
    from penstock.flow.isolation import IsolatedError as IsolatedError
    from penstock.flow.node import FunctionNode as FunctionNode
    from penstock.flow.node import Node as Node
    from penstock.flow.session import Session as Session
    from penstock.flow.step import Step as Step
    from penstock.flow.trace import ExecutionTrace as ExecutionTrace
    from penstock.flow.trace import StepTrace as StepTrace
    from penstock.front_door import contain as contain
    from penstock.kernel.executor import DataValue as DataValue
    from penstock.kernel.executor import ExecutionResult as ExecutionResult
    from penstock.kernel.frontier import quorum as quorum
    from penstock.kernel.graph import GraphInvalid as GraphInvalid
    from penstock.policies import ErrorPolicy as ErrorPolicy
    from penstock.providers.scope import contained as contained
    from penstock.runtime.billing.prices import Price as Price
    from penstock.runtime.billing.prices import PriceBook as PriceBook
    from penstock.runtime.billing.usage import Reported as Reported
    from penstock.runtime.billing.usage import Usage as Usage
    from penstock.runtime.call import Call as Call
    from penstock.runtime.calls import WrapOptions as WrapOptions
    from penstock.runtime.cancellation import CancellationToken as CancellationToken
    from penstock.runtime.context import ExecutionContext as ExecutionContext
    from penstock.runtime.context import current_call as current_call
    from penstock.runtime.context import current_context as current_context
    from penstock.runtime.graphs.graph_runtime import FlowContext as FlowContext
    from penstock.runtime.graphs.graph_runtime import GraphRuntime as GraphRuntime
    from penstock.runtime.graphs.node_execution import NodeEvent as NodeEvent
    from penstock.runtime.graphs.node_execution import run_flow as run_flow
    from penstock.runtime.graphs.validation import validate as validate
    from penstock.runtime.run import RunSettings as RunSettings
    from penstock.runtime.snapshot import ContextSnapshot as ContextSnapshot
    from penstock.runtime.snapshot import NodeRecord as NodeRecord
    from penstock.stops import Stop as Stop
    from penstock.stops import StopReason as StopReason
    from penstock.stops import TerminationReason as TerminationReason
    from penstock.tracing.events import ChildCompleteTrace as ChildCompleteTrace
    from penstock.tracing.events import ChildSpawnTrace as ChildSpawnTrace
    from penstock.tracing.events import CustomTrace as CustomTrace
    from penstock.tracing.events import IterationEndTrace as IterationEndTrace
    from penstock.tracing.events import IterationStartTrace as IterationStartTrace
    from penstock.tracing.events import ModelCallTrace as ModelCallTrace
    from penstock.tracing.events import ToolCallTrace as ToolCallTrace
    from penstock.tracing.events import TraceEvent as TraceEvent
    from penstock.tracing.execution_graph import ExecutionGraph as ExecutionGraph
    from penstock.tracing.stats import ExecutionStats as ExecutionStats

_MODULES: dict[str, tuple[str, ...]] = {
    "penstock.agents.agent": ("Agent",),
    "penstock.agents.compaction": ("Compaction",),
    "penstock.agents.executor": ("Executor",),
    "penstock.agents.formats": ("TextOutputFormat",),
    "penstock.agents.hooks": (
        "AfterExecutionEvent",
        "AfterIterationEvent",
        "BeforeExecutionEvent",
        "BeforeIterationEvent",
        "Hook",
        "HookEvent",
    ),
    "penstock.agents.loop": (
        "AgentLoop",
        "AgentLoopResult",
        "Iteration",
        "LoopAction",
        "LoopData",
    ),
    "penstock.agents.messages": (
        "ToolCall",
        "ToolResult",
    ),
    "penstock.agents.model": (
        "Model",
        "ModelResponse",
    ),
    "penstock.agents.react": ("ReActLoop",),
    "penstock.agents.tools": (
        "ToolChain",
        "tool",
    ),
    "penstock.containment.breaker": (
        "CircuitBreaker",
        "PolicyContext",
        "PolicyDecision",
    ),
    "penstock.containment.limits": (
        "Budget",
        "BudgetExceededError",
        "ExecutionConfig",
        "Limits",
        "ResourceUsage",
    ),
    "penstock.containment.safety": (
        "ChainMetadata",
        "Decision",
        "SafetyEvent",
        "ToolCallContext",
    ),
    "penstock.containment.shield": (
        "ShieldPipeline",
        "Verdict",
    ),
    "penstock.containment.window": ("BudgetWindowHook",),
    "penstock.errors": (
        "CancelledError",
        "DeadlockError",
        "Halted",
        "InvalidValue",
        "PenstockError",
        "RunEnded",
        "StepTimeout",
    ),
    "penstock.flow.execution": ("Results",),
    "penstock.flow.graph": ("Graph",),
    "penstock.flow.history": (
        "History",
        "read_history",
    ),
    "penstock.flow.isolation": ("IsolatedError",),
    "penstock.flow.node": (
        "FunctionNode",
        "Node",
    ),
    "penstock.flow.session": ("Session",),
    "penstock.flow.step": ("Step",),
    "penstock.flow.trace": (
        "ExecutionTrace",
        "StepTrace",
    ),
    "penstock.front_door": ("contain",),
    "penstock.kernel.executor": ("DataValue", "ExecutionResult"),
    "penstock.kernel.frontier": ("quorum",),
    "penstock.kernel.graph": ("GraphInvalid",),
    "penstock.policies": ("ErrorPolicy",),
    "penstock.providers.scope": ("contained",),
    "penstock.runtime.billing.prices": (
        "Price",
        "PriceBook",
    ),
    "penstock.runtime.billing.usage": (
        "Reported",
        "Usage",
    ),
    "penstock.runtime.call": ("Call",),
    "penstock.runtime.calls": ("WrapOptions",),
    "penstock.runtime.cancellation": ("CancellationToken",),
    "penstock.runtime.context": (
        "ExecutionContext",
        "current_call",
        "current_context",
    ),
    "penstock.runtime.graphs.graph_runtime": (
        "FlowContext",
        "GraphRuntime",
    ),
    "penstock.runtime.graphs.node_execution": (
        "NodeEvent",
        "run_flow",
    ),
    "penstock.runtime.graphs.validation": ("validate",),
    "penstock.runtime.run": ("RunSettings",),
    "penstock.runtime.snapshot": (
        "ContextSnapshot",
        "NodeRecord",
    ),
    "penstock.stops": (
        "Stop",
        "StopReason",
        "TerminationReason",
    ),
    "penstock.tracing.events": (
        "ChildCompleteTrace",
        "ChildSpawnTrace",
        "CustomTrace",
        "IterationEndTrace",
        "IterationStartTrace",
        "ModelCallTrace",
        "ToolCallTrace",
        "TraceEvent",
    ),
    "penstock.tracing.execution_graph": ("ExecutionGraph",),
    "penstock.tracing.stats": ("ExecutionStats",),
}
"""Where each public name lives."""

_HOME = {name: module for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AfterExecutionEvent",
    "AfterIterationEvent",
    "Agent",
    "AgentLoop",
    "AgentLoopResult",
    "BeforeExecutionEvent",
    "BeforeIterationEvent",
    "Budget",
    "BudgetExceededError",
    "BudgetWindowHook",
    "Call",
    "CancellationToken",
    "CancelledError",
    "ChainMetadata",
    "ChildCompleteTrace",
    "ChildSpawnTrace",
    "CircuitBreaker",
    "Compaction",
    "ContextSnapshot",
    "CustomTrace",
    "DataValue",
    "DeadlockError",
    "Decision",
    "ErrorPolicy",
    "ExecutionConfig",
    "ExecutionContext",
    "ExecutionGraph",
    "ExecutionResult",
    "ExecutionStats",
    "ExecutionTrace",
    "Executor",
    "FlowContext",
    "FunctionNode",
    "Graph",
    "GraphInvalid",
    "GraphRuntime",
    "Halted",
    "History",
    "Hook",
    "HookEvent",
    "InvalidValue",
    "IsolatedError",
    "Iteration",
    "IterationEndTrace",
    "IterationStartTrace",
    "Limits",
    "LoopAction",
    "LoopData",
    "Model",
    "ModelCallTrace",
    "ModelResponse",
    "Node",
    "NodeEvent",
    "NodeRecord",
    "PenstockError",
    "PolicyContext",
    "PolicyDecision",
    "Price",
    "PriceBook",
    "ReActLoop",
    "Reported",
    "ResourceUsage",
    "Results",
    "RunEnded",
    "RunSettings",
    "SafetyEvent",
    "Session",
    "ShieldPipeline",
    "Step",
    "StepTimeout",
    "StepTrace",
    "Stop",
    "StopReason",
    "TerminationReason",
    "TextOutputFormat",
    "ToolCall",
    "ToolCallContext",
    "ToolCallTrace",
    "ToolChain",
    "ToolResult",
    "TraceEvent",
    "Usage",
    "Verdict",
    "WrapOptions",
    "contain",
    "contained",
    "current_call",
    "current_context",
    "quorum",
    "read_history",
    "run_flow",
    "tool",
    "validate",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
