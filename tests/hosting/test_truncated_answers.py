"""A run whose answer a budget has cut is halted by it, keeps what came, and goes on when it is granted more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import Conflict, HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from tests.hosting.graphs import graph, host_with, killed, without_steps

PRICES = PriceBook(registered={"counter": Price(0, 1_000)}, use_genai_prices=False)
WORD_NANOS = 1_000_000
"""What a word costs: a tenth of a cent."""
ANN = "ann"


class Counter(Model):
    """Counts up to the number in the prompt, a word a token, and stops at its output limit."""

    max_output_tokens = 1_000
    floor = 2

    def __init__(self) -> None:
        super().__init__("counter")
        self.allowed: list[int] = []
        """The `max_output_tokens` of each request."""
        self.words = 0

    async def request(self, request: ModelRequest) -> ModelResponse:
        self.allowed.append(request.max_output_tokens)
        await asyncio.sleep(0)
        words = [f"{number} " for number in range(1, int(request.messages[-1].text) + 1)]
        output = words[: request.max_output_tokens]
        self.words += len(output)
        finish: Any = "stop" if len(output) == len(words) else "length"
        return ModelResponse("".join(output), usage=Usage(0, len(output), model="counter"), finish_reason=finish)

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        response = await self.request(request)
        for word in response.text.split():
            yield f"{word} "
        yield response

    def count_input(self, request: ModelRequest) -> int:
        return 0


def asking(type: str = "agent", **data: Any) -> dict[str, Any]:
    return graph(
        ("start", "chat-start", {}), ("a", type, {"model": "m", **data}), ("out", "output", {}), edges="start>a a>out"
    )


def counted(last: int) -> str:
    return "".join(f"{number} " for number in range(1, last + 1))


class Scene:
    """A host with one graph, and the model that it asks."""

    def __init__(self, host: RunHost, model: Counter) -> None:
        self.host, self.model = host, model

    async def halted(self, last: int, limits: Mapping[str, Any] | None = None, run_id: str = "r") -> RunRecord:
        await self.host.submit(owner=ANN, graph_id="g", run_id=run_id, input=str(last), limits=limits or {})
        left = await self.host.wait(run_id)
        assert left.status == "halted", left
        return left

    async def events(self, run_id: str = "r") -> list[HostedEvent]:
        return list(await self.host.stores.events.read(run_id, limit=10_000))

    async def streamed_text(self, run_id: str = "r") -> str:
        """The pieces of text since the run was last begun."""
        pieces: list[str] = []
        for event in await self.events(run_id):
            if event.type in ("run.started", "run.resumed"):
                pieces.clear()
            elif event.type == "text.delta":
                pieces.append(event.data["text"])
        return "".join(pieces)

    async def spent(self, run_id: str = "r") -> int:
        ledger = self.host.stores.ledger
        return (await asyncio.to_thread(ledger.balance, f"run:{run_id}")).spent_nanos


@asynccontextmanager
async def scene(at: str | None, document: Mapping[str, Any], **settings: Any) -> AsyncIterator[Scene]:
    """In memory, or in a database file."""
    model = Counter()
    async with MemoryStores() if at is None else await open_stores(at) as stores:
        await stores.graphs.save("g", ANN, "g", document, now_ms=0)
        how = HostSettings(tick_s=0.05, lease_s=1, drain_s=0, **settings)
        async with await host_with(stores, settings=how, prices=PRICES, services={"models": {"m": model}}) as host:
            yield Scene(host, model)


@pytest.fixture(params=["memory", "sqlite"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return None if request.param == "memory" else str(tmp_path / "runs.db")


@pytest.mark.requirement("X-3")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_an_answer_truncated_by_the_budget_is_halted_and_completed_after_a_grant(
    at: str | None, type: str, stream: bool
) -> None:
    async with scene(at, asking(type, stream=stream)) as here:
        left = await here.halted(50, {"max_cost_usd": "0.02"})
        assert (left.stop_reason, left.cost_nanos) == ("budget_exceeded", 20 * WORD_NANOS)
        last = (await here.events())[-1]
        assert (last.type, last.data["whose"], last.data["node_id"], last.data["unit"]) == (
            "run.halted",
            "run",
            "a",
            "usd",
        )
        assert "it paid for 20 of the 1000 tokens the answer might have had" in last.data["message"]
        assert await here.streamed_text() == counted(20), "what was paid for is there, once"

        await here.host.resume("r")
        assert (await here.host.wait("r")).status == "halted"
        assert (here.model.allowed, await here.spent()) == ([20], left.cost_nanos), (
            "no request is sent with nothing left"
        )

        await here.host.grant("r", {"max_cost_usd": "0.06"}, by="eve")
        left = await here.host.wait("r")
        assert (left.status, left.output) == ("completed", counted(50))
        assert here.model.allowed == [20, 60]
        assert left.cost_nanos == await here.spent() == here.model.words * WORD_NANOS == 70 * WORD_NANOS
        if stream:
            assert await here.streamed_text() == counted(50)


async def test_an_answer_that_the_runs_tokens_cut_is_halted_and_granted(at: str | None) -> None:
    async with scene(at, asking(stream=True)) as here:
        left = await here.halted(50, {"max_tokens": 30})
        assert (left.stop_reason, left.tokens_out) == ("token_limit_exceeded", 30)
        with pytest.raises(Conflict, match="grant max_tokens"):
            await here.host.grant("r", {"max_cost_usd": 1}, by="eve")
        await here.host.grant("r", {"max_tokens": 10}, by="eve")
        assert (await here.host.wait("r")).tokens_out == 40, "cut again, at the rest"
        await here.host.grant("r", {"max_tokens": 60}, by="eve")
        left = await here.host.wait("r")
        assert (left.status, left.output, left.tokens_out) == ("completed", counted(50), 90)
        assert here.model.allowed == [30, 10, 60]


async def test_a_nodes_own_budget_that_cuts_its_answer_is_the_nodes() -> None:
    async with scene(None, asking(budget={"max_cost_usd": 0.01})) as here:
        await here.halted(50, {"max_cost_usd": "0.50"})
        last = (await here.events())[-1]
        assert (last.data["whose"], last.data["budget"]) == ("node", "a")
        with pytest.raises(Conflict, match="a budget inside its graph"):
            await here.host.grant("r", {"max_cost_usd": 1}, by="eve")


async def test_a_fork_and_a_replay_find_the_complete_answer_and_not_the_truncated_one(at: str | None) -> None:
    async with scene(at, asking()) as here:
        await here.halted(30, {"max_cost_usd": "0.02"})
        await here.host.grant("r", {"max_cost_usd": "0.04"}, by="eve")
        assert (await here.host.wait("r")).output == counted(30)
        replay = await here.host.replay("r", owner=ANN)
        assert (await here.host.wait(replay.id)).output == counted(30)
        fork = await here.host.fork("r", owner=ANN, at="out")
        assert (await here.host.wait(fork.id)).output == counted(30)
        assert here.model.allowed == [20, 40]


class Stuck:
    """A journal that never says that it has kept an answer, and does so or not: there, its worker dies."""

    def __init__(self, inner: Any, keeps: bool) -> None:
        self._inner = inner
        self._keeps = keeps
        self.reached = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        is_answer = entries[0].kind == "llm"
        if self._keeps or not is_answer:
            await self._inner.append(run_id, entries, epoch=epoch)
        if is_answer:
            self.reached.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_worker_that_dies_with_a_cut_answer_leaves_it_paid_once(is_kept: bool) -> None:
    async with scene(None, asking(stream=True)) as here:
        stores = here.host.stores
        assert isinstance(stores, MemoryStores)
        kept = stores.journal
        stores.journal = stuck = Stuck(kept, is_kept)  # type: ignore[assignment]
        await here.host.submit(owner=ANN, graph_id="g", run_id="r", input="30", limits={"max_cost_usd": "0.02"})
        await stuck.reached.wait()
        await killed(here.host)
        stores.journal = kept
        services = {"models": {"m": here.model}}
        async with await host_with(stores, worker="other", prices=PRICES, services=services) as other:
            left = await other.wait("r")
            assert (left.status, left.stop_reason, left.cost_nanos) == ("halted", "budget_exceeded", 20 * WORD_NANOS)
            assert here.model.allowed == [20]
            await other.grant("r", {"max_cost_usd": "0.04"}, by="eve")
            left = await other.wait("r")
        assert (left.status, left.output, left.cost_nanos) == ("completed", counted(30), 50 * WORD_NANOS)
        assert (here.model.allowed, await here.spent()) == ([20, 40], 50 * WORD_NANOS), (
            "no more than there is, here or there"
        )


async def test_a_truncated_chat_answer_keeps_its_text_and_is_completed_later() -> None:
    async with scene(None, asking()) as here:
        stores = here.host.stores
        assert isinstance(stores, MemoryStores)
        chats = ChatService(here.host, stores.chats)
        await chats.create_chat(owner=ANN, graph_id="g", chat_id="c")
        turn = await chats.stream_chat("c", "30", owner=ANN, run_id="r", limits={"max_cost_usd": "0.02"})
        answer = await turn.result()
        assert (answer.content, answer.data["state"]) == (counted(20), "halted")
        await here.host.grant("r", {"max_cost_usd": "0.04"}, by="eve")
        answer = await turn.result()
        assert (answer.content, answer.data["state"]) == (counted(30), "complete")


# at its own limit


@pytest.mark.parametrize("type", ["agent", "llm-completion"])
async def test_answer_that_reaches_its_own_limit_is_reported_as_truncated(at: str | None, type: str) -> None:
    async with scene(at, asking(type, max_output_tokens=5)) as here:
        for run_id, last, reason in (("cut", 30, "length"), ("whole", 5, None)):
            await here.host.submit(owner=ANN, graph_id="g", run_id=run_id, input=str(last))
            left = await here.host.wait(run_id)
            assert (left.status, left.output) == ("completed", counted(5))
            events = without_steps(await here.events(run_id))
            by_type = {event.type: event.data.get("finish_reason") for event in events}
            assert (by_type["call.ended"], by_type["run.completed"]) == (reason, reason)
            nodes = [event.data for event in await here.events(run_id) if event.type == "node.completed"]
            reasons = {data["node_id"]: data.get("finish_reason") for data in nodes}
            assert reasons == {"start": None, "a": reason, "out": reason}
        replay = await here.host.replay("cut", owner=ANN)
        await here.host.wait(replay.id)
        events = without_steps(await here.events(replay.id))
        by_type = {event.type: event.data.get("finish_reason") for event in events}
        assert (by_type["call.ended"], by_type["run.completed"]) == ("length", "length")


# what a day pays for


async def test_a_call_asks_for_no_more_than_a_day_can_pay(at: str | None) -> None:
    async with scene(at, asking(), owner_daily_usd="0.10", daily_usd="0.08") as here:
        await here.host.submit(owner=ANN, graph_id="g", run_id="one", input="30")
        assert (await here.host.wait("one")).output == counted(30)
        await here.host.submit(owner="bob", graph_id="g", run_id="two", input="30")
        assert (await here.host.wait("two")).output == counted(30)
        assert here.model.allowed == [80, 50], "what all may spend leaves less than what one may"
        left = await here.halted(30)
        assert (left.stop_reason, left.cost_nanos, here.model.allowed) == (
            "budget_exceeded",
            20 * WORD_NANOS,
            [80, 50, 20],
        )
        last = (await here.events())[-1]
        assert last.data["whose"] == "all"
        assert "it paid for 20 of the 1000 tokens" in last.data["message"]
        assert await here.streamed_text() == counted(20)
        assert not [event for event in await here.events("two") if event.type == "limit"], "nothing stopped that one"
        left = await here.halted(30, run_id="after")
        assert (left.cost_nanos, len(here.model.allowed)) == (0, 3)


async def test_a_day_that_cannot_pay_for_the_least_answer_refuses_it() -> None:
    async with scene(None, asking(), owner_daily_usd="0.001") as here:
        await here.halted(30)
        last = (await here.events())[-1]
        assert (last.data["whose"], here.model.allowed) == ("owner", [])
        assert "the call would hold $0.002" in last.data["message"], "the least that would have done"
        assert "momentary" not in last.data


@pytest.mark.requirement("X-9")
async def test_a_call_waits_for_what_calls_of_another_run_hold_of_the_day(at: str | None) -> None:
    async with scene(at, asking(max_output_tokens=50), owner_daily_usd="0.055") as here:
        begun, go_on = asyncio.Event(), asyncio.Event()
        answer = here.model.request

        async def slowly(request: ModelRequest) -> ModelResponse:
            begun.set()
            await go_on.wait()
            return await answer(request)

        here.model.request = slowly  # type: ignore[method-assign]
        ledger = here.host.stores.ledger
        await here.host.submit(owner=ANN, graph_id="g", run_id="first", input="5")
        await begun.wait()
        await here.host.submit(owner=ANN, graph_id="g", run_id="r", input="5")
        while not await asyncio.to_thread(ledger.queued):  # noqa: ASYNC110 - there is nothing to be woken by
            await asyncio.sleep(0.001)
        go_on.set()
        assert (await here.host.wait("first")).output == counted(5)
        assert (await here.host.wait("r")).output == counted(5)
        assert here.model.allowed == [50, 50], "it had no less because of the other"


@pytest.mark.requirement("X-9")
async def test_owners_whose_runs_wait_for_the_same_day_take_turns() -> None:
    async with scene(None, asking(max_output_tokens=50), daily_usd="0.08") as here:
        go_on, served = asyncio.Event(), list[str]()
        answer = here.model.request

        async def slowly(request: ModelRequest) -> ModelResponse:
            served.append(request.messages[-1].text)
            await go_on.wait()
            return await answer(request)

        here.model.request = slowly  # type: ignore[method-assign]
        ledger = here.host.stores.ledger
        await here.host.stores.graphs.save("h", "bob", "h", asking(max_output_tokens=50), now_ms=0)
        await here.host.submit(owner=ANN, graph_id="g", run_id="1", input="1")
        while not served:  # noqa: ASYNC110 - there is nothing to be woken by
            await asyncio.sleep(0.001)
        for number, (owner, graph_id) in enumerate([(ANN, "g"), (ANN, "g"), ("bob", "h")], 1):
            await here.host.submit(owner=owner, graph_id=graph_id, run_id=str(number + 1), input=str(number + 1))
            while len(ledger.queued()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        go_on.set()
        for run_id in ("1", "2", "3", "4"):
            assert (await here.host.wait(run_id)).status == "completed"
        assert served == ["1", "2", "4", "3"]


async def test_a_refusal_for_what_calls_under_way_hold_says_that_it_may_pass() -> None:
    async with scene(None, asking(max_output_tokens=50), owner_daily_usd="0.05", max_wait_s=0.05) as here:
        begun, go_on = asyncio.Event(), asyncio.Event()
        answer = here.model.request

        async def slowly(request: ModelRequest) -> ModelResponse:
            begun.set()
            await go_on.wait()
            return await answer(request)

        here.model.request = slowly  # type: ignore[method-assign]
        await here.host.submit(owner=ANN, graph_id="g", run_id="first", input="5")
        await begun.wait()
        await here.halted(5)
        last = (await here.events())[-1]
        assert (last.data["whose"], last.data["held"], last.data["momentary"]) == ("owner", 0.05, True)
        with pytest.raises(Conflict, match=r"calls under way hold it: resume it in a moment"):
            await here.host.grant("r", {"max_cost_usd": 1}, by="eve")
        go_on.set()
        assert (await here.host.wait("first")).status == "completed"
        await here.host.resume("r")
        assert (await here.host.wait("r")).output == counted(5)
