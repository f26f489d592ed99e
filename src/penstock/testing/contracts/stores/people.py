"""The contract of every `PersonStore`."""

from __future__ import annotations

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, CostShare
from penstock.nodes.memory import space_of_owner
from penstock.testing.contracts.stores.suite import (
    StoreBundle,
    StoreContract,
    a_chat,
    a_run,
    a_token,
    an_approval,
    an_attachment,
    an_audit_record,
    brought_to,
    fresh,
    raises,
)


class PersonStoreContract(StoreContract):
    """A name is found wherever it stands, and is gone afterwards; other people keep theirs."""

    async def fill(self, stores: StoreBundle, name: str, other: str) -> None:
        run = await brought_to(stores, "completed", f"of-{name}", owner=name)
        await stores.spending.record(run, [CostShare("n", "m", 1)])
        await stores.chats.create(a_chat(f"c-{name}", owner=name))
        await stores.chats.attach(an_attachment(f"f-{name}", owner=name), b"abc")
        await stores.memories.put(space_of_owner(name), "dam", "Hoover")
        await stores.tokens.add(a_token(f"t-{name}", name=name, created_by=other))
        for number in range(2):
            await stores.graphs.save(f"g-{name}", name, f"{number}", {}, now_ms=1, saved_by=other if number else name)
        await stores.approvals.ask(an_approval(f"a-{other}", run_id=f"r-{other}", owner=other))
        await stores.approvals.answer(f"a-{other}", "approved", by=name, now_ms=1)
        await stores.audit.append(an_audit_record(f"e-{name}", actor=name, owner=other))

    @fresh
    async def test_a_person_is_found_in_every_place_and_forgotten(self, stores: StoreBundle) -> None:
        await self.fill(stores, "ann", "bob")
        await self.fill(stores, "bob", "ann")
        before = await stores.people.places("bob")
        assert before == await stores.people.places("ann")
        assert before == {
            "runs.owner": 1,
            "chats.owner": 1,
            "attachments.owner": 1,
            "memories.owner": 1,
            "tokens.name": 1,
            "tokens.created_by": 1,
            "graphs.owner": 1,
            "graph_versions.saved_by": 2,
            "approvals.answered_by": 1,
            "spending.owner": 1,
            "audit.actor": 1,
            "audit.owner": 1,
        }
        assert list(await stores.people.attachments("ann")) == ["f-ann"]
        await stores.runs.remove("of-ann")
        await stores.chats.remove("c-ann")
        await stores.people.forget("ann", "erased-1")
        assert await stores.people.places("ann") == {}
        assert await stores.people.forget("ann", "erased-2") == {}
        kept = await stores.people.places("erased-1")
        assert kept == {
            "tokens.name": 1,
            "tokens.created_by": 1,
            "graphs.owner": 1,
            "graph_versions.saved_by": 2,
            "approvals.answered_by": 1,
            "spending.owner": 1,
            "audit.actor": 1,
            "audit.owner": 1,
        }
        assert (await stores.chats.attachment("f-ann"), list(await stores.memories.search("owner:ann", ""))) == (
            None,
            [],
        )
        graph, token = await stores.graphs.get("g-ann"), await stores.tokens.get("t-bob")
        assert (graph and graph.owner, graph and graph.saved_by, token and token.created_by) == (
            "erased-1", "bob", "erased-1",
        )  # fmt: skip
        assert sum(found.calls for found in await stores.spending.sums(["owner"])) == 2
        assert await stores.people.places("bob") == before

    @fresh
    async def test_nothing_is_changed_while_the_person_has_runs_or_chats(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run(owner="ann"))
        await stores.chats.create(a_chat(owner="ann"))
        await stores.memories.put(space_of_owner("ann"), "dam", "Hoover")
        before = await stores.people.places("ann")
        with raises(Conflict):
            await stores.people.forget("ann", "erased-1")
        assert await stores.people.places("ann") == before
        assert await stores.people.places("unknown") == {}
        with raises(InvalidValue):
            await stores.people.forget("ann", "\0")
