"""A real browser on a real server: what the UI's scenarios are made of.

The browser comes with the UI's test packages (`make ui-test`). Any error on the console fails the scenario: an
exception, a violation of the content security policy, or a failed request that the scenario did not expect.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import Browser, Page, async_playwright, expect
from playwright.async_api import Error as PlaywrightError

UI = Path(__file__).parents[2] / "ui"
LAUNCH = UI / "node_modules" / ".chromium" / "launch.json"
AXE = UI / "node_modules" / "axe-core" / "axe.min.js"
ARGUMENTS = ("--no-sandbox", "--no-zygote", "--headless=shell", "--disable-gpu")
PATIENCE_MS = 60_000
"""How long a page may take on a busy machine; what is waited for is an event, and no time is asserted."""
SETTLED = (
    "() => Promise.allSettled(document.getAnimations().filter(a => a instanceof CSSTransition).map(a => a.finished))"
)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Server:
    """`penstock serve` as a process, on one port and one database over restarts."""

    folder: Path
    tokens: str = ""
    port: int = 0
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = (sys.executable, "-m", "penstock.cli")
    path: str | None = None
    """`PATH` of the process; that of the tests if it is None."""
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it listens."""
        database = f"sqlite:///{self.folder / 'ui.db'}"
        command = [*self.program, "serve", "--db", database, *self.options]
        environment = {**os.environ, "PENSTOCK_TOKENS": self.tokens}
        if self.path is not None:
            environment["PATH"] = self.path
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={name: value for name, value in environment.items() if value},
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return
        raise AssertionError(f"the server did not start: exit status {self._process.wait()}")

    def kill(self) -> None:
        """End it as a power failure would."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def serving(folder: Path, tokens: str = "", options: tuple[str, ...] = ()) -> Iterator[Server]:
    """Serve the example graphs until the block ends."""
    server = Server(folder, tokens, options=options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Tab:
    """One page, and what went wrong on it; `expected` are errors that belong to the scenario."""

    page: Page
    expected: tuple[str, ...] = ()
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Requests that were answered with an error."""

    async def description(self) -> str:
        """Describe the page for the report of a failure: where it is, what it shows, and what went wrong before."""
        try:
            text = await self.page.locator("body").inner_text(timeout=2_000)
        except PlaywrightError as error:
            text = f"(cannot be read: {error.message})"
        facts = {"errors": self.errors, "answered with an error": self.refused, "shows": text[:2_000]}
        return f"The page {self.page.url}\n" + "\n".join(f"{name}: {value}" for name, value in facts.items())

    def note(self, text: str) -> None:
        if not any(part in text for part in self.expected):
            self.errors.append(text)

    async def check_accessibility(self) -> None:
        """Fail for anything that axe finds to violate WCAG 2.2 AA, once colours have stopped fading into each other."""
        await self.page.evaluate(SETTLED)
        await self.page.evaluate(AXE.read_text("utf-8") + ";0")
        found: Any = await self.page.evaluate(f"axe.run({{runOnly: {json.dumps(RULES)}}})")
        shown = [f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}" for one in found["violations"]]
        assert not shown, f"{self.page.url}: {shown}"


@asynccontextmanager
async def browsing() -> AsyncGenerator[Browser, None]:
    """The browser that `make ui-test` has unpacked."""
    assert LAUNCH.exists(), "the browser is not unpacked: run `make ui-test` first"
    launch = json.loads(LAUNCH.read_text("utf-8"))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=launch["path"],
            args=list(ARGUMENTS),
            env={**os.environ, "LD_LIBRARY_PATH": launch["libraries"]},
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def tab(
    browser: Browser, *, theme: Literal["light", "dark"] = "light", expected: tuple[str, ...] = ()
) -> AsyncGenerator[Tab, None]:
    """A new page in a context of its own; fails at the end if anything went wrong on it."""
    context = await browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    opened = Tab(await context.new_page(), expected)
    opened.page.on("console", lambda message: opened.note(message.text) if message.type == "error" else None)
    opened.page.on("pageerror", lambda error: opened.note(str(error)))
    opened.page.on(
        "response",
        lambda answer: opened.refused.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None,
    )
    try:
        yield opened
    except Exception as error:
        error.add_note(await opened.description())
        raise
    await context.close()
    assert not opened.errors, opened.errors
