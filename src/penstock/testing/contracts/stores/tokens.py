"""The contract of every `TokenStore`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict
from penstock.hosting.tokens import USE_INTERVAL_MS, LastAdmin, NameTaken, TokenNotFound
from penstock.testing.contracts.stores.suite import (
    NOT_NAMES,
    StoreBundle,
    StoreContract,
    a_token,
    fresh,
    raises,
    until_nothing,
)

LATER_MS = 10_000_000


class TokenStoreContract(StoreContract):
    """Tokens by id: revoked once, never removed, and never the last admin's if that is requested."""

    @fresh
    async def test_a_token_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        limits = {"usd": "1"}
        token = a_token(note="k\x00\ud83d", kind="gateway", limits=limits, models=["m"], team="dams", expires_ms=9)
        assert await stores.tokens.add(token) == token
        assert await stores.tokens.add(token) == token, "the same again changes nothing"
        assert await stores.tokens.get(token.id) == token
        assert list(await stores.tokens.list()) == [token]
        for id in ("unknown", "", *NOT_NAMES):
            assert await stores.tokens.get(id) is None

    @fresh
    async def test_a_token_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        wrong: tuple[dict[str, Any], ...] = ({"role": "owner"}, {"kind": "robot"}, {"models": "m"}, {"limits": [1]})
        for fields in (*wrong, {"name": NOT_NAMES[0]}, {"created_ms": 1.5}, {"note": None}, {"team": NOT_NAMES[0]}):
            with raises(InvalidValue):
                await stores.tokens.add(a_token(**fields))
        assert list(await stores.tokens.list()) == []

    @fresh
    async def test_another_secret_under_the_same_id_is_a_conflict(self, stores: StoreBundle) -> None:
        token = await stores.tokens.add(a_token())
        with raises(Conflict):
            await stores.tokens.add(a_token(digest="f" * 64))
        assert await stores.tokens.get(token.id) == token

    @fresh
    async def test_an_only_token_needs_a_name_that_no_active_token_has(self, stores: StoreBundle) -> None:
        await stores.tokens.add(a_token("a", expires_ms=1_500))
        with raises(NameTaken):
            await stores.tokens.add(a_token("b"), is_only=True)
        await stores.tokens.add(a_token("b"))
        await stores.tokens.revoke("b", by="root", now_ms=1_200)
        await stores.tokens.add(a_token("c", created_ms=1_501), is_only=True)
        await stores.tokens.add(a_token("d", created_ms=1_501, kind="gateway"), is_only=True)
        await stores.tokens.add(a_token("e", created_ms=1_501, name="bob"), is_only=True)
        assert len(await stores.tokens.list()) == 5

    @fresh
    async def test_a_token_is_revoked_once(self, stores: StoreBundle) -> None:
        await stores.tokens.add(a_token())
        revoked = await stores.tokens.revoke("0123456789ab", by="root", now_ms=2_000)
        assert (revoked.revoked_ms, revoked.revoked_by) == (2_000, "root")
        assert await stores.tokens.revoke("0123456789ab", by="eve", now_ms=3_000) == revoked
        assert await stores.tokens.get("0123456789ab") == revoked
        with raises(TokenNotFound):
            await stores.tokens.revoke("unknown", by="root", now_ms=1)

    @fresh
    async def test_the_last_admin_is_kept_if_requested(self, stores: StoreBundle) -> None:
        assert not await stores.tokens.has_admin()
        await stores.tokens.add(a_token("k", kind="gateway", role="admin"))
        assert not await stores.tokens.has_admin(), "a gateway key is no admin"
        for id, fields in {"a": {}, "b": {}, "old": {"expires_ms": 1_500}}.items():
            await stores.tokens.add(a_token(id, role="admin", **fields))
        await stores.tokens.revoke("a", by="b", now_ms=2_000, keep_admin=True)
        with raises(LastAdmin):
            await stores.tokens.revoke("b", by="b", now_ms=2_000, keep_admin=True)
        await stores.tokens.revoke("old", by="b", now_ms=2_000, keep_admin=True)
        await stores.tokens.revoke("b", by="b", now_ms=2_000)
        assert await stores.tokens.has_admin(), "a revoked one still tells that tokens are needed"

    @fresh
    async def test_of_admins_who_revoke_each_other_one_is_left(self, stores: StoreBundle) -> None:
        ids = [f"t{number}" for number in range(4)]
        for id in ids:
            await stores.tokens.add(a_token(id, role="admin"))

        async with self.another(stores) as other:
            both = (stores, other)

            async def revoke(number: int) -> bool:
                try:
                    await both[number % 2].tokens.revoke(ids[number], by="x", now_ms=2_000, keep_admin=True)
                except LastAdmin:
                    return False
                return True

            revoked = await asyncio.gather(*map(revoke, range(4)))
        assert sorted(revoked) == [False, True, True, True]

    @fresh
    async def test_a_use_is_recorded_once_an_hour(self, stores: StoreBundle) -> None:
        await stores.tokens.add(a_token())
        for now_ms, expected in (
            (LATER_MS, LATER_MS),
            (LATER_MS + USE_INTERVAL_MS - 1, LATER_MS),
            (LATER_MS + USE_INTERVAL_MS, LATER_MS + USE_INTERVAL_MS),
            (LATER_MS, LATER_MS + USE_INTERVAL_MS),
        ):
            await stores.tokens.use("0123456789ab", now_ms=now_ms)
            token = await stores.tokens.get("0123456789ab")
            assert token is not None
            assert token.last_used_ms == expected
        await stores.tokens.use("unknown", now_ms=1)

    @fresh
    async def test_tokens_are_listed_newest_first_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for number in range(7):
            kind = cast("Any", "gateway" if number % 2 else "user")
            await stores.tokens.add(a_token(f"t{number}", created_ms=number // 2, kind=kind))
        found = await until_nothing(lambda last: stores.tokens.list(before=last, limit=2))
        assert [token.id for token in found] == [f"t{number}" for number in reversed(range(7))]
        assert [token.id for token in await stores.tokens.list(kinds=["gateway"])] == ["t5", "t3", "t1"]
        assert list(await stores.tokens.list(before="unknown")) == []
        with raises(InvalidValue):
            await stores.tokens.list(limit=-1)
