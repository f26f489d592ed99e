"""Named failpoints, where a test can make the process die.

Nothing happens at a failpoint unless a test has armed it (`penstock.testing.crash_points`): an unarmed one costs one
read of a global. Each call site is `if failpoints.hook is not None: failpoints.hook("…")`.
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
"""Failpoints of journals and shared budgets; packages with others list them in their own modules."""

hook: Callable[[str], None] | None = None
