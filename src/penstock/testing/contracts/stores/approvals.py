"""The contract of every `ApprovalStore` and every `CancelStore`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

from penstock.errors import InvalidValue
from penstock.hosting.ports import UNTIL_ENDED, ApprovalState, Conflict, Fenced
from penstock.testing.contracts.stores.suite import (
    LONG_S,
    NOT_JSON,
    NOT_NAMES,
    ODD_NAMES,
    ODD_VALUES,
    SOON_S,
    StoreBundle,
    StoreContract,
    a_cancel_request,
    a_run,
    an_approval,
    fresh,
    let_others_run,
    raises,
)

STATES: tuple[ApprovalState, ...] = get_args(ApprovalState)
ANSWERS: tuple[ApprovalState, ...] = ("approved", "edited", "rejected")


class ApprovalStoreContract(StoreContract):
    """Approvals by id, and by run and key: requested once, answered once, waited for."""

    @fresh
    async def test_an_approval_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        approval = an_approval(value={"mail": "\ud83d\x00"}, question="Send\x00it?", reason="\ud83d")
        assert await stores.approvals.ask(approval) == approval
        assert await stores.approvals.get("a") == approval
        assert list(await stores.approvals.list()) == [approval]
        for id in ("unknown", "", *NOT_NAMES):
            assert await stores.approvals.get(id) is None
        assert dict(await stores.approvals.answered(NOT_NAMES)) == {}

    @fresh
    async def test_odd_values_of_an_approval_are_read_back_exactly(self, stores: StoreBundle) -> None:
        for number, value in enumerate(ODD_VALUES):
            await stores.approvals.ask(an_approval(f"a{number}", value=value, expects=value))
            await stores.approvals.answer(f"a{number}", "edited", answer=value, by="bob", now_ms=2_000)
            found = await stores.approvals.get(f"a{number}")
            assert found is not None
            assert [repr(field) for field in (found.value, found.answer, found.expects)] == [repr(value)] * 3

    @fresh
    async def test_questions_and_answers_that_cannot_be_stored_are_refused(self, stores: StoreBundle) -> None:
        wrong = [an_approval(**{field: value}) for field in ("value", "expects") for value in NOT_JSON]
        wrong += [an_approval(**{field: name}) for field in ("id", "run_id", "owner", "key") for name in NOT_NAMES]
        for approval in [*wrong, an_approval(asked_ms=2**63), an_approval(state="lost")]:
            with raises(InvalidValue):
                await stores.approvals.ask(approval)
        assert list(await stores.approvals.list()) == []
        approval = await stores.approvals.ask(an_approval())
        for value in NOT_JSON:
            with raises(InvalidValue):
                await stores.approvals.answer("a", "edited", answer=value, by="bob", now_ms=1)
        for by, now_ms in (("b\x00b", 1), ("bob", 2**63)):
            with raises(InvalidValue):
                await stores.approvals.answer("a", "approved", by=by, now_ms=now_ms)
        for state in ("waiting", "withdrawn", "lost"):
            with raises(InvalidValue):
                await stores.approvals.answer("a", state, by="bob", now_ms=1)  # type: ignore[arg-type]
        assert await stores.approvals.get("a") == approval

    @fresh
    async def test_a_question_is_put_once_by_its_run_and_key(self, stores: StoreBundle) -> None:
        first = await stores.approvals.ask(an_approval("a", key="k"))
        for again in (an_approval("a", key="k"), an_approval("b", key="k", question="Really?", asked_ms=9_000)):
            assert await stores.approvals.ask(again) == first
        assert await stores.approvals.get("b") is None
        await stores.approvals.ask(an_approval("b", key="k", run_id="another"))
        await stores.approvals.ask(an_approval("c", key="another"))
        assert [approval.id for approval in await stores.approvals.list()] == ["a", "b", "c"]

    @fresh
    async def test_an_id_that_is_another_questions_is_a_conflict(self, stores: StoreBundle) -> None:
        first = await stores.approvals.ask(an_approval("a", key="k"))
        for other in (an_approval("a", key="l"), an_approval("a", key="k", run_id="another")):
            with raises(Conflict):
                await stores.approvals.ask(other)
        assert list(await stores.approvals.list()) == [first]

    @fresh
    async def test_asking_an_answered_question_again_returns_its_answer(self, stores: StoreBundle) -> None:
        for state in ANSWERS:
            approval = an_approval(state)
            await stores.approvals.ask(approval)
            answered = await stores.approvals.answer(state, state, answer={"x": 1}, by="bob", now_ms=2_000)
            assert await stores.approvals.ask(replace(approval, id="new", asked_ms=9_000)) == answered

    @fresh
    async def test_asking_a_withdrawn_question_again_replaces_it(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval("a", key="k", value="old"))
        await stores.approvals.withdraw("r", 0, now_ms=2_000)
        now = an_approval("b", key="k", value="new", question="Send that?", asked_ms=3_000, expects={"tool": "send"})
        waits = await stores.approvals.ask(now)
        assert waits == replace(now, id="a"), "under the id it had, and an answer is for the value that the run has now"
        assert await stores.approvals.get("a") == waits
        assert dict(await stores.approvals.answered(["a", "b"])) == {}
        assert (await stores.approvals.answer("a", "approved", by="bob", now_ms=4_000)).state == "approved"

    @fresh
    async def test_questions_are_listed_oldest_first_by_run_owner_and_state(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval("3", asked_ms=3))
        await stores.approvals.ask(an_approval("2b", asked_ms=2, owner="bob"))
        await stores.approvals.ask(an_approval("2a", asked_ms=2, run_id="s"))
        await stores.approvals.ask(an_approval("1", asked_ms=1, run_id="s", owner="bob"))
        await stores.approvals.answer("1", "rejected", by="bob", now_ms=5)
        cases: list[tuple[dict[str, Any], list[str]]] = [
            ({}, ["1", "2a", "2b", "3"]),
            ({"run_id": "s"}, ["1", "2a"]),
            ({"owner": "bob"}, ["1", "2b"]),
            ({"states": ["waiting"]}, ["2a", "2b", "3"]),
            ({"states": {"waiting", "rejected"}}, ["1", "2a", "2b", "3"]),
            ({"states": ("withdrawn",)}, []),
            ({"run_id": "s", "owner": "bob", "states": ["rejected"]}, ["1"]),
            ({"limit": 2}, ["1", "2a"]),
            ({"limit": 2, "before": "2a"}, ["2b", "3"]),
            ({"before": "1", "states": ["waiting"]}, ["2a", "2b", "3"]),
            ({"before": "2a", "owner": "bob"}, ["2b"]),
            ({"before": "3"}, []),
            ({"before": "unknown"}, []),
            ({"before": ""}, []),
            ({"limit": 0}, []),
            ({"owner": "unknown"}, []),
            ({"owner": ""}, []),
            ({"run_id": ""}, []),
        ]
        for filters, ids in cases:
            assert [approval.id for approval in await stores.approvals.list(**filters)] == ids, filters
        for wrong in ({"limit": -1}, {"states": ["lost"]}):
            with raises(InvalidValue):
                await stores.approvals.list(**wrong)

    @fresh
    async def test_the_first_answer_counts(self, stores: StoreBundle) -> None:
        for state in ANSWERS:
            approval = await stores.approvals.ask(an_approval(state))
            given: dict[str, Any] = {"answer": {"a": 1, "b": 2}, "reason": "it is\x00fine"}
            answered = await stores.approvals.answer(state, state, by="bob", now_ms=2_000, **given)
            assert answered == replace(approval, state=state, answered_by="bob", answered_ms=2_000, **given)
            assert await stores.approvals.get(state) == answered
            for other in ANSWERS:
                with raises(Conflict):
                    await stores.approvals.answer(state, other, by="eve", now_ms=3_000)
            assert await stores.approvals.get(state) == answered

    @fresh
    async def test_an_answer_whose_confirmation_was_lost_can_be_repeated(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval())
        once = await stores.approvals.answer("a", "edited", answer={"a": 1, "b": 2}, reason="x", by="bob", now_ms=2)
        again = await stores.approvals.answer("a", "edited", answer={"b": 2, "a": 1}, reason="x", by="bob", now_ms=2)
        assert again == once

    @fresh
    async def test_an_unknown_approval_is_a_key_error(self, stores: StoreBundle) -> None:
        with raises(KeyError):
            await stores.approvals.answer("unknown", "approved", by="bob", now_ms=1)
        with raises(KeyError):
            await stores.approvals.wait("unknown", LONG_S)

    @fresh
    async def test_of_concurrent_answers_one_counts(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval())
        async with self.another(stores) as other:
            both = (stores, other)

            async def answer(number: int) -> str | None:
                state = ANSWERS[number % len(ANSWERS)]
                try:
                    done = await both[number % 2].approvals.answer("a", state, by=f"u{number}", now_ms=number)
                except Conflict:
                    return None
                return done.answered_by

            answered = [by for by in await asyncio.gather(*map(answer, range(self.claimants))) if by is not None]
        found = await stores.approvals.get("a")
        assert found is not None
        assert answered == [found.answered_by]

    @fresh
    async def test_a_fenced_worker_withdraws_nothing(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        for _ in range(2):
            await stores.runs.claim("w", now_ms=1_000, lease_ms=0)
        await stores.approvals.ask(an_approval("a"), epoch=2)
        for epoch in (0, 1, 3):
            with raises(Fenced):
                await stores.approvals.withdraw("r", epoch, now_ms=2_000)
        assert await stores.approvals.get("a") == an_approval("a")
        await stores.approvals.withdraw("r", 2, now_ms=2_000)
        assert await stores.approvals.get("a") == an_approval("a", state="withdrawn", answered_ms=2_000)

    @fresh
    async def test_a_fenced_worker_asks_nothing(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        for _ in range(2):
            await stores.runs.claim("w", now_ms=1_000, lease_ms=0)
        await stores.approvals.ask(an_approval("a"), epoch=2)
        await stores.approvals.withdraw("r", 2, now_ms=2_000)
        for id in ("a", "b"):
            for epoch in (0, 1, 3):
                with raises(Fenced):
                    await stores.approvals.ask(an_approval(id), epoch=epoch)
        assert [approval.state for approval in await stores.approvals.list(run_id="r")] == ["withdrawn"]
        assert (await stores.approvals.ask(an_approval("a"), epoch=2)).state == "waiting"

    @fresh
    async def test_only_waiting_approvals_of_the_run_are_withdrawn(self, stores: StoreBundle) -> None:
        for id, run_id in (("a", "r"), ("b", "r"), ("answered", "r"), ("another's", "s")):
            await stores.approvals.ask(an_approval(id, run_id=run_id))
        answered = await stores.approvals.answer("answered", "approved", by="bob", now_ms=1)
        for _ in range(2):
            await stores.approvals.withdraw("r", 0, now_ms=2_000)
        await stores.approvals.withdraw("unknown", 0, now_ms=2_000)
        for id in ("a", "b"):
            assert await stores.approvals.get(id) == an_approval(id, state="withdrawn", answered_ms=2_000)
            with raises(Conflict):
                await stores.approvals.answer(id, "approved", by="bob", now_ms=3_000)
        assert await stores.approvals.get("answered") == answered
        assert await stores.approvals.get("another's") == an_approval("another's", run_id="s")

    @fresh
    async def test_answered_finds_approvals_that_are_no_longer_waiting(self, stores: StoreBundle) -> None:
        for id in ("waits", "approved", "edited", "rejected", "withdrawn"):
            await stores.approvals.ask(an_approval(id, run_id=id))
        for state in ANSWERS:
            await stores.approvals.answer(state, state, by="bob", now_ms=1)
        await stores.approvals.withdraw("withdrawn", 0, now_ms=1)
        ids = ["waits", *ANSWERS, "withdrawn", "unknown", "approved"]
        found = await stores.approvals.answered(ids)
        assert {id: approval.state for id, approval in found.items()} == {id: id for id in (*ANSWERS, "withdrawn")}
        assert set(await stores.approvals.answered({"approved", "waits"})) == {"approved"}
        assert dict(await stores.approvals.answered([])) == {}
        assert dict(await stores.approvals.answered([f"n{number}" for number in range(2_000)])) == {}

    @fresh
    async def test_waiting_ends_with_the_answer(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            for id, writer in (("a", stores), ("b", other)):
                await stores.approvals.ask(an_approval(id))
                waits = [asyncio.ensure_future(bundle.approvals.wait(id, LONG_S)) for bundle in (stores, other) * 2]
                await let_others_run()
                answered = await writer.approvals.answer(id, "approved", by="bob", now_ms=1)
                assert await asyncio.gather(*waits) == [answered] * 4
                assert await stores.approvals.wait(id, 0) == answered

    @fresh
    async def test_waiting_ends_when_the_question_is_withdrawn(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval())
        waits = asyncio.ensure_future(stores.approvals.wait("a", LONG_S))
        await let_others_run()
        await stores.approvals.withdraw("r", 0, now_ms=1)
        found = await waits
        assert found is not None
        assert found.state == "withdrawn"

    @fresh
    async def test_waiting_for_an_answer_times_out(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval())
        await stores.approvals.ask(an_approval("b"))
        await stores.approvals.answer("b", "approved", by="bob", now_ms=1)
        for timeout_s in (SOON_S, 0, -1):
            assert await stores.approvals.wait("a", timeout_s) is None
        with raises(InvalidValue):
            await stores.approvals.wait("a", float("nan"))

    @fresh
    async def test_a_cancelled_wait_for_an_answer_leaves_the_others_waiting(self, stores: StoreBundle) -> None:
        await stores.approvals.ask(an_approval())
        waits = [asyncio.ensure_future(stores.approvals.wait("a", LONG_S)) for _ in range(3)]
        await let_others_run()
        waits[1].cancel()
        await asyncio.wait([waits[1]])
        assert waits[1].cancelled()
        answered = await stores.approvals.answer("a", "approved", by="bob", now_ms=1)
        assert [await waits[0], await waits[2]] == [answered, answered]


def of_ann(run_ids: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(run_ids, "ann")


class CancelStoreContract(StoreContract):
    """Cancel requests, by run and owner: the first counts, each for a limited time."""

    @fresh
    async def test_a_cancel_request_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        for owner in ("", "ann", *ODD_NAMES):
            request = a_cancel_request(
                owner or "r", reason="en\x00ough \ud83d", at_ms=2**62, until_ms=2**63 - 1, owner=owner
            )
            assert await stores.cancels.put(request) == request
            assert dict(await stores.cancels.find({request.run_id: owner}, now_ms=2**62)) == {request.run_id: request}

    @fresh
    async def test_the_first_cancel_request_counts(self, stores: StoreBundle) -> None:
        first = await stores.cancels.put(a_cancel_request())
        for other in (
            a_cancel_request(by="bob"),
            a_cancel_request(reason="more", at_ms=150, until_ms=160),
            a_cancel_request(at_ms=200),
        ):
            assert await stores.cancels.put(other) == first
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=100)) == {"r": first}

    @fresh
    async def test_the_first_cancel_request_is_stored_until_the_latest_expiry(self, stores: StoreBundle) -> None:
        await stores.cancels.put(a_cancel_request())
        longer = a_cancel_request(until_ms=900)
        assert await stores.cancels.put(a_cancel_request(reason="more", by="bob", at_ms=150, until_ms=900)) == longer
        assert await stores.cancels.put(a_cancel_request(reason="more", at_ms=160, until_ms=300)) == longer
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=900)) == {"r": longer}
        lasting = a_cancel_request(until_ms=UNTIL_ENDED)
        assert await stores.cancels.put(a_cancel_request(by="eve", at_ms=900, until_ms=UNTIL_ENDED)) == lasting
        assert await stores.cancels.put(a_cancel_request(by="eve", at_ms=10_000, until_ms=20_000)) == lasting
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=2**62)) == {"r": lasting}
        assert await stores.cancels.prune(now_ms=2**62) == 0

    @fresh
    async def test_all_cancel_requests_of_a_run_are_listed(self, stores: StoreBundle) -> None:
        owners = ("", "ann", "bob")
        requests = [a_cancel_request(owner=owner, at_ms=90 - n, reason="\x00 \ud83d") for n, owner in enumerate(owners)]
        for request in (*requests, a_cancel_request("s"), *(a_cancel_request(name) for name in ODD_NAMES)):
            await stores.cancels.put(request)
        assert list(await stores.cancels.of("r")) == requests[::-1]
        for name in ODD_NAMES:
            assert list(await stores.cancels.of(name)) == [a_cancel_request(name)]
        for run_id in ("unknown", *NOT_NAMES):
            assert list(await stores.cancels.of(run_id)) == []

    @fresh
    async def test_lasting_cancel_requests_are_listed_oldest_first(self, stores: StoreBundle) -> None:
        lasting = [a_cancel_request(f"r{number}", at_ms=90 - number, until_ms=UNTIL_ENDED) for number in range(3)]
        for request in (*lasting, a_cancel_request("s"), a_cancel_request("t", until_ms=UNTIL_ENDED - 1)):
            await stores.cancels.put(request)
        assert list(await stores.cancels.lasting()) == lasting[::-1]
        assert list(await stores.cancels.lasting(limit=2)) == lasting[:0:-1]
        with raises(InvalidValue):
            await stores.cancels.lasting(limit=-1)

    @fresh
    async def test_dropping_cancel_requests_leaves_newer_ones(self, stores: StoreBundle) -> None:
        for owner in ("", "ann", "bob"):
            await stores.cancels.put(a_cancel_request(owner=owner, reason="\x00 \ud83d"))
        seen = await stores.cancels.of("r")
        await stores.cancels.put(a_cancel_request("s"))
        longer = await stores.cancels.put(a_cancel_request(owner="bob", at_ms=150, until_ms=900))
        await stores.cancels.drop("r", seen[:1])
        anew = await stores.cancels.put(a_cancel_request(by="eve"))
        for _ in range(2):
            await stores.cancels.drop("r", seen)
            assert list(await stores.cancels.of("r")) == [anew, longer]
        await stores.cancels.drop("s", seen)
        await stores.cancels.drop("r", [])
        await stores.cancels.drop("r", [a_cancel_request("s")])
        assert (len(await stores.cancels.of("r")), len(await stores.cancels.of("s"))) == (2, 1)
        await stores.cancels.drop("r", await stores.cancels.of("r"))
        assert list(await stores.cancels.of("r")) == []

    @fresh
    async def test_a_cancel_request_for_an_owner_applies_to_that_owner_only(self, stores: StoreBundle) -> None:
        bobs = await stores.cancels.put(a_cancel_request(owner="bob", by="bob"))
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=100)) == {}
        assert dict(await stores.cancels.find({"r": ""}, now_ms=100)) == {}
        assert dict(await stores.cancels.find({"r": "bob"}, now_ms=100)) == {"r": bobs}
        anns = a_cancel_request(owner="ann", at_ms=110)
        assert await stores.cancels.put(anns) == anns, "another's does not stand in its way"
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=110)) == {"r": anns}
        assert dict(await stores.cancels.find({"r": "bob", "s": "bob"}, now_ms=110)) == {"r": bobs}

    @fresh
    async def test_of_a_request_for_an_owner_and_one_for_any_owner_the_first_counts(self, stores: StoreBundle) -> None:
        for_anybody = await stores.cancels.put(a_cancel_request(by="root", at_ms=120))
        anns = await stores.cancels.put(a_cancel_request(owner="ann", at_ms=130, until_ms=900))
        await stores.cancels.put(a_cancel_request(owner="bob", at_ms=110, until_ms=130))
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=130)) == {"r": for_anybody}
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=201)) == {"r": anns}
        assert (await stores.cancels.find({"r": "bob"}, now_ms=130))["r"].by == "ann"
        assert (await stores.cancels.find({"r": "bob"}, now_ms=131))["r"] == for_anybody
        await stores.cancels.drop("r")
        for owner in ("ann", "bob", "eve"):
            assert dict(await stores.cancels.find({"r": owner}, now_ms=0)) == {}

    @fresh
    async def test_a_cancel_request_counts_until_it_is_dropped_or_pruned(self, stores: StoreBundle) -> None:
        await stores.cancels.put(a_cancel_request())
        for _ in range(2):
            await stores.cancels.drop("r")
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=100)) == {}
        second = a_cancel_request(by="bob")
        assert await stores.cancels.put(second) == second
        third = a_cancel_request(by="eve", at_ms=201, until_ms=300)
        assert await stores.cancels.put(third) == third, "the one before expired at 200"
        assert dict(await stores.cancels.find({"r": "ann"}, now_ms=250)) == {"r": third}

    @fresh
    async def test_a_cancel_request_is_found_until_it_expires(self, stores: StoreBundle) -> None:
        for run_id in ("a", "b", *ODD_NAMES):
            await stores.cancels.put(a_cancel_request(run_id))
        await stores.cancels.put(a_cancel_request("later", until_ms=900))
        assert set(await stores.cancels.find(of_ann(["a", "later", "unknown"]), now_ms=200)) == {"a", "later"}
        assert set(await stores.cancels.find(of_ann(["a", "later"]), now_ms=201)) == {"later"}
        assert set(await stores.cancels.find(of_ann(ODD_NAMES), now_ms=0)) == set(ODD_NAMES)
        assert dict(await stores.cancels.find({}, now_ms=0)) == {}
        assert dict(await stores.cancels.find(of_ann(f"n{number}" for number in range(2_000)), now_ms=0)) == {}

    @fresh
    async def test_expired_cancel_requests_are_pruned_and_counted(self, stores: StoreBundle) -> None:
        for number in range(5):
            await stores.cancels.put(a_cancel_request(f"r{number}", until_ms=200 + number))
        await stores.cancels.put(a_cancel_request("r3", owner="bob"))
        assert await stores.cancels.prune(now_ms=200) == 0
        assert await stores.cancels.prune(now_ms=203) == 4
        assert await stores.cancels.prune(now_ms=203) == 0
        assert set(await stores.cancels.find(of_ann(f"r{number}" for number in range(5)), now_ms=0)) == {"r3", "r4"}

    @fresh
    async def test_concurrent_cancel_requests_all_get_the_first(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            both = (stores, other)
            requests = [both[n % 2].cancels.put(a_cancel_request(by=f"u{n}")) for n in range(self.claimants)]
            assert len({request.by for request in await asyncio.gather(*requests)}) == 1

    @fresh
    async def test_a_cancel_request_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        wrong = [a_cancel_request(**{field: name}) for field in ("run_id", "by", "owner") for name in NOT_NAMES]
        for request in [*wrong, a_cancel_request(until_ms=2**63), a_cancel_request(at_ms=1.5)]:
            with raises(InvalidValue):
                await stores.cancels.put(request)
        assert dict(await stores.cancels.find(of_ann(["r", *NOT_NAMES]), now_ms=0)) == {}
