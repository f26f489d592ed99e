"""The editor of graphs, in a real browser on a real server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Locator, Page, expect

from tests.ui.browser import Server, Tab, browsing, serving, tab

pytestmark = pytest.mark.timeout(300)

ANN, ROOT = "canary-ui-ann-0123456789", "canary-ui-root-012345678"
UNAUTHORIZED = "the server responded with a status of 401"
NOT_FOUND = "the server responded with a status of 404"
INVALID = "the server responded with a status of 422"
CONFLICT = "the server responded with a status of 409"
AWAY = ("net::ERR_", "the server responded with a status of 503")

ODD = """{ "id" : "odd",
    "nodes" : [ {"id":"in", "type":"input", "position":{"x":0,"y":0.50}},
        {"id":"strange", "type":"of-another-server", "data":{"ratio":1.0, "deep":{"list":[1E2, "\\u00e9"]}},
            "extra":[]},
        {"id":"each", "type":"map", "data":{"graph":{"nodes":[{"id":"say","type":"text",
            "data":{"text":"hi"}}],"edges":[]}}},
        {"id":"out", "type":"output"} ],
    "edges" : [ {"id":"e1", "source":"in", "target":"each", "data":{"channel":"flow", "colour":"red"}},
        {"id":"e2", "source":"each", "target":"out", "data":{"channel":"flow"}} ],
    "viewport" : {"zoom":1.250} }

"""
"""A graph as no program would write it: odd spacing and numbers, fields and a node type that nothing here knows."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without tokens, for scenarios that each have graphs of their own."""
    with serving(tmp_path_factory.mktemp("editor")) as server:
        yield server


def api(server: Server, method: str, path: str, body: Any = None, token: str = "") -> Any:
    """Request the API directly, for what the editor is compared with."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method)) as response:
        return json.load(response)


def card(page: Page, name: str) -> Locator:
    return page.locator(f'.react-flow__node[data-id="{name}"]')


def handle(page: Page, node: str, name: str, side: Literal["source", "target"]) -> Locator:
    return card(page, node).locator(f'.react-flow__handle.{side}[data-handleid="{name}"]')


def state(page: Page) -> Locator:
    """What the top bar says of the version."""
    return page.locator(".editor > header").get_by_role("status")


async def new_graph(page: Page, server: Server, name: str) -> None:
    await page.goto(f"{server.url}/#/graphs")
    await page.get_by_role("button", name="New graph").click()
    await page.get_by_label("Name", exact=True).fill(name)
    await page.get_by_role("button", name="Create").click()
    await expect(state(page)).to_contain_text("not saved yet")


async def add(page: Page, title: str) -> None:
    await page.get_by_role("region", name="Node types").get_by_role("button", name=title, exact=True).click()


async def save(page: Page, note: str = "") -> None:
    await page.get_by_role("button", name="Save", exact=True).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Note (optional)").fill(note)
    await dialog.get_by_role("button", name="Save", exact=True).click()
    await expect(state(page)).not_to_contain_text("unsaved")


def run_state(page: Page) -> Locator:
    return page.get_by_role("region", name="Run", exact=True).get_by_role("status")


async def sign_in(page: Page, server: Server, token: str) -> None:
    await page.goto(server.url)
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()


async def exported(page: Page) -> str:
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export").click()
    path = await (await download.value).path()
    return await asyncio.to_thread(path.read_text, "utf-8")


async def import_text(page: Page, text: str) -> None:
    file: Any = {"name": "graph.json", "mimeType": "application/json", "buffer": text.encode()}
    await page.locator('input[type="file"]').set_input_files(file)


@pytest.mark.requirement("K-19")
async def test_a_graph_is_built_by_mouse_fails_and_is_mended(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
        page = opened.page
        await new_graph(page, server, "Mouse made")
        await expect(page.get_by_text("An empty graph")).to_be_visible()
        await add(page, "Input")
        await add(page, "Prompt template")
        await page.get_by_role("textbox", name="Template").fill("Hello {{ who }}")
        await expect(handle(page, "prompt-template", "who", "target")).to_be_visible()
        await add(page, "Output")  # connected to the selected template by itself
        await expect(page.get_by_text("to mend")).to_have_count(0)
        await save(page, "first")
        await page.get_by_role("button", name="▷ Run").click()
        await page.get_by_label("Input", exact=True).fill("Ann")
        await page.get_by_role("button", name="Start", exact=True).click()
        await expect(run_state(page)).to_contain_text("failed")
        await expect(card(page, "prompt-template")).to_contain_text("failed")
        await card(page, "prompt-template").click(position={"x": 60, "y": 15})
        await expect(
            page.get_by_role("region", name="Settings of prompt-template").get_by_role("status")
        ).to_contain_text("who")

        source = handle(page, "input", "output", "source")
        await source.hover()
        await page.mouse.down()
        await page.mouse.move(500, 500, steps=3)
        outputs = card(page, "prompt-template").locator(".outputs li")
        await expect(outputs).to_have_class("off")  # an output does not fit an output
        await handle(page, "prompt-template", "who", "target").hover()
        await page.mouse.up()
        await expect(page.locator(".react-flow__edge.flow")).to_have_count(2)
        await page.get_by_role("button", name="Save and start").click()
        await expect(run_state(page)).to_contain_text("completed")
        await expect(card(page, "output")).to_contain_text("completed")

        saved = api(server, "GET", "/api/graphs/mouse-made")
        assert (saved["version"], saved["valid"], saved["saved_by"]) == (2, True, "local")
        assert {edge["data"]["channel"] for edge in saved["document"]["edges"]} == {"flow"}
        runs = api(server, "GET", "/api/runs?graph_id=mouse-made")["runs"]
        assert api(server, "GET", f"/api/runs/{runs[0]['id']}")["output"] == "Hello Ann"


async def tab_to(page: Page, wanted: Locator) -> None:
    """Press Tab until that element has the focus."""
    for _ in range(150):
        if await wanted.evaluate("one => one === document.activeElement"):
            return
        await page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {wanted}")


async def test_a_graph_is_built_by_keyboard_alone(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
        page, press, write = opened.page, opened.page.keyboard.press, opened.page.keyboard.type
        await page.goto(server.url)
        await expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
        await press("g")
        await press("e")
        await tab_to(page, page.get_by_role("button", name="New graph"))
        await press("Enter")
        await write("Keys made")
        await press("Enter")
        await expect(state(page)).to_contain_text("not saved yet")
        await press("a")
        await write("input")
        await press("Enter")
        await write("prompt template")
        await press("Enter")
        await press("Escape")
        await press("Enter")  # to the settings of the node
        await tab_to(page, page.get_by_role("textbox", name="Template"))
        await write("Hello {{ who }}")
        await press("Escape")
        await press("a")
        await write("output")
        await press("Enter")
        await press("Control+s")
        await write("by keys")
        await press("Enter")
        await expect(state(page)).to_contain_text("version 1")

        await tab_to(page, page.get_by_role("button", name="▷ Run"))
        await press("Enter")
        await tab_to(page, page.get_by_label("Input", exact=True))
        await write("Bob")
        await tab_to(page, page.get_by_role("button", name="Start", exact=True))
        await press("Enter")
        await expect(run_state(page)).to_contain_text("failed")

        await tab_to(page, card(page, "prompt-template"))
        await press("Enter")
        await tab_to(page, page.get_by_label("Connect who from"))
        await press("ArrowDown")
        await expect(page.get_by_role("button", name="Disconnect who from input")).to_be_visible()
        await press("Control+z")
        await expect(page.get_by_label("Connect who from")).to_be_visible()
        await press("Control+Shift+z")
        await expect(page.get_by_role("button", name="Disconnect who from input")).to_be_visible()
        await tab_to(page, page.get_by_role("button", name="Save and start"))
        await press("Enter")
        await expect(run_state(page)).to_contain_text("completed")
        runs = api(server, "GET", "/api/runs?graph_id=keys-made")["runs"]
        assert api(server, "GET", f"/api/runs/{runs[0]['id']}")["output"] == "Hello Bob"


async def test_a_version_saved_elsewhere_is_shown_and_never_overwritten(tmp_path: Path) -> None:
    first = {"nodes": [{"id": "t", "type": "text", "data": {"text": "one"}}], "edges": []}
    with serving(tmp_path, f"ann:user:{ANN}\nroot:admin:{ROOT}") as server:
        api(server, "PUT", "/api/graphs/shared", {"document": first}, ANN)
        expected = (UNAUTHORIZED, CONFLICT)
        async with (
            browsing() as browser,
            tab(browser, expected=expected) as ann,
            tab(browser, expected=expected) as root,
        ):
            for opened, token in ((ann, ANN), (root, ROOT)):
                await sign_in(opened.page, server, token)
                await opened.page.goto(f"{server.url}/#/graphs/shared")
                await card(opened.page, "t").click()
                await expect(opened.page.get_by_label("Text", exact=True)).to_have_value("one")
            await root.page.get_by_label("Text", exact=True).fill("of root")
            await save(root.page, "better words")
            await ann.page.get_by_label("Text", exact=True).fill("of ann")
            await ann.page.get_by_text("root saved version 2").wait_for()
            await ann.page.get_by_role("button", name="Save", exact=True).click()
            dialog = ann.page.get_by_role("dialog")
            await expect(dialog).to_contain_text("better words")
            await expect(dialog.locator("del")).to_have_text("one")
            await expect(dialog.locator("ins")).to_have_text("of root")
            await ann.check_accessibility()
            await dialog.get_by_role("button", name="Keep mine").click()
            await expect(ann.page.get_by_label("Text", exact=True)).to_have_value("of ann")
            await save(ann.page)
            texts = [api(server, "GET", f"/api/graphs/shared?version={n}", token=ANN) for n in (1, 2, 3)]
            assert [one["document"]["nodes"][0]["data"]["text"] for one in texts] == ["one", "of root", "of ann"]
            assert [one["saved_by"] for one in texts] == ["ann", "root", "ann"]
            await ann.page.get_by_role("button", name="Versions").click()
            versions = ann.page.get_by_role("dialog")
            await expect(versions.get_by_role("row")).to_have_count(4)
            await expect(versions.get_by_role("row", name="better words")).to_contain_text("root")
            await expect(versions.locator("ins")).to_have_text("of ann")
            await versions.get_by_role("button", name="Changes in version 2").click()
            await expect(versions.locator("del")).to_have_text("one")
            await expect(versions.locator("ins")).to_have_text("of root")
            await versions.get_by_role("button", name="Bring back version 2").click()
            await card(ann.page, "t").click()
            await expect(ann.page.get_by_label("Text", exact=True)).to_have_value("of root")
            await ann.page.get_by_role("button", name="Undo").click()
            await expect(ann.page.get_by_label("Text", exact=True)).to_have_value("of ann")
            await expect(state(ann.page)).to_have_text("version 3")


async def test_a_save_that_comes_too_late_is_refused_and_shows_the_other_version(server: Server) -> None:
    document = {"nodes": [{"id": "t", "type": "text", "data": {"text": "one"}}], "edges": []}
    api(server, "PUT", "/api/graphs/late", {"document": document})
    async with browsing() as browser, tab(browser, expected=("net::ERR_FAILED", CONFLICT)) as opened:
        page = opened.page
        await page.route("**/api/graphs/late/versions", lambda route: route.abort())  # the page has not heard of it yet
        await page.goto(f"{server.url}/#/graphs/late")
        await card(page, "t").click()
        await page.get_by_label("Text", exact=True).fill("mine")
        document["nodes"][0]["data"] = {"text": "theirs"}
        api(server, "PUT", "/api/graphs/late", {"document": document, "note": "in a hurry"})
        await page.get_by_role("button", name="Save", exact=True).click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog.get_by_role("alert")).to_contain_text("the newest version is 2")
        await page.unroute("**/api/graphs/late/versions")
        await dialog.get_by_role("button", name="Show version 2").click()
        await expect(page.get_by_role("dialog")).to_contain_text("in a hurry")
        await page.get_by_role("button", name="Decide later").click()
        await expect(page.get_by_label("Text", exact=True)).to_have_value("mine")
        saved = api(server, "GET", "/api/graphs/late")
        assert (saved["version"], saved["document"]["nodes"][0]["data"]["text"]) == (2, "theirs")


@pytest.mark.requirement("K-19")
async def test_a_file_is_exported_as_it_was_imported(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
        page = opened.page
        await new_graph(page, server, "Odd")
        await import_text(page, "{]")
        await expect(page.get_by_role("alert")).to_contain_text("line 1, column 2")
        await import_text(page, ODD)
        await expect(card(page, "strange")).to_contain_text("? of-another-server")
        assert await exported(page) == ODD
        problems = page.get_by_role("region", name="Problems")
        await expect(problems).to_contain_text("strange this server has no such node type")
        await card(page, "strange").click()
        await expect(page.get_by_text("The node is kept as it is")).to_be_visible()

        await card(page, "each").dblclick()
        await expect(page.get_by_role("navigation", name="Where this graph is")).to_contain_text("each")
        await card(page, "say").click()
        await page.get_by_label("Text", exact=True).fill("hello")
        changed = ODD.replace('"text":"hi"', '"text":"hello"')
        assert await exported(page) == changed
        await page.keyboard.press("Escape")
        await page.keyboard.press("Control+z")
        assert await exported(page) == ODD
        await page.keyboard.press("Control+Shift+z")
        await save(page)
        await page.reload()  # what the server has is the text, not only what it means
        await expect(card(page, "strange")).to_be_visible()
        assert await exported(page) == changed
        assert api(server, "GET", "/api/graphs/odd")["document"] == json.loads(changed)

        await card(page, "out").hover()
        await page.mouse.down()
        await page.mouse.move(600, 600, steps=4)
        async with page.expect_response(lambda answer: answer.url.endswith("/layout")) as stored:
            await page.mouse.up()
        assert (await stored.value).status == 200
        await expect(state(page)).to_have_text("version 1")  # a moved node is no change of the graph
        assert list(api(server, "GET", "/api/graphs/odd/layout")["positions"]) == ["out"]
        assert await exported(page) == changed


@pytest.mark.requirement("K-19")
async def test_a_missing_channel_is_shown_and_never_filled_in(server: Server) -> None:
    bare = ODD.replace('"data":{"channel":"flow"}}', '"data":{"note":1}}')
    assert bare != ODD
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND, INVALID)) as opened:
        page = opened.page
        await new_graph(page, server, "Bare")
        await import_text(page, bare)
        await expect(page.locator(".react-flow__edge.wrong")).to_have_count(1)
        await expect(page.get_by_role("region", name="Problems")).to_contain_text("e2 every edge says its channel")
        assert await exported(page) == bare
        await add(page, "Text")
        assert '"e2", "source":"each", "target":"out", "data":{"note":1}}' in await exported(page)
        await page.get_by_role("button", name="Save", exact=True).click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog.get_by_role("alert")).to_contain_text("channel")
        await dialog.get_by_role("button", name="Back").click()
        await card(page, "out").click(position={"x": 60, "y": 15})
        await page.get_by_role("button", name="Disconnect input from each").click()
        await page.get_by_label("Connect input from").select_option("each · output")
        await expect(page.locator(".react-flow__edge.wrong")).to_have_count(0)
        await save(page)
        edges = api(server, "GET", "/api/graphs/bare")["document"]["edges"]
        assert {edge["id"]: edge["data"]["channel"] for edge in edges} == {"e1": "flow", "each-out": "flow"}


async def test_unsaved_changes_survive_the_tab_and_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        async with browsing() as browser, tab(browser, expected=AWAY) as opened:
            page = opened.page
            await page.goto(f"{server.url}/#/graphs/publish")
            await add(page, "Text")
            server.kill()
            await page.get_by_label("Text", exact=True).fill("written while the server was away")
            await page.get_by_role("button", name="Save", exact=True).click()
            await page.get_by_role("dialog").get_by_role("button", name="Save", exact=True).click()
            await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("does not answer")
            other = await page.context.new_page()
            await crash(page)
            server.start()
            await other.goto(f"{server.url}/#/graphs")
            await expect(other.get_by_text("unsaved changes here")).to_be_visible()
            await other.goto(f"{server.url}/#/graphs/publish")
            await expect(other.get_by_text("are back")).to_be_visible()
            await card(other, "text").click()
            await expect(other.get_by_label("Text", exact=True)).to_have_value("written while the server was away")
            await save(other)
            assert api(server, "GET", "/api/graphs/publish")["version"] == 2
            await other.reload()
            await expect(state(other)).to_have_text("version 2")


async def test_a_graph_opened_while_the_server_is_away_is_shown_once_it_is_back(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        async with browsing() as browser, tab(browser, expected=AWAY) as opened:
            page = opened.page
            await page.goto(f"{server.url}/#/graphs")
            await expect(page.get_by_role("row", name="publish")).to_be_visible()
            server.kill()
            await page.evaluate("location.hash = '#/graphs/publish'")
            await expect(page.get_by_role("alert")).to_contain_text("does not answer")
            server.start()
            await expect(card(page, "editor")).to_be_visible()
            await expect(page.get_by_role("alert")).to_have_count(0)


async def test_people_who_may_only_look_are_offered_nothing_they_may_not_do(tmp_path: Path) -> None:
    with serving(tmp_path, f"vera:viewer:{ANN}") as server:
        async with browsing() as browser, tab(browser, expected=(UNAUTHORIZED,)) as opened:
            await sign_in(opened.page, server, ANN)
            await opened.page.goto(f"{server.url}/#/graphs/publish")
            await expect(opened.page.get_by_text("You may look at graphs")).to_be_visible()
            for name in ("Save", "Save a copy", "▷ Run"):
                await expect(opened.page.get_by_role("button", name=name, exact=True)).to_have_count(0)


async def test_two_tabs_keep_their_unsaved_changes_apart(server: Server) -> None:
    api(server, "PUT", "/api/graphs/twice", {"document": {"nodes": [], "edges": []}})
    address = f"{server.url}/#/graphs/twice"
    async with browsing() as browser, tab(browser) as opened:
        first, second = opened.page, await opened.page.context.new_page()
        await first.goto(address)
        await add(first, "Text")
        await first.get_by_label("Text", exact=True).fill("of the first tab")
        await second.goto(address)
        await expect(second.get_by_text("Another tab of this browser has unsaved changes")).to_be_visible()
        await expect(card(second, "text")).to_have_count(0)
        await add(second, "Constant")
        await save(second)
        await expect(first.get_by_text("saved version 2")).to_be_visible()
        await crash(first)
        third = await opened.page.context.new_page()
        await third.goto(address)
        await expect(third.get_by_text("are back")).to_be_visible()
        await expect(third.get_by_text("saved version 2")).to_be_visible()
        await card(third, "text").click()
        await expect(third.get_by_label("Text", exact=True)).to_have_value("of the first tab")


async def crash(page: Page) -> None:
    """End the process of a page, as one that has no memory left ends; nothing in it hears of that."""
    session = await page.context.new_cdp_session(page)
    async with page.expect_event("crash"):
        sent = asyncio.ensure_future(session.send("Page.crash"))  # the page is gone: no answer comes
    sent.cancel()
    await asyncio.wait([sent])


async def test_parts_are_copied_pasted_removed_and_brought_back(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
        page = opened.page
        await new_graph(page, server, "Pieces")
        await add(page, "Agent")
        await add(page, "Tool")  # a part of the selected agent: linked, not in the flow
        await expect(page.locator(".react-flow__edge.link")).to_have_count(1)
        await card(page, "tool").focus()
        await page.keyboard.press("Control+a")
        await page.keyboard.press("Control+c")
        await page.keyboard.press("Control+v")
        await expect(card(page, "agent-2")).to_be_visible()
        await expect(page.locator(".react-flow__edge.link")).to_have_count(2)
        await page.keyboard.press("Delete")
        await expect(card(page, "agent-2")).to_have_count(0)
        await page.keyboard.press("Control+z")
        await expect(card(page, "tool-2")).to_be_visible()
        await card(page, "agent").click(position={"x": 60, "y": 15})
        settings = page.get_by_role("region", name="Settings of agent", exact=True)
        await settings.locator("input").nth(1).fill("none-such")
        await expect(settings).to_contain_text("there is no model 'none-such'")
        await settings.get_by_text("Errors, timeout and budget").click()
        await expect(settings.get_by_text("Budget").last).to_be_visible()


async def check_editor(opened: Tab, server: Server) -> None:
    page = opened.page
    await page.goto(f"{server.url}/#/graphs")
    await expect(page.get_by_role("link", name="A chat with one agent")).to_be_visible()
    await opened.check_accessibility()
    await page.goto(f"{server.url}/#/graphs/pipeline")
    await card(page, "researcher").click()
    await opened.check_accessibility()
    await page.get_by_role("textbox", name="Instructions").fill("")
    await add(page, "Condition")
    await expect(page.get_by_role("region", name="Problems")).to_be_visible()
    await opened.check_accessibility()
    await page.get_by_role("button", name="Versions").click()
    await opened.check_accessibility()


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_editor_is_accessible(server: Server, theme: Literal["light", "dark"]) -> None:
    async with browsing() as browser, tab(browser, theme=theme) as opened:
        await check_editor(opened, server)


async def test_a_graph_of_300_nodes_is_edited(server: Server) -> None:
    names = [f"n{at}" for at in range(300)]
    document = {
        "nodes": [{"id": name, "type": "text", "data": {"text": name}} for name in names],
        "edges": [
            {"id": f"e{at}", "source": names[at - 1], "target": names[at], "data": {"channel": "flow"}}
            for at in range(1, 300)
        ],
    }
    api(server, "PUT", "/api/graphs/large", {"document": document})
    async with browsing() as browser, tab(browser) as opened:
        page = opened.page
        await page.goto(f"{server.url}/#/graphs/large")
        await page.get_by_role("region", name="Nodes", exact=True).get_by_role("button", name="n299 Text").click()
        await page.get_by_label("Text", exact=True).fill("the last one")
        await save(page)
        assert api(server, "GET", "/api/graphs/large")["document"]["nodes"][299]["data"]["text"] == "the last one"


async def test_a_graph_that_may_not_be_changed_is_shown_and_copied(tmp_path: Path) -> None:
    document = {"nodes": [{"id": "t", "type": "text", "data": {"text": "one"}}], "edges": []}
    with serving(tmp_path, f"ann:user:{ANN}\nroot:admin:{ROOT}") as server:
        api(server, "PUT", "/api/graphs/roots", {"document": document}, ROOT)
        async with browsing() as browser, tab(browser, expected=(UNAUTHORIZED,)) as opened:
            page = opened.page
            await sign_in(page, server, ANN)
            await page.goto(f"{server.url}/#/graphs/roots")
            await expect(page.get_by_text("This graph belongs to root")).to_be_visible()
            await expect(page.get_by_role("region", name="Node types")).to_have_count(0)
            await card(page, "t").click()
            await expect(page.get_by_label("Text", exact=True)).to_be_disabled()
            await page.get_by_role("button", name="Save a copy").click()
            await page.get_by_role("button", name="Save the copy").click()
            await page.wait_for_url("**/roots-copy")
            assert api(server, "GET", "/api/graphs/roots-copy", token=ANN)["owner"] == "ann"


async def test_links_budgets_and_policies_are_set_and_stored(server: Server) -> None:
    async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
        page = opened.page
        await new_graph(page, server, "Cautious")
        for title in ("Input", "Agent", "Tool"):
            await add(page, title)
        dashes = [
            await page.locator(f".react-flow__edge.{channel} path.react-flow__edge-path").evaluate(
                "path => getComputedStyle(path).strokeDasharray"
            )
            for channel in ("flow", "link")
        ]
        assert dashes[0] == "none" != dashes[1]
        await card(page, "agent").click(position={"x": 60, "y": 15})
        settings = page.get_by_role("region", name="Settings of agent", exact=True)
        await settings.get_by_text("Errors, timeout and budget").click()
        await settings.get_by_role("button", name="Set budget").click()
        await settings.get_by_label("Maximum cost, US dollars").fill("0.25")
        await settings.get_by_label("Maximum time, seconds").fill("-1")
        await expect(settings.get_by_label("Maximum time, seconds")).to_have_attribute("aria-invalid", "true")
        await settings.get_by_label("Maximum time, seconds").fill("30")
        await settings.get_by_role("button", name="Set error policy").click()
        await settings.get_by_label("On error").select_option("continue")
        await settings.get_by_label("Timeout").fill("2500")
        await save(page)
        nodes = {node["id"]: node for node in api(server, "GET", "/api/graphs/cautious")["document"]["nodes"]}
        assert nodes["agent"]["data"]["budget"] == {"max_cost_usd": 0.25, "max_time_s": 30}
        policy = nodes["agent"]["data"]["error_policy"]
        assert (policy["on_error"], policy["timeout_ms"]) == ("continue", 2_500)


async def test_node_types_models_tools_prompts_and_graphs_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS, "utf-8")
    with serving(tmp_path, options=("--tools", f"{tmp_path / 'tools.py'}:tools")) as server:
        async with browsing() as browser, tab(browser, expected=(NOT_FOUND,)) as opened:
            page = opened.page
            await page.goto(f"{server.url}/#/chat")  # its styles stay, and change nothing here
            await expect(page.get_by_role("radio", name="assistant")).to_be_visible()
            await new_graph(page, server, "Chosen")
            types = page.get_by_role("region", name="Node types")
            categories = await types.get_by_role("group").evaluate_all("all => all.map(one => one.ariaLabel)")
            assert categories[:2] == ["Begin and end", "Models"]
            await types.get_by_role("button", name="Merge", exact=True).focus()
            await expect(types).to_contain_text("Merge. ")
            await types.get_by_role("button", name="Agent", exact=True).drag_to(page.locator(".react-flow__pane"))
            await expect(card(page, "agent")).to_be_visible()
            drawn = card(page, "agent").locator(".card")
            assert await drawn.evaluate("one => getComputedStyle(one).display") == "block"
            settings = page.get_by_role("region", name="Settings of agent", exact=True)
            model = settings.locator("input[list]").first
            assert "example" in await offered(page, model)
            await model.fill("example")
            await settings.get_by_role("textbox", name="Instructions").fill("Be brief.")
            await settings.get_by_role("button", name="Add to tools").click()
            tool = settings.get_by_role("textbox", name="Tools 1").or_(settings.get_by_role("combobox", name="Tools 1"))
            assert await offered(page, tool) == ["weather"]
            await tool.fill("weather")

            await settings.get_by_label("Kind of model").select_option("Scripted replies")
            script = {"script": ["hi", {"tool": "weather", "arguments": {}}]}
            await import_text(page, json.dumps(one_agent(script)))
            await card(page, "agent").click(position={"x": 60, "y": 15})
            await expect(page.get_by_text("[object Object]")).to_have_count(0)
            await settings.get_by_role("textbox", name="Instructions").fill("Be very brief.")
            await add(page, "Agent")
            second = page.get_by_role("region", name="Settings of agent-2", exact=True)
            await second.get_by_label("Copy instructions of another node").select_option("agent: Be very brief.")
            await expect(second.get_by_role("textbox", name="Instructions")).to_have_value("Be very brief.")
            await add(page, "For each item")
            await page.get_by_label("Use a copy of a saved graph").select_option("publish")
            await expect(page.get_by_text("A graph of 5 nodes inside")).to_be_visible()
            await save(page)
            nodes = {node["id"]: node["data"] for node in api(server, "GET", "/api/graphs/chosen")["document"]["nodes"]}
            assert nodes["agent"]["model"] == script
            assert len(nodes["map"]["graph"]["nodes"]) == 5
            await check_handles(page, server, "chosen")
            await card(page, "map").dblclick()
            await expect(card(page, "editor")).to_be_visible()
            await check_handles(page, server, "chosen", "map/")


TOOLS = """
from penstock.agents.tools import Tool


def weather() -> str:
    return "rain"


tools = {"weather": Tool(weather)}
"""


def one_agent(model: Any) -> dict[str, Any]:
    return {"nodes": [{"id": "agent", "type": "agent", "data": {"model": model}}], "edges": []}


async def offered(page: Page, field: Locator) -> list[str]:
    """What a field suggests."""
    found: list[str] = await field.evaluate("one => [...one.list.options].map(option => option.value)")
    return found


async def check_handles(page: Page, server: Server, graph_id: str, path: str = "") -> None:
    """Compare the handles on the canvas with those that the server finds."""
    document = api(server, "GET", f"/api/graphs/{graph_id}")["document"]
    found = api(server, "POST", "/api/graphs/validate", {"document": document})["handles"]
    here = {name.removeprefix(path): sides for name, sides in found.items() if name.rpartition("/")[0] == path[:-1]}
    assert here
    for name, sides in here.items():
        for side, kind in (("inputs", "target"), ("outputs", "source")):
            drawn = card(page, name).locator(f".react-flow__handle.{kind}")
            shown = await drawn.evaluate_all(
                "all => all.map(one => [one.dataset.handleid, one.classList.contains('link') ? 'link' : 'flow'])"
            )
            assert shown == [[one["name"], one["channel"]] for one in sides[side]], (name, side)


HELPER = """
from penstock.agents.agent import Agent
from penstock.agents.scripted import ScriptedModel

helper = Agent(ScriptedModel(["hi"]), name="helper")
"""


async def test_a_graph_in_python_is_shown_and_cannot_be_changed(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "examples" / "research.py"
    (tmp_path / "agents.py").write_text(HELPER, "utf-8")
    with serving(tmp_path, options=(f"{program}:graph", f"{tmp_path / 'agents.py'}:helper")) as server:
        (agent, graph) = sorted(api(server, "GET", "/api/graphs")["graphs"], key=lambda one: str(one["id"]))
        async with browsing() as browser, tab(browser) as opened:
            page = opened.page
            await page.goto(f"{server.url}/#/graphs/{agent['id']}")
            await expect(page.get_by_text("follows Python code")).to_be_visible()
            await expect(page.get_by_role("button", name="Save", exact=True)).to_have_count(0)
            await page.goto(f"{server.url}/#/graphs")
            await expect(page.get_by_role("row", name=graph["id"])).to_contain_text("Python, read-only")
            await page.get_by_role("link", name=graph["id"]).click()
            await expect(page.get_by_text("follows Python code")).to_be_visible()
            await expect(page.get_by_role("region", name="Node types")).to_have_count(0)
            await expect(page.get_by_role("button", name="Save", exact=True)).to_have_count(0)
            await expect(page.locator(".react-flow__node .card").first).to_be_visible()
