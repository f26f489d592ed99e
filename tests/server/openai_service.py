"""A whole server on loopback, with graphs to ask: a host, a chat service and stores in memory, on the test's loop.

It listens as `penstock serve` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAI

from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelRequest, ModelResponse
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import tool
from penstock.chat.service import ChatService
from penstock.errors import Halted
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import RunRecord
from penstock.nodes import executors
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.server.app import create_app
from penstock.server.auth import Token
from penstock.server.examples import EXAMPLE_PRICE, ExampleModel
from penstock.server.settings import ServerSettings
from penstock.stops import Stop, StopReason
from penstock.storage import Stores, open_stores
from tests.nodes.graphs import graph, node
from tests.server.served import listening

ANNA, BERT, VERA = "secret-of-anna-1234", "secret-of-bert-1234", "secret-of-vera-1234"
TOKENS = (Token.of("anna", "user", ANNA), Token.of("bert", "user", BERT), Token.of("vera", "viewer", VERA))
PRICE = Usage(7, 3, cost_nanos=250_000_000)
"""What every reply of the models here says it used: a quarter of a dollar."""

Json = dict[str, Any]


def last(request: ModelRequest) -> str:
    return request.messages[len(request.messages) - 1].text


def heard(request: ModelRequest) -> str:
    """Everything in the model's request, as it came."""
    return " | ".join(f"{message.role}: {message.text}" for message in request.messages)


def says_and_looks(_: ModelRequest) -> ModelResponse:
    return ModelResponse("Let me look.", (ToolCall("c1", "look", {"at": "it"}),), PRICE, "tool_calls", "saying")


def looks_first(request: ModelRequest) -> str | ToolCall:
    is_first = request.messages[len(request.messages) - 1].role == "user"
    return ToolCall("c1", "look", {"at": "the ☀"}) if is_first else "Bright."


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at} is bright"


@dataclass
class Gate:
    """Where models wait until a test lets them go on."""

    reached: asyncio.Event
    opened: asyncio.Event

    async def reply(self, request: ModelRequest) -> str:
        self.reached.set()
        await self.opened.wait()
        return f"After all: {last(request)}"


class Crowd:
    """A model that is refused once because of what other calls hold, and answers afterwards."""

    def __init__(self) -> None:
        self._stops = [Stop(StopReason.BUDGET_EXCEEDED, "the rest is held", unit="usd", held=1.0, momentary=True)]

    def reply(self, request: ModelRequest) -> str | Halted:
        return Halted(self._stops.pop()) if self._stops else f"Now: {last(request)}"


def chat_with(model: str, **data: Any) -> Json:
    nodes = [node("start", "chat-start"), node("agent", "agent", model=model, stream=True, **data)]
    return graph(nodes, ["start > agent"])


GRAPHS: dict[str, Json] = {
    "parrot": chat_with("parrot"),
    "listener": chat_with("listener", instructions="Listen."),
    "counter": chat_with("counter"),
    "looker": chat_with("looker", tools=["look"]),
    "endless": chat_with("endless", tools=["look"]),
    "quiet": graph([node("start", "chat-start"), node("agent", "agent", model="parrot")], ["start > agent"]),
    "slow": chat_with("slow"),
    "broken": chat_with("broken"),
    "crowded": chat_with("crowded"),
    "greedy": graph(
        [
            node("start", "chat-start"),
            node("first", "agent", model="parrot"),
            node("agent", "agent", model="parrot", stream=True),
        ],
        ["start > first", "first > agent"],
    ),
    "example": chat_with("example"),
    "short": chat_with("example", max_output_tokens=5),
    "plain": graph([node("in", "input"), node("out", "output")], ["in > out"]),
    "question": graph(
        [node("start", "chat-start"), node("ask", "approval", question="Really?"), node("out", "output")],
        ["start > ask", "ask.approved > out"],
    ),
}


Models = Mapping[str, ScriptedModel]
NO_MODELS: Models = {}


@dataclass
class Served:
    """What a test has of a server."""

    port: int
    host: RunHost
    stores: Stores
    gate: Gate
    models: dict[str, ScriptedModel]
    app: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = ANNA, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", timeout=30, **options)

    def sync_client(self, key: str = ANNA) -> OpenAI:
        return OpenAI(api_key=key, base_url=f"{self.url}/v1", timeout=30)

    async def run(self, run_id: str) -> RunRecord:
        """The run, once it has ended."""
        return await self.host.wait(run_id)

    async def no_open_streams(self) -> None:
        """Wait until the server has noticed that every client disconnected."""
        while self.app.state.server.metrics.open_streams:  # noqa: ASYNC110  it is a figure
            await asyncio.sleep(0.01)

    async def runs(self) -> list[RunRecord]:
        return list(await self.stores.runs.list())


@asynccontextmanager
async def serving(
    settings: HostSettings | None = None, url: str = "memory:", models: Models = NO_MODELS, **server: Any
) -> AsyncIterator[Served]:
    """`models` are served beside the usual ones; parked runs continue as soon as the server starts, and need theirs."""
    async with (
        await open_stores(url) as stores,
        _serving(stores, settings, models, ServerSettings(tokens=TOKENS, **{"retry_grace_s": 0, **server})) as it,
    ):
        yield it


@asynccontextmanager
async def _serving(
    stores: Stores, settings: HostSettings | None, added: Models, server: ServerSettings
) -> AsyncIterator[Served]:
    gate = Gate(asyncio.Event(), asyncio.Event())
    models = {**_models(gate), **added}
    services = {"models": {**models, "example": ExampleModel(words_per_second=0)}, "tools": {"look": look}}
    settings, prices = settings or HostSettings(drain_s=0), PriceBook(registered={"example": EXAMPLE_PRICE})
    host = RunHost(stores, executors=executors(), services=services, settings=settings, prices=prices)
    chats = ChatService(host, stores.chats)
    for id, document in GRAPHS.items():
        await stores.graphs.save(id, "anna", f"The {id}", document, now_ms=1_700_000_000_000)
    app = create_app(host, chats, stores, server)
    async with host, listening(app) as (_, port):
        yield Served(port, host, stores, gate, models, app)
        gate.opened.set()


def _models(gate: Gate) -> dict[str, ScriptedModel]:
    numbers = " ".join(str(number) for number in range(1000))
    answers: dict[str, Callable[[ModelRequest], Any]] = {
        "parrot": last,
        "listener": heard,
        "counter": lambda _: numbers,
        "looker": looks_first,
        "endless": says_and_looks,
        "slow": gate.reply,
        "broken": lambda _: ValueError("the model fell over"),
        "crowded": Crowd().reply,
    }
    made = {name: ScriptedModel(answer, name=name, usage=PRICE) for name, answer in answers.items()}
    made["counter"].piece_characters = 4
    return made
