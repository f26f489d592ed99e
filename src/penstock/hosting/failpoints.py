"""Named failpoints of a host, in addition to those of `runtime.durable.failpoints`.

A failpoint does nothing unless a test has armed it (`penstock.testing.crash_points`).
"""

from __future__ import annotations

from penstock.runtime.durable import failpoints

POINTS = (
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
"""Failpoints in the order in which a run passes them; the last ones are for grants, forks and cancels."""


def failpoint(name: str) -> None:
    """Pass a failpoint: an armed test may end its process here."""
    if failpoints.hook is not None:
        failpoints.hook(name)
