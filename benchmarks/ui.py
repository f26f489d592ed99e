"""How quick is the web UI with large runs, in a headless browser without a GPU?

Runs of many calls are written into a database, and `penstock serve` shows them. Times are from the browser's own clock:
from a click on a link to the first row, between frames while something scrolls or is panned, and what each drawing of
the flame takes of the main thread. A run of 1,000 calls in the same browser is the baseline. The live run is a real
one: models that answer after a pause, so that its events come at a known rate; what the page takes of a core is the CPU
time of its process. Needs `make ui-test`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from playwright.async_api import Browser, CDPSession, Page, expect

from benchmarks._report import Cell, Table, main
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.storage.stores import open_stores
from tests.ui.browser import Server, browsing, serving

WIDTH, HEIGHT = 1280, 800
BRANCHES = 8
"""Items of a written run that are worked on at once."""
PAUSE_S = 0.2
LIVE_PARALLEL = 10
LIVE_S = 10.0
MODELS = f"""
import asyncio

from penstock.agents.scripted import ScriptedModel


async def answer(request):
    await asyncio.sleep({PAUSE_S})
    return "It is 235 m high."


models = {{"steady": ScriptedModel(answer, name="steady")}}
"""
FRAMES = """(ms) => new Promise((done) => {
    const times = []; const until = performance.now() + ms;
    const step = (now) => { times.push(now); now < until ? requestAnimationFrame(step) : done(times); };
    requestAnimationFrame(step);
})"""
GO = """([hash, selector]) => new Promise((done) => {
    const began = performance.now(); location.hash = hash;
    const step = () => document.querySelector(selector)
        ? requestAnimationFrame(() => done(performance.now() - began)) : requestAnimationFrame(step);
    requestAnimationFrame(step);
})"""
"""Goes to a place, and gives the time until an element is there and was painted."""
TIMED = """
window.drawn = []; const original = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => original((now) => {
    const began = performance.now(); callback(now); window.drawn.push(performance.now() - began);
});
"""
"""Times everything that the page does in an animation frame; the flame is drawn there."""
LOADED = """() => {
    const entries = [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')];
    const own = entries.filter(({ name }) => !name.includes('/api/'));
    const [paint] = performance.getEntriesByName('first-contentful-paint');
    return [own.reduce((sum, one) => sum + one.encodedBodySize, 0), own.length, paint.startTime];
}"""
SCROLL = """([selector, step]) => new Promise((done) => {
    const times = []; const element = document.querySelector(selector); const until = performance.now() + 2000;
    const frame = (now) => {
        times.push(now); element.scrollTop += step;
        now < until ? requestAnimationFrame(frame) : done(times);
    };
    requestAnimationFrame(frame);
})"""
ROW = "[role=treegrid] [role=row][aria-level]"


def events_of(calls: int) -> Iterator[HostedEvent]:
    """Yield the events of a run that reads items in branches: three for each call, and its budget now and then."""
    seq, at_ms, number = 0, int(time.time() * 1_000) - 3_600_000, 1

    def event(kind: str, /, **data: Any) -> HostedEvent:
        nonlocal seq
        seq += 1
        return HostedEvent(seq, at_ms, kind, data)

    def started(id: int, parent: int | None, kind: str, name: str, **more: Any) -> HostedEvent:
        made_by = None if parent is None else f"n{parent:06d}"
        facts = {"call_id": f"n{id:06d}", "parent_id": made_by, "kind": kind, "name": name, "context": "main"}
        return event("call.started", **facts, depth=0 if parent is None else 1, attempt=1, **more)

    def ended(id: int, parent: int | None, kind: str, name: str, **more: Any) -> HostedEvent:
        made_by = None if parent is None else f"n{parent:06d}"
        facts = {"call_id": f"n{id:06d}", "parent_id": made_by, "kind": kind, "name": name, "status": "success"}
        paid = kind == "llm"
        figures = {"cost_usd": 0.00002 if paid else 0.0, "tokens_in": 40 if paid else 0, "tokens_out": 9 if paid else 0}
        return event("call.ended", **facts, **figures, duration_ms=20.0, **more)

    yield event("run.queued")
    yield event("run.started", epoch=1)
    yield started(1, None, "system", "bulk")
    items = (calls - 1) // 2
    for first in range(0, items, BRANCHES):
        group = range(first, min(items, first + BRANCHES))
        nodes = {item: number + 1 + 2 * at for at, item in enumerate(group)}
        number += 2 * len(nodes)
        for item, id in nodes.items():
            path = f"each/{item}/read"
            at_ms += 1
            yield started(id, 1, "system", "read", node_id=path, node_type="llm-completion")
            yield started(id + 1, id, "llm", "steady", node_id=path, model="steady", held_usd=0.0004)
            yield event("node.progress", node_id="each", node_type="map", name="inside", data={"path": path})
        at_ms += 20
        for item, id in nodes.items():
            path = f"each/{item}/read"
            at_ms += 1
            yield ended(id + 1, id, "llm", "steady", node_id=path, model="steady")
            yield ended(id, 1, "system", "read", node_id=path)
            yield event("node.progress", node_id="each", node_type="map", name="inside", data={"path": path})
        if first % (BRANCHES * 50) == 0:
            units = [{"unit": "usd", "spent": first * 0.00002, "held": 0.0, "unresolved": 0.0, "limit": 5.0}]
            yield event("budget", budget="main", level="run", node_id=None, units=units)
    yield ended(1, None, "system", "bulk")
    yield event("run.completed", output="done", cost_usd=items * 0.00002, tokens_in=40 * items, tokens_out=9 * items)


async def write_run(url: str, run_id: str, calls: int) -> int:
    """Write a run of so many calls into the database; returns the number of its events."""
    async with await open_stores(url) as stores:
        now_ms = int(time.time() * 1_000)
        document = {"nodes": [{"id": "in", "type": "input", "data": {}}], "edges": []}
        await stores.graphs.save("bulk", "local", "bulk", document, now_ms=now_ms)
        await stores.runs.add(RunRecord(run_id, "local", "bulk", 1, created_ms=now_ms, limits={"max_cost_usd": 5.0}))
        claimed = await stores.runs.claim("benchmark", now_ms=now_ms, lease_ms=600_000, run_id=run_id)
        assert claimed is not None
        page: list[HostedEvent] = []
        last = 0
        for event in events_of(calls):
            page.append(event)
            last = event.seq
            if len(page) == 2_000:
                await stores.events.append(run_id, claimed.epoch, page)
                page = []
        await stores.events.append(run_id, claimed.epoch, page)
        ended = {"ended_ms": now_ms, "started_ms": now_ms - 3_600_000, "cost_nanos": (calls - 1) // 2 * 20_000}
        await stores.runs.update(run_id, claimed.epoch, status="completed", **ended)
        return last


def request(server: Server, path: str, body: Any = None, method: str | None = None) -> Any:
    """Request the API directly."""
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers, method=method)) as response:
        return json.load(response)


def frames(times: list[float]) -> tuple[float, float]:
    """Return the median time between frames, and that at p95."""
    deltas = [after - before for before, after in pairwise(times)]
    return median(deltas), quantiles(deltas, n=20)[-1]


async def heap_mib(session: CDPSession) -> float:
    """Return what the page keeps of the heap after its garbage was collected, with the memory behind its arrays."""
    await session.send("HeapProfiler.collectGarbage")
    usage = await session.send("Runtime.getHeapUsage")
    return float(usage["usedSize"] + usage.get("backingStorageSize", 0)) / 2**20


async def ended(browser: Browser, server: Server, run_id: str) -> None:
    """Wait until a run is completed."""
    page = await browser.new_page()
    await page.goto(f"{server.url}/#/runs/{run_id}")
    await page.get_by_text("The run is completed").wait_for(state="attached")
    await page.close()


async def first_load(browser: Browser, server: Server) -> dict[str, float]:
    """Open the list of runs in a browser that has nothing of the page yet."""
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    began = time.perf_counter()
    await page.goto(f"{server.url}/#/runs")
    await page.get_by_role("heading", name="Runs", exact=True).wait_for()
    await page.locator("tbody tr").first.wait_for()
    whole_ms = (time.perf_counter() - began) * 1_000
    size, files, paint_ms = await page.evaluate(LOADED)
    await page.close()
    return {"kB": size / 1_000, "files": files, "paint": paint_ms, "list": whole_ms}


async def one_run(browser: Browser, server: Server, run_id: str) -> dict[str, float]:
    """Open a run from the list, then its flame and its events; move through both."""
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    await page.add_init_script(TIMED)
    session = await page.context.new_cdp_session(page)
    await page.goto(f"{server.url}/#/runs")
    await page.locator("tbody tr").first.wait_for()
    found: dict[str, float] = {"open": await page.evaluate(GO, [f"#/runs/{run_id}", ROW])}
    await page.get_by_text("The run is completed").wait_for(state="attached")
    await page.evaluate(GO, [f"#/runs/{run_id}?view=timeline", ".lane"])
    found["flame"] = await page.evaluate(GO, [f"#/runs/{run_id}?view=flame", ".flame canvas"])
    found["draw"], found["draw95"], found["zoom"], found["zoom95"] = await flame(page)
    await page.evaluate(GO, [f"#/runs/{run_id}?view=events", ".event"])
    await asyncio.sleep(0.5)
    found["scroll"], found["scroll95"] = frames(await page.evaluate(SCROLL, ["[role=tabpanel] .scroll", 40]))
    found["heap"] = await heap_mib(session)
    await page.close()
    return found


async def flame(page: Page) -> tuple[float, float, float, float]:
    """Zoom in and out by keys; return what drawing takes in a frame, and the time between frames."""
    await page.locator(".flame").focus()
    await page.evaluate("() => { window.drawn.length = 0; }")
    times = asyncio.ensure_future(page.evaluate(FRAMES, 4_000))
    for _ in range(10):
        for key in ("+", "+", "+", "-", "-", "-"):
            await page.keyboard.press(key)
            await asyncio.sleep(0.02)
    between = frames(await times)
    drawn = [float(one) for one in await page.evaluate("window.drawn") if one > 0.2]  # the others counted frames
    return median(drawn), quantiles(drawn, n=20)[-1], *between


async def graph_of_300(browser: Browser, server: Server, run_id: str) -> tuple[float, float, float]:
    """Open the graph of a run and pan it; return the time until its cards are there, and frames."""
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    await page.goto(f"{server.url}/#/runs/{run_id}")
    await page.locator(ROW).first.wait_for()
    opened = await page.evaluate(GO, [f"#/runs/{run_id}?view=graph", ".graph-card"])
    box = await page.locator(".react-flow__pane").bounding_box()
    assert box is not None
    times = asyncio.ensure_future(page.evaluate(FRAMES, 2_000))
    x, y = box["x"] + box["width"] - 30, box["y"] + 30
    await page.mouse.move(x, y)
    await page.mouse.down()
    for at in range(60):
        await page.mouse.move(x - 6 * (at % 30), y + 4 * (at % 30))
    await page.mouse.up()
    between = frames(await times)
    await page.close()
    return opened, *between


async def renderers_s(session: CDPSession) -> float:
    """Return the CPU time of the processes that show pages, in seconds."""
    found = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
    return sum(float(one["cpuTime"]) for one in found if one["type"] == "renderer")


async def live(browser: Browser, server: Server) -> dict[str, float]:
    """Watch a run that goes on; return its events a second, and what the browser takes of a core meanwhile."""
    session = await browser.new_browser_cdp_session()
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    await page.goto(f"{server.url}/#/runs")
    items = [str(number) for number in range(4_000)]
    run = request(server, "/api/runs", {"graph_id": "live", "input": items, "limits": {"max_steps": 20_000}})["id"]
    found: dict[str, float] = {}
    for view in ("tree", "flame", "events"):
        await page.goto(f"{server.url}/#/runs/{run}?view={view}")
        await page.get_by_text("The run is running").wait_for(state="attached")
        await asyncio.sleep(1)
        seq, cpu_s = request(server, f"/api/runs/{run}")["last_seq"], await renderers_s(session)
        began = time.perf_counter()
        await asyncio.sleep(LIVE_S)
        took_s = time.perf_counter() - began
        found[view] = 100 * (await renderers_s(session) - cpu_s) / took_s
        found[f"{view} events"] = (request(server, f"/api/runs/{run}")["last_seq"] - seq) / took_s
    await expect(page.get_by_text("The run is running")).to_have_count(1)
    request(server, f"/api/runs/{run}/cancel", {})
    await page.close()
    return found


def chain(nodes: int) -> dict[str, Any]:
    """Return rows of ten texts, each joined to the next."""
    names = [f"n{at}" for at in range(nodes)]
    edges = [
        {"id": f"e{at}", "source": names[at - 1], "target": names[at], "data": {"channel": "flow"}}
        for at in range(1, nodes)
    ]
    first = {"id": names[0], "type": "input", "data": {}}
    rest = [{"id": name, "type": "prompt-template", "data": {"template": "{{ input }}"}} for name in names[1:]]
    return {"nodes": [first, *rest], "edges": [{**edge, "targetHandle": "input"} for edge in edges]}


LIVE: dict[str, Any] = {
    "nodes": [
        {"id": "in", "type": "input", "data": {}},
        {
            "id": "each",
            "type": "map",
            "data": {
                "max_items": 10_000,
                "parallel": LIVE_PARALLEL,
                "graph": {
                    "nodes": [
                        {"id": "in", "type": "input", "data": {}},
                        {"id": "read", "type": "llm-completion", "data": {"model": "steady"}},
                    ],
                    "edges": [{"id": "e", "source": "in", "target": "read", "data": {"channel": "flow"}}],
                },
            },
        },
    ],
    "edges": [{"id": "e", "source": "in", "target": "each", "data": {"channel": "flow"}}],
}


async def answers(sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Measure everything; of each figure of a run the best of the rounds."""
    found: dict[str, Any] = {"events": {}, "runs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models.py").write_text(MODELS, "utf-8")
        for size in sizes:
            found["events"][size] = await write_run(f"sqlite:///{folder / 'ui.db'}", f"r{size}", size)
        with serving(folder, options=("--models", f"{folder / 'models.py'}:models")) as server:
            for graph_id, document in (("chain", chain(300)), ("live", LIVE)):
                request(server, f"/api/graphs/{graph_id}", {"name": graph_id, "document": document}, "PUT")
            found["folds"] = {size: tree_ms(server, f"r{size}") for size in sizes}
            run = request(server, "/api/runs", {"graph_id": "chain", "input": "x"})["id"]
            async with browsing() as browser:
                await ended(browser, server, run)
                loads = [await first_load(browser, server) for _ in range(rounds)]
                found["load"] = {one: min(load[one] for load in loads) for one in loads[0]}
                each = {size: [await one_run(browser, server, f"r{size}") for _ in range(rounds)] for size in sizes}
                found["runs"] = {
                    size: {one: min(measured[one] for measured in all_of) for one in all_of[0]}
                    for size, all_of in each.items()
                }
                panned = [await graph_of_300(browser, server, run) for _ in range(rounds)]
                found["graph"] = tuple(map(min, zip(*panned, strict=True)))
                found["live"] = await live(browser, server)
    return found


def tree_ms(server: Server, run_id: str) -> float:
    """Return how long the server takes for the columns of a run that it has not read before."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{server.url}/api/runs/{run_id}/tree") as response:
        response.read()
    return (time.perf_counter() - began) * 1_000


def ask(quick: bool) -> list[Table]:
    """Answer with a table of runs by size, and one of everything else."""
    sizes, rounds = ((1_000, 10_001), 1) if quick else ((1_000, 10_001, 33_333, 50_001), 3)
    found = asyncio.run(answers(sizes, rounds))
    names = ("open", "flame", "draw", "draw95", "zoom", "zoom95", "scroll", "scroll95", "heap")
    how = f"best of {rounds}, ms of wall time in headless Chromium without a GPU, {WIDTH} × {HEIGHT}"
    rows: list[tuple[Cell, ...]] = [
        (
            f"{size:,} calls",
            f"{found['events'][size]:,}",
            round(found["folds"][size]),
            *(round(found["runs"][size][name], 1) for name in names),
        )
        for size in sizes
    ]
    load, (opened, pan, pan95) = found["load"], found["graph"]
    others: list[tuple[Cell, ...]] = [
        ("files of the first load, compressed, kB", round(load["kB"], 1)),
        ("number of these files", str(load["files"])),
        ("first paint, ms", round(load["paint"])),
        ("list of runs shown, ms", round(load["list"])),
        ("graph of 300 nodes: first card, ms", round(opened)),
        ("graph of 300 nodes, panned: a frame, ms", round(pan, 1)),
        ("graph of 300 nodes, panned: a frame at p95, ms", round(pan95, 1)),
    ]
    for view in ("tree", "flame", "events"):
        rate = found["live"][f"{view} events"]
        name = f"live run, {rate:,.0f} events a second, view {view}: % of a core"
        others.append((name, round(found["live"][view], 1)))
    return [
        Table(
            question="How quick is the page of a run with many calls?",
            measured=f"{how}; the heap in MiB. `columns` is the server's first reading of the run, later ones are kept",
            columns=(
                *("run", "events", "columns", "open", "flame", "a drawing", "at p95", "a frame of zooming", "at p95"),
                *("a frame of scrolling events", "at p95", "heap"),
            ),
            rows=rows,
        ),
        Table(question="And the rest?", measured=how, columns=("", "figure"), rows=others),
    ]


if __name__ == "__main__":
    main(ask)
