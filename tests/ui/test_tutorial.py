"""The steps that the tutorial takes in the browser, on the programs that its pages have a reader save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.ui.browser import browsing, serving, tab

PAGES = Path(__file__).parents[2] / "docs" / "tutorial"
FILE = re.compile(r"^`([\w.]+)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)

pytestmark = pytest.mark.timeout(300)


def saved(folder: Path, page: str) -> str:
    """Save the file of a page, as its reader does."""
    found = FILE.search((PAGES / f"{page}.md").read_text("utf-8"))
    assert found is not None
    (folder / found[1]).write_text(found[2], "utf-8")
    return str(folder / found[1])


async def test_a_reader_watches_a_run_and_grants_more_in_the_browser(tmp_path: Path) -> None:
    programs = (saved(tmp_path, "graph"), saved(tmp_path, "approve"))
    with serving(tmp_path, options=programs) as server:
        async with browsing() as browser, tab(browser) as opened:
            page = opened.page
            await page.goto(server.url)
            await page.get_by_role("link", name="Start a run").first.click()
            await page.get_by_label("Graph").select_option("briefing")
            await page.get_by_label("Input", exact=True).fill("dams")
            await page.get_by_label("Money, US dollars").fill("0.000025")
            await page.get_by_role("button", name="Start", exact=True).click()
            status = page.get_by_role("status").filter(has_text="The run is")
            await expect(status).to_have_text("The run is halted")
            for view in re.findall(r"^\| (\w+) \|", (PAGES / "watch.md").read_text("utf-8"), re.MULTILINE)[1:]:
                await page.get_by_role("tab", name=view, exact=True).click()
                await expect(page.get_by_role("tabpanel")).to_be_visible()
            await page.get_by_role("tab", name="Calls", exact=True).click()
            await page.get_by_role("treegrid").get_by_role("row").filter(has_text="example").first.click()
            await expect(page.get_by_role("region", name="Who pays for this call")).to_be_visible()
            why = page.get_by_role("region", name="Why it stopped")
            await why.get_by_role("button", name="Grant more and go on").click()
            await page.get_by_role("dialog").get_by_label("Money, US dollars").fill("0.01")
            await page.get_by_role("button", name="Grant", exact=True).click()
            await expect(status).to_have_text("The run is completed")
