"""The contract of every store for calls that fail, before or after their work was done.

Each scenario is the use that one part of the service makes of its stores. It is run with each of its calls failing in
turn, in each way; the caller repeats the call. The final contents must be the same as when nothing fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.hosting.ports import UNTIL_ENDED, CostShare
from penstock.nodes.memory import Memory
from penstock.testing.contracts.stores.suite import (
    StoreBundle,
    StoreContract,
    a_cancel_request,
    a_chat,
    a_message,
    a_payload,
    a_run,
    a_token,
    an_approval,
    an_attachment,
    an_audit_record,
    an_entry,
    an_event,
    claimed,
    fresh,
)
from penstock.testing.faulty import Fault, FaultKind, FaultyStores, ask_again, every_call

Scenario = Callable[[StoreBundle, StoreBundle], Awaitable[None]]
"""Takes the stores that fail, and the stores behind them, which do not."""


class FaultsContract(StoreContract):
    """Every method fails once, and repeating the call leaves the same state as one successful call."""

    fault_kinds: tuple[FaultKind, ...] = ("busy", "write-then-timeout")
    """Before any work was done, and after all of it was."""

    async def test_a_hosted_run_is_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(a_hosted_run) >= 12

    async def test_a_run_that_is_resumed_ended_and_removed_is_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(a_resumed_run) >= 6

    async def test_graphs_are_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(an_edited_graph) >= 5

    async def test_approvals_and_cancel_requests_are_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(approvals_and_cancel_requests) >= 8

    async def test_a_chat_is_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(a_conversation) >= 7

    async def test_tokens_are_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(some_tokens) >= 10

    async def test_the_audit_log_is_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(some_audit_records) >= 6

    async def test_memories_are_the_same_whichever_call_fails(self) -> None:
        assert await self.same_whatever_fails(some_memories) >= 8

    @fresh
    async def test_a_claim_whose_answer_was_lost_can_be_repeated_when_its_lease_expires(
        self, stores: StoreBundle
    ) -> None:
        await stores.runs.add(a_run())
        faulty = FaultyStores(stores, "write-then-timeout", at=1)
        claim = await ask_again(lambda: faulty.runs.claim("w", now_ms=1_000, lease_ms=100))
        assert claim is None, "the run is claimed and its worker unknown: a repeated claim must not give it away twice"
        claim = await stores.runs.claim("w", now_ms=1_100, lease_ms=100)
        assert claim is not None
        assert claim.epoch == 2

    async def same_whatever_fails(self, scenario: Scenario) -> int:
        """Return how many calls of the scenario failed, after checking that the contents were the same each time."""
        expected = await self.contents_after(scenario, Fault("busy", at=None))
        failed = 0

        async def once(fault: Fault) -> None:
            assert await self.contents_after(scenario, fault) == expected

        for kind in self.fault_kinds:
            failed += await every_call(once, kind)
        return failed

    async def contents_after(self, scenario: Scenario, fault: Fault) -> Any:
        stores = await self.open_stores()
        try:
            faulty: Any = FaultyStores(stores, fault)
            await scenario(faulty, stores)
            return await contents(stores)
        finally:
            await stores.close()


async def a_hosted_run(faulty: StoreBundle, stores: StoreBundle) -> None:
    await ask_again(lambda: faulty.runs.add(a_run(input={"a": 1})))
    await ask_again(lambda: faulty.events.append("r", 0, [an_event(1)]))
    await stores.runs.claim("w", now_ms=1_000, lease_ms=100)
    await ask_again(lambda: faulty.runs.renew("w", ["r"], now_ms=1_050, lease_ms=100))
    await ask_again(lambda: faulty.events.append("r", 1, [an_event(2), an_event(3)]))
    await ask_again(lambda: faulty.journal.append("r", [an_entry("k", 1), an_entry("l", 2)], epoch=1))
    await ask_again(lambda: faulty.payloads.put("r", [a_payload(), a_payload("n000002", at_ms=5)], epoch=1))
    await ask_again(lambda: faulty.payloads.remove_before(3))
    await ask_again(lambda: faulty.runs.update("r", 1, status="waiting"))
    await ask_again(lambda: faulty.runs.update("r", 1, status="running", cost_nanos=3))
    await ask_again(lambda: faulty.runs.update("r", 1, status="completed", output=[1], ended_ms=2_000))
    await ask_again(lambda: faulty.events.append("r", 1, [an_event(4)]))
    ended = a_run(cost_nanos=3)
    await ask_again(lambda: faulty.spending.record(ended, [CostShare("a", "m", 1, 2)]))
    assert len(await ask_again(lambda: faulty.spending.of("r"))) == 2
    assert len(await ask_again(faulty.spending.sums)) == 1
    assert len(await ask_again(lambda: faulty.events.read("r"))) == 4
    assert await ask_again(lambda: faulty.events.wait("r", 3, 0))
    assert len(await ask_again(lambda: faulty.journal.load("r"))) == 2


async def a_resumed_run(faulty: StoreBundle, stores: StoreBundle) -> None:
    for id in ("r", "s", "old"):
        await claimed(stores, id)
        await stores.journal.append(id, [an_entry("k")], epoch=1)
        await stores.runs.update(id, 1, status="halted", stop_reason="budget_exceeded", ended_ms=2_000)
    await ask_again(lambda: faulty.runs.set_usage("r", 1, cost_nanos=5, unresolved_nanos=0))
    await ask_again(lambda: faulty.runs.requeue("r", 1, limits={"max_steps": 5}))
    await ask_again(lambda: faulty.runs.requeue("s", 1))
    await ask_again(lambda: faulty.runs.end("s", "cancelled", now_ms=9_000, error="by ann"))
    await ask_again(lambda: faulty.journal.forget("r"))
    await ask_again(lambda: faulty.runs.remove_ended(9_000))
    await claimed(stores, "new")
    await stores.runs.update("new", 1, status="halted", ended_ms=10_000)
    await ask_again(lambda: faulty.runs.remove("new"))
    assert await ask_again(faulty.runs.count) == 2


async def an_edited_graph(faulty: StoreBundle, stores: StoreBundle) -> None:
    for number in range(3):
        await ask_again(lambda n=number: faulty.graphs.save("g", "ann", "G", {"n": n}, now_ms=n, expected_version=n))  # type: ignore[misc]
    await ask_again(lambda: faulty.graphs.archive("g"))
    await ask_again(lambda: faulty.graphs.save("h", "ann", "H", {}, now_ms=1))
    assert len(await ask_again(faulty.graphs.list)) == 1


async def approvals_and_cancel_requests(faulty: StoreBundle, stores: StoreBundle) -> None:
    await stores.runs.add(a_run())
    await ask_again(lambda: faulty.approvals.ask(an_approval("a")))
    await ask_again(lambda: faulty.approvals.ask(an_approval("b")))
    await ask_again(lambda: faulty.approvals.answer("a", "edited", answer={"x": 1}, by="bob", now_ms=2_000))
    assert await ask_again(lambda: faulty.approvals.wait("a", 0)) is not None
    await ask_again(lambda: faulty.approvals.withdraw("r", 0, now_ms=3_000))
    await ask_again(lambda: faulty.approvals.ask(an_approval("b", asked_ms=4_000)))
    await ask_again(lambda: faulty.cancels.put(a_cancel_request("r")))
    await ask_again(lambda: faulty.cancels.put(a_cancel_request("s", until_ms=900)))
    await ask_again(lambda: faulty.cancels.drop("t"))
    lasting = await ask_again(lambda: faulty.cancels.put(a_cancel_request("t", until_ms=UNTIL_ENDED)))
    assert list(await ask_again(faulty.cancels.lasting)) == list(await ask_again(lambda: faulty.cancels.of("t")))
    await ask_again(lambda: faulty.cancels.drop("t", [lasting]))
    await ask_again(lambda: faulty.cancels.prune(now_ms=500))


async def a_conversation(faulty: StoreBundle, stores: StoreBundle) -> None:
    await ask_again(lambda: faulty.chats.create(a_chat()))
    await ask_again(lambda: faulty.chats.add_messages("c", [a_message("q"), a_message("1", "q")], now_ms=2))
    await ask_again(lambda: faulty.chats.add_messages("c", [a_message("2", "q", "", state="writing")], now_ms=3))
    await ask_again(lambda: faulty.chats.finish_message("c", "2", "hello", {"state": "complete"}, now_ms=4))
    await ask_again(lambda: faulty.chats.choose("c", "1"))
    await ask_again(lambda: faulty.chats.rename("c", "title", now_ms=5))
    await ask_again(lambda: faulty.chats.attach(an_attachment(), b"abc"))
    await ask_again(lambda: faulty.chats.attach(an_attachment("g"), b"abc"))
    await ask_again(lambda: faulty.chats.detach("g"))
    await ask_again(lambda: faulty.chats.mark("k", "c", "q"))
    assert await ask_again(lambda: faulty.chats.marked(["k"])) is not None
    for id in ("d", "e"):
        await stores.chats.create(a_chat(id, made_by="it"))
        await stores.chats.add_messages(id, [a_message("m", attachments=[{"id": "f"}])], now_ms=1)
    await ask_again(lambda: faulty.chats.remove("d"))
    await ask_again(lambda: faulty.chats.remove_unused(9_000))


async def some_memories(faulty: StoreBundle, stores: StoreBundle) -> None:
    for key, value in (("a", "the dam"), ("b", "the river"), ("a", {"the": "lake"})):
        await ask_again(lambda k=key, v=value: faulty.memories.put("s", k, v))  # type: ignore[misc]
    await ask_again(lambda: faulty.memories.put("t", "a", 1))
    found = await ask_again(lambda: faulty.memories.get("s", "a"))
    assert found == Memory("a", {"the": "lake"})
    assert [memory.key for memory in await ask_again(lambda: faulty.memories.search("s", "The river"))] == ["b", "a"]


async def some_tokens(faulty: StoreBundle, stores: StoreBundle) -> None:
    for id, role in (("a", "admin"), ("b", "admin"), ("c", "user")):
        token = a_token(id, role=role, name=id)
        await ask_again(lambda t=token: faulty.tokens.add(t, is_only=True))  # type: ignore[misc]
    await ask_again(lambda: faulty.tokens.use("c", now_ms=5_000_000))
    await ask_again(lambda: faulty.tokens.revoke("a", by="b", now_ms=2_000, keep_admin=True))
    assert await ask_again(faulty.tokens.has_admin)
    assert [token.id for token in await ask_again(lambda: faulty.tokens.list(limit=2))] == ["c", "b"]
    assert (await ask_again(lambda: faulty.tokens.get("a"))) is not None


async def some_audit_records(faulty: StoreBundle, stores: StoreBundle) -> None:
    for number in range(3):
        entry = an_audit_record(f"a{number}", at_ms=number)
        await ask_again(lambda e=entry: faulty.audit.append(e))  # type: ignore[misc]
    await ask_again(lambda: faulty.audit.rename("ann", "bob"))
    await ask_again(lambda: faulty.audit.remove_before(1))
    assert [entry.id for entry in await ask_again(faulty.audit.list)] == ["a2", "a1"]


async def contents(stores: StoreBundle) -> dict[str, Any]:
    """Return the contents of the stores, as far as the scenarios write them."""
    runs = await stores.runs.list(limit=1_000)
    graphs = [*await stores.graphs.versions("g"), *await stores.graphs.versions("h")]
    messages, in_view = await stores.chats.messages("c")
    return {
        "runs": list(runs),
        "events": {run.id: list(await stores.events.read(run.id)) for run in runs},
        "journal": {id: list(await stores.journal.load(id)) for id in ("r", "s", "old")},
        "payloads": [await stores.payloads.get("r", f"n00000{number}") for number in (1, 2)],
        "spending": list(await stores.spending.sums(["day", "node", "model"])),
        "graphs": graphs,
        "approvals": list(await stores.approvals.list()),
        "cancels": dict(await stores.cancels.find(dict.fromkeys("rst", "ann"), now_ms=0)),
        "chats": list(await stores.chats.list()),
        "messages": list(messages),
        "in view": set(in_view),
        "attachments": [await stores.chats.attachment(id) for id in "fg"],
        "marked": await stores.chats.marked(["k"]),
        "tokens": list(await stores.tokens.list()),
        "audit": list(await stores.audit.list()),
        "memories": [list(await stores.memories.search(space, text)) for space in "st" for text in ("", "dam", "lake")],
    }
