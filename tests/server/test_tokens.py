"""Tokens in the database: created, used and revoked while servers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS, Budget
from penstock.errors import InvalidValue
from penstock.gateway.key_accounts import key_account, run_account
from penstock.hosting.durability import day_of
from penstock.hosting.ports import StoreUnavailable
from penstock.server.serve import count_tokens, greeting
from penstock.server.settings import ServerSettings
from penstock.server.tokens import MAX_AGE_S, StoredTokens, create_token
from penstock.storage import open_stores
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock
from tests.server.served import GATE, SECRETS, TOKENS, Served, listening, parts, served, wire


async def created(root: httpx2.AsyncClient, name: str = "carl", **fields: Any) -> tuple[str, str]:
    """Create a token; its id and its secret."""
    answer = await root.post("/api/tokens", json={"name": name, **fields})
    assert answer.status_code == 201, answer.text
    return answer.json()["token"]["id"], answer.json()["secret"]


def bearer(server: Served, secret: str) -> httpx2.AsyncClient:
    return server.client(None, Authorization=f"Bearer {secret}")


@pytest.mark.requirement("X-15")
async def test_a_created_token_works_at_once_and_a_revoked_one_no_more() -> None:
    async with served() as server, server.client("root") as root:
        id, secret = await created(root, role="user", note="for the build")
        async with bearer(server, secret) as carl:
            me = await carl.get("/api/me")
            assert (me.status_code, me.json()["name"], me.json()["role"]) == (200, "carl", "user")
            assert (await carl.get("/api/tokens")).status_code == 403
            assert (await root.post(f"/api/tokens/{id}/revoke")).json()["state"] == "revoked"
            refused = await carl.get("/api/me")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "token_revoked")


async def test_secrets_are_shown_once_and_stored_as_a_salted_hash() -> None:
    async with served() as server, server.client("root") as root:
        id, secret = await created(root)
        listed = (await root.get("/api/tokens")).text
        assert id in listed
        assert secret not in listed
        assert SECRETS["ann"] not in listed
        record = await server.stores.tokens.get(id)
        assert record is not None
        assert secret not in repr(record)
        assert secret.rpartition("_")[2] not in repr(record)
        other, _ = create_token("carl", "user", by="root", now_ms=1)
        assert record.salt != other.salt


async def test_the_list_has_tokens_of_the_database_and_of_the_environment() -> None:
    async with served() as server, server.client("root") as root:
        id, secret = await created(root, role="admin", expires="2090-12-31", note="n")
        async with bearer(server, secret) as carl:
            listed = (await carl.get("/api/tokens")).json()
        assert listed["needs_tokens"] is True
        by_id = {token["id"]: token for token in listed["tokens"]}
        assert [id for id in by_id if id.startswith("env-")] == [f"env-{number}" for number in range(1, 6)]
        assert (by_id["env-5"]["name"], by_id["env-5"]["state"]) == ("past", "expired")
        assert by_id["env-1"]["source"] == "environment"
        mine = by_id[id]
        assert (mine["is_yours"], mine["state"], mine["expires"]) == (True, "active", "2090-12-31T23:59:59Z")
        assert (mine["created_by"], mine["source"], mine["note"]) == ("root", "database", "n")
        assert mine["last_used_ms"] > mine["created_ms"] - 1


WRONG = [
    ({"name": "carl", "role": "owner"}, "role", 422),
    ({"name": "c a", "role": "user"}, "name", 422),
    ({"name": "carl", "expires": "2020-01-01"}, "not past", 422),
    ({"name": "carl", "expires": "tomorrow"}, "2026-12-31", 422),
    ({"name": "carl", "expires": "2090-01-01T00:00:00"}, "time zone", 422),
    ({"name": "carl", "note": "two\nlines"}, "one line", 422),
    ({"name": "carl", "daily_usd": 1}, "daily_usd may be set for gateway keys only", 422),
    ({"name": "carl", "kind": "gateway", "daily_usd": -1}, "daily_usd", 422),
    ({"name": "carl", "kind": "gateway", "max_cost_usd": "much"}, "max_cost_usd", 422),
    ({"name": "carl", "kind": "gateway", "models": [""]}, "models", 422),
    ({"name": "carl", "kind": "gateway", "team": "a b"}, "team", 422),
    ({"name": "ann"}, "environment", 409),
    ({"name": "taken"}, "active token", 409),
]


@pytest.mark.parametrize(("body", "says", "status"), WRONG)
async def test_bad_input_is_refused_with_what_is_wrong(body: dict[str, Any], says: str, status: int) -> None:
    async with served() as server, server.client("root") as root:
        await created(root, "taken")
        answer = await root.post("/api/tokens", json=body)
        assert (answer.status_code, says in answer.text) == (status, True), answer.text
        assert len((await root.get("/api/tokens")).json()["tokens"]) == 6


async def test_a_second_token_of_a_name_is_created_on_request() -> None:
    async with served() as server, server.client("root") as root:
        await created(root)
        await created(root, another=True)
        await created(root, "ann", another=True)


async def test_one_cannot_revoke_oneself_the_last_admin_or_a_token_of_the_environment() -> None:
    clock = ManualClock()
    async with served(ServerSettings(), clock=clock) as server:
        async with server.client() as local:
            id, secret = await created(local, "root", role="admin")
            assert (await local.get("/api/me")).status_code == 401, "an admin's token ends the free access"
        async with bearer(server, secret) as root:
            own = await root.post(f"/api/tokens/{id}/revoke")
            assert (own.status_code, "your own token" in own.text) == (409, True)
            other_id, other_secret = await created(root, "other", role="admin", expires="2026-01-01T01:00:00Z")
            async with bearer(server, other_secret) as other:
                clock.advance(1)
                assert (await other.post(f"/api/tokens/{other_id}/revoke")).status_code == 409
            clock.advance(3_600)
            third_id, third_secret = await created(root, "third", role="admin")
            async with bearer(server, third_secret) as third:
                assert (await third.post(f"/api/tokens/{id}/revoke")).status_code == 200
            with pytest.raises(Exception, match="last active one"):
                await server.stores.tokens.revoke(third_id, by="x", now_ms=clock.time_ns() // 10**6, keep_admin=True)
    async with served() as server, server.client("root") as root:
        env = await root.post("/api/tokens/env-1/revoke")
        assert (env.status_code, "environment" in env.text) == (409, True)
        assert (await root.post("/api/tokens/0123456789ab/revoke")).status_code == 404


async def test_the_last_admin_of_the_database_may_go_while_the_environment_has_one() -> None:
    async with served() as server, server.client("root") as root:
        id, _ = await created(root, "other", role="admin")
        assert (await root.post(f"/api/tokens/{id}/revoke")).status_code == 200


async def test_a_change_in_another_process_is_in_force_within_a_second(tmp_path: Path) -> None:
    clock = ManualClock()
    url = str(tmp_path / "penstock.db")
    async with await open_stores(url) as here, await open_stores(url) as there:
        tokens = StoredTokens(here.tokens, clock)
        assert not await tokens.are_required()
        record, secret = create_token("ann", "admin", by="root", now_ms=1)
        assert await tokens.find(secret.encode()) is None
        await there.tokens.add(record)
        assert MAX_AGE_S < 1
        clock.advance(MAX_AGE_S + 0.01)
        assert await tokens.are_required()
        found = await tokens.find(secret.encode())
        assert found is not None
        assert not found.is_revoked
        await there.tokens.revoke(record.id, by="root", now_ms=2)
        clock.advance(MAX_AGE_S + 0.01)
        found = await tokens.find(secret.encode())
        assert found is not None
        assert found.is_revoked
        assert await tokens.are_required(), "a server does not open itself because its tokens have ended"
        assert await tokens.find(secret[:-1].encode() + b"!") is None


async def test_an_open_stream_ends_when_its_token_is_revoked() -> None:
    async with served() as server, server.client("root") as root:
        await server.save("gate", GATE, owner="root")
        id, secret = await created(root, role="admin")
        run = await root.post("/api/runs", json={"graph_id": "gate", "input": "x"})
        async with listening(server.app) as address, wire(address) as client:
            client.send("GET", f"/api/runs/{run.json()['id']}/events", Authorization=f"Bearer {secret}")
            assert await client.status() == 200
            await client.until(b"node.started")
            await root.post(f"/api/tokens/{id}/revoke")
            rest = await client.reader.read()
            while b"0\r\n\r\n" not in rest:
                rest += await client.reader.read()
            assert b"run.completed" not in rest
        server.gate.opened.set()


async def test_unknown_tokens_are_throttled_and_known_ones_are_not() -> None:
    settings = ServerSettings(tokens=TOKENS, max_failed_tokens_per_minute=3)
    async with served(settings) as server, server.client("root") as root:
        _, secret = await created(root)
        async with bearer(server, secret) as carl:
            assert (await carl.get("/api/me")).status_code == 200
            statuses = []
            for number in range(5):
                async with bearer(server, f"pen_0123456789ab_{number}{'x' * 30}") as guess:
                    statuses.append((await guess.get("/api/me")).status_code)
            assert statuses == [401, 401, 401, 429, 429]
            assert (await carl.get("/api/me")).status_code == 200


async def test_a_gateway_key_calls_models_and_nothing_else() -> None:
    async with served() as server, server.client("root") as root:
        record, secret = create_token("carl", "user", by="root", now_ms=1, kind="gateway")
        await server.stores.tokens.add(record)
        async with bearer(server, secret) as key:
            for path in ("/api/runs", "/v1/models"):  # a run of a graph would not be paid from the budget of the key
                refused = await key.get(path)
                assert (refused.status_code, "gateway key" in refused.text) == (403, True)
            assert (await root.get("/api/me")).status_code == 200


async def test_a_gateway_key_is_listed_with_its_budgets_and_what_it_spent() -> None:
    async with served() as server, server.client("root") as root:
        fields = {"kind": "gateway", "daily_usd": "2.50", "max_cost_usd": 9, "models": ["gpt-*"], "team": "dams"}
        id, secret = await created(root, "ann", **fields)
        await created(root, "carl")
        ledger, day = server.stores.ledger, day_of(parts(server.app).now_ms())
        ledger.open_account(key_account(id, day), Budget(max_cost_dollars=2).limits())
        ledger.charge("k", key_account(id, day), Amounts(250_000_000, 7, 3, 1))
        (key,) = (await root.get("/api/tokens", params={"kind": "gateway"})).json()["tokens"]
        about = {name: key["gateway"][name] for name in ("team", "daily_usd", "max_cost_usd", "models")}
        assert about == {"team": "dams", "daily_usd": 2.5, "max_cost_usd": 9.0, "models": ["gpt-*"]}
        today = key["gateway"]["today"]
        assert (today["limit_usd"], today["spent_usd"], today["left_usd"], today["tokens_in"]) == (2.5, 0.25, 2.25, 7)
        assert (await root.get(f"/api/tokens/{id}/spend")).json() == {"token_id": id, "days": [today]}
        async with bearer(server, secret) as carl:
            assert (await carl.get("/api/tokens")).status_code == 403


async def test_spend_of_a_key_is_returned_for_each_of_the_last_days() -> None:
    clock = ManualClock()
    async with served(clock=clock) as server, server.client("root") as root:
        id, _ = await created(root, "ann", kind="gateway", max_cost_usd="1")
        first = day_of(parts(server.app).now_ms())
        server.stores.ledger.open_account(key_account(id, first), NO_LIMITS)
        server.stores.ledger.charge("k", key_account(id, first), Amounts(400_000_000, api_calls=1))
        clock.advance(2 * 86_400)
        days = (await root.get(f"/api/tokens/{id}/spend")).json()["days"]
        assert [(one["spent_usd"], one["limit_usd"]) for one in days] == [(0.4, 1.0), (0.0, 0.6), (0.0, 0.6)]
        assert days[0]["day"] == str(first)
        assert (await root.get(f"/api/tokens/{id}/spend", params={"days": 1})).json()["days"] == days[-1:]
        user, _ = await created(root, "carl")
        assert (await root.get(f"/api/tokens/{user}/spend")).status_code == 409
        assert (await root.get("/api/tokens/0123456789ab/spend")).status_code == 404


async def test_an_admin_lists_the_runs_of_a_key_on_a_day() -> None:
    clock = ManualClock()
    async with served(clock=clock) as server, server.client("root") as root:
        id, _ = await created(root, "ann", kind="gateway")
        other, _ = await created(root, "bob", kind="gateway")
        ledger, first = server.stores.ledger, day_of(parts(server.app).now_ms())
        clock.advance(86_400)
        day = day_of(parts(server.app).now_ms())
        for key, run, on in ((id, "nightly:1", first), (id, "day", day), (other, "day", day), (id, "nightly:1", day)):
            ledger.open_account(run_account(key, run, on), NO_LIMITS)
            ledger.charge(f"k {key} {run} {on}", run_account(key, run, on), Amounts(250_000_000, 7, 3, 1))
        path = f"/api/tokens/{id}/runs"
        used = {"spent_usd": 0.25, "held_usd": 0.0, "unresolved_usd": 0.0, "api_calls": 1, "tokens_in": 7,
            "tokens_out": 3}  # fmt: skip
        runs = [{"run": "day", **used}, {"run": "nightly:1", **used}]
        assert (await root.get(path)).json() == {"token_id": id, "day": str(day), "runs": runs, "next": None}
        page = (await root.get(path, params={"limit": 1})).json()
        assert (page["runs"], page["next"]) == (runs[:1], "day")
        assert (await root.get(path, params={"limit": 1, "after": "day"})).json()["runs"] == runs[1:]
        assert (await root.get(path, params={"day": str(first)})).json()["runs"] == runs[1:]
        assert (await root.get(path, params={"day": "2020-02-02"})).json()["runs"] == []
        assert (await root.get(path, params={"day": "soon"})).status_code == 422
        user, _ = await created(root, "carl")
        assert (await root.get(f"/api/tokens/{user}/runs")).status_code == 409
        assert (await root.get("/api/tokens/0123456789ab/runs")).status_code == 404


async def broken_call(server: Served, key_id: str) -> str:
    """Leave the bill of a call of the key unresolved; its id."""
    ledger, day = server.stores.ledger, day_of(parts(server.app).now_ms())
    run = f"gateway:{key_id}:nightly:{day}"
    ledger.open_account(run, NO_LIMITS)
    ledger.hold(f"{run}/0123456789ab-c0de/n000002", run, Amounts(50_000_000, 10, 90, 1))
    ledger.leave_unresolved(f"{run}/0123456789ab-c0de/n000002")
    return f"nightly:{day}/0123456789ab-c0de/n000002"


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize(("action", "cost"), [("resolve", {"cost_usd": "0.02"}), ("release", {})])
async def test_an_admin_lists_and_resolves_the_bills_of_a_key(action: str, cost: dict[str, str]) -> None:
    async with served() as server, server.client("root") as root:
        id, _ = await created(root, "ann", kind="gateway")
        call = await broken_call(server, id)
        listed = (await root.get(f"/api/tokens/{id}/bills")).json()
        day = str(day_of(parts(server.app).now_ms()))
        held = {"call_id": call, "run": "nightly", "day": day, "held_usd": 0.05, "held_tokens": 100}
        assert listed == {"token_id": id, "bills": [held], "unresolved_usd": 0.05}
        unknown = await root.post(f"/api/tokens/{id}/bills/{action}", json={"call_id": "else", **cost})
        assert (unknown.status_code, "has no unresolved bill of call 'else'" in unknown.text) == (409, True)
        resolved = await root.post(f"/api/tokens/{id}/bills/{action}", json={"call_id": call, **cost})
        assert resolved.json() == {"token_id": id, "bills": [], "unresolved_usd": 0.0}
        assert (await root.post(f"/api/tokens/{id}/bills/{action}", json={"call_id": call, **cost})).status_code == 409
        (entry,) = (await root.get("/api/audit", params={"action": "bill"})).json()["entries"]
        assert (entry["action"], entry["target"], entry["actor"], entry["owner"]) == (
            f"bill.{action}",
            id,
            "root",
            "ann",
        )
        assert entry["details"]["call_id"] == call
        user, _ = await created(root, "carl")
        assert (await root.get(f"/api/tokens/{user}/bills")).status_code == 409
        assert (await root.get("/api/tokens/0123456789ab/bills")).status_code == 404


async def test_a_user_has_one_team_at_a_time() -> None:
    async with served() as server, server.client("root") as root:
        id, _ = await created(root, "ann", kind="gateway", team="dams")
        await created(root, "ann", kind="gateway", team="dams")
        other = await root.post("/api/tokens", json={"name": "ann", "kind": "gateway", "team": "locks"})
        assert (other.status_code, "of team 'dams', and a user has one team" in other.text) == (409, True)
        for key in (await root.get("/api/tokens", params={"kind": "gateway"})).json()["tokens"]:
            await root.post(f"/api/tokens/{key['id']}/revoke")
        assert id != (await created(root, "ann", kind="gateway", team="locks"))[0]


async def test_while_the_database_is_away_its_tokens_are_refused_and_others_accepted() -> None:
    async with served() as server, server.client("root") as root:
        _, secret = await created(root)
        store = parts(server.app).tokens

        async def away(token_id: str) -> Any:
            raise StoreUnavailable("away")

        store.store = type("Away", (), {"get": staticmethod(away)})()
        store._known.clear()
        async with bearer(server, secret) as carl:
            assert (await carl.get("/api/me")).status_code == 503
            assert (await carl.get("/health")).status_code == 200
        assert (await root.get("/api/me")).status_code == 200


async def test_a_server_listens_beyond_its_machine_only_if_there_is_an_admin() -> None:
    settings = ServerSettings(host="0.0.0.0", tokens_in_database=True)
    stores: Any = MemoryStores()
    with pytest.raises(InvalidValue, match="loopback"):
        await count_tokens(settings, stores)
    record, _ = create_token("ann", "admin", by="x", now_ms=1)
    await stores.tokens.add(record)
    assert await count_tokens(settings, stores) == 1
    assert "1 token in the database" in greeting(settings, 1, "memory:", stored=1)


async def test_a_local_server_ignores_unknown_tokens_but_not_revoked_ones() -> None:
    async with served(ServerSettings()) as server, server.client() as local:
        id, secret = await created(local)
        async with bearer(server, "sk-none-of-ours-0123456789") as unknown, bearer(server, secret) as carl:
            assert (await unknown.get("/api/me")).json()["name"] == "local"
            assert (await carl.get("/api/me")).json()["name"] == "carl"
            await local.post(f"/api/tokens/{id}/revoke")
            assert (await carl.get("/api/me")).status_code == 401
