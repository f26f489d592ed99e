"""A worker of a hosted chat service, and its client, in processes that may be killed or stopped.

Forked by the server of `crash_driver`. Each process opens the stores, asks for the answer under the same id as those
before it, works on the run when it can claim it, answers what is asked, grants more where a limit has halted it, and
writes to the log what the run was left as. What the model bills and what the tools do stands there as well, written
before anybody has the result.
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
from penstock.hosting.host import HostSettings, RunHost, RunLimits
from penstock.hosting.ports import Conflict
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook, default_prices
from penstock.runtime.durable.keys import idempotency_key
from penstock.storage import Stores, open_stores
from penstock.testing import crash_points
from tests.nodes.graphs import graph, node, registry
from tests.reliability.crash_driver import FileLog, serve
from tests.runtime.durable.journalled import ITEM, Log, Thinker, tools

ANN, CHAT, RUN, FORK = "ann", "c", "r", "f"
SETTINGS = HostSettings(lease_s=0.5, tick_s=0.05, drain_s=0)
QUIET_NS = 100_000_000
"""So long before a lease is renewed, nothing of that is being written."""
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
"""A chat that an agent with two turns of two tools answers, beside a map, then somebody who is asked, and a writer."""

default_prices().register("thinker", Price(1, 10))


class Invoiced(Thinker):
    """Bills before it answers, as providers do; stops its process at one place, if it is to."""

    def __init__(self, log: FileLog, stop_in: str | None) -> None:
        super().__init__(Log())
        self._written = log
        self._stop_in = stop_in
        self.host: RunHost | None = None

    async def request(self, request: ModelRequest) -> ModelResponse:
        turn = sum(message.role == "assistant" for message in request.messages)
        key = str(idempotency_key())
        self._written.write(key=key, billed=(100 + turn) * 1_000 + 10 * 10_000)
        if self._stop_in is not None and key.startswith(self._stop_in):
            await self._stop()
        await asyncio.sleep(0.001)
        return await super().request(request)

    async def _stop(self) -> None:
        """Have the process stop before it writes the answer down: when it goes on, that is the first thing it does.

        Not while it writes something else: who stops within a transaction keeps what that has locked.
        """
        self._stop_in = None
        await asyncio.sleep(0.1)
        host = self.host
        assert host is not None
        while host._next_renew_ns - time.monotonic_ns() < QUIET_NS:  # noqa: ASYNC110  # nobody tells when it was
            await asyncio.sleep(0.005)
        crash_points.arm("llm.before_append", die=self._stopped)

    def _stopped(self) -> None:
        time.sleep(0.2)  # the loop stands still meanwhile, so that what its threads were writing is written
        self._written.write(stops=os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)


async def attend(command: dict[str, Any]) -> None:
    """One process's part."""
    log = FileLog(command["log"], command["epoch"])
    async with await open_stores(command["url"]) as stores:
        assert isinstance(stores, Stores)
        await stores.graphs.save("g", ANN, "g", ANSWERED, now_ms=0)
        for run_id in (RUN, FORK):
            log.write(recorded=[f"{run_id}/{one.key}" for one in await stores.journal.load(run_id)], run=run_id)
        model = Invoiced(log, command.get("stop_in"))
        services = {"models": {"thinker": model}, "tools": tools(log)}
        story = command.get("story", "chat")
        prices = PriceBook() if story == "unpriced" else None
        host = model.host = RunHost(stores, executors=registry(), services=services, settings=SETTINGS, prices=prices)
        chats = ChatService(host, stores.chats)
        if story == "early":
            await _cancelled_before_it_is_there(host, chats)
        async with host:
            await _as_client(host, chats, story)
        totals = host.stats()["totals"]
        for run_id in (RUN, FORK):
            if (run := await stores.runs.get(run_id)) is not None:
                log.write(**await left_of(stores, run), totals=totals)


async def _as_client(host: RunHost, chats: ChatService, story: str) -> None:
    await chats.create_chat(owner=ANN, graph_id="g", chat_id=CHAT)
    limits = TIGHT if story == "grant" else AMPLE
    turn = await chats.stream_chat(CHAT, "go", owner=ANN, run_id=RUN, limits=limits)
    if story == "cancel":
        await _cancelled_while_it_waits(host)
    else:
        await _come_to_its_end(host, turn.run_id)
    if story == "fork":
        await host.fork(RUN, owner=ANN, at="writer", run_id_new=FORK)
        await _come_to_its_end(host, FORK)


async def _come_to_its_end(host: RunHost, run_id: str) -> RunRecord:
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


async def _cancelled_before_it_is_there(host: RunHost, chats: ChatService) -> None:
    """On a host that does not work yet: it would claim the run as soon as it is there."""
    await chats.create_chat(owner=ANN, graph_id="g", chat_id=CHAT)
    await host.cancel(RUN, reason="never mind", by="bob")
    await chats.stream_chat(CHAT, "go", owner=ANN, run_id=RUN, limits=AMPLE)


async def _cancelled_while_it_waits(host: RunHost) -> None:
    async with aclosing(host.events(RUN)) as events:
        async for event in events:
            if event.type == "run.waiting":
                await host.cancel(RUN, reason="enough", by="bob")
    await host.wait(RUN)


async def left_of(stores: Stores, run: RunRecord) -> dict[str, Any]:
    """All that the stores have of a run."""
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
        "told": [event.type for event in events],
        "seqs": [event.seq for event in events],
        "last": dict(events[-1].data),
        "entries": sorted(entry.key for entry in await stores.journal.load(run.id)),
        "conversation": [[one.role, one.content, one.data.get("state")] for one in messages],
        "questions": [[one.key, one.state] for one in await stores.approvals.list(run_id=run.id)],
        "record": [run.cost_nanos, run.unresolved_nanos, run.tokens_in, run.tokens_out],
        "account": account,
        "held": held,
        "api_calls": api_calls,
        "unknown_costs": run.unknown_costs,
    }


def _balance(stores: Stores, account: str) -> list[int]:
    try:
        found = stores.ledger.balance(account)
    except KeyError:  # it was stopped before it could spend anything
        return [0] * 6
    used = [found.spent_nanos, found.unresolved_nanos, found.tokens_in, found.tokens_out]
    return [*used, found.held_nanos, found.api_calls]


async def _all_events(stores: Stores, run_id: str) -> Sequence[HostedEvent]:
    found: list[HostedEvent] = []
    while page := await stores.events.read(run_id, len(found)):
        found += page
    return found


if __name__ == "__main__":
    serve(attend)
