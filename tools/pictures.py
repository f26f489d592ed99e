"""Take the pictures of the documentation: `python -m tools.pictures [NAME …]`, or `make pictures`.

Each picture is a page of a real server in a real browser, in light and in dark: `docs/images/NAME-light.png` and
`NAME-dark.png`. The server has an example program, example graphs and scripted models: no key, no network. Without
names, every picture is taken. An error on the console of a page fails the picture.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import Browser, Locator, Page, ViewportSize, expect

from tests.ui.browser import Server, browsing, tab

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
SERVED = (f"{ROOT / 'examples' / 'research.py'}:graph", str(ROOT / "src" / "penstock" / "server" / "examples"))
PAYER = """
from typing import Literal

from penstock.agents.agent import Agent
from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool


def pay(to: str, amount_usd: int, when: Literal["today", "at the end of the month"] = "today") -> str:
    return f"paid {amount_usd} to {to}"


invoice = ToolCall("1", "pay", {"to": "Turbine works", "amount_usd": 700, "when": "today"})
payer = Agent(ScriptedModel([invoice, "It is paid."]), tools=[Tool(pay, needs_approval=True)], name="payer")
"""
"""An agent whose tool a person approves."""
MODELS = """
from penstock.agents.scripted import ScriptedModel
from penstock.runtime.billing.prices import Price


def lose(request):
    raise ConnectionResetError("the connection was reset before the answer came")


models = {
    "distant": ScriptedModel(lose, name="distant"),
    "lossy": ScriptedModel(lose, name="lossy-1"),
    "new": ScriptedModel(lambda request: "Short.", name="new-1"),
}
prices = {"scripted": Price(0.8, 4), "distant": Price(0, 50), "lossy-1": Price(1, 5)}
"""
"""Models whose answers are lost, so that their cost is unknown, and prices."""
DAILY = ("--daily", "2", "--user-daily", "1")
SECRET = "for-pictures-0123456789"
SIGNED_OUT = "the server responded with a status of 401"
SCRIPT = [
    {"tool": "remember", "arguments": {"key": "highest dam", "value": "Oroville Dam, 235 m"}},
    """**Oroville Dam** in California is the highest, at 235 m. I have kept that.

| dam | height | completed |
|---|---|---|
| Oroville | 235 m | 1968 |
| Hoover | 221 m | 1936 |
| Dworshak | 219 m | 1973 |

Its main spillway was rebuilt after 2017.""",
]
SIZE: ViewportSize = {"width": 1280, "height": 800}
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


@dataclass(frozen=True)
class Site:
    """The server, and the runs that pages show."""

    server: Server
    halted: str
    finished: str
    pipeline: str
    waiting: str
    other: str
    chat: str
    edited: str


Scene = Callable[[Page, Site], Awaitable[None]]
SCENES: dict[str, Scene] = {}


def scene(function: Scene) -> Scene:
    """Register a picture by the function's name, with dashes."""
    SCENES[function.__name__.replace("_", "-")] = function
    return function


def request(server: Server, path: str, body: Any = None, method: str | None = None) -> Any:
    """Request the API as the person of the pictures."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(server.url + path, data, headers, method=method)
    with urllib.request.urlopen(sent) as response:
        return json.load(response)


def run_of(server: Server, graph: str, text: str, until: str, **limits: float) -> str:
    """Start a run and wait for its status; returns its id."""
    body = {"graph_id": graph, "input": text, **({"limits": limits} if limits else {})}
    run = request(server, "/api/runs", body)
    while run["status"] in ("queued", "running") and run["status"] != until:
        run = request(server, f"/api/runs/{run['id']}")
        time.sleep(0.1)
    assert run["status"] == until, run
    return str(run["id"])


def chat_of(server: Server) -> str:
    """Have a conversation with an agent that uses tools; returns its id."""
    nodes = [
        {"id": "start", "type": "chat-start", "data": {}},
        {"id": "guide", "type": "agent", "data": {"model": {"script": SCRIPT}, "stream": True}},
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
    request(server, "/api/graphs/guide", {"name": "Guide to dams", "document": document}, "PUT")
    question = "Which dam is the highest in the USA? Remember it for later."
    turn = request(server, "/api/agents/guide/chat", {"content": question})
    ended(server, turn["run_id"])
    request(server, f"/api/chats/{turn['chat_id']}/messages/{turn['message_id']}/retry", {})
    return str(turn["chat_id"])


def report(length: str) -> dict[str, Any]:
    """Return a graph with branches, links, and a graph inside."""
    one = {
        "nodes": [
            {"id": "river", "type": "input", "data": {}},
            {"id": "measure", "type": "agent", "data": {"model": {"script": ["It is full."]}}},
        ],
        "edges": [flow("river", "measure")],
    }
    nodes = [
        {"id": "topic", "type": "input", "data": {}},
        {"id": "brief", "type": "prompt-template", "data": {"template": f"Report on {{{{ topic }}}} in {length}."}},
        {
            "id": "researcher", "type": "agent",
            "data": {
                "model": "example", "instructions": "Collect what is known, with sources.", "stream": True,
                "budget": {"max_cost_usd": 0.05},
            },
        },
        {"id": "notes", "type": "memory", "data": {}},
        {"id": "rivers", "type": "constant", "data": {"value": ["Feather", "Colorado"]}},
        {"id": "each", "type": "map", "data": {"graph": one}},
        {"id": "answer", "type": "merge", "data": {}},
        {"id": "published", "type": "output", "data": {}},
    ]  # fmt: skip
    edges = [
        flow("topic", "brief", target="topic"),
        flow("brief", "researcher"),
        {
            "id": "tools", "source": "notes", "sourceHandle": "tools", "target": "researcher", "targetHandle": "tools",
            "data": {"channel": "link"},
        },
        flow("rivers", "each"),
        flow("researcher", "answer"),
        flow("each", "answer"),
        flow("answer", "published"),
    ]  # fmt: skip
    return {"nodes": nodes, "edges": edges}


def flow(source: str, to: str, target: str = "input") -> dict[str, Any]:
    data = {"channel": "flow"}
    return {"id": f"{source}-{to}", "source": source, "target": to, "targetHandle": target, "data": data}


def edited_of(server: Server) -> str:
    """Save a graph with two versions and run it; returns the run."""
    for length, note in (("one page", ""), ("half a page", "Readers want it short")):
        body = {"name": "Report on dams", "document": report(length), "note": note}
        request(server, "/api/graphs/dam-report", body, "PUT")
    return run_of(server, "dam-report", "Oroville Dam", "completed")


def bills_of(server: Server) -> None:
    """Leave one call without an answer, and one whose model has no price."""
    for name, model in (("forecast", "lossy"), ("summary", "new")):
        ask = {"id": "ask", "type": "agent", "data": {"model": model, "max_output_tokens": 2_000}}
        nodes = [{"id": "text", "type": "input", "data": {}}, ask]
        document = {"nodes": nodes, "edges": [flow("text", "ask")]}
        request(server, f"/api/graphs/{name}", {"name": name.capitalize(), "document": document}, "PUT")
        ended(server, str(request(server, "/api/runs", {"graph_id": name, "input": "Oroville"})["id"]))


def tokens_of(server: Server) -> None:
    """Create tokens and a gateway key."""
    keys = (
        {"name": "carl", "note": "nightly report", "expires": f"{datetime.now(UTC).year + 1}-12-31"},
        {"name": "vera", "role": "viewer", "note": "the screen in the hall"},
        {"name": "dora", "kind": "gateway", "daily_usd": 2.5, "models": ["gpt-*", "claude-*"], "team": "research"},
    )
    for body in keys:
        request(server, "/api/tokens", body)


def ended(server: Server, run_id: str) -> None:
    while request(server, f"/api/runs/{run_id}")["status"] in ("queued", "running"):
        time.sleep(0.1)


def lose(server: Server) -> None:
    """Have a run whose bill is unresolved."""
    nodes = [
        {"id": "in", "type": "input", "data": {}},
        {"id": "ask", "type": "llm-completion", "data": {"model": "distant"}},
    ]
    edges = [{"id": "e", "source": "in", "target": "ask", "data": {"channel": "flow"}}]
    request(server, "/api/graphs/survey", {"name": "Survey", "document": {"nodes": nodes, "edges": edges}}, "PUT")
    run_of(server, "survey", "How full is the reservoir?", "failed", max_cost_usd=0.5)


def prepare(server: Server) -> Site:
    """Start the runs that the pages show."""
    lose(server)
    finished = run_of(server, "research", "turbines", "completed", max_cost_usd=0.5)
    pipeline = run_of(server, "pipeline", "count to 12", "completed")
    waiting = run_of(server, "publish", "Write two lines about spillways.", "waiting")
    run_of(server, "payer", "Pay the invoice of the turbine works.", "waiting")
    other = run_of(server, "research", "spillways", "completed", max_cost_usd=0.5)
    halted = run_of(server, "research", "dams", "halted", max_cost_usd=0.03)
    bills_of(server)
    tokens_of(server)
    edited = edited_of(server)
    return Site(server, halted, finished, pipeline, waiting, other, chat_of(server), edited)


async def show(page: Page, site: Site, route: str) -> None:
    """Open a route and wait for its heading."""
    await page.goto(f"{site.server.url}/#/{route}")
    await expect(page.get_by_role("heading", level=1)).to_be_visible()


async def from_tabs(page: Page) -> None:
    """Scroll to the views of a run."""
    await page.get_by_role("tablist").evaluate("one => one.scrollIntoView()")


@scene
async def signing_in(page: Page, site: Site) -> None:
    await page.reload()  # forgets a token that is not kept
    await expect(page.get_by_label("Token")).to_be_visible()


@scene
async def runs(page: Page, site: Site) -> None:
    await show(page, site, "runs")
    await expect(page.get_by_role("row")).not_to_have_count(0)
    await page.get_by_label(f"Compare {site.finished}").check()
    await page.get_by_label(f"Compare {site.other}").check()


@scene
async def run_halted(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.halted}")
    await expect(page.get_by_role("region", name="Why it stopped")).to_be_visible()
    await expect(page.get_by_role("treegrid").get_by_role("row").nth(3)).to_be_visible()


@scene
async def run_refusals(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.halted}")
    await page.locator("details.refusals summary").click()
    await page.locator("details.refusals").evaluate("one => one.scrollIntoView()")


@scene
async def run_grant(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.halted}")
    await page.get_by_role("button", name="Grant more and go on").click()
    await expect(page.get_by_role("dialog")).to_be_visible()


@scene
async def run_calls(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}")
    await page.get_by_role("treegrid").get_by_text("model", exact=True).nth(3).click()
    await expect(page.get_by_role("region", name="Who pays for this call")).to_be_visible()
    await from_tabs(page)


@scene
async def run_flame(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}?view=flame&call=1:n000008")
    await expect(page.get_by_role("region", name="Who pays for this call")).to_be_visible()
    await from_tabs(page)


@scene
async def run_flame_money(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}?view=flame&by=money")
    await from_tabs(page)


@scene
async def run_timeline(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}?view=timeline")
    await expect(page.locator(".lane").first).to_be_visible()
    await from_tabs(page)


@scene
async def run_graph(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.pipeline}?view=graph")
    await expect(page.locator(".graph-card").first).to_be_visible()
    await from_tabs(page)


@scene
async def run_events(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}?view=events&event=8")
    await expect(page.get_by_label("Data of the event")).to_be_visible()
    await from_tabs(page)


@scene
async def run_moment(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.finished}?view=flame&t=700")
    await expect(page.get_by_text("This is the run as it was")).to_be_visible()
    await page.evaluate("scrollTo(0, 0)")


@scene
async def run_waiting(page: Page, site: Site) -> None:
    await show(page, site, f"runs/{site.waiting}")
    await expect(page.get_by_role("button", name="Approve")).to_be_visible()


@scene
async def diff(page: Page, site: Site) -> None:
    await show(page, site, f"diff/{site.finished}/{site.other}")
    await expect(page.get_by_role("region", name="What each node used")).to_be_visible()


@scene
async def start(page: Page, site: Site) -> None:
    await show(page, site, "start?graph=pipeline")
    await page.get_by_label("Input", exact=True).fill("count to 12")


@scene
async def approvals(page: Page, site: Site) -> None:
    await show(page, site, "approvals")
    form = page.get_by_role("region", name="Approval").filter(has_text="The tool pay")
    await form.get_by_role("button", name="Edit").click()
    await expect(form.get_by_label("Amount")).to_be_visible()


@scene
async def bills(page: Page, site: Site) -> None:
    await show(page, site, "bills")
    await expect(page.get_by_role("button", name="Settle").first).to_be_visible()


@scene
async def palette(page: Page, site: Site) -> None:
    await show(page, site, "runs")
    await page.keyboard.press("Control+k")
    await page.get_by_role("combobox", name="Find a page, a graph or a run").fill("p")
    await expect(page.get_by_role("listbox", name="Found").get_by_role("option").first).to_contain_text("Graphs")


@scene
async def chat(page: Page, site: Site) -> None:
    await show(page, site, f"chat/{site.chat}")
    await expect(page.get_by_text("rebuilt after 2017")).to_be_visible()


@scene
async def money(page: Page, site: Site) -> None:
    await show(page, site, "money")
    await expect(page.get_by_role("region", name="Costs by day")).to_be_visible()


@scene
async def server_health(page: Page, site: Site) -> None:
    await show(page, site, "admin/health")
    await expect(page.get_by_role("row", name="database").first).to_be_visible()


@scene
async def connect(page: Page, site: Site) -> None:
    await show(page, site, "connect")
    await expect(page.get_by_role("region", name="OpenAI, Python", exact=True)).to_be_visible()


@scene
async def graphs(page: Page, site: Site) -> None:
    await show(page, site, "graphs")
    await expect(page.get_by_role("row", name="Report on dams")).to_be_visible()


async def open_editor(page: Page, site: Site, route: str) -> None:
    await page.set_viewport_size({"width": 1500, "height": 840})
    await show(page, site, "graphs")  # whatever the picture before left open is closed
    await page.goto(f"{site.server.url}/#/graphs/dam-report{route}")
    await expect(page.locator(".react-flow__edge")).to_have_count(7)
    await page.wait_for_timeout(500)  # the canvas moves to fit the graph, and draws its map


def node_card(page: Page, name: str) -> Locator:
    return page.locator(f'.react-flow__node[data-id="{name}"]')


@scene
async def editor(page: Page, site: Site) -> None:
    await open_editor(page, site, "")
    await node_card(page, "researcher").click(position={"x": 60, "y": 15})
    await expect(page.get_by_role("textbox", name="Instructions")).to_be_visible()


@scene
async def editor_run(page: Page, site: Site) -> None:
    await open_editor(page, site, f"?run={site.edited}")
    await expect(node_card(page, "published")).to_contain_text("completed")


@scene
async def editor_versions(page: Page, site: Site) -> None:
    await open_editor(page, site, "")
    await page.get_by_role("button", name="Versions").click()
    await expect(page.get_by_role("dialog").locator("ins")).to_be_visible()


@scene
async def editor_problems(page: Page, site: Site) -> None:
    await open_editor(page, site, "")
    await node_card(page, "brief").click(position={"x": 60, "y": 15})
    await page.get_by_role("textbox", name="Template").fill("Report on {{ topic }} in {{ length.")
    await node_card(page, "answer").click(position={"x": 60, "y": 15})
    await page.keyboard.press("Delete")
    await node_card(page, "brief").click(position={"x": 60, "y": 15})
    await expect(page.get_by_role("region", name="Problems")).to_be_visible()


@scene
async def server_models(page: Page, site: Site) -> None:
    await show(page, site, "admin/models")
    await expect(page.get_by_role("row", name="ANTHROPIC_API_KEY")).to_be_visible()


@scene
async def server_tokens(page: Page, site: Site) -> None:
    await show(page, site, "admin/tokens")
    await expect(page.get_by_role("row", name="carl")).to_be_visible()


@scene
async def server_settings(page: Page, site: Site) -> None:
    await show(page, site, "admin/settings")
    await expect(page.get_by_role("row", name="Daily budget of all users together")).to_be_visible()


async def sign_in(page: Page, site: Site) -> None:
    await page.goto(site.server.url)
    await page.get_by_label("Token").fill(SECRET)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_label("Token")).to_be_hidden()


async def settle(page: Page) -> None:
    """Wait until nothing is fetched or moved any more."""
    await page.evaluate("document.fonts.ready.then(() => 0)")
    await page.evaluate("Promise.all(document.getAnimations().map(one => one.finished.catch(() => 0))).then(() => 0)")


QUANTIZE = """async (encoded) => {
  const bytes = Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes]));
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  const counts = new Map();
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const parts = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  const apart = (one, other) => parts(one).reduce((sum, part, at) => sum + (part - parts(other)[at]) ** 2, 0);
  const found = [...counts].sort((one, other) => other[1] - one[1]);
  const palette = found.slice(0, 160).map(([pixel]) => pixel);
  const left = found.slice(160).map(([pixel, count]) => ({
    pixel, weight: Math.sqrt(count), distance: Math.min(...palette.map((one) => apart(one, pixel))),
  }));
  while (palette.length < 256 && left.some((one) => one.distance)) {
    const next = left.reduce((most, one) => one.weight * one.distance > most.weight * most.distance ? one : most).pixel;
    palette.push(next);
    for (const one of left) one.distance = Math.min(one.distance, apart(one.pixel, next));
  }
  const colours = palette.map(parts);
  const nearest = new Map(palette.map((pixel, index) => [pixel, index]));
  const find = (pixel) => {
    const [r, g, b] = parts(pixel);
    let [best, least] = [0, Infinity];
    colours.forEach(([x, y, z], index) => {
      const distance = (x - r) ** 2 + (y - g) ** 2 + (z - b) ** 2;
      if (distance < least) [best, least] = [index, distance];
    });
    nearest.set(pixel, best);
    return best;
  };
  const indexes = Uint8Array.from(pixels, (pixel) => nearest.get(pixel) ?? find(pixel));
  let text = "";
  for (let at = 0; at < indexes.length; at += 8192) text += String.fromCharCode(...indexes.subarray(at, at + 8192));
  return [image.width, image.height, colours.flat(), btoa(text)];
}"""
"""Gives an image 256 colours, its most frequent ones and those least like them.

Returns width, height, palette, and the index of each pixel.
"""


async def reduced(browser: Browser, picture: bytes) -> bytes:
    """Return the picture as a PNG with a palette, a third of its size."""
    page = await browser.new_page()
    width, height, palette, encoded = await page.evaluate(QUANTIZE, base64.b64encode(picture).decode())
    await page.close()
    indexes = base64.b64decode(encoded)
    rows = b"".join(b"\0" + indexes[at : at + width] for at in range(0, len(indexes), width))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", bytes(palette)), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


async def take(browser: Browser, site: Site, names: list[str], theme: Literal["light", "dark"]) -> None:
    async with tab(browser, theme=theme, expected=(SIGNED_OUT,)) as opened:
        await sign_in(opened.page, site)
        for name in names:
            if await opened.page.get_by_label("Token", exact=True).is_visible():  # the scene before had signed out
                await sign_in(opened.page, site)
            await opened.page.set_viewport_size(SIZE)
            await SCENES[name](opened.page, site)
            await settle(opened.page)
            (FOLDER / f"{name}-{theme}.png").write_bytes(await reduced(browser, await opened.page.screenshot()))
            print(f"{name}-{theme}.png")


async def take_all(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "app.py"
        program.write_text(PAYER, "utf-8")
        models = Path(folder) / "models.py"
        models.write_text(MODELS, "utf-8")
        offered = ("--models", f"{models}:models", "--prices", f"{models}:prices", *DAILY)
        server = Server(Path(folder), f"ann:admin:{SECRET}", options=(*SERVED, f"{program}:payer", *offered))
        server.start()
        try:
            site = prepare(server)
            async with browsing() as browser:
                for theme in THEMES:
                    await take(browser, site, names, theme)
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.pictures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SCENES)}; default: every picture")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(SCENES)):
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(SCENES)}")
    asyncio.run(take_all(names or list(SCENES)))


if __name__ == "__main__":
    main()
