"""How quick is the web UI, in a headless browser without a GPU, beside the goals that it was designed for?

The runs are written into the database as a server writes them. A page is opened as a person opens it, and times are
those that the page itself measures. The browser is that of `make ui-test`.
"""

from __future__ import annotations

import asyncio
import gzip
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.async_api import Page

from benchmarks._report import Cell, Table, main
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.storage import open_stores
from tests.ui.browser import Server, browsing, serving, tab

EVENTS_PER_CALL = 2
CALLS_PER_NODE = 9
FRAMES = 60
LIVE_PER_S = 500

Fact = tuple[str, dict[str, Any]]


def of_run(calls: int) -> list[HostedEvent]:
    """The events of a run with that many calls: nodes of one map, each with model calls and tools below it."""
    events: list[Fact] = [("run.queued", {}), ("run.started", {"epoch": 1, "worked_ms": 0})]
    events.append(("call.started", {"call_id": "n000001", "parent_id": None, "kind": "system", "name": "main"}))
    made = 1
    for node in range((calls - 1) // (CALLS_PER_NODE + 1)):
        made += 1
        above = f"n{made:06d}"
        path = f"each/{node}/read"
        about = {"call_id": above, "parent_id": "n000001", "kind": "system", "name": "read", "node_id": path}
        events.append(("call.started", {**about, "node_type": "agent", "depth": 1}))
        for _ in range(CALLS_PER_NODE):
            made += 1
            events += _call(f"n{made:06d}", above, path, made)
        events.append(("call.ended", {**about, "status": "success", "cost_usd": 0, "tokens_in": 0, "tokens_out": 0}))
    events.append(("run.completed", {"output": None}))
    return [HostedEvent(seq, seq, type, data) for seq, (type, data) in enumerate(events, 1)]


def _call(call: str, above: str, path: str, number: int) -> list[Fact]:
    is_model = number % 3 != 0
    about = {
        "call_id": call, "parent_id": above, "node_id": path, "depth": 2, "context": "main",
        "kind": "llm" if is_model else "tool", "name": "model" if is_model else "search",
    }  # fmt: skip
    used = {"cost_usd": 0.001 * (number % 7), "tokens_in": 100, "tokens_out": number % 50, "model": "fake-1"}
    return [
        ("call.started", {**about, "attempt": 1, "held_usd": 0.01}),
        ("call.ended", {**about, **used, "status": "success", "duration_ms": 2}),
    ]


async def fill(folder: Path, sizes: dict[str, int]) -> None:
    """Write runs of these numbers of calls into the server's database."""
    async with await open_stores(f"sqlite:///{folder / 'ui.db'}") as stores:
        for run_id, calls in sizes.items():
            events = of_run(calls)
            run = RunRecord(run_id, "local", "assistant", 1, "input", {}, created_ms=1)
            await stores.runs.add(run)
            claimed = await stores.runs.claim("benchmark", now_ms=1, lease_ms=1_000_000, run_id=run_id)
            assert claimed is not None
            for first in range(0, len(events), 2_000):
                await stores.events.append(run_id, claimed.epoch, events[first : first + 2_000])
            facts = {"status": "completed", "ended_ms": len(events), "cost_nanos": 1}
            await stores.runs.update(run_id, claimed.epoch, **facts)


async def opened(page: Page, server: Server, route: str, shown: str) -> float:
    """Milliseconds from opening a route in a page that is loaded until the selector is painted."""
    await page.goto("about:blank")
    await page.goto(f"{server.url}/#/start")
    await page.get_by_label("Graph").wait_for()
    wait = """async ([route, shown]) => {
      const began = performance.now();
      location.hash = route;
      while (!document.querySelector(shown)) await new Promise((next) => requestAnimationFrame(next));
      await new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
      return performance.now() - began;
    }"""
    return float(await page.evaluate(wait, [route, shown]))


async def frames(page: Page, does: str) -> list[float]:
    """Milliseconds of each frame while a script is called once in each."""
    measure = f"""async () => {{
      const times = [];
      let before = performance.now();
      for (let frame = 0; frame < {FRAMES}; frame += 1) {{
        ({does})(frame);
        await new Promise((next) => requestAnimationFrame(next));
        times.push(performance.now() - before);
        before = performance.now();
      }}
      return times;
    }}"""
    return [float(one) for one in await page.evaluate(measure)]


async def scripting(page: Page, while_: Callable[[], Awaitable[None]]) -> float:
    """Seconds for which the page's thread ran while something happened."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")

    async def busy() -> float:
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    before = await busy()
    await while_()
    return await busy() - before


async def heap_mb(page: Page) -> float:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    return float((await session.send("Runtime.getHeapUsage"))["usedSize"]) / 1e6


def first_load_kb() -> float:
    """Kilobytes, gzipped, of the page, its first script and style, and what the list of runs needs."""
    folder = files("penstock.server") / "ui"
    index = (folder / "index.html").read_text("utf-8")
    names = [file.name for file in (folder / "assets").iterdir()]
    needed = [name for name in names if name in index or name.startswith(("runs-", "router-", "use-run-", "visible-"))]
    assert any(name.startswith("index-") for name in needed)
    return sum(len(gzip.compress((folder / "assets" / name).read_bytes())) for name in needed) / 1_000


async def live(page: Page, server: Server, folder: Path, events: int) -> float:
    """Share of a core that the page takes while a run writes `LIVE_PER_S` events a second."""
    all_events = of_run(events // EVENTS_PER_CALL)[:-1]
    async with await open_stores(f"sqlite:///{folder / 'ui.db'}") as stores:
        await stores.runs.add(RunRecord("live", "local", "assistant", 1, "input", {}, created_ms=1))
        claimed = await stores.runs.claim("benchmark", now_ms=1, lease_ms=10_000_000_000_000, run_id="live")
        assert claimed is not None
        await stores.events.append("live", claimed.epoch, all_events[:10])
        await page.goto(f"{server.url}/#/runs/live?view=flame")
        await page.locator(".flame canvas").wait_for()
        began = time.perf_counter()

        async def write() -> None:
            for first in range(10, len(all_events), LIVE_PER_S // 10):
                await stores.events.append("live", claimed.epoch, all_events[first : first + LIVE_PER_S // 10])
                due = began + (first - 10) / LIVE_PER_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

        busy = await scripting(page, write)
    return busy / (time.perf_counter() - began)


async def measured(quick: bool) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = [("first load, gzipped kB", first_load_kb(), 150)]
    large = 5_000 if quick else 50_000
    sizes = {"ten": 1_000 if quick else 10_000, "fifty": large}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        await fill(folder, sizes)
        with serving(folder) as server:
            async with browsing() as browser, tab(browser) as seen:
                page = seen.page
                await page.goto(server.url)
                await page.get_by_role("heading", name="Runs", exact=True).wait_for()
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                rows.append(("first paint, ms", float(await page.evaluate(paint)), 500))
                for run, goal in (("ten", 300), ("fifty", 600)):
                    times = [await opened(page, server, f"#/runs/{run}?view=flame", ".flame canvas") for _ in range(3)]
                    rows.append((f"a run of {sizes[run]:,} calls as a flame, ms", min(times), goal))
                zoom = "(n) => document.querySelector('.flame').dispatchEvent(new KeyboardEvent('keydown', "
                times = await frames(page, zoom + "{key: n % 2 ? '-' : '+', bubbles: true}))")
                label = f"flame of {large:,} calls, ms a frame"
                rows.append((f"{label}, median", statistics.median(times), 16.7))
                rows.append((f"{label}, p95", sorted(times)[int(FRAMES * 0.95)], 16.7))
                await page.goto(f"{server.url}/#/runs/fifty?view=events")
                await page.locator(".event").first.wait_for()
                scroll = "() => document.querySelector('.scroll').scrollBy(0, 900)"
                times = await frames(page, scroll)
                count = 2 * large
                rows.append((f"{count:,} events scrolled, ms a frame, median", statistics.median(times), 16.7))
                rows.append((f"heap with a run of {count:,} events, MB", await heap_mb(page), 80))
                busy = await live(page, server, folder, 1_000 if quick else 5_000)
                rows.append((f"a run of {LIVE_PER_S} events a second, share of a core", busy, 0.3))
    return rows


def ask(quick: bool = False) -> list[Table]:
    """Measure the page, and set it beside its goals."""
    rows = asyncio.run(measured(quick))
    return [Table("How quick is the web UI?", "headless Chromium without a GPU", ("what", "measured", "goal"), rows)]


if __name__ == "__main__":
    main(ask)
