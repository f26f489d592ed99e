"""Watching runs in a real browser: two runs compared, seven at once, an earlier moment, forms, ends of access, and
text, servers and clocks that are not as a page would like them.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.ui.browser import Server, browsing, serving, tab
from tests.ui.test_scenarios import status

pytestmark = [pytest.mark.timeout(300), pytest.mark.requirement("X-18")]

EXAMPLES = Path(__file__).parents[2] / "src" / "penstock" / "server" / "examples"
ROOT, ANN, BOB = "canary-watch-root-0123456789", "canary-watch-ann-0123456789", "canary-watch-bob-0123456789"
TOKENS = f"root:admin:{ROOT}\nbob:user:{BOB}"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202egnp.exe\u200b"
SHOWN = "<img src=x onerror=alert(1)><script>alert(2)</script>⟨U+202E⟩gnp.exe⟨U+200B⟩"
PAYER = """
from typing import Literal

from penstock.agents.agent import Agent
from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool


def pay(to: str, amount: int, speed: Literal["slow", "fast"] = "slow") -> str:
    return f"paid {amount} to {to}, {speed}"


calls = [ToolCall("1", "pay", {"to": "Ann", "amount": 700})]
model = ScriptedModel(lambda request: request.messages[-1].text if len(request.messages) > 2 else calls)
payer = Agent(model, tools=[Tool(pay, needs_approval=True)], name="payer")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with tokens for root and bob, the example graphs, and an agent whose tool needs approval."""
    folder = tmp_path_factory.mktemp("watching")
    (folder / "app.py").write_text(PAYER, "utf-8")
    with serving(folder, TOKENS, (f"{folder / 'app.py'}:payer", str(EXAMPLES))) as server:
        yield server


def api(server: Server, path: str, body: Any = None, *, token: str = ROOT, method: str | None = None) -> Any:
    """Request the API directly, for what the UI is compared with."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def run_of(server: Server, graph: str, text: str, *, until: str = "completed", token: str = ROOT) -> str:
    """Start a run, wait for a status, and return its id."""
    run_id = str(api(server, "/api/runs", {"graph_id": graph, "input": text}, token=token)["id"])
    request = urllib.request.Request(
        f"{server.url}/api/stream?runs={run_id}@0", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if line.strip() == f"event: run.{until}".encode():
                return run_id
    raise AssertionError(f"the run never was {until}")


async def sign_in(page: Page, server: Server, token: str, route: str = "runs") -> None:
    await page.goto(f"{server.url}/#/{route}")
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_label("Token")).to_be_hidden()


SIGNED_OUT = "the server responded with a status of 401"
UNLOADED = ("net::ERR_FAILED", "Failed to fetch dynamically imported module")
NOT_FOUND = "the server responded with a status of 404"


async def test_two_runs_are_picked_in_the_list_and_compared(server: Server) -> None:
    one, other = run_of(server, "pipeline", "count to 3"), run_of(server, "pipeline", "count to 9")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        await sign_in(page, server, ROOT)
        for run in (one, other):
            await page.get_by_label(f"Compare {run}").check()
        await page.get_by_role("link", name="Compare", exact=True).click()
        differs = page.get_by_role("region", name="What differs")
        await expect(differs.get_by_label("Input of run A")).to_have_text("count to 3")
        await expect(differs.get_by_label("Input of run B")).to_have_text("count to 9")
        used = page.get_by_role("region", name="What each node used").locator("tbody tr").filter(has_text="+$")
        cells = await used.first.get_by_role("cell").all_text_contents()
        assert cells[1:4] == ["1", "1", "="], cells  # as many calls
        assert cells[6].startswith("+$"), cells  # and a longer answer is dearer
        await opened.check_accessibility()
        await page.get_by_role("link", name="Swap").click()
        await expect(differs.get_by_label("Input of run A")).to_have_text("count to 9")
        await page.goto(f"{server.url}/#/diff/{one}/{one}")
        await expect(page.get_by_text("These runs do not differ")).to_be_visible()
        await page.goto(f"{server.url}/#/diff")
        await opened.check_accessibility()


async def test_seven_runs_in_as_many_tabs_are_live_over_one_connection(server: Server) -> None:
    runs = [run_of(server, "publish", f"count to {number}", until="waiting") for number in range(7)]
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        await sign_in(opened.page, server, ROOT)
        await opened.page.evaluate(f"sessionStorage.setItem('penstock.token', '{ROOT}')")
        pages = []
        for run in runs:
            async with opened.page.expect_popup() as popup:
                await opened.page.evaluate(f"void window.open('#/runs/{run}')")
            pages.append(await popup.value)
        for page in pages:
            await expect(status(page)).to_have_text("The run is waiting")
        # One of this browser; that of another test's may not have ended yet. Without the worker there are eight.
        assert api(server, "/api/host")["streams"] <= 3
        for run in runs:
            (approval,) = api(server, f"/api/approvals?run_id={run}")["approvals"]
            api(server, f"/api/approvals/{approval['id']}/approve", {})
        for page in pages:
            await expect(status(page)).to_have_text("The run is completed")
        await expect(opened.page.get_by_role("link", name="Approvals")).to_have_text("Approvals")  # nothing waits


async def test_an_earlier_moment_of_a_run_is_shown(server: Server) -> None:
    run = run_of(server, "pipeline", "count to 9")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        await sign_in(page, server, ROOT, f"runs/{run}")
        await expect(status(page)).to_have_text("The run is completed")
        rows = page.get_by_role("treegrid").get_by_role("row")
        await expect(rows.nth(4)).to_be_visible()
        whole = await rows.count()
        await page.get_by_role("button", name="To the change before").click()
        await expect(page.get_by_text("This is the run as it was")).to_be_visible()
        await page.goto(f"{server.url}/#/runs/{run}?t=0")
        await expect(page.get_by_text("This is the run as it was 0 ms after its start")).to_be_visible()
        await expect(page.get_by_role("region", name="Money of this run").locator(".figure")).to_contain_text("$0 ")
        assert await rows.count() < whole
        await opened.check_accessibility()
        for view in ("Flame", "Timeline", "Graph"):
            await page.get_by_role("tab", name=view).click()
            await expect(page.get_by_role("slider", name="Moment")).to_be_visible()
        await page.get_by_role("button", name="Back to now").click()
        await expect(page.get_by_text("This is the run as it was")).to_be_hidden()


async def test_the_arguments_of_a_tool_are_edited_by_a_form_before_they_are_approved(server: Server) -> None:
    run = run_of(server, "payer", "pay Ann", until="waiting")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        await sign_in(page, server, ROOT, f"runs/{run}?view=data")
        question = page.get_by_role("region", name="Approval")
        await expect(question).to_contain_text("The tool pay would run with these arguments")
        await question.get_by_role("button", name="Edit").click()
        await question.get_by_label("Amount").fill("seven")
        await question.get_by_role("button", name="Approve with this change").click()
        await expect(question.get_by_text("Write a number")).to_be_visible()
        assert api(server, f"/api/approvals?run_id={run}")["approvals"], "nothing was sent"
        await question.get_by_label("Amount").fill("7")
        await question.get_by_label("Speed").select_option("fast")
        await opened.check_accessibility()
        await question.get_by_role("button", name="Approve with this change").click()
        await expect(status(page)).to_have_text("The run is completed")
        await expect(page.get_by_label("Output", exact=True)).to_have_text("paid 7 to Ann, fast")


async def test_a_token_that_ends_leads_to_sign_in_and_back_to_the_same_page(server: Server) -> None:
    made = api(server, "/api/tokens", {"name": "ann", "role": "user"})
    run = run_of(server, "publish", "count to 2", until="waiting", token=made["secret"])
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        await sign_in(page, server, made["secret"], f"runs/{run}?view=events")
        await expect(status(page)).to_have_text("The run is waiting")
        api(server, f"/api/tokens/{made['token']['id']}/revoke", {})
        await expect(page.get_by_label("Token")).to_be_visible()
        await expect(page.get_by_text("revoked")).to_be_visible()
        await expect(page.get_by_text(run)).to_have_count(0)  # nothing of what was shown is left
        again = api(server, "/api/tokens", {"name": "ann", "role": "user", "another": True})
        await page.get_by_label("Token").fill(again["secret"])
        await page.get_by_role("button", name="Sign in").click()
        await expect(status(page)).to_have_text("The run is waiting")


async def test_another_users_run_does_not_exist_wherever_it_is_looked_for(server: Server) -> None:
    secret = "a secret of root's"
    run = run_of(server, "pipeline", secret)
    own = run_of(server, "pipeline", "count to 2", token=BOB)
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT, NOT_FOUND)) as opened:
        page = opened.page
        await sign_in(page, server, BOB)
        await expect(page.get_by_label(f"Compare {own}")).to_be_visible()
        await expect(page.get_by_label(f"Compare {run}")).to_have_count(0)
        for place in (f"runs/{run}", f"runs/{run}?view=events", f"diff/{own}/{run}", f"diff/{run}/{own}"):
            await page.goto(f"{server.url}/#/{place}")
            await expect(page.get_by_role("alert")).to_contain_text("there is no such run")
            assert secret not in await page.content()


async def test_hostile_names_are_shown_with_what_they_hide_and_never_run(server: Server) -> None:
    nodes = [
        {"id": "in", "type": "input", "data": {"label": HOSTILE}},
        {"id": "ask", "type": "approval", "data": {"question": HOSTILE, "label": HOSTILE}},
    ]
    edges = [{"id": "e", "source": "in", "target": "ask", "data": {"channel": "flow"}}]
    body = {"name": "hostile", "document": {"nodes": nodes, "edges": edges}}
    api(server, "/api/graphs/hostile", body, method="PUT")
    run = run_of(server, "hostile", HOSTILE, until="waiting")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        await sign_in(page, server, ROOT, "approvals")
        await expect(page.get_by_role("heading", name=SHOWN)).to_be_visible()
        # What a person approves is what it looks like.
        await expect(page.get_by_label("What it would go on with").filter(has_text=SHOWN)).to_be_visible()
        for view in ("tree", "flame", "timeline", "graph", "events"):
            await page.goto(f"{server.url}/#/runs/{run}?view={view}")
            await expect(status(page)).to_have_text("The run is waiting")
            assert await page.locator("main img, main script, main iframe").count() == 0
        await page.goto(f"{server.url}/#/runs/{run}?view=data")
        await expect(page.get_by_label("Input", exact=True)).to_have_text(SHOWN)
        await page.goto(f"{server.url}/#/runs/{run}?view=graph")
        await expect(page.locator(".graph-card").filter(has_text=SHOWN)).to_have_count(2)
        await page.goto(f"{server.url}/#/runs?q=%3Cscript%3Ealert(1)%3C/script%3E")
        await expect(page.get_by_text("No runs match these filters.")).to_be_visible()
        for odd in ("runs/%3Cimg%20src=x%20onerror=alert(1)%3E", "runs/%E0%A4%A", "diff/%3Cb%3E/..%2F..", "%3Cb%3E"):
            opened.expected = (SIGNED_OUT, NOT_FOUND, "the server responded with a status of 422")
            await page.goto(f"{server.url}/#/{odd}")
            await expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert dialogs == []


def as_stream(*events: dict[str, Any]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


async def test_events_of_a_newer_server_are_shown_plainly_and_a_newer_page_is_announced(server: Server) -> None:
    run = run_of(server, "pipeline", "count to 2")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page = opened.page
        # Without a worker the page has a connection of its own, which a test can answer.
        await page.add_init_script("delete window.SharedWorker")
        newer = {"seq": 1, "at_ms": 1_000, "type": "budget.forecast", "data": {"within": "<b>5 min</b>"}, "run_id": run}
        end = {"seq": 2, "at_ms": 2_000, "type": "run.completed", "data": {}, "run_id": run}

        async def answer(route: Route) -> None:
            if f"{run}%400" in route.request.url:
                await route.fulfill(content_type="text/event-stream", body=as_stream(newer, end))
            else:
                body = as_stream({"type": "approvals.open", "approvals": []})
                await route.fulfill(content_type="text/event-stream", body=body)

        async def another_page(route: Route) -> None:
            response = await route.fetch()
            text = await response.text()
            await route.fulfill(response=response, body=text.replace("assets/index-", "assets/newer-"))

        await page.route("**/api/stream?*", answer)
        await sign_in(page, server, ROOT, f"runs/{run}?view=events&event=1")
        await expect(page.get_by_text("unknown type")).to_be_visible()
        await expect(page.get_by_label("Data of the event")).to_contain_text("<b>5 min</b>")
        await expect(page.get_by_text("the server may be newer")).to_be_visible()
        await page.route(f"{server.url}/", another_page)
        await expect(page.get_by_text("The server has another version of this page.")).to_be_visible()


async def test_a_server_that_cannot_stream_and_a_part_that_cannot_be_loaded_are_named(server: Server) -> None:
    run = run_of(server, "pipeline", "count to 2")
    gone = {"error": {"code": "not_found", "message": "there is no such route"}}
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT, NOT_FOUND, *UNLOADED)) as opened:
        page = opened.page
        await page.add_init_script("delete window.SharedWorker")
        await page.route("**/api/stream?*", lambda route: route.fulfill(status=404, json=gone))
        await sign_in(page, server, ROOT, f"runs/{run}")
        await expect(page.get_by_text("it may be older than the page")).to_be_visible()
        await page.route("**/assets/flame-*", lambda route: route.abort())
        await page.get_by_role("tab", name="Flame").click()
        await expect(page.get_by_role("heading", name="This page cannot be shown")).to_be_visible()
        await expect(page.get_by_role("alert")).to_contain_text("has another version of this page")
        await opened.check_accessibility()
        await page.get_by_role("link", name="Runs").last.click()
        await expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()


async def test_a_clock_that_is_wrong_and_another_time_zone_change_no_duration(server: Server) -> None:
    run = run_of(server, "publish", "count to 2", until="waiting")
    async with browsing() as browser:
        context = await browser.new_context(timezone_id="Asia/Kathmandu", locale="en-GB")
        page = await context.new_page()
        await page.clock.install(time=datetime.now(UTC) + timedelta(hours=5))
        await sign_in(page, server, ROOT, f"runs/{run}")
        await expect(status(page)).to_have_text("The run is waiting")
        took = page.get_by_role("region", name="Time", exact=True).locator(".figure")
        await expect(took).to_contain_text(" s")
        assert "h" not in (await took.inner_text()).split()[1], "the five hours are the clock's, not the run's"
        await page.goto(f"{server.url}/#/runs/{run}?call=1:n000001")
        await expect(page.get_by_label("Call publish").or_(page.locator("aside"))).to_contain_text("UTC)")
        await expect(page.locator("aside")).to_contain_text("GMT+5:45")
        await context.close()


async def test_pages_graphs_and_runs_are_found_and_keys_are_listed_by_keyboard(server: Server) -> None:
    run = run_of(server, "pipeline", "count to 2")
    async with browsing() as browser, tab(browser, expected=(SIGNED_OUT,)) as opened:
        page, press = opened.page, opened.page.keyboard.press
        await sign_in(page, server, ROOT)
        await press("Control+k")
        await expect(page.get_by_role("combobox", name="Find a page, a graph or a run")).to_be_focused()
        await opened.check_accessibility()
        await page.keyboard.type(run[-8:])
        found = page.get_by_role("listbox", name="Found").get_by_role("option")
        await expect(found.first).to_contain_text("run of pipeline")
        await press("Enter")
        await expect(status(page)).to_have_text("The run is completed")
        await press("?")
        await expect(page.get_by_role("dialog", name="Keys")).to_contain_text("g a")
        await opened.check_accessibility()
        await press("Escape")
        await press("g")
        await press("a")
        await expect(page.get_by_role("heading", name="Approvals")).to_be_visible()
        await press("g")
        await press("r")
        await expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
        await press("/")
        await expect(page.get_by_label("Find a run")).to_be_focused()
