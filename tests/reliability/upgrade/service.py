"""The service whose databases are kept as upgrade fixtures: its graphs, its model and tools, its clock, what it stored.

`make_fixture` writes databases with it, `test_inv_17_upgrade` opens them with it. The fixtures outlive the code that
wrote them, so the graphs and ids here must stay as they are: a new fixture may add to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.agents.tools import Tool
from penstock.hosting.host import HostSettings, RunHost
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable.keys import idempotency_key
from penstock.storage import Stores
from tests.nodes.graphs import Json, graph, node, registry

ANN, BOB = "ann", "bob"
DAY = "2026-03-01"
NOON_NS = 1_772_366_400 * 1_000_000_000
"""2026-03-01T12:00:00Z, when the fixtures were written by their own clock."""
LEASE_S = 300.0
CHAT, CHAT_INTERRUPTED = "chat", "chat-interrupted"
MARK = "mark"
"""The key under which a message of the chat is found."""
OPEN_RUNS = {
    "interrupted": "running",
    "chat-interrupted-1": "running",
    "waiting": "waiting",
    "parked": "parked",
    "queued": "queued",
}
"""The runs that go on when the fixture is opened, and the status that each was left in."""
CANCELLED_EARLY = "cancelled-early"
"""A run that was cancelled before it was submitted, and has not been submitted."""
LARGE = "All work and no play makes a long output. " * 1_000
MEMORY_SPACE = "owner:ann"

PRICES = PriceBook(registered=dict.fromkeys(("thinker", "courier"), Price(1, 10)), use_genai_prices=False)
"""One dollar per million input tokens, ten per million output tokens. The writer has no price: its cost is unknown."""
CALL_NANOS = 100 * 1_000 + 10 * 10_000
"""Cost of a model call; each earlier answer in the conversation adds `ANSWER_NANOS`."""
ANSWER_NANOS = 1_000
LOOK_NANOS = 1_000

ITEM = graph([node("ask", "llm-completion", model="thinker")])
STEPS = graph(
    [
        node("in", "input"),
        node("list", "constant", value=["a", "b", "c"]),
        node("each", "map", graph=ITEM, parallel=3),
        node("both", "merge", mode="text"),
        node("thinks", "agent", model="thinker", tools=["look", "count"]),
        node("out", "output"),
    ],
    ["in > both", "list > each", "each > both", "both > thinks", "thinks > out"],
)
"""A map of three model calls, then an agent that takes two turns of two tools and answers in the third."""
APPROVED = graph(
    [
        node("in", "input"),
        node("draft", "llm-completion", model="thinker"),
        node("may", "approval", question="May it be written?"),
        node("writer", "llm-completion", model="thinker"),
    ],
    ["in > draft", "draft > may", "may.approved > writer"],
)
FAILING = graph(
    [
        node("in", "input"),
        node("draft", "llm-completion", model="thinker"),
        node("send", "llm-completion", model="courier"),
    ],
    ["in > draft", "draft > send"],
)
"""The courier is down while the fixture is written."""
CHATTING = graph(
    [node("start", "chat-start"), node("answers", "agent", model="thinker", tools=["look"])], ["start > answers"]
)
LONG = graph([node("in", "input"), node("long", "llm-completion", model="writer")], ["in > long"])


def versioned(version: int) -> Json:
    """One version of the graph that has several."""
    nodes = [
        node("in", "input"),
        node("text", "prompt-template", template=f"version {version}: {{{{input}}}}"),
        node("write", "llm-completion", model="thinker"),
    ]
    return graph(nodes, ["in > text", "text > write"])


GRAPHS: dict[str, list[Json]] = {
    "steps": [STEPS],
    "approved": [APPROVED],
    "failing": [FAILING],
    "chatting": [CHATTING],
    "long": [LONG],
    "versioned": [versioned(1), versioned(2), versioned(3)],
}


class FixtureClock:
    """Real time, counted from a fixed moment on the day of the fixtures."""

    def __init__(self, minutes_after_noon: float = 0) -> None:
        self._start_ns = NOON_NS + round(minutes_after_noon * 60_000_000_000) - time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def time_ns(self) -> int:
        return self._start_ns + time.monotonic_ns()


class Scripted(Model):
    """Calls all of its tools in each of two turns, then answers with the texts of the conversation.

    The key of each request is appended to `log`. Requests of agents in turn `hang_in_turn` put theirs into `hanging`
    and never return.
    """

    def __init__(self, log: list[str], hang_in_turn: int | None = None) -> None:
        super().__init__("thinker")
        self._log = log
        self._hang_in_turn = hang_in_turn
        self.hanging: asyncio.Queue[str] = asyncio.Queue()

    async def request(self, request: ModelRequest) -> ModelResponse:
        key = str(idempotency_key())
        self._log.append(key)
        turn = _tool_turns(request)
        if request.tools and turn == self._hang_in_turn:
            self.hanging.put_nowait(key)
            await asyncio.Event().wait()
        answers = sum(message.role == "assistant" for message in request.messages)
        usage = Usage(input_tokens=100 + answers, output_tokens=10)
        if turn < 2 and request.tools:
            calls = tuple(ToolCall(f"t{turn}-{one.name}", one.name, {"what": f"{turn}"}) for one in request.tools)
            return ModelResponse("", calls, usage, "tool_calls", "thinker")
        texts = " ".join(message.text for message in request.messages if message.role != "assistant")
        return ModelResponse(f"<{texts}>", (), usage, "stop", "thinker")


def _tool_turns(request: ModelRequest) -> int:
    """Number of tool-calling answers since the last user message."""
    turns = 0
    for message in reversed(request.messages):
        if message.role == "user":
            break
        turns += message.role == "assistant"
    return turns


class Courier(Model):
    """Fails while it is down; otherwise answers that it has sent the message."""

    def __init__(self, log: list[str], *, is_down: bool) -> None:
        super().__init__("courier")
        self._log = log
        self._is_down = is_down

    async def request(self, request: ModelRequest) -> ModelResponse:
        self._log.append(str(idempotency_key()))
        if self._is_down:
            raise RuntimeError("the courier is down")
        usage = Usage(input_tokens=100, output_tokens=10)
        return ModelResponse(f"sent {request.messages[-1].text}", (), usage, "stop", "courier")


class Writer(Model):
    """Answers with a text that is longer than what the stores keep twice."""

    def __init__(self) -> None:
        super().__init__("writer")

    async def request(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(LARGE, (), Usage(input_tokens=100, output_tokens=10), "stop", "writer")


def tools(log: list[str]) -> dict[str, Tool]:
    """The tools of the agents; each call appends its key to `log`."""

    async def look(what: str) -> str:
        log.append(str(idempotency_key()))
        return f"saw {what}"

    async def count(what: str) -> int:
        log.append(str(idempotency_key()))
        return len(what)

    return {"look": Tool(look, cost_usd="0.000001"), "count": Tool(count)}


def host_on(
    stores: Stores,
    log: list[str],
    clock: FixtureClock,
    *,
    worker: str,
    hang_in_turn: int | None = None,
    courier_is_down: bool = False,
    owner_daily_usd: str = "50",
) -> tuple[RunHost, Scripted]:
    """A host of the service, not started, and its model."""
    model = Scripted(log, hang_in_turn)
    models = {"thinker": model, "courier": Courier(log, is_down=courier_is_down), "writer": Writer()}
    settings = HostSettings(
        lease_s=LEASE_S, tick_s=0.05, drain_s=0, daily_usd="100", owner_daily_usd=owner_daily_usd, keep_days=30
    )
    host = RunHost(
        stores,
        executors=registry(),
        services={"models": models, "tools": tools(log)},
        settings=settings,
        prices=PRICES,
        worker=worker,
        clock=clock,
    )
    return host, model


# What the stores have, as JSON.


async def snapshot(stores: Stores) -> dict[str, Any]:
    """Everything that the stores have of the service, as plain data."""
    run_ids = sorted(run.id for run in await stores.runs.list(limit=1_000))
    return {
        "runs": {run_id: await run_in(stores, run_id) for run_id in run_ids},
        "graphs": {
            graph_id: [[one.version, one.owner, one.name, one.digest, one.document] for one in versions]
            for graph_id in GRAPHS
            if (versions := await stores.graphs.versions(graph_id))
        },
        "chats": {chat_id: await chat_in(stores, chat_id) for chat_id in (CHAT, CHAT_INTERRUPTED)},
        "marked": None
        if (marked := await stores.chats.marked([MARK])) is None
        else [marked.chat_id, marked.message_id],
        "approvals": sorted(
            [one.id, one.run_id, one.owner, one.key, one.node_id, one.question, one.value, one.state, one.answered_by]
            for one in await stores.approvals.list(limit=1_000)
        ),
        "cancels": [[one.run_id, one.owner, one.reason, one.by] for one in await stores.cancels.of(CANCELLED_EARLY)],
        "memories": [[one.key, one.value] for one in await stores.memories.search(MEMORY_SPACE, "dams")],
        "accounts": await accounts_in(stores, run_ids),
    }


async def run_in(stores: Stores, run_id: str) -> dict[str, Any]:
    """The record of a run, its events and its journal."""
    run = await stores.runs.get(run_id)
    assert run is not None
    return {
        "owner": run.owner,
        "graph": [run.graph_id, run.graph_version],
        "input": run.input,
        "limits": dict(run.limits),
        "origin": dict(run.origin),
        "status": run.status,
        "times": [run.created_ms, run.started_ms, run.ended_ms],
        "claim": [run.worker, run.epoch, run.lease_until_ms],
        "stop_reason": run.stop_reason,
        "error": run.error,
        "output": run.output,
        "cost": [run.cost_nanos, run.unresolved_nanos, run.tokens_in, run.tokens_out, run.unknown_costs],
        "events": [[one.seq, one.at_ms, one.type, dict(one.data)] for one in await stores.events.read(run_id)],
        "journal": [
            [one.key, one.kind, one.value, one.cost_nanos, one.tokens_in, one.tokens_out]
            for one in await stores.journal.load(run_id)
        ],
    }


async def chat_in(stores: Stores, chat_id: str) -> dict[str, Any]:
    """A chat, every message of its tree, which of them are in view, and what is attached."""
    chat = await stores.chats.get(chat_id)
    assert chat is not None
    messages, chosen = await stores.chats.messages(chat_id)
    attached = [one["id"] for message in messages for one in message.data.get("attachments") or ()]
    contents = [found[1].decode() for one in attached if (found := await stores.chats.attachment(one)) is not None]
    return {
        "chat": [chat.owner, chat.title, chat.graph_id, chat.created_ms, chat.updated_ms],
        "messages": [[one.id, one.parent_id, one.role, one.content, one.at_ms, dict(one.data)] for one in messages],
        "chosen": list(chosen),
        "attached": contents,
    }


async def accounts_in(stores: Stores, run_ids: list[str]) -> dict[str, list[int]]:
    """The figures of the accounts of the day, and of those of runs that have one."""
    names = [f"all:{DAY}", f"user:{ANN}:{DAY}", f"user:{BOB}:{DAY}", *(f"run:{run_id}" for run_id in run_ids)]
    names += [f"unknown:{run_id}" for run_id in run_ids]
    found: dict[str, list[int]] = {}
    for name in names:
        if (figures := await asyncio.to_thread(_figures, stores, name)) is not None:
            found[name] = figures
    return found


def _figures(stores: Stores, name: str) -> list[int] | None:
    try:
        one = stores.ledger.balance(name)
    except KeyError:
        return None
    return [one.spent_nanos, one.held_nanos, one.unresolved_nanos, one.tokens_in, one.tokens_out, one.api_calls]


async def until(stores: Stores, run_id: str, is_so: Callable[[Json], bool]) -> Json:
    """The run as `run_in` gives it, once the condition holds."""
    while True:
        after = await stores.events.last_seq(run_id)
        if is_so(found := await run_in(stores, run_id)):
            return found
        await stores.events.wait(run_id, after, 0.05)
