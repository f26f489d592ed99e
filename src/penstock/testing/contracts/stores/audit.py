"""The contract of every `AuditStore`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from penstock.errors import InvalidValue
from penstock.hosting.audit import AuditFilter
from penstock.testing.contracts.stores.suite import (
    NOT_NAMES,
    NOT_OBJECTS,
    ODD_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    an_audit_record,
    fresh,
    raises,
    until_nothing,
)


class AuditStoreContract(StoreContract):
    """Entries in the order of their time: found by person, action and target, renamed, and removed by age."""

    @fresh
    async def test_entries_are_read_back_exactly(self, stores: StoreBundle) -> None:
        entries = [
            an_audit_record(f"a{number}", details={"value": value}, target=name, owner=name, actor=name, source="cli")
            for number, (value, name) in enumerate(zip(ODD_VALUES, ODD_NAMES * 9, strict=False))
        ]
        for entry in entries:
            await stores.audit.append(entry)
        found = {entry.id: entry for entry in await stores.audit.list(limit=1_000)}
        assert [repr(found[entry.id]) for entry in entries] == [repr(entry) for entry in entries]

    @fresh
    async def test_an_entry_is_never_changed_by_another_of_its_id(self, stores: StoreBundle) -> None:
        first = an_audit_record()
        for entry in (first, first, replace(first, actor="bob")):
            await stores.audit.append(entry)
        assert list(await stores.audit.list()) == [first]

    @fresh
    async def test_entries_are_listed_newest_first_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for number in range(7):
            await stores.audit.append(an_audit_record(f"a{number}", at_ms=number // 2))
        found = await until_nothing(lambda last: stores.audit.list(before=last, limit=2))
        assert [entry.id for entry in found] == [f"a{number}" for number in reversed(range(7))]
        assert list(await stores.audit.list(before="unknown")) == []

    @fresh
    async def test_entries_are_found_by_person_action_target_and_time(self, stores: StoreBundle) -> None:
        for id, fields in {
            "a1": {"at_ms": 1, "actor": "ann", "action": "run.cancel", "target": "r"},
            "a2": {"at_ms": 2, "actor": "bob", "action": "run.cancel", "target": "r", "owner": "ann"},
            "a3": {"at_ms": 3, "actor": "bob", "action": "runner.start"},
            "a4": {"at_ms": 4, "actor": "bob", "action": "run", "target": "s"},
            "a5": {"at_ms": 5, "actor": "bob_", "action": "token.create"},
        }.items():
            await stores.audit.append(an_audit_record(id, **cast("Any", fields)))
        for wanted, expected in (
            (AuditFilter(actor="ann"), "a2 a1"),
            (AuditFilter(actor="bob"), "a4 a3 a2"),
            (AuditFilter(action="run"), "a4 a2 a1"),
            (AuditFilter(action="run.cancel"), "a2 a1"),
            (AuditFilter(action="r%"), ""),
            (AuditFilter(target="r"), "a2 a1"),
            (AuditFilter(since_ms=2, until_ms=4), "a3 a2"),
            (AuditFilter(actor="bob", action="run", target="r", since_ms=1), "a2"),
        ):
            found = await stores.audit.list(wanted)
            assert " ".join(entry.id for entry in found) == expected, wanted

    @fresh
    async def test_a_person_is_renamed_as_actor_and_as_owner(self, stores: StoreBundle) -> None:
        await stores.audit.append(an_audit_record("a1", actor="ann", owner="bob"))
        await stores.audit.append(an_audit_record("a2", actor="bob", owner="ann"))
        await stores.audit.append(an_audit_record("a3", actor="anna", owner=""))
        assert await stores.audit.rename("ann", "erased-1") == 2
        assert await stores.audit.rename("ann", "erased-1") == 0
        found = {entry.id: (entry.actor, entry.owner) for entry in await stores.audit.list()}
        assert found == {"a1": ("erased-1", "bob"), "a2": ("bob", "erased-1"), "a3": ("anna", "")}

    @fresh
    async def test_old_entries_are_removed_oldest_first(self, stores: StoreBundle) -> None:
        for number in range(5):
            await stores.audit.append(an_audit_record(f"a{number}", at_ms=number))
        assert await stores.audit.remove_before(4, limit=3) == 3
        assert await stores.audit.remove_before(4, limit=3) == 1
        assert await stores.audit.remove_before(4) == 0
        assert [entry.id for entry in await stores.audit.list()] == ["a4"]

    @fresh
    async def test_entries_that_cannot_be_stored_are_refused(self, stores: StoreBundle) -> None:
        wrong = [an_audit_record(details=value) for value in NOT_OBJECTS]
        wrong += [an_audit_record(actor=name) for name in NOT_NAMES]
        for entry in [*wrong, an_audit_record(at_ms=2**63), an_audit_record(source="mail")]:
            with raises(InvalidValue):
                await stores.audit.append(entry)
        for call in (
            lambda: stores.audit.list(limit=-1),
            lambda: stores.audit.list(AuditFilter(since_ms=cast("Any", "1"))),
            lambda: stores.audit.list(AuditFilter(actor=cast("Any", 7))),
            lambda: stores.audit.rename("ann", "\0"),
        ):
            with raises(InvalidValue):
                await call()
        assert list(await stores.audit.list()) == []
