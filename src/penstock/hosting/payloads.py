"""Payloads of a hosted run: the requests and responses of model and tool calls, on the way from trace to store.

In the trace they are already bounded and, if the operator wants that, redacted (`penstock.tracing.payloads`). A
recorder takes them from ended calls, and they are stored in the transaction of the events that they belong to. Payloads
beyond the maximum size of the run are replaced by a mark, so that readers see the omission.
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
        """Drop the stored payloads, which are the oldest waiting ones."""
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
    """Whether a recorded request or response is truncated."""
    if isinstance(part, list):  # if messages do not all fit, the first item has the number of missing ones
        return any(isinstance(item, dict) and item.get("truncated") is True for item in part)
    return isinstance(part, dict) and part.get("truncated") is True and "original_bytes" in part
