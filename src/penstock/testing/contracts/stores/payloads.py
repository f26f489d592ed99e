"""The contract of every `PayloadStore`."""

from __future__ import annotations

from penstock.errors import InvalidValue
from penstock.hosting.ports import Fenced
from penstock.testing.contracts.stores.suite import (
    NOT_JSON,
    NOT_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    a_payload,
    a_run,
    fresh,
    raises,
)


class PayloadStoreContract(StoreContract):
    """Payloads by run and call: replaced, removed by age, and removed with their run."""

    @fresh
    async def test_payloads_are_read_back_exactly(self, stores: StoreBundle) -> None:
        for number, value in enumerate(ODD_VALUES):
            payload = a_payload(f"n{number}", request=value, response=value, recording="full", epoch=0, at_ms=number)
            await stores.payloads.put("r", [payload])
            found = await stores.payloads.get("r", f"n{number}")
            assert found is not None
            assert [repr(part) for part in found] == [repr(part) for part in payload]
        for call_id in ("unknown", "", *NOT_NAMES):
            assert await stores.payloads.get("r", call_id) is None
            assert await stores.payloads.get(call_id, "n0") is None

    @fresh
    async def test_a_payload_replaces_that_of_the_same_call(self, stores: StoreBundle) -> None:
        await stores.payloads.put("r", [a_payload(request="old"), a_payload("n000002", request="other")])
        newer = a_payload(request="new", recording="full", epoch=2, at_ms=9)
        await stores.payloads.put("r", [newer])
        assert await stores.payloads.get("r", "n000001") == newer
        other = await stores.payloads.get("r", "n000002")
        assert other is not None
        assert other.request == "other"

    @fresh
    async def test_payloads_that_cannot_be_stored_are_refused_together(self, stores: StoreBundle) -> None:
        wrong = [a_payload(request=value) for value in NOT_JSON] + [a_payload(name) for name in NOT_NAMES]
        for payload in [*wrong, a_payload(run_id="another"), a_payload(recording="off"), a_payload(at_ms=2**63)]:
            with raises(InvalidValue):
                await stores.payloads.put("r", [a_payload("fine"), payload])
        assert await stores.payloads.get("r", "fine") is None

    @fresh
    async def test_payloads_of_an_older_claim_are_fenced(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run("r"))
        for _ in range(2):
            await stores.runs.claim("w", now_ms=10_000, lease_ms=0, run_id="r")
        with raises(Fenced):
            await stores.payloads.put("r", [a_payload()], epoch=1)
        assert await stores.payloads.get("r", "n000001") is None
        await stores.payloads.put("r", [a_payload()], epoch=2)
        assert await stores.payloads.get("r", "n000001") is not None

    @fresh
    async def test_payloads_are_removed_with_their_run(self, stores: StoreBundle) -> None:
        for id in ("r", "s"):
            await stores.runs.add(a_run(id))
            await stores.payloads.put(id, [a_payload(run_id=id)])
        await stores.runs.end("r", "cancelled", now_ms=5)
        await stores.runs.remove("r")
        assert await stores.payloads.get("r", "n000001") is None
        assert await stores.payloads.get("s", "n000001") is not None
        await stores.runs.end("s", "cancelled", now_ms=5)
        assert list(await stores.runs.remove_ended(6)) == ["s"]
        assert await stores.payloads.get("s", "n000001") is None

    @fresh
    async def test_old_payloads_are_removed_oldest_first_and_within_the_limit(self, stores: StoreBundle) -> None:
        await stores.payloads.put("r", [a_payload(f"n{at_ms}", at_ms=at_ms) for at_ms in (3, 1, 2, 4)])
        assert await stores.payloads.remove_before(4, limit=2) == 2
        kept = [at_ms for at_ms in (1, 2, 3, 4) if await stores.payloads.get("r", f"n{at_ms}") is not None]
        assert kept == [3, 4]
        assert await stores.payloads.remove_before(4, limit=2) == 1
        assert await stores.payloads.remove_before(4) == 0

    @fresh
    async def test_payloads_are_stored_with_the_events_of_a_transaction_or_not_at_all(
        self, stores: StoreBundle
    ) -> None:
        async def unit(inside: StoreBundle) -> None:
            await inside.payloads.put("r", [a_payload()])
            raise KeyError("on purpose")

        with raises(KeyError):
            await stores.transaction(unit)
        assert await stores.payloads.get("r", "n000001") is None
