"""Journalled runs in few words: a store that keeps JSON text, a graph of many parts, and a log of what really ran."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.agents.tools import Tool
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.keys import idempotency_key
from penstock.runtime.durable.ports import JournalEntry
from tests.nodes.graphs import Json, events_of, graph, node

PRICES = PriceBook(registered={"thinker": Price(1, 10)}, use_genai_prices=False)
"""A dollar for a million tokens in, ten for a million out."""


class JsonJournals:
    """A journal store that keeps what a database would: text."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, str]] = {}
        self.figures: dict[tuple[str, str], JournalEntry] = {}
        self.appends = 0

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        kept = self.kept.get(run_id, {})
        return [self.figures[run_id, key]._replace(value=json.loads(text)) for key, text in kept.items()]

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        self.appends += 1
        for entry in entries:
            if entry.key not in self.kept.setdefault(run_id, {}):
                self.kept[run_id][entry.key] = json.dumps(entry.value)
                self.figures[run_id, entry.key] = entry._replace(value=None)

    async def forget(self, run_id: str) -> None:
        self.kept.pop(run_id, None)

    def keys_of(self, run_id: str = "r") -> list[str]:
        return list(self.kept.get(run_id, {}))


Wait = Callable[[], Awaitable[None]]


async def at_once() -> None:
    """Wait for nothing."""


class Log:
    """What really ran, by the key it ran under."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def ran(self) -> None:
        self.lines.append(str(idempotency_key()))

    def __len__(self) -> int:
        return len(self.lines)


class Thinker(Model):
    """Two turns of all its tools, then an answer; its answer depends on the request alone."""

    def __init__(self, log: Log, wait: Wait = at_once) -> None:
        super().__init__("thinker")
        self._log = log
        self._wait = wait

    async def request(self, request: ModelRequest) -> ModelResponse:
        self._log.ran()
        await self._wait()
        turn = sum(message.role == "assistant" for message in request.messages)
        usage = Usage(input_tokens=100 + turn, output_tokens=10)
        if turn < 2 and request.tools:
            calls = tuple(
                ToolCall(f"t{turn}-{one.name}", one.name, {next(iter(one.parameters["properties"])): f"{turn}"})
                for one in request.tools
            )
            return ModelResponse("", calls, usage, "tool_calls", "thinker")
        text = " ".join(message.text for message in request.messages if message.role != "assistant")
        return ModelResponse(f"<{text}>", (), usage, "stop", "thinker")


def tools(log: Log, wait: Wait = at_once) -> dict[str, Tool]:
    async def look(what: str) -> str:
        log.ran()
        await wait()
        return f"saw {what}"

    async def count(what: str) -> int:
        log.ran()
        await wait()
        return len(what)

    return {"look": Tool(look, cost_usd="0.000001"), "count": Tool(count)}


ITEM = graph([node("ask", "llm-completion", model="thinker")])

MANY_PARTS: Json = graph(
    [
        node("in", "input"),
        node("left", "agent", model="thinker", tools=["look", "count"]),
        node("right", "llm-completion", model="thinker"),
        node("list", "constant", value=["a", "b", "c"]),
        node("each", "map", graph=ITEM, parallel=3),
        node("again", "loop", graph=ITEM, max_iterations=2),
        node("helper", "agent", model="thinker", tools=["look"], description="helps"),
        node("boss", "agent", model="thinker"),
        node("both", "merge"),
        node("out", "output"),
    ],
    [
        "in > left",
        "in > right",
        "in > again",
        "in > boss",
        "list > each",
        "left > both",
        "right > both",
        "each > both",
        "again > both",
        "boss > both",
        "both > out",
    ],
    ["helper.tool > boss.tools"],
)
"""Two branches and more, an agent with two turns of two tools, an agent with an agent, a map and a loop."""


def context_for(journal: Journal | None, input: Any = "go", **options: Any) -> ExecutionContext:
    return ExecutionContext(input=input, prices=PRICES, journal=journal, **options)


async def run(
    store: JsonJournals, document: Json, log: Log, *, run_id: str = "r", replay_only: bool = False, **options: Any
) -> tuple[Any, Any, ExecutionContext, Journal]:
    """One pass over a graph: its outputs, events, context and journal."""
    journal = await Journal.open(store, run_id, replay_only=replay_only)
    more, wait = options.pop("more", None), options.pop("wait", at_once)
    context = context_for(journal, **options)
    services = {"models": {"thinker": Thinker(log, wait)}, "tools": tools(log, wait)}
    events, result = await events_of(document, run=context, services=services, more=more)
    context.end()
    return {handle: value.value for handle, value in result.outputs.items()}, events, context, journal
