"""The states of a call, and the transitions between them.

One table. All code that changes the state of a call follows it, and the diagram in the docs is drawn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Status = Literal["created", "running", "success", "fail", "halt"]
CallKind = Literal["llm", "tool", "system"]

KINDS: frozenset[str] = frozenset(get_args(CallKind))

TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    "created": frozenset({"running", "fail", "halt"}),
    "running": frozenset({"success", "fail", "halt"}),
    "success": frozenset(),
    "fail": frozenset(),
    "halt": frozenset(),
}

TERMINAL: frozenset[Status] = frozenset(status for status, onward in TRANSITIONS.items() if not onward)


def mermaid() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> created"]
    lines += [f"    {status} --> {onward}" for status, after in TRANSITIONS.items() for onward in sorted(after)]
    lines += [f"    {status} --> [*]" for status in TRANSITIONS if status in TERMINAL]
    return "\n".join(lines)
