"""A run of 100,000 events in a real browser: it opens as columns, and everything of it can be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from benchmarks.ui import write_run
from tests.ui.browser import browsing, serving, tab
from tests.ui.test_scenarios import status

pytestmark = [pytest.mark.timeout(300), pytest.mark.requirement("X-18")]

CALLS = 33_335
COST_NANOS = 20_000
"""Cost of each call of a model: one of two calls."""


async def test_a_run_of_a_hundred_thousand_events_opens_and_everything_of_it_is_reached(tmp_path: Path) -> None:
    last = await write_run(f"sqlite:///{tmp_path / 'ui.db'}", "r", CALLS)
    assert last > 100_000
    cost = f"${(CALLS - 1) // 2 * COST_NANOS / 1e9:.3f}".rstrip("0")
    with serving(tmp_path) as server:
        async with browsing() as browser, tab(browser) as opened:
            page = opened.page
            await page.goto(f"{server.url}/#/runs/r")
            await expect(status(page)).to_have_text("The run is completed")
            await expect(page.get_by_text(f"{CALLS:,} calls")).to_be_visible()
            root = page.get_by_role("treegrid").get_by_role("row").nth(1)
            await expect(root).to_contain_text(cost)  # the sum is that of the record
            spent = page.get_by_role("region", name="Money of this run").locator(".figure")
            await expect(spent).to_contain_text(cost)
            assert await page.get_by_role("row").count() < 200, "only the rows on the screen are made"
            await page.get_by_label("Find a call").fill("each/16000/read")
            await expect(page.get_by_role("treegrid").get_by_role("row").filter(has_text="read")).to_have_count(1)
            await page.get_by_label("Find a call").fill("")
            await page.get_by_role("tab", name="Flame").click()
            await expect(page.get_by_role("group", name=f"Flame of this run by time, {CALLS} calls")).to_be_visible()
            await page.get_by_role("tab", name=f"Events ({last:,})").click()
            log = page.get_by_role("region", name="Events, newest first")
            await expect(log.get_by_role("button").first).to_contain_text("run.completed")
            await log.evaluate("one => { one.scrollTop = one.scrollHeight; }")
            await expect(log.get_by_role("button").last).to_contain_text(
                "run.queued"
            )  # the first, loaded when looked at
            await page.goto(f"{server.url}/#/runs/r?view=events&event=50000")
            await expect(page.get_by_label("Data of the event")).to_contain_text("node_id")
            await page.goto(f"{server.url}/#/runs/r?t=1000")
            await expect(page.get_by_text("This is the run as it was 1.0 s after its start")).to_be_visible()
            await opened.check_accessibility()
