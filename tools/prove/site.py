"""What a program of a contestant is given, and how it reports.

Runs in the environment of the contestant: nothing but the standard library. A report is one line of JSON on stdout,
with the time of the machine's monotonic clock, which the provider's clock shares.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "@prove "
"""Begins the lines of stdout that are reports."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Site:
    """The provider's address, the limits of the probe, and a folder that outlives the process."""

    url: str
    folder: Path
    attempt: int = 1
    """1, then 2 in the process that is started after the first was killed."""
    key: str = "none"
    model: str = "gpt-4o-mini"
    """A name that every framework knows; the provider answers to any."""
    max_tokens: int = 20
    """Output tokens of each answer, and so the most that a request has to allow."""
    call_usd: float = 0.02
    ceiling_usd: float = 0.10
    calls: int = 20
    """Calls that a program tries to make."""
    max_calls: int = 5
    """Calls that the ceiling pays for, for contestants whose limit counts calls."""
    max_retries: int = 3
    """Retries that the run allows, of all layers together."""
    timeout_s: float = 2.0
    tool_s: float = 8.0
    """Duration of the sync tool that the time limit has to stop."""

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def began(self) -> None:
        """Report that the run begins: the time limit counts from here."""
        report("began")

    def cancelling(self) -> None:
        """Report that the program cancels its run now."""
        report("cancel")

    def stopped(self, error: BaseException | str) -> None:
        """Report that a limit of the contestant, or its cancel, ended the run."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        report("stopped", text=text[:200])

    def event(self, case: str, kind: str, name: str) -> None:
        """Report an event of a run: `kind` is `start` or `end`, `name` the contestant's own."""
        report("event", case=case, kind_of=kind, name=name)

    def answer(self, text: object) -> None:
        """Report what the run came to."""
        report("answer", text=str(text)[:200])

    def slow_tool(self) -> str:
        """Block the thread, as a sync tool does that waits for something slow."""
        report("tool")
        time.sleep(self.tool_s)
        return "found"

    def wait_asked(self, count: int = 1) -> None:
        """Return when the provider has received `count` requests."""
        while not (self.folder / f"asked-{count}").exists():
            time.sleep(POLL_S)

    async def asked(self, count: int = 1) -> None:
        """Return when the provider has received `count` requests."""
        while not (self.folder / f"asked-{count}").exists():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(POLL_S)


def report(kind: str, **facts: Any) -> None:
    """Print one report."""
    line = json.dumps({"kind": kind, "at": time.monotonic(), **facts})
    sys.__stdout__.write(f"{MARK}{line}\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
