"""Keys of a database: their owners, budgets, models and runs, over several gateways on one database."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock import logs
from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS, Budget
from penstock.errors import LedgerUnavailable
from penstock.gateway import loopback, stored_keys
from penstock.gateway.app import Gateway
from penstock.gateway.connections import Connections
from penstock.gateway.key_accounts import key_account, run_account
from penstock.gateway.key_bills import KeyBillNotFound, key_bills, resolve_key_bill
from penstock.gateway.key_runs import key_runs, remove_past_runs
from penstock.gateway.loopback import serving
from penstock.gateway.service import GatewayService
from penstock.gateway.stored_keys import GatewaySettings, StoredKeys
from penstock.gateway.upstreams import upstreams_in
from penstock.hosting.durability import day_of
from penstock.hosting.tokens import id_in
from penstock.money import format_usd
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.server.tokens import create_token
from penstock.storage import Stores, open_stores
from penstock.testing.clock import ManualClock
from penstock.testing.provider import Cut, FakeProviderServer, Hang, Say
from tests.forked import Program
from tests.gateway.conftest import environment
from tests.server.served import served

CHAT: dict[str, Any] = {"model": "fake-1", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 50}
DAY_S = 86_400


@dataclass
class Team:
    """A gateway on a database, and a client without a key."""

    stores: Stores
    url: str
    client: httpx2.AsyncClient
    clock: ManualClock
    keys: StoredKeys

    async def key(self, name: str = "ann", **options: Any) -> str:
        now_ms = self.clock.time_ns() // 1_000_000
        record, secret = create_token(name, "user", by="test", now_ms=now_ms, **{"kind": "gateway", **options})
        await self.stores.tokens.add(record)
        return secret

    async def post(self, key: str, body: Any = None, **headers: str) -> httpx2.Response:
        sent = {"authorization": f"Bearer {key}", **headers}
        url = f"{self.url}/openai/v1/chat/completions"
        return await self.client.post(url, json={**CHAT, **(body or {})}, headers=sent)


@asynccontextmanager
async def team(
    provider: FakeProviderServer, stores: Stores, clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[Team]:
    clock = clock or ManualClock()
    connections = Connections()
    keys = StoredKeys(stores.tokens, stores.ledger, provider.provider.prices, GatewaySettings(**settings), clock)
    app = Gateway(upstreams_in(environment(provider)), keys, connections)
    async with serving(app) as url, httpx2.AsyncClient(timeout=60) as client:
        yield Team(stores, url, client, clock, keys)
    await keys.aclose()
    await connections.aclose()


@pytest.mark.requirement("X-12")
async def test_key_spends_its_daily_budget_and_no_more_until_the_next_day(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(limits={"daily_usd": "0.002"})
        statuses = [(await gateway.post(key)).status_code for _ in range(5)]
        assert statuses == [200, 200, 402, 402, 402]
        gateway.clock.advance(DAY_S)
        assert (await gateway.post(key)).status_code == 200


async def test_whole_budget_of_a_key_spans_days(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(limits={"max_cost_usd": "0.002"})
        assert [(await gateway.post(key)).status_code for _ in range(3)] == [200, 200, 402]
        gateway.clock.advance(DAY_S)
        refused = await gateway.post(key)
        assert refused.status_code == 402
        assert len(provider.requests) == 2


CHICAGO = GatewaySettings(day_zone="America/Chicago").zone  # read before an event loop would wait for it


async def test_day_of_a_key_is_that_of_the_time_zone_in_the_settings(provider: FakeProviderServer) -> None:
    clock = ManualClock()  # it begins at midnight in UTC
    clock.advance(2 * 3_600)  # still the day before in Chicago
    async with (
        await open_stores("memory:") as stores,
        team(provider, stores, clock, day_zone="America/Chicago") as gateway,
    ):
        key = await gateway.key(limits={"daily_usd": "0.001", "max_cost_usd": "0.002"})
        assert [(await gateway.post(key)).status_code for _ in range(2)] == [200, 402]
        days = {name.rpartition(":")[2] for name in stores.ledger.aged(0) if name.startswith("key:")}
        assert days == {"2025-12-31"} == {str(day_of(clock.time_ns() // 1_000_000, CHICAGO))}
        gateway.clock.advance(5 * 3_600)
        assert [(await gateway.post(key)).status_code for _ in range(2)] == [200, 402]
        gateway.clock.advance(DAY_S)
        assert (await gateway.post(key)).status_code == 402  # both days count in the whole budget


async def test_owners_share_a_daily_budget_over_their_keys(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores, owner_daily_usd="0.002") as gateway:
        ann, also_ann, bob = [await gateway.key(name) for name in ("ann", "ann", "bob")]
        statuses = [(await gateway.post(key)).status_code for key in (ann, also_ann, ann, bob)]
        assert statuses == [200, 200, 402, 200]


async def test_members_of_a_team_share_its_daily_budget(provider: FakeProviderServer) -> None:
    budgets = {"dams": "0.002", "*": "0.001"}
    async with await open_stores("memory:") as stores, team(provider, stores, team_daily_usd=budgets) as gateway:
        ann, bob = [await gateway.key(name, team="dams") for name in ("ann", "bob")]
        eve, joe = await gateway.key("eve", team="locks"), await gateway.key("joe")
        statuses = [(await gateway.post(key)).status_code for key in (ann, bob, ann, bob)]
        assert statuses == [200, 200, 402, 402]
        assert [(await gateway.post(eve)).status_code for _ in range(2)] == [200, 402]
        assert [(await gateway.post(joe)).status_code for _ in range(3)] == [200, 200, 200]


async def test_team_counts_what_its_members_spend_in_runs_of_a_server(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores:
        ledger, clock = stores.ledger, ManualClock()
        day = day_of(clock.time_ns() // 1_000_000)
        ledger.open_account(f"user:ann:{day}", Budget(max_cost_dollars=1).limits())
        ledger.charge("run", f"user:ann:{day}", Amounts(1_500_000))
        async with team(provider, stores, clock, team_daily_usd={"dams": "0.002"}) as gateway:
            key = await gateway.key(team="dams")
            assert (await gateway.post(key)).status_code == 402
            assert ledger.balance(f"team:dams:{day}").spent_nanos == 1_500_000
        ledger.put_under(f"user:ann:{day}", f"all:{day}")  # a server with a daily budget for all finds its place


async def test_key_of_another_team_counts_at_the_first_team_of_its_owner_for_the_rest_of_the_day(
    provider: FakeProviderServer,
) -> None:
    settings = {"team_daily_usd": {"*": "0.002"}, "owner_daily_usd": 1}
    async with await open_stores("memory:") as stores, team(provider, stores, **settings) as gateway:
        first, second = await gateway.key(team="dams"), await gateway.key(team="locks")
        assert [(await gateway.post(key)).status_code for key in (first, first, second)] == [200, 200, 402]
        gateway.clock.advance(DAY_S)
        assert [(await gateway.post(second)).status_code for _ in range(2)] == [200, 200]


@pytest.mark.parametrize("opens_twice", [True, False])
async def test_two_gateways_on_one_database_hold_at_one_budget(
    provider: FakeProviderServer, tmp_path: Path, opens_twice: bool
) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    async with await open_stores(url) as stores, await open_stores(url) as others:
        second = others if opens_twice else stores
        async with team(provider, stores) as one, team(provider, second) as other:
            key = await one.key(limits={"daily_usd": "0.01"})
            answers = await asyncio.gather(*(gateway.post(key) for gateway in (one, other) for _ in range(15)))
        statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 402, 429}
    assert statuses.count(200) >= 8
    assert provider.invoice.total_usd <= 0.01


async def test_revoked_expired_and_unknown_keys_are_refused(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key, user = await gateway.key(), await gateway.key(kind="user")
        expiring = await gateway.key(expires="2999-01-01")
        assert (await gateway.post(key)).status_code == 200
        (record,) = [token for token in await stores.tokens.list() if key.startswith(f"pen_{token.id}_")]
        await stores.tokens.revoke(record.id, by="test", now_ms=0)
        gateway.clock.advance(1)
        messages = [_message(await gateway.post(wrong)) for wrong in (key, user, key[:-1] + "_", "sk-x")]
        assert "was revoked" in messages[0]
        assert "no key of the gateway" in messages[1]
        assert messages[2] == messages[3] == "this is no key of the gateway: provider keys stay with it, and its " \
            "clients send a key of the gateway"  # fmt: skip
        gateway.clock.advance(1_000 * 366 * DAY_S)
        assert "expired" in _message(await gateway.post(expiring))


@pytest.mark.requirement("X-15")
async def test_requests_are_logged_with_key_model_and_cost_and_without_prompts(
    provider: FakeProviderServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(models=["fake-*"])
        assert (await gateway.post(key, **{"x-penstock-run": "nightly"})).status_code == 200
        assert (await gateway.post(key, {"model": "other\n" + "x" * 300})).status_code == 403
        assert (await gateway.post("sk-x")).status_code == 401
    paid, refused, unknown = [getattr(one, logs.FIELDS) for one in caplog.records if one.getMessage() == "request"]
    figures = (paid["route"], paid["upstream"], paid["status"], paid["user"], paid["run_id"], paid["model"])
    assert figures == ("model", "openai", 200, "ann", "nightly", "fake-1")
    assert paid["cost_usd"] == pytest.approx(provider.invoice.total_usd)
    assert paid["key"] in key
    assert (refused["status"], refused["error"], len(refused["model"])) == (403, "model_not_allowed", 200)
    assert (unknown["status"], "user" in unknown) == (401, False)
    assert "hello there" not in caplog.text
    assert key not in caplog.text


@pytest.fixture
def breaking() -> Iterator[FakeProviderServer]:
    """A provider whose first answer breaks off."""
    script = lambda request: Say(then=Cut()) if request.number == 1 else Say("fine")  # noqa: E731
    with FakeProviderServer(script=script) as server:
        yield server


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize(
    ("actual", "spent_usd"), [(None, 0.0), (Amounts(700_000), 0.0007), (Amounts(9_000_000), 0.009)]
)
async def test_broken_call_takes_what_it_held_until_a_person_resolves_its_bill(
    breaking: FakeProviderServer, caplog: pytest.LogCaptureFixture, actual: Amounts | None, spent_usd: float
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with await open_stores("memory:") as stores, team(breaking, stores, owner_daily_usd=1) as gateway:
        key = await gateway.key(limits={"max_cost_usd": "0.001"})
        assert (await gateway.post(key, **{"x-penstock-run": "nightly:1"})).status_code == 502
        assert (await gateway.post(key)).status_code == 402
        ledger, key_id = AsyncLedger(stores.ledger), str(id_in(key.encode()))
        (bill,) = await key_bills(ledger, key_id)
        day = day_of(gateway.clock.time_ns() // 1_000_000)
        assert (bill.run, bill.day) == ("nightly:1", day)
        assert bill.held.cost_nanos > 500_000
        logged, _ = [getattr(one, logs.FIELDS) for one in caplog.records if one.getMessage() == "request"]
        assert (logged["call"], logged["key"], logged["model"]) == (bill.call_id, key_id, "fake-1")
        with pytest.raises(KeyBillNotFound):
            await resolve_key_bill(ledger, "0123456789ab", bill.call_id, actual)
        assert await resolve_key_bill(ledger, key_id, bill.call_id, actual) == []
        with pytest.raises(KeyBillNotFound):
            await resolve_key_bill(ledger, key_id, bill.call_id, actual)
        for account in (key_account(key_id, day), f"user:ann:{day}"):
            balance = stores.ledger.balance(account)
            assert (balance.spent_usd, balance.unresolved_nanos) == (spent_usd, 0)
        assert (await gateway.post(key)).status_code == (402 if actual else 200)


async def test_key_calls_its_models_only(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(models=["fake-*"])
        assert (await gateway.post(key)).status_code == 200
        assert (await gateway.post(key, {"model": "gpt-9"})).status_code == 403


async def test_requests_are_grouped_into_the_named_run(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key()
        for _ in range(2):
            assert (await gateway.post(key, **{"x-penstock-run": "nightly"})).status_code == 200
        assert (await gateway.post(key)).status_code == 200
        assert (await gateway.post(key, **{"x-penstock-run": "no/id"})).status_code == 400
        (record,) = await stores.tokens.list()
        day = day_of(gateway.clock.time_ns() // 1_000_000)
        assert stores.ledger.balance(f"gateway:{record.id}:nightly:{day}").api_calls == 2
        assert stores.ledger.balance(f"gateway:{record.id}:day:{day}").api_calls == 1
    assert not any("x-penstock-run" in request.headers for request in provider.requests)


async def test_every_request_counts_in_the_list_of_runs_of_its_key(
    breaking: FakeProviderServer, tmp_path: Path
) -> None:
    url, named = f"sqlite:///{tmp_path}/keys.db", {"x-penstock-run": "nightly:1"}
    async with await open_stores(url) as stores, await open_stores(url) as others:
        async with team(breaking, stores) as one, team(breaking, others) as other:
            key = await one.key()
            statuses = [(await gateway.post(key, **named)).status_code for gateway in (one, other, one)]
            statuses.append((await other.post(key)).status_code)
            day = day_of(one.clock.time_ns() // 1_000_000)
        runs = await key_runs(AsyncLedger(stores.ledger), str(id_in(key.encode())), day)
    assert statuses == [502, 200, 200, 200]
    assert [(run.name, run.used.api_calls) for run in runs] == [("nightly:1", 3), ("day", 1)]
    assert [run.used.unresolved_nanos > 0 for run in runs] == [True, False]
    taken = sum(run.used.spent_nanos + run.used.unresolved_nanos for run in runs)
    assert taken >= breaking.invoice.total_nanos > 0


async def test_past_runs_are_removed_and_stay_counted_at_their_key(breaking: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(breaking, stores) as gateway:
        key = await gateway.key(limits={"max_cost_usd": "0.01"})
        key_id, ledger = str(id_in(key.encode())), AsyncLedger(stores.ledger)
        first = day_of(gateway.clock.time_ns() // 1_000_000)
        for name in ("broken", "whole"):
            await gateway.post(key, **{"x-penstock-run": name})
        before = stores.ledger.balance(key_account(key_id, first))
        assert await remove_past_runs(ledger, first) == 0
        gateway.clock.advance(DAY_S)
        second = day_of(gateway.clock.time_ns() // 1_000_000)
        assert (await gateway.post(key)).status_code == 200
        assert await remove_past_runs(ledger, second) == 1
        assert [run.name for run in await key_runs(ledger, key_id, first)] == ["broken"], "its bill is unresolved"
        (bill,) = await key_bills(ledger, key_id)
        await resolve_key_bill(ledger, key_id, bill.call_id, Amounts(1_000))
        assert await remove_past_runs(ledger, second) == 1
        assert [run.name for run in await key_runs(ledger, key_id, second)] == ["day"]
        after = stores.ledger.balance(key_account(key_id, first))
        assert (after.spent_nanos, after.api_calls) == (before.spent_nanos + 1_000, before.api_calls)


async def test_open_gateway_removes_past_runs_by_itself(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores:
        old, new = (run_account("0123456789ab", "day", day_of(at)) for at in (0, time.time_ns() // 1_000_000))
        for name in (old, new, "gateway:no:day:soon"):
            stores.ledger.open_account(name, NO_LIMITS)
        service = GatewayService(upstreams_in(environment(provider)), provider.provider.prices)
        async with service.opened(stores):
            while old in stores.ledger.aged(0):  # noqa: ASYNC110  # nothing signals the end of a sweep
                await asyncio.sleep(0.01)
        assert list(stores.ledger.aged(0, prefix="gateway:")) == [new, "gateway:no:day:soon"]


async def test_run_is_not_ended_below_its_calls_by_runs_of_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_keys, "MAX_RUNS", 2)
    script = lambda request: Say(then=Hang()) if request.number == 1 else Say()  # noqa: E731
    async with (
        FakeProviderServer(script=script) as provider,
        await open_stores("memory:") as stores,
        team(provider, stores) as gateway,
    ):
        ann, bob = await gateway.key("ann"), await gateway.key("bob")
        slow = asyncio.create_task(gateway.post(ann))
        await provider.until(lambda: provider.in_flight)
        for number in range(4):
            answer = await gateway.post(bob, **{"x-penstock-run": f"run-{number}"})
            assert answer.status_code == 200
        assert (await gateway.post(ann)).status_code == 200
        assert not slow.done()
        assert provider.in_flight == 1, "the call goes on"
        slow.cancel()
        await asyncio.wait((slow,))
        await provider.until(lambda: not provider.in_flight)
        for number in range(2):  # it is ended once it is the oldest without a request
            assert (await gateway.post(bob, **{"x-penstock-run": f"late-{number}"})).status_code == 200
        assert len(gateway.keys._runs) == 2


async def test_request_that_is_open_when_the_gateway_stops_is_answered_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loopback, "CLOSING_S", 0)
    async with (
        FakeProviderServer(script=[Say(then=Hang())]) as provider,
        await open_stores("memory:") as stores,
        httpx2.AsyncClient(timeout=60) as client,
    ):
        async with team(provider, stores) as gateway:
            key = await gateway.key()
            url, head = f"{gateway.url}/openai/v1/chat/completions", {"authorization": f"Bearer {key}"}
            slow = asyncio.create_task(client.post(url, json=CHAT, headers=head))
            await provider.until(lambda: provider.in_flight)
        answer = await slow
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopped")
        day = day_of(gateway.clock.time_ns() // 1_000_000)
        balance = stores.ledger.balance(key_account(str(id_in(key.encode())), day))
        assert (balance.held_nanos, balance.steps_open) == (0, 0)
        assert balance.unresolved_nanos > 0, "the provider may charge for it"


async def test_runs_of_two_keys_with_one_name_are_two_runs(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        ann, bob = await gateway.key("ann", limits={"daily_usd": "0.001"}), await gateway.key("bob")
        statuses = [(await gateway.post(key, **{"x-penstock-run": "nightly"})).status_code for key in (ann, ann, bob)]
        assert statuses == [200, 402, 200]
        day = day_of(gateway.clock.time_ns() // 1_000_000)
        for token in await stores.tokens.list():
            assert stores.ledger.balance(f"gateway:{token.id}:nightly:{day}").api_calls == 1


async def test_key_that_was_refused_a_large_call_still_makes_small_ones(provider: FakeProviderServer) -> None:
    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(limits={"daily_usd": "0.01"})
        large = [{"role": "user", "content": "word " * 20_000}]
        assert (await gateway.post(key, {"messages": large})).status_code == 402
        assert (await gateway.post(key)).status_code == 200


async def test_call_waits_for_what_another_gateway_holds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    script = lambda request: Say(latency_s=0.3 if request.number == 1 else 0)  # noqa: E731
    async with (
        FakeProviderServer(script=script) as provider,
        await open_stores(url) as stores,
        await open_stores(url) as others,
        team(provider, stores) as one,
        team(provider, others) as other,
    ):
        key = await one.key(limits={"daily_usd": "0.02"})
        first = asyncio.create_task(one.post(key, {"max_tokens": 1_000}))
        await provider.until(lambda: provider.in_flight)
        second = await other.post(key, {"max_tokens": 1_000})
        assert ((await first).status_code, second.status_code) == (200, 200)


@pytest.mark.parametrize("operation", ["open_account", "hold"])
async def test_database_that_cannot_be_used_is_no_question_of_money_and_is_not_named(
    provider: FakeProviderServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LedgerUnavailable("/srv/team.db.ledger cannot record: database is locked")

    async with await open_stores("memory:") as stores, team(provider, stores) as gateway:
        key = await gateway.key(limits={"daily_usd": 1})
        with monkeypatch.context() as broken:
            broken.setattr(stores.ledger, operation, fail)
            refused = await gateway.post(key)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "api_error")
        assert "x-should-retry" not in refused.headers
        assert "team.db" not in refused.text
        assert "/srv/team.db.ledger" in caplog.text
        assert provider.requests == ()
        assert (await gateway.post(key)).status_code == 200
        day = day_of(gateway.clock.time_ns() // 1_000_000)
        assert stores.ledger.balance(key_account(str(id_in(key.encode())), day)).held_nanos == 0


def _message(answer: httpx2.Response) -> str:
    assert answer.status_code == 401
    return str(answer.json()["error"]["message"])


@pytest.mark.usefixtures("forks")
@pytest.mark.requirement("X-12")
@pytest.mark.parametrize(("command", "below"), [(("gateway",), ""), (("serve", "--gateway"), "/gateway")])
def test_command_serves_a_key_that_is_created_while_it_runs(
    provider: FakeProviderServer, tmp_path: Path, command: tuple[str, ...], below: str
) -> None:
    db = f"sqlite:///{tmp_path}/team.db"
    env = {**os.environ, **environment(provider)}
    (tmp_path / "prices.py").write_text("from penstock import Price\nprices = {'fake-1': Price('3', '15')}\n")
    options = ["--db", db, "--port", "0", "--prices", "prices:prices"]
    with Program(["-m", "penstock.cli", *command, *options], env=env, cwd=tmp_path) as server:
        url = (server.stdout if below else server.stderr).readline().split()[-1] + below
        create = ["-m", "penstock.cli", "tokens", "create", "ann", "--gateway", "--daily", "0.001", "--db", db]
        with Program(create, env=env, cwd=tmp_path) as created:
            key, _ = created.communicate()
        headers = {"authorization": f"Bearer {key.strip()}"}
        with httpx2.Client() as client:
            assert client.get(f"{url}/health").status_code == 200
            statuses = [
                client.post(f"{url}/openai/v1/chat/completions", json=CHAT, headers=headers).status_code
                for _ in range(3)
            ]
        listed = ["-m", "penstock.cli", "tokens", "list", "--gateway", "--json", "--db", db]
        with Program(listed, env=env, cwd=tmp_path) as listing:
            (row,), _ = json.loads(listing.communicate()[0]), listing.wait()
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate()
    assert (server.wait(), statuses) == (0, [200, 402, 402])
    assert (row["daily"], row["spent today"]) == ("$0.001", format_usd(provider.invoice.total_nanos))
    assert "Traceback" not in err


async def test_server_answers_below_its_path_and_has_no_gateway_by_default() -> None:
    for gateway, status in ((None, 404), (_teapot, 418)):
        async with served(gateway=gateway) as server, server.client("root") as root:
            for path in ("/gateway", "/gateway/", "/gateway/openai/v1/models"):
                assert (await root.get(path)).status_code == status
            assert (await root.get("/gatewayed")).status_code == 404
            assert (await root.get("/api/me")).status_code == 200
            assert ('route="/gateway"' in (await root.get("/metrics")).text) == (gateway is not None)


async def _teapot(scope: Any, receive: Any, send: Any) -> None:
    assert not scope["path"].startswith("/gateway")
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})
