"""How quick is the editor of graphs with 300 nodes, in a headless browser without a GPU?

Times are from the browser's own clock: from opening the page to the first card and to all cards that fit the screen,
from a keystroke in a setting to the frame that shows it, and between frames while the canvas is panned. A graph of
10 nodes on the same machine in the same run is the baseline. Needs `make ui-test`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from playwright.async_api import Page

from benchmarks._report import Table, main
from tests.ui.browser import Server, browsing, serving

WIDTH, HEIGHT = 1280, 800
FRAMES = """() => new Promise((done) => {
    const times = []; const until = performance.now() + 2000;
    const step = (now) => { times.push(now); now < until ? requestAnimationFrame(step) : done(times); };
    requestAnimationFrame(step);
})"""
OPEN = """() => new Promise((done) => {
    const began = performance.now(); let first = null; let count = 0; let quiet = 0;
    const step = () => {
        const cards = document.querySelectorAll('.react-flow__node .card').length;
        if (cards && first === null) first = performance.now() - began;
        quiet = cards && cards === count ? quiet + 1 : 0; count = cards;
        quiet > 20 ? done([first, performance.now() - began, count]) : requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""
TYPE = """() => new Promise((done) => {
    const field = document.activeElement; const before = performance.now();
    const set = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), 'value').set;
    set.call(field, field.value + 'x'); field.dispatchEvent(new Event('input', {bubbles: true}));
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - before)));
})"""


def graph(nodes: int) -> dict[str, Any]:
    """Return rows of ten texts, each joined to the next."""
    names = [f"n{at}" for at in range(nodes)]
    return {
        "nodes": [
            {"id": name, "type": "text", "data": {"text": name}, "position": {"x": at % 10 * 260, "y": at // 10 * 150}}
            for at, name in enumerate(names)
        ],
        "edges": [
            {"id": f"e{at}", "source": names[at - 1], "target": names[at], "data": {"channel": "flow"}}
            for at in range(1, nodes)
        ],
    }


def save(server: Server, graph_id: str, document: dict[str, Any]) -> None:
    """Save a graph on the server."""
    body = json.dumps({"name": graph_id, "document": document}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/api/graphs/{graph_id}", body, headers, method="PUT")
    urllib.request.urlopen(request).close()


async def pan(page: Page) -> None:
    """Move the canvas to and fro with the mouse."""
    box = await page.locator(".react-flow__pane").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] - 40, box["y"] + 40
    await page.mouse.move(x, y)
    await page.mouse.down()
    for at in range(60):
        await page.mouse.move(x - 6 * (at % 30), y + 4 * (at % 30))
    await page.mouse.up()


async def measured(page: Page, server: Server, graph_id: str) -> dict[str, float]:
    """Open the graph, type into a setting, and pan."""
    await page.goto(f"{server.url}/#/graphs")
    await page.get_by_role("link", name=graph_id, exact=True).wait_for()
    opening = asyncio.ensure_future(page.evaluate(OPEN))
    await asyncio.sleep(0)
    await page.evaluate(f"location.hash = '#/graphs/{graph_id}'")
    first, settled, cards = await opening
    await page.get_by_role("region", name="Nodes", exact=True).get_by_role("button", name="n9 Text").click()
    await page.get_by_label("Text", exact=True).focus()
    typed = [float(await page.evaluate(TYPE)) for _ in range(9)]
    frames = asyncio.ensure_future(page.evaluate(FRAMES))
    await pan(page)
    times = await frames
    deltas = [after - before for before, after in pairwise(times)]
    return {
        "first": first,
        "settled": settled,
        "cards": cards,
        "typed": median(typed),
        "frame": median(deltas),
        "frame95": quantiles(deltas, n=20)[-1],
    }


async def asked(sizes: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Measure each size, the sizes in turn; return the best of the rounds."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        for size in sizes:
            save(server, f"g{size}", graph(size))
        async with browsing() as browser:
            for _ in range(rounds):
                for size in sizes:
                    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                    found[size].append(await measured(page, server, f"g{size}"))
                    await page.close()
    return {size: {name: min(one[name] for one in each) for name in each[0]} for size, each in found.items()}


def ask(quick: bool) -> list[Table]:
    """Answer with a row for each number of nodes."""
    sizes, rounds = ((10, 300), 1) if quick else ((10, 100, 300, 1_000), 3)
    found = asyncio.run(asked(sizes, rounds))
    names = ("first", "settled", "cards", "typed", "frame", "frame95")
    return [
        Table(
            question="How quick is the editor with many nodes?",
            measured=f"best of {rounds}, ms of wall time in headless Chromium without a GPU, {WIDTH} × {HEIGHT}",
            columns=("nodes", "first card", "all that fit", "cards drawn", "a keystroke", "a frame", "frame, p95"),
            rows=[(str(size), *(round(found[size][name], 1) for name in names)) for size in sizes],
        )
    ]


if __name__ == "__main__":
    main(ask)
