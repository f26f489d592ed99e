"""A worker of a hosted chat service and its client, in processes that may be killed or stopped; see `fork_server`.

Each process opens the stores, requests the answer under the same id as those before it, works on the run when it can
claim it, answers the approval, grants more where a limit has halted the run, and writes to the log what it found in the
stores at the end. What the model bills and what the tools do is written there before the result is returned.

Leases are long, so that a busy machine never loses one. Instead of waiting for the lease of a dead process, the next
one has a clock that is ahead of it by more than a lease. Where Temporal dispatches the run (`temporal`), the next one
gets it when the heartbeats of the dead one have stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

from penstock.agents.model import ModelRequest, ModelResponse
from penstock.chat.service import ChatService
from penstock.engines.temporal import TemporalEngine, TemporalSettings
from penstock.hosting import dispatched
from penstock.hosting import host as hosting_host
from penstock.hosting.host import HostSettings, RunHost, RunLimits
from penstock.hosting.ports import Conflict, HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook, default_prices
from penstock.runtime.durable.keys import idempotency_key
from penstock.storage import Stores, open_stores
from penstock.testing import crash_points
from tests.nodes.graphs import graph, node, registry
from tests.reliability.crash_driver import FileLog
from tests.reliability.fork_server import serve
from tests.runtime.durable.journalled import ITEM, Log, Thinker, tools

ANN, CHAT, RUN, FORK = "ann", "c", "r", "f"
SETTINGS = HostSettings(lease_s=30, tick_s=0.05, drain_s=0)
LATER_NS = 40_000_000_000
"""By how much the clock of each process is ahead of that of the one before it: more than a lease."""
QUIET_NS = 100_000_000
"""Minimum time to the next renewal of the lease when a process stops: none is being written then."""
HEARTBEAT_S = 1.0
SWEPT_S = 0.5
"""A run that is stored and that the engine does not know of is dispatched after this time."""
AMPLE = RunLimits(max_cost_usd="5")
TIGHT = RunLimits(max_cost_usd="5", max_api_calls=5)
"""Less than the run needs."""
MORE = RunLimits(max_api_calls=20)

ANSWERED = graph(
    [
        node("start", "chat-start"),
        node("thinks", "agent", model="thinker", tools=["look", "count"]),
        node("list", "constant", value=["a", "b", "c"]),
        node("each", "map", graph=ITEM, parallel=3),
        node("both", "merge", mode="text"),
        node("may", "approval", question="May it be written?"),
        node("writer", "agent", model="thinker", stream=True),
    ],
    [
        "start > thinks",
        "start > list",
        "list > each",
        "thinks > both",
        "each > both",
        "both > may",
        "may.approved > writer",
    ],
)
"""A chat answered by an agent with two turns of two tools, beside a map; then an approval and a writer."""

default_prices().register("thinker", Price(1, 10))


class LaterClock:
    """The machine's clocks, with wall time and time including suspends ahead by `ahead_ns`."""

    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self, ahead_ns: int) -> None:
        self.ahead_ns = ahead_ns

    def time_ns(self) -> int:
        return time.time_ns() + self.ahead_ns

    def passed_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


class BillingModel(Thinker):
    """Bills before it answers, as providers do; stops its process in the call `stop_in`."""

    def __init__(self, log: FileLog, clock: LaterClock, stop_in: str | None) -> None:
        super().__init__(Log())
        self._file_log = log
        self._clock = clock
        self._stop_in = stop_in
        self.host: RunHost | None = None

    async def request(self, request: ModelRequest) -> ModelResponse:
        turn = sum(message.role == "assistant" for message in request.messages)
        key = str(idempotency_key())
        self._file_log.write(key=key, billed=(100 + turn) * 1_000 + 10 * 10_000)
        if self._stop_in is not None and key.startswith(self._stop_in):
            await self._stop()
        await asyncio.sleep(0.001)
        return await super().request(request)

    async def _stop(self) -> None:
        """Stop the process just before it records the response, so that recording it is the first thing it does later.

        Not during another write: a process that stops inside a transaction keeps its locks.
        """
        self._stop_in = None
        await asyncio.sleep(0.1)
        host = self.host
        assert host is not None
        while host._next_renew_ns - host._context.steady.time_ns() < QUIET_NS:  # noqa: ASYNC110  # renewals have no event
            await asyncio.sleep(0.005)
        crash_points.arm("llm.before_append", die=self._stop_now)

    def _stop_now(self) -> None:
        time.sleep(0.2)  # blocks the loop, so that its threads finish what they are writing
        self._file_log.write(stops=os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        self._clock.ahead_ns += 100 * LATER_NS  # it was stopped for so long that every lease has expired


async def answer_chat(command: dict[str, Any]) -> None:
    """Do one process's part."""
    log = FileLog(command["log"], command["epoch"])
    clock = LaterClock(command["epoch"] * LATER_NS)
    async with await open_stores(command["url"]) as stores:
        assert isinstance(stores, Stores)
        await stores.graphs.save("g", ANN, "g", ANSWERED, now_ms=0)
        claims_before: dict[str, int] = {}
        for run_id in (RUN, FORK):
            log.write(recorded=[f"{run_id}/{entry.key}" for entry in await stores.journal.load(run_id)], run=run_id)
            before = await stores.runs.get(run_id)
            claims_before[run_id] = 0 if before is None else before.epoch
        model = BillingModel(log, clock, command.get("stop_in"))
        services = {"models": {"thinker": model}, "tools": tools(log)}
        story = command.get("story", "chat")
        prices = PriceBook() if story == "unpriced" else None
        host = model.host = RunHost(
            stores,
            executors=registry(),
            services=services,
            settings=SETTINGS,
            prices=prices,
            clock=clock,
            engine=_engine(command),
        )
        chats = ChatService(host, stores.chats, clock=clock)
        if story == "early":
            await _cancel_before_submitting(host, chats)
        async with host:
            await _as_client(host, chats, story)
        totals = host.stats()["totals"]
        for run_id in (RUN, FORK):
            if (run := await stores.runs.get(run_id)) is not None:
                facts = await facts_of(stores, run)
                log.write(**facts, totals=totals, claims_before=claims_before[run_id])


def _engine(command: dict[str, Any]) -> TemporalEngine | None:
    if command.get("temporal") is None:
        return None
    dispatched.REDISPATCH_S = hosting_host.TIDY_S = SWEPT_S
    url, queue = command["temporal"], command["queue"]
    return TemporalEngine(TemporalSettings.parse(url), queues=(queue,), queue=queue, heartbeat_s=HEARTBEAT_S)


async def _as_client(host: RunHost, chats: ChatService, story: str) -> None:
    await chats.create_chat(owner=ANN, graph_id="g", chat_id=CHAT)
    limits = TIGHT if story == "grant" else AMPLE
    turn = await chats.stream_chat(CHAT, "go", owner=ANN, run_id=RUN, limits=limits)
    if story == "cancel":
        await _cancel_while_waiting(host)
    else:
        await _follow_to_end(host, turn.run_id)
    if story == "fork":
        await host.fork(RUN, owner=ANN, at="writer", run_id_new=FORK)
        await _follow_to_end(host, FORK)


async def _follow_to_end(host: RunHost, run_id: str) -> RunRecord:
    while True:
        async with aclosing(host.events(run_id)) as events:
            async for event in events:
                if event.type == "run.waiting":
                    await _answer(host, event)
        run = await host.wait(run_id)
        if run.status != "halted":
            return run
        with suppress(Conflict):
            await host.grant(run_id, MORE, by="eve")


async def _answer(host: RunHost, event: HostedEvent) -> None:
    approval = await host.stores.approvals.get(event.data["approval_id"])
    if approval is not None and approval.state == "waiting":
        with suppress(Conflict):
            await host.answer(approval.id, "approved", by="bob")


async def _cancel_before_submitting(host: RunHost, chats: ChatService) -> None:
    """On a host that is not started: a started one would claim the run immediately."""
    await chats.create_chat(owner=ANN, graph_id="g", chat_id=CHAT)
    await host.cancel(RUN, reason="never mind", by="bob")
    await chats.stream_chat(CHAT, "go", owner=ANN, run_id=RUN, limits=AMPLE)


async def _cancel_while_waiting(host: RunHost) -> None:
    async with aclosing(host.events(RUN)) as events:
        async for event in events:
            if event.type == "run.waiting":
                await host.cancel(RUN, reason="enough", by="bob")
    await host.wait(RUN)


async def facts_of(stores: Stores, run: RunRecord) -> dict[str, Any]:
    """Everything the stores have about a run."""
    events = await _all_events(stores, run.id)
    *account, held, api_calls = await asyncio.to_thread(_balance, stores, f"run:{run.id}")
    messages, _ = await stores.chats.messages(CHAT)
    return {
        "left": run.id,
        "status": run.status,
        "error": run.error,
        "output": run.output,
        "claims": run.epoch,
        "worker": run.worker,
        "event_types": [event.type for event in events],
        "seqs": [event.seq for event in events],
        "last": dict(events[-1].data),
        "entries": sorted(entry.key for entry in await stores.journal.load(run.id)),
        "conversation": [[message.role, message.content, message.data.get("state")] for message in messages],
        "approvals": [[approval.key, approval.state] for approval in await stores.approvals.list(run_id=run.id)],
        "record": [run.cost_nanos, run.unresolved_nanos, run.tokens_in, run.tokens_out],
        "account": account,
        "held": held,
        "unresolved_bills": sorted(await asyncio.to_thread(stores.ledger.unresolved, f"{run.id}/")),
        "api_calls": api_calls,
        "unknown_costs": run.unknown_costs,
    }


def _balance(stores: Stores, account: str) -> list[int]:
    try:
        found = stores.ledger.balance(account)
    except KeyError:  # the run was stopped before it could spend anything
        return [0] * 6
    used = [found.spent_nanos, found.unresolved_nanos, found.tokens_in, found.tokens_out]
    return [*used, found.held_nanos, found.api_calls]


async def _all_events(stores: Stores, run_id: str) -> Sequence[HostedEvent]:
    found: list[HostedEvent] = []
    while page := await stores.events.read(run_id, len(found)):
        found += page
    return found


if __name__ == "__main__":
    serve(answer_chat)
