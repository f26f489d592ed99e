"""Recorded payloads in memory."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.hosting.ports import PayloadRecord
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.rules import PAYLOAD_RECORDINGS, check_payloads

PAYLOAD = RecordCodec(
    PayloadRecord,
    names=("run_id", "call_id"),
    numbers=("epoch", "at_ms"),
    documents=("request", "response"),
    choices={"recording": PAYLOAD_RECORDINGS},
)


class MemoryPayloadStore:
    """Payloads by run and call."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_remove(self._remove_run)
        self._payloads: dict[tuple[str, str], PayloadRecord] = {}

    async def put(self, run_id: str, payloads: Sequence[PayloadRecord], *, epoch: int = 0) -> None:
        check_payloads(run_id, payloads)
        encoded = [PAYLOAD.encode(payload) for payload in payloads]
        self._runs.fence(run_id, epoch)
        for payload in encoded:
            key = payload.run_id, payload.call_id
            self._runs.undo.entry(self._payloads, key)
            self._payloads[key] = payload

    async def get(self, run_id: str, call_id: str) -> PayloadRecord | None:
        payload = self._payloads.get((run_id, call_id))
        return None if payload is None else PAYLOAD.decode(payload)

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        codec.number("before_ms", before_ms)
        codec.limit(limit)
        old = sorted((payload.at_ms, *key) for key, payload in self._payloads.items() if payload.at_ms < before_ms)
        for _, run_id, call_id in old[:limit]:
            self._remove((run_id, call_id))
        return min(len(old), limit)

    def _remove_run(self, run_id: str) -> None:
        for key in [key for key in self._payloads if key[0] == run_id]:
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        self._runs.undo.entry(self._payloads, key)
        del self._payloads[key]
