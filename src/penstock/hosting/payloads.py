"""Payloads of a hosted run: what its model and tool calls were given and returned, on the way from trace to store.

The trace has them already bounded and, if the operator wants that, redacted (`penstock.tracing.payloads`). A recorder
takes them from ended calls, and they are stored in the transaction of the events that they belong to. What exceeds the
size of the run is replaced by a mark, so that a reader sees that something was left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from penstock.hosting.limits import HostSettings
from penstock.hosting.ports import PayloadRecord, RunRecord
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.payloads import Payload
from penstock.tracing.record import CallRecord


class PayloadRecorder:
    """Collects the payloads of ended calls of one run until they are stored."""

    def __init__(self, settings: HostSettings, run: RunRecord, now_ms: Callable[[], int]) -> None:
        self._mode: Literal["redacted", "full"] = "full" if settings.record_payloads == "full" else "redacted"
        self._run = run
        self._now_ms = now_ms
        self._left = settings.max_run_payload_bytes
        self.waiting: list[PayloadRecord] = []
        """Payloads that are not stored yet."""

    def take(self, graph: ExecutionGraph, call: CallRecord) -> None:
        """Take the payload of an ended call from the trace, which then need not keep it."""
        with graph.lock:  # a late bill may be changing the same record
            payload, call.extras = call.payload, call.extras._replace(payload=None)
        if payload is not None:
            self.waiting.append(self._record(call.node_id, payload))

    def stored(self, payloads: Sequence[PayloadRecord]) -> None:
        """Drop what was stored: the oldest of those that wait."""
        del self.waiting[: len(payloads)]

    def _record(self, call_id: str, payload: Payload) -> PayloadRecord:
        request, response = (self._fitting(part) for part in payload)
        return PayloadRecord(self._run.id, call_id, self._run.epoch, self._mode, request, response, self._now_ms())

    def _fitting(self, part: Any) -> Any:
        if part is None:
            return None
        size = len(json.dumps(part))
        if size > self._left:
            return {"truncated": True, "original_bytes": size, "content": ""}
        self._left -= size
        return part


def is_truncated(part: Any) -> bool:
    """Whether something of a recorded request or response was left out."""
    if isinstance(part, list):  # of messages that do not all fit, the first place says how many are missing
        return any(isinstance(item, dict) and item.get("truncated") is True for item in part)
    return isinstance(part, dict) and part.get("truncated") is True and "original_bytes" in part
