"""Penstock: an agent-graph runtime whose limits hold.

The public API. Names are loaded when they are first used, so that `import penstock` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.agents.agent import Agent as Agent
    from penstock.agents.agent import AgentResult as AgentResult
    from penstock.agents.compaction import Compaction as Compaction
    from penstock.agents.executor import Executor as Executor
    from penstock.agents.executor import ExecutorResult as ExecutorResult
    from penstock.agents.executor import MaxIterationsReached as MaxIterationsReached
    from penstock.agents.formats import FormatError as FormatError
    from penstock.agents.formats import JsonFormat as JsonFormat
    from penstock.agents.formats import MarkdownFormat as MarkdownFormat
    from penstock.agents.formats import ReActFormat as ReActFormat
    from penstock.agents.formats import TextOutputFormat as TextOutputFormat
    from penstock.agents.formats import XmlFormat as XmlFormat
    from penstock.agents.hooks import Approval as Approval
    from penstock.agents.hooks import Hook as Hook
    from penstock.agents.hooks import HookAbort as HookAbort
    from penstock.agents.loop import AgentLoop as AgentLoop
    from penstock.agents.loop import AgentLoopResult as AgentLoopResult
    from penstock.agents.loop import Conversation as Conversation
    from penstock.agents.loop import Iteration as Iteration
    from penstock.agents.loop import LoopAction as LoopAction
    from penstock.agents.loop import LoopData as LoopData
    from penstock.agents.loop import data_of as data_of
    from penstock.agents.loop import remember as remember
    from penstock.agents.loop import transcript_of as transcript_of
    from penstock.agents.messages import Media as Media
    from penstock.agents.messages import Message as Message
    from penstock.agents.messages import ToolCall as ToolCall
    from penstock.agents.messages import ToolResult as ToolResult
    from penstock.agents.messages import Transcript as Transcript
    from penstock.agents.model import AnswerCut as AnswerCut
    from penstock.agents.model import Model as Model
    from penstock.agents.model import ModelRequest as ModelRequest
    from penstock.agents.model import ModelResponse as ModelResponse
    from penstock.agents.model import ModelSettings as ModelSettings
    from penstock.agents.model import TextDelta as TextDelta
    from penstock.agents.model import ToolCallDelta as ToolCallDelta
    from penstock.agents.model import TruncatedResponse as TruncatedResponse
    from penstock.agents.react import ReActLoop as ReActLoop
    from penstock.agents.scripted import ScriptedModel as ScriptedModel
    from penstock.agents.scripted import ScriptEnded as ScriptEnded
    from penstock.agents.tool_calling import ToolCallingLoop as ToolCallingLoop
    from penstock.agents.tools import Tool as Tool
    from penstock.agents.tools import ToolChain as ToolChain
    from penstock.agents.tools import Tools as Tools
    from penstock.agents.tools import ToolSpec as ToolSpec
    from penstock.agents.tools import tool as tool
    from penstock.clock import Clock as Clock
    from penstock.containment.accounts import Account as Account
    from penstock.containment.accounts import Balance as Balance
    from penstock.containment.accounts import Hold as Hold
    from penstock.containment.breaker import CircuitBreaker as CircuitBreaker
    from penstock.containment.breaker import CircuitSnapshot as CircuitSnapshot
    from penstock.containment.breaker import CircuitState as CircuitState
    from penstock.containment.breaker import PolicyContext as PolicyContext
    from penstock.containment.breaker import PolicyDecision as PolicyDecision
    from penstock.containment.ledger import Amounts as Amounts
    from penstock.containment.ledger import Ledger as Ledger
    from penstock.containment.ledger import LedgerStore as LedgerStore
    from penstock.containment.ledger import MemoryLedgerStore as MemoryLedgerStore
    from penstock.containment.limits import Budget as Budget
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
    from penstock.errors import BudgetExceededError as BudgetExceededError
    from penstock.errors import CancelledError as CancelledError
    from penstock.errors import DeadlockError as DeadlockError
    from penstock.errors import Halted as Halted
    from penstock.errors import InvalidValue as InvalidValue
    from penstock.errors import LedgerError as LedgerError
    from penstock.errors import LedgerUnavailable as LedgerUnavailable
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
    from penstock.flow.step import StepEvent as StepEvent
    from penstock.flow.trace import ExecutionTrace as ExecutionTrace
    from penstock.flow.trace import StepTrace as StepTrace
    from penstock.front_door import contain as contain
    from penstock.kernel.document import parse_graph as parse_graph
    from penstock.kernel.executor import ExecutionResult as ExecutionResult
    from penstock.kernel.executor import ExecutorRegistry as ExecutorRegistry
    from penstock.kernel.executor import Handle as Handle
    from penstock.kernel.executor import NodeExecutor as NodeExecutor
    from penstock.kernel.graph import EdgeSpec as EdgeSpec
    from penstock.kernel.graph import GraphInvalid as GraphInvalid
    from penstock.kernel.graph import GraphSpec as GraphSpec
    from penstock.kernel.graph import NodeSpec as NodeSpec
    from penstock.kernel.graph import Problem as Problem
    from penstock.kernel.settle import Quorum as Quorum
    from penstock.kernel.settle import quorum as quorum
    from penstock.kernel.validate import validate as validate
    from penstock.kernel.values import DataValue as DataValue
    from penstock.money import format_usd as format_usd
    from penstock.policies import ErrorPolicy as ErrorPolicy
    from penstock.providers.clients import contained_async_client as contained_async_client
    from penstock.providers.clients import contained_client as contained_client
    from penstock.providers.scope import contained as contained
    from penstock.runtime.billing.prices import Price as Price
    from penstock.runtime.billing.prices import PriceBook as PriceBook
    from penstock.runtime.billing.usage import Reported as Reported
    from penstock.runtime.billing.usage import Usage as Usage
    from penstock.runtime.call import Call as Call
    from penstock.runtime.calls import Outcome as Outcome
    from penstock.runtime.cancellation import CancellationToken as CancellationToken
    from penstock.runtime.context import ExecutionContext as ExecutionContext
    from penstock.runtime.context import current_call as current_call
    from penstock.runtime.context import current_context as current_context
    from penstock.runtime.durable.journal import Journal as Journal
    from penstock.runtime.durable.journal import JournalMissing as JournalMissing
    from penstock.runtime.durable.journal import fork_journal as fork_journal
    from penstock.runtime.durable.keys import entry_node as entry_node
    from penstock.runtime.durable.keys import idempotency_key as idempotency_key
    from penstock.runtime.durable.keys import known_as as known_as
    from penstock.runtime.durable.shared import SharedBudget as SharedBudget
    from penstock.runtime.graphs.flow_context import FlowContext as FlowContext
    from penstock.runtime.graphs.graph_runtime import GraphRuntime as GraphRuntime
    from penstock.runtime.graphs.graph_runtime import QuorumMissed as QuorumMissed
    from penstock.runtime.graphs.graph_runtime import run_flow as run_flow
    from penstock.runtime.graphs.node_events import NodeEvent as NodeEvent
    from penstock.runtime.graphs.node_work import ExecutorMisbehaved as ExecutorMisbehaved
    from penstock.runtime.options import WrapOptions as WrapOptions
    from penstock.runtime.run import RunSettings as RunSettings
    from penstock.runtime.scheduling.scheduler import NestedTooDeep as NestedTooDeep
    from penstock.runtime.watching.observers import Subscription as Subscription
    from penstock.runtime.watching.registry import CancelResult as CancelResult
    from penstock.runtime.watching.registry import EarlyCancelsFull as EarlyCancelsFull
    from penstock.runtime.watching.registry import RunRegistry as RunRegistry
    from penstock.runtime.watching.snapshot import ContextSnapshot as ContextSnapshot
    from penstock.runtime.watching.snapshot import NodeRecord as NodeRecord
    from penstock.runtime.watching.stream import EventStream as EventStream
    from penstock.runtime.watching.stream import MissedEvents as MissedEvents
    from penstock.runtime.watching.stream import stream_events as stream_events
    from penstock.stops import Stop as Stop
    from penstock.stops import StopReason as StopReason
    from penstock.stops import TerminationReason as TerminationReason
    from penstock.telemetry.collector import otlp_provider as otlp_provider
    from penstock.telemetry.export import OtelExport as OtelExport
    from penstock.telemetry.export import export_to_otel as export_to_otel
    from penstock.tracing.divergence import DivergenceDetector as DivergenceDetector
    from penstock.tracing.events import CallEnded as CallEnded
    from penstock.tracing.events import CallSettled as CallSettled
    from penstock.tracing.events import CallStarted as CallStarted
    from penstock.tracing.events import ChildCompleteTrace as ChildCompleteTrace
    from penstock.tracing.events import ChildSpawnTrace as ChildSpawnTrace
    from penstock.tracing.events import CompactionTrace as CompactionTrace
    from penstock.tracing.events import CustomTrace as CustomTrace
    from penstock.tracing.events import DivergenceTrace as DivergenceTrace
    from penstock.tracing.events import ErrorTrace as ErrorTrace
    from penstock.tracing.events import IterationEndTrace as IterationEndTrace
    from penstock.tracing.events import IterationStartTrace as IterationStartTrace
    from penstock.tracing.events import LimitTrace as LimitTrace
    from penstock.tracing.events import ModelCallTrace as ModelCallTrace
    from penstock.tracing.events import RunCompleted as RunCompleted
    from penstock.tracing.events import RunStarted as RunStarted
    from penstock.tracing.events import SafetyTrace as SafetyTrace
    from penstock.tracing.events import ToolCallTrace as ToolCallTrace
    from penstock.tracing.events import TraceEvent as TraceEvent
    from penstock.tracing.execution_graph import ExecutionGraph as ExecutionGraph
    from penstock.tracing.page import trace_html as trace_html
    from penstock.tracing.redaction import redact as redact
    from penstock.tracing.stats import ExecutionStats as ExecutionStats
    from penstock.tracing.tree import trace_data as trace_data
    from penstock.tracing.tree import trace_json as trace_json
    from penstock.tracing.tree import trace_mermaid as trace_mermaid
    from penstock.tracing.tree import trace_tree as trace_tree

_MODULES: dict[str, tuple[str, ...]] = {
    "penstock.agents.agent": (
        "Agent",
        "AgentResult",
    ),
    "penstock.agents.compaction": ("Compaction",),
    "penstock.agents.executor": (
        "Executor",
        "ExecutorResult",
        "MaxIterationsReached",
    ),
    "penstock.agents.formats": (
        "FormatError",
        "JsonFormat",
        "MarkdownFormat",
        "ReActFormat",
        "TextOutputFormat",
        "XmlFormat",
    ),
    "penstock.agents.hooks": (
        "Approval",
        "Hook",
        "HookAbort",
    ),
    "penstock.agents.loop": (
        "AgentLoop",
        "AgentLoopResult",
        "Conversation",
        "Iteration",
        "LoopAction",
        "LoopData",
        "data_of",
        "remember",
        "transcript_of",
    ),
    "penstock.agents.messages": (
        "Media",
        "Message",
        "ToolCall",
        "ToolResult",
        "Transcript",
    ),
    "penstock.agents.model": (
        "AnswerCut",
        "Model",
        "ModelRequest",
        "ModelResponse",
        "ModelSettings",
        "TextDelta",
        "ToolCallDelta",
        "TruncatedResponse",
    ),
    "penstock.agents.react": ("ReActLoop",),
    "penstock.agents.scripted": (
        "ScriptEnded",
        "ScriptedModel",
    ),
    "penstock.agents.tool_calling": ("ToolCallingLoop",),
    "penstock.agents.tools": (
        "Tool",
        "ToolChain",
        "ToolSpec",
        "Tools",
        "tool",
    ),
    "penstock.clock": ("Clock",),
    "penstock.containment.accounts": (
        "Account",
        "Balance",
        "Hold",
    ),
    "penstock.containment.breaker": (
        "CircuitBreaker",
        "CircuitSnapshot",
        "CircuitState",
        "PolicyContext",
        "PolicyDecision",
    ),
    "penstock.containment.ledger": (
        "Amounts",
        "Ledger",
        "LedgerStore",
        "MemoryLedgerStore",
    ),
    "penstock.containment.limits": (
        "Budget",
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
        "BudgetExceededError",
        "CancelledError",
        "DeadlockError",
        "Halted",
        "InvalidValue",
        "LedgerError",
        "LedgerUnavailable",
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
    "penstock.flow.step": (
        "Step",
        "StepEvent",
    ),
    "penstock.flow.trace": (
        "ExecutionTrace",
        "StepTrace",
    ),
    "penstock.front_door": ("contain",),
    "penstock.kernel.document": ("parse_graph",),
    "penstock.kernel.executor": (
        "ExecutionResult",
        "ExecutorRegistry",
        "Handle",
        "NodeExecutor",
    ),
    "penstock.kernel.graph": (
        "EdgeSpec",
        "GraphInvalid",
        "GraphSpec",
        "NodeSpec",
        "Problem",
    ),
    "penstock.kernel.settle": (
        "Quorum",
        "quorum",
    ),
    "penstock.kernel.validate": ("validate",),
    "penstock.kernel.values": ("DataValue",),
    "penstock.money": ("format_usd",),
    "penstock.policies": ("ErrorPolicy",),
    "penstock.providers.clients": (
        "contained_async_client",
        "contained_client",
    ),
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
    "penstock.runtime.calls": ("Outcome",),
    "penstock.runtime.cancellation": ("CancellationToken",),
    "penstock.runtime.context": (
        "ExecutionContext",
        "current_call",
        "current_context",
    ),
    "penstock.runtime.durable.journal": (
        "Journal",
        "JournalMissing",
        "fork_journal",
    ),
    "penstock.runtime.durable.keys": (
        "entry_node",
        "idempotency_key",
        "known_as",
    ),
    "penstock.runtime.durable.shared": ("SharedBudget",),
    "penstock.runtime.graphs.flow_context": ("FlowContext",),
    "penstock.runtime.graphs.graph_runtime": (
        "GraphRuntime",
        "QuorumMissed",
        "run_flow",
    ),
    "penstock.runtime.graphs.node_events": ("NodeEvent",),
    "penstock.runtime.graphs.node_work": ("ExecutorMisbehaved",),
    "penstock.runtime.options": ("WrapOptions",),
    "penstock.runtime.run": ("RunSettings",),
    "penstock.runtime.scheduling.scheduler": ("NestedTooDeep",),
    "penstock.runtime.watching.observers": ("Subscription",),
    "penstock.runtime.watching.registry": (
        "CancelResult",
        "EarlyCancelsFull",
        "RunRegistry",
    ),
    "penstock.runtime.watching.snapshot": (
        "ContextSnapshot",
        "NodeRecord",
    ),
    "penstock.runtime.watching.stream": (
        "EventStream",
        "MissedEvents",
        "stream_events",
    ),
    "penstock.stops": (
        "Stop",
        "StopReason",
        "TerminationReason",
    ),
    "penstock.telemetry.collector": ("otlp_provider",),
    "penstock.telemetry.export": (
        "OtelExport",
        "export_to_otel",
    ),
    "penstock.tracing.divergence": ("DivergenceDetector",),
    "penstock.tracing.events": (
        "CallEnded",
        "CallSettled",
        "CallStarted",
        "ChildCompleteTrace",
        "ChildSpawnTrace",
        "CompactionTrace",
        "CustomTrace",
        "DivergenceTrace",
        "ErrorTrace",
        "IterationEndTrace",
        "IterationStartTrace",
        "LimitTrace",
        "ModelCallTrace",
        "RunCompleted",
        "RunStarted",
        "SafetyTrace",
        "ToolCallTrace",
        "TraceEvent",
    ),
    "penstock.tracing.execution_graph": ("ExecutionGraph",),
    "penstock.tracing.page": ("trace_html",),
    "penstock.tracing.redaction": ("redact",),
    "penstock.tracing.stats": ("ExecutionStats",),
    "penstock.tracing.tree": (
        "trace_data",
        "trace_json",
        "trace_mermaid",
        "trace_tree",
    ),
}
"""Where each public name lives."""

_HOME = {name: module for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "Account",
    "Agent",
    "AgentLoop",
    "AgentLoopResult",
    "AgentResult",
    "Amounts",
    "AnswerCut",
    "Approval",
    "Balance",
    "Budget",
    "BudgetExceededError",
    "BudgetWindowHook",
    "Call",
    "CallEnded",
    "CallSettled",
    "CallStarted",
    "CancelResult",
    "CancellationToken",
    "CancelledError",
    "ChainMetadata",
    "ChildCompleteTrace",
    "ChildSpawnTrace",
    "CircuitBreaker",
    "CircuitSnapshot",
    "CircuitState",
    "Clock",
    "Compaction",
    "CompactionTrace",
    "ContextSnapshot",
    "Conversation",
    "CustomTrace",
    "DataValue",
    "DeadlockError",
    "Decision",
    "DivergenceDetector",
    "DivergenceTrace",
    "EarlyCancelsFull",
    "EdgeSpec",
    "ErrorPolicy",
    "ErrorTrace",
    "EventStream",
    "ExecutionConfig",
    "ExecutionContext",
    "ExecutionGraph",
    "ExecutionResult",
    "ExecutionStats",
    "ExecutionTrace",
    "Executor",
    "ExecutorMisbehaved",
    "ExecutorRegistry",
    "ExecutorResult",
    "FlowContext",
    "FormatError",
    "FunctionNode",
    "Graph",
    "GraphInvalid",
    "GraphRuntime",
    "GraphSpec",
    "Halted",
    "Handle",
    "History",
    "Hold",
    "Hook",
    "HookAbort",
    "InvalidValue",
    "IsolatedError",
    "Iteration",
    "IterationEndTrace",
    "IterationStartTrace",
    "Journal",
    "JournalMissing",
    "JsonFormat",
    "Ledger",
    "LedgerError",
    "LedgerStore",
    "LedgerUnavailable",
    "LimitTrace",
    "Limits",
    "LoopAction",
    "LoopData",
    "MarkdownFormat",
    "MaxIterationsReached",
    "Media",
    "MemoryLedgerStore",
    "Message",
    "MissedEvents",
    "Model",
    "ModelCallTrace",
    "ModelRequest",
    "ModelResponse",
    "ModelSettings",
    "NestedTooDeep",
    "Node",
    "NodeEvent",
    "NodeExecutor",
    "NodeRecord",
    "NodeSpec",
    "OtelExport",
    "Outcome",
    "PenstockError",
    "PolicyContext",
    "PolicyDecision",
    "Price",
    "PriceBook",
    "Problem",
    "Quorum",
    "QuorumMissed",
    "ReActFormat",
    "ReActLoop",
    "Reported",
    "ResourceUsage",
    "Results",
    "RunCompleted",
    "RunEnded",
    "RunRegistry",
    "RunSettings",
    "RunStarted",
    "SafetyEvent",
    "SafetyTrace",
    "ScriptEnded",
    "ScriptedModel",
    "Session",
    "SharedBudget",
    "ShieldPipeline",
    "Step",
    "StepEvent",
    "StepTimeout",
    "StepTrace",
    "Stop",
    "StopReason",
    "Subscription",
    "TerminationReason",
    "TextDelta",
    "TextOutputFormat",
    "Tool",
    "ToolCall",
    "ToolCallContext",
    "ToolCallDelta",
    "ToolCallTrace",
    "ToolCallingLoop",
    "ToolChain",
    "ToolResult",
    "ToolSpec",
    "Tools",
    "TraceEvent",
    "Transcript",
    "TruncatedResponse",
    "Usage",
    "Verdict",
    "WrapOptions",
    "XmlFormat",
    "contain",
    "contained",
    "contained_async_client",
    "contained_client",
    "current_call",
    "current_context",
    "data_of",
    "entry_node",
    "export_to_otel",
    "fork_journal",
    "format_usd",
    "idempotency_key",
    "known_as",
    "otlp_provider",
    "parse_graph",
    "quorum",
    "read_history",
    "redact",
    "remember",
    "run_flow",
    "stream_events",
    "tool",
    "trace_data",
    "trace_html",
    "trace_json",
    "trace_mermaid",
    "trace_tree",
    "transcript_of",
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
