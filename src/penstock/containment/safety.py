"""What a judge may say, and the record of it.

`Decision` is the verdict on one call; `SafetyEvent` is the incident that is kept of it. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock import checks
from penstock.clock import utc_now


class Decision(StrEnum):
    """The verdict on one call."""

    ALLOW = "ALLOW"
    RETRY = "RETRY"
    HALT = "HALT"
    DEGRADE = "DEGRADE"
    QUARANTINE = "QUARANTINE"
    QUEUE = "QUEUE"


@dataclass(frozen=True, slots=True)
class SafetyEvent:
    """One incident: what happened, what was decided, by which hook and why."""

    event_type: str
    decision: Decision
    reason: str
    hook: str
    request_id: str | None = None
    ts: datetime = field(default_factory=utc_now)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("event_type", "reason", "hook"):
            checks.text(name, getattr(self, name))
        checks.instance("decision", self.decision, Decision)
        if self.request_id is not None:
            checks.text("request_id", self.request_id, none="unknown")
        checks.instance("ts", self.ts, datetime)
        checks.mapping("metadata", self.metadata, "values by name")


@dataclass(frozen=True)
class ToolCallContext:
    """What a hook knows of the call it decides on."""

    request_id: str
    tool_name: str = ""
    kind: str = "llm"
    model: str | None = None
    cost_usd: float = 0.0
    """What is held for the call: its hint, or the worst case that is known."""
    chain_id: str = ""
    node_id: str = ""
    org_id: str = ""
    team: str = ""
    service: str = ""
    user_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    """The session the call belongs to; for direct use of a pipeline, a run does not fill it in."""
    endpoint: str | None = None
    """Where the call is sent; for direct use of a pipeline, a run does not fill it in."""
    tokens_in: int | None = None
    """Input tokens, where they are known: a run fills them in for `before_charge`."""
    tokens_out: int | None = None
    """Output tokens, where they are known: a run fills them in for `before_charge`."""

    def __post_init__(self) -> None:
        for name in ("request_id", "tool_name", "kind", "chain_id", "node_id", "org_id", "team", "service"):
            checks.text(name, getattr(self, name))
        checks.number("cost_usd", self.cost_usd, minimum=0)
        for name in ("model", "user_id", "session_id", "endpoint"):
            text = getattr(self, name)
            if text is not None:
                checks.text(name, text, none="unknown")
        checks.labels("tags", self.tags)
        checks.mapping("metadata", self.metadata, "values by name")
        for name in ("tokens_in", "tokens_out"):
            count = getattr(self, name)
            if count is not None:
                checks.integer(name, count, of="tokens", none="unknown")


@dataclass(frozen=True, slots=True)
class ChainMetadata:
    """Who a run belongs to; reaches hooks, events, traces and exports."""

    request_id: str
    chain_id: str
    org_id: str = ""
    team: str = ""
    service: str = ""
    user_id: str | None = None
    model: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("request_id", "chain_id", "org_id", "team", "service"):
            checks.text(name, getattr(self, name))
        for name in ("user_id", "model"):
            text = getattr(self, name)
            if text is not None:
                checks.text(name, text, none="unknown")
        checks.labels("tags", self.tags)

    def to_dict(self) -> dict[str, Any]:
        """Who the run belongs to, as plain data."""
        return {
            "request_id": self.request_id,
            "chain_id": self.chain_id,
            "org_id": self.org_id,
            "team": self.team,
            "service": self.service,
            "user_id": self.user_id,
            "model": self.model,
            "tags": dict(self.tags),
        }
