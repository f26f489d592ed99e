"""What people do with the UI, in a real browser on a real server."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Page, expect

from tests.ui import test_money
from tests.ui.browser import UI, Server, browsing, serving, tab

pytestmark = [pytest.mark.timeout(300), pytest.mark.requirement("X-18")]

SECRET = "canary-ui-ann-0123456789"
UNAUTHORIZED = "the server responded with a status of 401"
REFUSED = ("net::ERR_", "the server responded with a status of 503")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without tokens, for the scenarios that leave nothing behind for each other."""
    with serving(tmp_path_factory.mktemp("ui")) as server:
        yield server


def api(server: Server, path: str, body: Any = None) -> Any:
    """Request the API directly, for what the UI is compared with."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


async def start(page: Page, graph: str, text: str, money: str = "") -> str:
    """Start a run by the form; returns its id."""
    await page.get_by_role("link", name="Start a run").first.click()
    await expect(page.get_by_role("heading", name="Start a run")).to_be_visible()  # the list has a Graph field, too
    await page.get_by_label("Graph").select_option(graph)
    await page.get_by_label("Input", exact=True).fill(text)
    if money:
        await page.get_by_label("Money, US dollars").fill(money)
    await page.get_by_role("button", name="Start", exact=True).click()
    await page.wait_for_url("**/#/runs/*")
    return page.url.rpartition("/")[2].partition("?")[0]


async def record_payloads(page: Page) -> None:
    """Answer for every call as a server does that records what was sent and received."""
    payload = {"recording": "full", "request": {"messages": ["<b>hi</b>"]}, "response": "ok"}
    facts = {"call_id": "n000005", **payload, "truncated": True, "expired": False}
    await page.route("**/api/runs/*/calls/*", lambda route: route.fulfill(json=facts))


def three_digits(usd: float) -> str:
    """Format a small amount as the UI does."""
    return f"${usd:.{2 - math.floor(math.log10(usd))}f}".rstrip("0")


def status(page: Page) -> Any:
    return page.get_by_role("status").filter(has_text="The run is")


async def test_from_signing_in_to_the_first_answer(tmp_path: Path) -> None:
    with serving(tmp_path, f"ann:user:{SECRET}") as server:
        async with browsing() as browser, tab(browser, expected=(UNAUTHORIZED,)) as opened:
            page = opened.page
            await page.goto(server.url)
            for theme in ("dark", "light"):
                await page.emulate_media(color_scheme=theme)
                await expect(page.get_by_label("Token")).to_be_visible()
                await opened.check_accessibility()
            await page.get_by_label("Token").fill("wrong-0123456789abcdef")
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_role("alert")).to_contain_text("token")
            await page.get_by_label("Token").fill(SECRET)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_text("No runs yet.")).to_be_visible()
            await start(page, "pipeline", "count to 5")
            await expect(status(page)).to_have_text("The run is completed")
            await page.get_by_role("tab", name="Input and output").click()
            await expect(page.get_by_label("Output", exact=True)).to_contain_text("1, 2, 3, 4, 5")
            await page.get_by_role("link", name="Runs", exact=True).click()
            await expect(page.get_by_text("1 run", exact=True)).to_be_visible()
            stored = await page.evaluate(
                "JSON.stringify([localStorage, sessionStorage, location.href, document.cookie])"
            )
            assert SECRET not in stored
            await page.reload()  # without "keep it", the page has forgotten the token
            await expect(page.get_by_label("Token")).to_be_visible()


async def test_a_halted_run_says_whose_limit_it_was_and_goes_on_after_a_grant(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(server.url)
        run_id = await start(page, "pipeline", "count to 40", money="0.00002")
        await expect(status(page)).to_have_text("The run is halted")
        why = page.get_by_role("region", name="Why it stopped")
        await expect(why).to_contain_text("this run's own limit")
        await expect(why).to_contain_text("$0.00001995 spent of the $0.00002")
        await expect(page.get_by_role("region", name="Money of this run")).to_contain_text("limit reached")
        await opened.check_accessibility()
        await why.get_by_role("button", name="Grant more and go on").click()
        await page.get_by_role("dialog").get_by_label("Money, US dollars").fill("0.01")
        await opened.check_accessibility()
        await page.get_by_role("button", name="Grant", exact=True).click()
        await expect(status(page)).to_have_text("The run is completed")
        record = api(server, f"/api/runs/{run_id}")
        assert record["epoch"] == 2
        spent = page.get_by_role("region", name="Money of this run").locator(".figure")
        await expect(spent).to_contain_text(three_digits(record["cost_usd"]))


async def test_a_run_that_its_server_died_in_goes_on_in_the_open_page(tmp_path: Path) -> None:
    with serving(tmp_path, options=("--lease", "1")) as server:
        async with browsing() as browser, tab(browser, expected=REFUSED) as opened:
            page = opened.page
            await page.goto(server.url)
            run_id = await start(page, "assistant", "count to 900")
            answer = page.get_by_role("treegrid").get_by_role("row").filter(has=page.get_by_text("model", exact=True))
            await expect(answer).to_contain_text("running")
            server.kill()
            await expect(page.get_by_text("Not connected")).to_be_visible()
            server.start()
            await expect(page.get_by_text("Not connected")).to_be_hidden()
            await expect(page.get_by_text("resumed 1 time")).to_be_visible()  # taken over, in a second attempt
            await expect(page.get_by_label("Attempt").locator("option")).to_have_count(2)
            await expect(answer).to_contain_text("running")
            money = page.get_by_role("region", name="Money of this run")
            await expect(money).to_contain_text("unresolved")  # what the lost call held
            api(server, f"/api/runs/{run_id}/cancel", {})
            await expect(status(page)).to_have_text("The run is cancelled")
            await expect(money).to_contain_text("unresolved")
            await page.get_by_label("Attempt").select_option("1")
            await expect(answer).to_contain_text("interrupted")


async def test_a_short_run_shows_the_daily_budgets_that_paid_for_it(tmp_path: Path) -> None:
    with serving(tmp_path, options=("--user-daily", "5", "--daily", "20")) as server:
        async with browsing() as browser, tab(browser) as opened:
            page = opened.page
            await page.goto(server.url)
            await start(page, "assistant", "count to 1")
            await expect(status(page)).to_have_text("The run is completed")
            for name, limit in (("Daily budget of local", "$5.00"), ("Daily budget of everyone", "$20.00")):
                meter = page.get_by_role("region", name=name)
                await expect(meter).to_contain_text(f"of {limit}")
                await expect(meter.locator(".figure")).to_contain_text("$0.0000")  # what the run has spent
            await page.get_by_role("treegrid").get_by_text("model", exact=True).first.click()
            payers = page.get_by_role("region", name="Who pays for this call").get_by_role("listitem")
            await expect(payers.last).to_contain_text("Daily budget of everyone")
            await opened.check_accessibility()


async def test_a_running_run_is_watched_and_cancelled(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(server.url)
        run_id = await start(page, "assistant", "count to 900")
        await expect(status(page)).to_have_text("The run is running")
        await page.get_by_role("button", name="Cancel run").click()
        await page.get_by_label("Reason (optional)").fill("enough seen")
        await page.get_by_role("button", name="Cancel the run").click()
        await expect(status(page)).to_have_text("The run is cancelled")
        await expect(page.get_by_role("region", name="Why it stopped")).to_contain_text("enough seen")
        await expect(page.get_by_text("refused")).to_have_count(0)  # nothing was: a person has stopped it
        assert api(server, f"/api/runs/{run_id}")["status"] == "cancelled"


async def test_an_approval_is_answered_with_an_edit(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(server.url)
        run_id = await start(page, "publish", "count to 3")
        await expect(status(page)).to_have_text("The run is waiting")
        await page.get_by_role("link", name="Approvals").click()
        await expect(page.get_by_role("heading", name="Publish this?")).to_be_visible()
        await opened.check_accessibility()
        await page.get_by_role("button", name="Edit").click()
        await page.get_by_label("Go on with this instead").fill("four, five")
        await page.get_by_role("button", name="Approve with this change").click()
        await expect(page.get_by_text("Nothing waits for you.")).to_be_visible()
        await page.goto(f"{server.url}/#/runs/{run_id}?view=data")
        await expect(status(page)).to_have_text("The run is completed")
        await expect(page.get_by_label("Output", exact=True)).to_contain_text("four, five")


async def test_a_page_reconnects_to_a_server_that_was_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        async with browsing() as browser, tab(browser, expected=REFUSED) as opened:
            page = opened.page
            await page.goto(server.url)
            run_id = await start(page, "publish", "count to 3")
            await expect(status(page)).to_have_text("The run is waiting")
            server.kill()
            await expect(page.get_by_text("Not connected")).to_be_visible()
            server.start()
            await expect(page.get_by_text("Not connected")).to_be_hidden()
            (approval,) = api(server, f"/api/approvals?run_id={run_id}")["approvals"]
            api(server, f"/api/approvals/{approval['id']}/approve", {})
            await expect(status(page)).to_have_text("The run is completed")


PAGES = ("runs", "start", "approvals", "nowhere", "diff", "diff/{run}/{halted}")
RUN_PAGES = (
    "{run}",
    "{halted}",
    "{waiting}",
    "{run}?call=1:n000005",
    "{run}?view=flame&call=1:n000005",
    "{run}?view=flame&by=money&as=table",
    "{run}?view=timeline",
    "{run}?view=graph",
    "{run}?view=graph&as=table",
    "{run}?view=events&event=3",
    "{run}?view=data",
)
CHECKED_BY = {"chat": "test_chat.py", "graphs": "test_editor.py", "connect": "", "money": "", "bills": "", "admin": ""}
"""Pages of other scenarios; those without a file are the places of `test_money`."""


def test_every_page_of_the_ui_is_checked_in_both_themes() -> None:
    table = (UI / "src" / "pages" / "index.ts").read_text("utf-8").partition("PLACES: Record")[2]
    names = set(re.findall(r"^  (\w+): \{", table, re.MULTILINE))
    assert {"runs", "chat", "graphs"} <= names
    here = {page.partition("/")[0] for page in PAGES}
    assert names - here == CHECKED_BY.keys() - here
    for name, file in CHECKED_BY.items():
        if file:
            text = (Path(__file__).parent / file).read_text("utf-8")
            assert f"#/{name}" in text
            assert "check_accessibility" in text
        else:
            assert any(place.startswith(name) for place in test_money.PAGES), name


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_meets_wcag_and_fetches_nothing_from_outside(
    server: Server, theme: Literal["light", "dark"]
) -> None:
    body = {"graph_id": "pipeline", "input": "count to 3"}
    run = api(server, "/api/runs", body)["id"]
    halted = api(server, "/api/runs", {**body, "limits": {"max_cost_usd": "0"}})["id"]
    waiting = api(server, "/api/runs", {**body, "graph_id": "publish"})["id"]
    async with browsing() as browser, tab(browser, theme=theme) as opened:
        page = opened.page
        outside: list[str] = []
        await record_payloads(page)
        page.on("request", lambda request: None if request.url.startswith(server.url) else outside.append(request.url))
        for id, ended in ((run, "completed"), (halted, "halted"), (waiting, "waiting")):
            await page.goto(f"{server.url}/#/runs/{id}")
            await expect(status(page)).to_have_text(f"The run is {ended}")
        for place in (*PAGES, *(f"runs/{place}" for place in RUN_PAGES)):
            await page.goto(f"{server.url}/#/{place.format(run=run, halted=halted, waiting=waiting)}")
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
            await opened.check_accessibility()
        for key, dialog in (("Control+k", "Go to"), ("?", "Keys")):
            await page.keyboard.press(key)
            await expect(page.get_by_role("dialog", name=dialog)).to_be_visible()
            await opened.check_accessibility()
            await page.keyboard.press("Escape")
            await expect(page.get_by_role("dialog")).to_have_count(0)
        assert outside == []


async def test_no_page_scrolls_sideways_in_a_window_of_320_pixels(server: Server) -> None:
    """Success criterion 1.4.10 of WCAG, which axe cannot check; tables scroll within their panel."""
    body = {"graph_id": "pipeline", "input": "count to 3"}
    run = api(server, "/api/runs", body)["id"]
    halted = api(server, "/api/runs", {**body, "limits": {"max_cost_usd": "0"}})["id"]
    waiting = api(server, "/api/runs", {**body, "graph_id": "publish"})["id"]
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await record_payloads(page)
        await page.set_viewport_size({"width": 320, "height": 640})
        for place in (*PAGES, *(f"runs/{place}" for place in RUN_PAGES), *test_money.PAGES, "chat", "graphs"):
            await page.goto(f"{server.url}/#/{place.format(run=run, halted=halted, waiting=waiting)}")
            await expect(page.get_by_role("heading", level=1).first).to_be_visible()
            await expect(page.get_by_text("Loading…")).to_have_count(0)
            wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{place} is {wide} pixels wider than the window"


async def test_a_filter_that_changes_while_its_page_is_left_does_not_bring_the_page_back(server: Server) -> None:
    leave = """one => {
        location.hash = "#/start";  // the page is still the list until the event of this change is handled
        one.value = "pipeline";
        one.dispatchEvent(new Event("change", { bubbles: true }));
    }"""
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(f"{server.url}/#/runs")
        graph = page.get_by_label("Graph", exact=True)
        await expect(graph.locator("option[value=pipeline]")).to_have_count(1)
        await graph.evaluate(leave)
        await expect(page.get_by_label("Input", exact=True)).to_be_visible()
        assert page.url.endswith("/#/start")


async def test_hostile_text_is_shown_and_never_run(server: Server) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script> [x](javascript:alert(3))"
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        alerts: list[str] = []
        page.on("dialog", lambda dialog: alerts.append(dialog.message))
        await page.goto(server.url)
        await start(page, "pipeline", attack)
        await expect(status(page)).to_have_text("The run is completed")
        await page.get_by_role("tab", name="Events").click()
        await page.get_by_role("tab", name="Input and output").click()
        await expect(page.get_by_label("Input", exact=True)).to_have_text(attack)
        assert await page.locator("main img, main script, main a[href^=javascript]").count() == 0
        assert alerts == []
