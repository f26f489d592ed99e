"""Money over HTTP: sums equal the records of the runs and the ledger, budgets of the day, prices, and open bills."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.containment.limits import NO_LIMITS
from penstock.hosting.durability import ALL
from penstock.hosting.host import HostSettings
from penstock.hosting.limits import zone_named
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.server.tokens import create_token
from tests.hosting.graphs import graph
from tests.server.served import Served, served

NANOS = 1_000_000_000
TWO = graph(
    ("in", "input", {}),
    ("draft", "llm-completion", {"model": "small"}),
    ("final", "llm-completion", {"model": "large"}),
    edges="in>draft draft>final",
)
ONE = graph(("in", "input", {}), ("ask", "llm-completion", {"model": "small"}), edges="in>ask")
LOST = graph(("in", "input", {}), ("ask", "llm-completion", {"model": "lost"}), edges="in>ask")
FREE = graph(("in", "input", {}), ("ask", "llm-completion", {"model": "unpriced"}), edges="in>ask")
PRICES = PriceBook(
    registered={"gpt-small": Price("0.15", "0.60"), "gpt-large": Price(0, 1), "lossy": Price(0, 100)},
    use_genai_prices=False,
)


def lose(request: ModelRequest) -> str:
    raise ConnectionResetError("the peer has gone")


def models() -> dict[str, Any]:
    def usage(usd: str) -> Usage:
        return Usage.of(cost_usd=usd, input_tokens=3, output_tokens=2)

    return {
        "small": ScriptedModel(lambda request: "a", name="gpt-small", usage=usage("0.01")),
        "large": ScriptedModel(lambda request: "b", name="gpt-large", usage=usage("0.10")),
        "lost": ScriptedModel(lose, name="lossy"),
        "unpriced": ScriptedModel(lambda request: "c", name="new-model"),
    }


def serving(**settings: Any) -> Any:
    return served(
        models=models(), prices=PRICES, host_settings=HostSettings(tick_s=0.05, drain_s=0, daily_usd="5", **settings)
    )


async def ran(server: Served, *runs: tuple[str, str]) -> None:
    """Run graphs, each for its owner, to their ends."""
    for name, document in (("two", TWO), ("one", ONE), ("lost", LOST), ("free", FREE)):
        await server.save(name, document)
    for owner, graph_id in runs:
        run = await server.host.submit(owner=owner, graph_id=graph_id, input="x", limits={"max_cost_usd": "0.50"})
        await server.host.wait(run.id)


async def got(server: Served, path: str, user: str = "root") -> Any:
    async with server.client(user) as client:
        answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


RUNS = (("ann", "two"), ("ann", "one"), ("bob", "two"), ("bob", "one"), ("bob", "one"))


async def test_a_sum_of_which_nothing_is_known_is_null_and_not_zero() -> None:
    async with serving() as server:
        await ran(server, ("ann", "free"))
        money = await got(server, "/api/money?by=model")
        assert [(one["cost_usd"], one["unknown_costs"]) for one in (money["total"], *money["sums"])] == [(None, 1)] * 2
        await ran(server, ("ann", "one"))
        assert (await got(server, "/api/money"))["total"]["cost_usd"] == 0.01


async def test_sums_by_every_key_equal_the_records_and_the_ledger() -> None:
    async with serving() as server:
        await ran(server, *RUNS)
        runs = await server.stores.runs.list()
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        balance = await asyncio.to_thread(server.stores.ledger.balance, f"{ALL}{today}")
        total = sum(run.cost_nanos for run in runs)
        assert total == balance.spent_nanos == 250_000_000
        for by in ("day", "model", "graph", "owner", "node", "day,model", "owner,graph", "day,model,graph,owner,node"):
            money = await got(server, f"/api/money?by={by}")
            assert sum(one["cost_nanos"] for one in money["sums"]) == money["total"]["cost_nanos"] == total, by
            assert (money["total"]["calls"], money["total"]["runs"]) == (7, 5)
        by_model = (await got(server, "/api/money?by=model"))["sums"]
        assert [(one["model"], one["cost_usd"], one["calls"], one["runs"]) for one in by_model] == [
            ("gpt-large", 0.2, 2, None),
            ("gpt-small", 0.05, 5, None),
        ]
        by_node = (await got(server, "/api/money?by=node&owner=bob"))["sums"]
        assert [(one["graph_id"], one["node"], one["cost_usd"]) for one in by_node] == [
            ("one", "ask", 0.02),
            ("two", "draft", 0.01),
            ("two", "final", 0.1),
        ]
        (one_day,) = (await got(server, "/api/money"))["sums"]
        assert (one_day["day"], one_day["cost_usd"], one_day["runs"]) == (today, 0.25, 5)
        assert (await got(server, "/api/money?graph_id=two"))["total"]["cost_usd"] == 0.22
        assert (await got(server, "/api/money?until=2020-01-01"))["sums"] == []


async def test_people_see_their_own_money_and_admins_all() -> None:
    async with serving() as server:
        await ran(server, *RUNS)
        own = await got(server, "/api/money?by=owner", "ann")
        assert [(one["owner"], one["cost_usd"]) for one in own["sums"]] == [("ann", 0.12)]
        assert own["total"]["cost_usd"] == 0.12
        assert [one["owner"] for one in (await got(server, "/api/money?by=owner"))["sums"]] == ["ann", "bob"]
        assert (await got(server, "/api/money", "vera"))["total"]["cost_nanos"] == 0
        assert [price["model"] for price in (await got(server, "/api/prices", "vera"))["prices"]]
        async with server.client("ann") as ann:
            assert (await ann.get("/api/money?owner=bob")).status_code == 403
            assert (await ann.get("/api/bills?owner=bob")).status_code == 403


async def test_spending_is_there_after_its_runs_were_removed() -> None:
    async with serving() as server:
        await ran(server, *RUNS)
        before = (await got(server, "/api/money?by=day,model,graph,owner,node"))["sums"]
        assert len(await server.stores.runs.remove_ended(2**53)) == len(RUNS)
        assert (await got(server, "/api/money?by=day,model,graph,owner,node"))["sums"] == before


async def test_unknown_and_unresolved_costs_are_shown_apart() -> None:
    async with serving() as server:
        await ran(server, ("ann", "free"), ("ann", "lost"), ("bob", "one"))
        money = await got(server, "/api/money?by=model")
        unknown = {one["model"]: one["unknown_costs"] for one in money["sums"]}
        assert unknown["new-model"] == 1 == money["total"]["unknown_costs"]
        assert money["total"]["cost_usd"] == 0.01
        assert (money["unresolved"]["runs"], money["unresolved"]["held_usd"]) == (1, 0.4096)
        (lost,) = (await got(server, "/api/bills"))["runs"]
        assert (lost["graph_id"], lost["owner"], lost["unresolved_usd"]) == ("lost", "ann", 0.4096)
        (bill,) = lost["bills"]
        assert (bill["model"], bill["reason"]) == ("lossy", "the peer has gone")
        (free,) = (await got(server, "/api/bills?state=unknown"))["runs"]
        assert free["unknown"] == [{"node": "ask", "model": "new-model", "calls": 1}]
        assert (await got(server, "/api/bills", "bob"))["runs"] == []
        async with server.client("ann") as ann:
            body = {"call_id": bill["call_id"], "cost_usd": "0.02"}
            resolved = await ann.post(f"/api/runs/{lost['run_id']}/bills/resolve", json=body)
        assert resolved.status_code == 200, resolved.text
        assert (await got(server, "/api/bills"))["runs"] == []
        by_model = {one["model"]: one["cost_usd"] for one in (await got(server, "/api/money?by=model"))["sums"]}
        assert by_model == {"gpt-small": 0.01, "lossy": 0.02, "new-model": None}


async def test_runs_in_progress_are_shown_apart() -> None:
    async with serving() as server:
        waits = graph(
            ("in", "input", {}),
            ("ask", "llm-completion", {"model": "small"}),
            ("gate", "gate", {}),
            edges="in>ask ask>gate",
        )
        await server.save("waits", waits)
        run = await server.host.submit(owner="ann", graph_id="waits", input="x")
        await server.gate.entered.wait()
        money = await got(server, "/api/money")
        assert (money["in_progress"]["runs"], money["in_progress"]["spent_usd"]) == (1, 0.01)
        assert money["total"]["cost_usd"] == 0
        assert (await got(server, "/api/money?graph_id=other"))["in_progress"]["runs"] == 0
        server.gate.opened.set()
        await server.host.wait(run.id)
        money = await got(server, "/api/money")
        assert (money["in_progress"]["runs"], money["total"]["cost_usd"]) == (0, 0.01)


async def test_budgets_of_the_day_have_what_is_spent_held_and_left() -> None:
    async with serving(owner_daily_usd="1") as server:
        before = await got(server, "/api/budgets", "ann")
        assert [(one["level"], one["name"], one["spent_usd"], one["left_usd"]) for one in before["budgets"]] == [
            ("all", "", 0, 5),
            ("owner", "ann", 0, 1),
        ]
        await ran(server, *RUNS, ("ann", "lost"))
        own = {one["level"]: one for one in (await got(server, "/api/budgets", "ann"))["budgets"]}
        facts = ("name", "limit_usd", "spent_usd", "held_usd", "unresolved_usd", "left_usd")
        assert [own["owner"][fact] for fact in facts] == ["ann", 1, 0.12, 0, 0.4096, 0.4704]
        assert [own["all"][fact] for fact in facts] == ["", 5, 0.25, 0, 0.4096, 4.3404]
        shown = await got(server, "/api/budgets")
        assert [(one["level"], one["name"]) for one in shown["budgets"]] == [
            ("all", ""), ("owner", "ann"), ("owner", "bob"),
        ]  # fmt: skip
        resets = datetime.fromtimestamp(shown["resets_ms"] / 1_000, UTC)
        assert resets == datetime.combine(date.fromisoformat(shown["day"]) + timedelta(days=1), resets.min.time(), UTC)
        assert shown["now_ms"] < shown["resets_ms"]


FAR = zone_named("Pacific/Kiritimati")  # read before an event loop would wait for it


async def test_budgets_of_the_day_begin_and_end_in_the_time_zone_of_the_server() -> None:
    async with serving(owner_daily_usd="1", day_zone="Pacific/Kiritimati") as server:
        shown = await got(server, "/api/budgets")
        assert shown["day"] == str(datetime.fromtimestamp(shown["now_ms"] / 1_000, FAR).date())
        resets = datetime.fromtimestamp(shown["resets_ms"] / 1_000, FAR)
        assert (resets.hour, resets.minute, str(resets.date() - timedelta(days=1))) == (0, 0, shown["day"])


async def test_budgets_of_the_day_include_owners_and_teams_of_gateway_keys() -> None:
    async with serving(owner_daily_usd="1") as server:
        record, _ = create_token("carl", "user", by="root", now_ms=1, kind="gateway", team="dams")
        await server.stores.tokens.add(record)
        shown = (await got(server, "/api/budgets"))["budgets"]
        day = (await got(server, "/api/budgets"))["day"]
        assert [(one["level"], one["name"]) for one in shown] == [("all", ""), ("owner", "carl")]
        await asyncio.to_thread(server.stores.ledger.open_account, f"team:dams:{day}", NO_LIMITS)
        shown = (await got(server, "/api/budgets"))["budgets"]
        assert [(one["level"], one["name"]) for one in shown] == [("all", ""), ("team", "dams"), ("owner", "carl")]


async def test_without_daily_budgets_there_are_none() -> None:
    async with served(models=models(), prices=PRICES) as server:
        await ran(server, ("ann", "one"))
        assert (await got(server, "/api/budgets"))["budgets"] == []


async def test_prices_in_force_say_where_they_come_from() -> None:
    async with serving() as server:
        await ran(server, ("ann", "one"))
        listed = await got(server, "/api/prices", "ann")
        found = {price["model"]: price for price in listed["prices"]}
        facts = ("offered_as", "source", "input_usd_per_mtok", "output_usd_per_mtok")
        assert [found["gpt-small"][fact] for fact in facts] == [["small"], "registered", 0.15, 0.6]
        assert [found["new-model"][fact] for fact in facts] == [["unpriced"], "unknown", None, None]
        assert listed["unknown"] == "count"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("by=hour", "day, model, graph, owner, node"),
        ("by=", "must be any of"),
        ("by=day,day", "twice"),
        ("since=2026-02-30", "since"),
        ("since=2026-02-02&until=2026-02-01", "later than until"),
        ("since=0001-01-01", "at most"),
        ("until=0001-01-01&since=0001-01-02", "later than until"),
        ("owner=%00", "owner"),
        ("days=3", "no query parameter"),
    ],
)
async def test_bad_questions_about_money_name_what_is_wrong(query: str, words: str) -> None:
    async with serving() as server, server.client("root") as root:
        answer = await root.get(f"/api/money?{query}")
    assert answer.status_code == 422
    assert words in answer.text


async def test_open_bills_come_in_pages() -> None:
    async with serving() as server:
        await ran(server, *[("ann", "lost")] * 3)
        seen, before = list[str](), ""
        while True:
            page = await got(server, f"/api/bills?limit=1{before}", "ann")
            seen += [run["run_id"] for run in page["runs"]]
            if page["next"] is None:
                break
            before = f"&before={page['next']}"
        assert len(seen) == len(set(seen)) == 3
        async with server.client("ann") as ann:
            assert (await ann.get("/api/bills?before=unknown")).status_code == 422
