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
"""Failpoints of journals and shared budgets."""

HOSTED_POINTS = (
    "submit.added",
    "claim.taken",
    "claim.adopted",
    "start.before_event",
    "events.before_append",
    "events.after_append",
    "approval.put",
    "approval.waiting",
    "approval.answered",
    "approval.got",
    "end.decided",
    "end.before_commit",
    "end.committed",
    "grant.committed",
    "fork.read",
    "fork.added",
    "cancel.kept",
    "cancel.committed",
)
"""Failpoints that a host adds, in the order in which a run passes them; the last are for grants, forks and cancels."""

hook: Callable[[str], None] | None = None
