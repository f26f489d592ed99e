"""Chats while stores fail, processes end in between, and everything happens at once, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.hosting.limits import HostSettings
from penstock.hosting.ports import ENDED, Conflict
from penstock.storage.memory import MemoryStores
from penstock.testing import explore, sim_run
from penstock.testing.faulty import Fault, FaultKind, FaultyStores, ask_again, every_call
from tests.chat.chats import ANN, ECHOING, Echo, Histories, chatting, loop
from tests.nodes.graphs import registry
from tests.soak import scaled

SCHEDULES = scaled(60, soak=2_000)


async def behind(fault: Fault, **settings: Any) -> tuple[MemoryStores, RunHost, ChatService]:
    """A chat of ann's on stores that fail, and the stores that do not."""
    clock = loop().clock
    stores = MemoryStores(clock=clock)
    await stores.graphs.save("g", ANN, "g", ECHOING, now_ms=0)
    faulty: Any = FaultyStores(stores, fault)
    faulty.ledger = stores.ledger
    host = RunHost(
        faulty,
        executors=registry({"echo": Echo()}),
        settings=HostSettings(drain_s=0, **settings),
        worker="w",
        clock=clock,
    )
    service = ChatService(host, faulty.chats, clock=clock)
    await ask_again(lambda: service.create_chat(owner=ANN, graph_id="g", chat_id="c"))
    return stores, host, service


async def kept(stores: MemoryStores) -> list[tuple[str, str, str]]:
    messages, _ = await stores.chats.messages("c")
    return [(one.role, one.content, one.data["state"]) for one in messages]


async def answered(fault: Fault) -> None:
    stores, host, service = await behind(fault)
    async with host:
        turn = await ask_again(lambda: service.stream_chat("c", "one", owner=ANN, run_id="r"))
        answer = await ask_again(turn.result)
        assert answer.content == "answer to one"
    assert await kept(stores) == [("user", "one", "complete"), ("assistant", "answer to one", "complete")]


async def left(fault: Fault) -> None:
    stores, host, service = await behind(fault)
    async with host:
        turn = await ask_again(lambda: service.stream_chat("c", "one", owner=ANN, run_id="r"))
        async with aclosing(turn.events(on_leave="cancel")) as events:
            async for _ in events:
                break
        run = await stores.runs.get("r")
        assert run is not None
        assert run.status == "cancelled"
    assert [state for _, _, state in await kept(stores)] == ["complete", "partial"]


async def edited(fault: Fault) -> None:
    stores, host, service = await behind(fault)
    async with host:
        turn = await ask_again(lambda: service.stream_chat("c", "one", owner=ANN, run_id="r1"))
        await ask_again(turn.result)
        message_id = str(turn.user_message_id)
        again = await ask_again(lambda: service.edit_user_message("c", message_id, "two", owner=ANN, run_id="r2"))
        await ask_again(again.result)
    assert await kept(stores) == [
        ("user", "one", "complete"),
        ("assistant", "answer to one", "complete"),
        ("user", "two", "complete"),
        ("assistant", "answer to two", "complete"),
    ]


@pytest.mark.reliability
@pytest.mark.parametrize("kind", ["io", "write-then-timeout"])
@pytest.mark.parametrize("scenario", [answered, left, edited])
def test_whichever_call_of_a_store_fails_the_chat_is_as_if_none_had(scenario: Any, kind: FaultKind) -> None:
    assert sim_run(lambda: every_call(scenario, kind), seed=1) > 10


async def everything_at_once(seed: int) -> None:
    """Turns, edits, retries, cancels and readers that leave: every answer ends, and nothing is lost."""
    stores, host, service = await behind(Fault("io", None), max_running_per_owner=3)
    async with host:
        first = await service.stream_chat("c", "first", owner=ANN, run_id="first")

        async def says(text: str) -> None:
            turn = await service.stream_chat("c", text, owner=ANN, run_id=text)
            await turn.result()

        async def leaves() -> None:
            turn = await service.stream_chat("c", "leaves", owner=ANN, run_id="leaves")
            async with aclosing(turn.events(on_leave="cancel")) as events:
                async for event in events:
                    if event.seq > seed % 5:
                        break

        async def edits() -> None:
            await (await service.edit_user_message("c", str(first.user_message_id), "edit", owner=ANN)).result()

        async def retries() -> None:
            await (await service.retry_message("c", first.message_id, owner=ANN)).result()

        async def cancels() -> None:
            await asyncio.sleep(seed % 7 / 20)
            await host.cancel("one")
            await host.cancel("early")

        async with asyncio.TaskGroup() as group:
            for work in (says("one"), says("two"), says("early"), leaves(), edits(), retries(), cancels()):
                group.create_task(work)
        await first.result()
        tree = await service.tree("c", owner=ANN)
    runs = await stores.runs.list(chat_id="c", limit=100)
    assert {run.status for run in runs} <= ENDED
    answers = [one for one in tree if one.role == "assistant"]
    assert len(answers) == len(runs) == 7
    state_of = {"completed": "complete", "cancelled": "partial"}
    assert {one.data["run_id"]: one.data["state"] for one in answers} == {r.id: state_of[r.status] for r in runs}
    assert {one.content for one in tree if one.role == "user"} == {"first", "one", "two", "early", "leaves", "edit"}
    for one in answers:
        question = tree[str(one.parent_id)].content
        assert one.content in ((f"answer to {question}",) if one.data["state"] == "complete" else ("",))


@pytest.mark.reliability
@pytest.mark.requirement("K-14")
def test_whatever_happens_at_once_every_answer_ends_and_nothing_is_lost() -> None:
    explore(everything_at_once, schedules=SCHEDULES)


async def test_a_run_id_that_belongs_elsewhere_is_refused() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        await chats.host.submit(owner=ANN, graph_id="g", run_id="plain", input="x")
        with pytest.raises(Conflict, match="'plain'"):
            await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="plain")
        await chats.host.wait("plain")
