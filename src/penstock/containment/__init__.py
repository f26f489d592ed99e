"""Limits, budgets, hooks and breakers.

The names of a contained run are here too, and those that few programs need are here alone. They are loaded when they
are first used, because they live in layers above this one; `__init__.pyi` has their types.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ChainMetadata": "penstock.containment.safety",
    "CircuitSnapshot": "penstock.containment.breaker",
    "CircuitState": "penstock.containment.breaker",
    "ContextSnapshot": "penstock.runtime.snapshot",
    "ExecutionConfig": "penstock.containment.limits",
    "ExecutionContext": "penstock.runtime.context",
    "ExecutionGraph": "penstock.tracing.execution_graph",
    "IncompleteOutput": "penstock.runtime.streams",
    "NodeRecord": "penstock.runtime.snapshot",
    "Outcome": "penstock.runtime.calls",
    "UnresolvedBill": "penstock.runtime.bills",
    "WrapOptions": "penstock.runtime.calls",
}

__all__ = [
    "ChainMetadata",
    "CircuitSnapshot",
    "CircuitState",
    "ContextSnapshot",
    "ExecutionConfig",
    "ExecutionContext",
    "ExecutionGraph",
    "IncompleteOutput",
    "NodeRecord",
    "Outcome",
    "UnresolvedBill",
    "WrapOptions",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.containment' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
