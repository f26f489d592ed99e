"""The events of runs, and watching runs from outside: streams, subscriptions, and the registry of active runs."""

from __future__ import annotations

from penstock.flow.step import StepEvent
from penstock.runtime.observers import Subscription
from penstock.runtime.watching.registry import CancelResult, EarlyCancelsFull, RunRegistry
from penstock.runtime.watching.stream import EventStream, MissedEvents, stream_events
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    CallWaiting,
    ChildCompleteTrace,
    ChildSpawnTrace,
    CompactionTrace,
    CustomTrace,
    DivergenceTrace,
    ErrorTrace,
    IterationEndTrace,
    IterationStartTrace,
    LimitTrace,
    ModelCallTrace,
    RunCompleted,
    RunStarted,
    SafetyTrace,
    ToolCallTrace,
    TraceEvent,
)

__all__ = [
    "CallEnded",
    "CallSettled",
    "CallStarted",
    "CallWaiting",
    "CancelResult",
    "ChildCompleteTrace",
    "ChildSpawnTrace",
    "CompactionTrace",
    "CustomTrace",
    "DivergenceDetector",
    "DivergenceTrace",
    "EarlyCancelsFull",
    "ErrorTrace",
    "EventStream",
    "IterationEndTrace",
    "IterationStartTrace",
    "LimitTrace",
    "MissedEvents",
    "ModelCallTrace",
    "RunCompleted",
    "RunRegistry",
    "RunStarted",
    "SafetyTrace",
    "StepEvent",
    "Subscription",
    "ToolCallTrace",
    "TraceEvent",
    "stream_events",
]
