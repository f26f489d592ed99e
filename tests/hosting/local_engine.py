"""An engine in memory, for tests of hosts: it dispatches, repeats and wakes as one in other processes does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.hosting.engine import (
    CannotWork,
    Ended,
    EngineHealth,
    EngineUnavailable,
    Fence,
    Waiting,
    Why,
    Work,
    WorkResult,
    stretch_of,
)
from penstock.hosting.ports import RunRecord

RETRY_S = 1.0


class LocalServer:
    """What the hosts of a fleet share: the runs that are dispatched, and the hosts that work."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.works: list[Work] = []
        self.is_away = False
        self.stretches: list[tuple[str, Fence]] = []
        """Each call of a host's work."""
        self.failures: list[str] = []
        """Why a host could not work on a run."""
        self._news: dict[str, asyncio.Event] = {}
        self._after: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def dispatch(self, run: RunRecord, why: Why | None = None) -> None:
        after = stretch_of(run.fence) if why is None else 0
        self._after[run.id] = max(after, self._after.get(run.id, 0))
        self._news.setdefault(run.id, asyncio.Event()).set()
        if run.id not in self.tasks:
            self.tasks[run.id] = asyncio.create_task(self._drive(run.id, stretch_of(run.fence)))

    async def _drive(self, run_id: str, stretch: int) -> None:
        news = self._news[run_id]
        while True:
            stretch += 1
            news.clear()
            result = await self._stretch(run_id, stretch)
            if isinstance(result, Ended) and self._after[run_id] < stretch:
                del self.tasks[run_id], self._news[run_id], self._after[run_id]
                return
            if isinstance(result, Waiting):
                pause_s = None if result.until_ms is None else max(0, result.until_ms - self.now_ms()) / 1_000
                await asyncio.wait((task := asyncio.create_task(news.wait()),), timeout=pause_s)
                task.cancel()

    async def _stretch(self, run_id: str, stretch: int) -> WorkResult:
        attempt = 0
        while True:
            attempt += 1
            while not self.works:  # noqa: ASYNC110  # simulated time
                await asyncio.sleep(RETRY_S)
            work = self.works[attempt % len(self.works)]
            self.stretches.append((run_id, Fence(stretch, attempt)))
            try:
                return await work(run_id, Fence(stretch, attempt), "local")
            except CannotWork as error:
                self.failures.append(str(error))
                await asyncio.sleep(RETRY_S)


class LocalEngine:
    """The engine of one host."""

    queue: str | None = "local"

    def __init__(self, server: LocalServer, *, is_worker: bool = True) -> None:
        self._server = server
        self._is_worker = is_worker
        self._work: Work | None = None

    async def start(self, work: Work) -> None:
        self._work = work
        if self._is_worker:
            self._server.works.append(work)

    async def drain(self) -> None:
        if self._work in self._server.works:
            self._server.works.remove(self._work)

    async def close(self) -> None:
        self._work = None

    async def dispatch(self, run: RunRecord) -> None:
        self._reach().dispatch(run)

    async def nudge(self, run: RunRecord, why: Why) -> None:
        self._reach().dispatch(run, why)

    def _reach(self) -> LocalServer:
        if self._server.is_away:
            raise EngineUnavailable("it is away")
        return self._server

    async def health(self) -> EngineHealth:
        return EngineHealth(not self._server.is_away, "local")
