"""Places where a process may die, by name.

Nothing happens at them unless a test has armed one (`penstock.testing.crash_points`): to pass by costs one look at a
global. Each call site is `if points.hook is not None: points.hook("…")`.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "node.started",
    "node.before_append",
    "node.after_append",
    "node.replayed",
    "llm.before_call",
    "llm.before_append",
    "llm.after_append",
    "tool.before_call",
    "tool.before_append",
    "tool.after_append",
    "value.before_append",
    "value.after_append",
    "hold.before",
    "hold.after",
    "settle.before",
    "settle.after",
    "graph.after_last_node",
    "fork.before_append",
    "fork.after_append",
)
"""Those of journals and shared budgets; whoever has others lists them where they are."""

hook: Callable[[str], None] | None = None
