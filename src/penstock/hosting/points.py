"""Places where a host may die, by name, beside those of `runtime.durable.points`.

Nothing happens at them unless a test has armed one (`penstock.testing.crash_points`).
"""

from __future__ import annotations

from penstock.runtime.durable import points

POINTS = (
    "chat.said",
    "submit.added",
    "submit.told",
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
    "end.before_kind",
    "end.after_kind",
    "end.before_status",
    "end.after_status",
    "answer.before_finish",
    "answer.after_finish",
    "grant.told",
    "grant.requeued",
    "fork.read",
    "fork.added",
    "cancel.kept",
    "cancel.told",
)
"""In the order in which a run comes by; the last ones are for those that somebody grants more, forks or cancels."""


def passing(name: str) -> None:
    """Here a test may have its process die."""
    if points.hook is not None:
        points.hook(name)
