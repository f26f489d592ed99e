"""What do the hooks in HTTP libraries cost requests that they do not concern?

A small POST over a kept connection to a server in a process of its own, CPU of this process alone. Four times for each
library: unpatched; patched, after the only scope has ended; patched, outside of a scope that is open elsewhere; and
inside a scope, to an address that is no model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from benchmarks._peers import load
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, least_and_median, measure, play

BODY = b'{"query": "dams"}'
PATH = "/search"
SERVER = """
import socket
answer = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 2\\r\\n\\r\\n{}"
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    wire, _ = listening.accept()
    kept = b""
    while data := wire.recv(65536):
        kept += data
        if kept.endswith(b"}"):
            wire.sendall(answer)
            kept = b""
"""
"""Answers one connection until it is closed."""

LIBRARIES = {
    "http.client": "http_client",
    "urllib3": "urllib3_pool",
    "httpx2": "httpx2_client",
    "aiohttp": "aiohttp_session",
}
MODES = {
    "unpatched": "",
    "patched, no scope is open": "after",
    "patched, a scope is open elsewhere": "outside",
    "in a scope, no model's address": "inside",
}


@contextlib.contextmanager
def server() -> Iterator[int]:
    """The port of a server that ends with its only connection."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def patched(mode: str) -> Iterator[None]:
    """The libraries as they are in that mode."""
    from penstock import contain
    from penstock.providers import contained

    with contextlib.ExitStack() as stack:
        if mode:
            scope, elsewhere = contained(stack.enter_context(contain())), contextvars.Context()
            if mode == "after":
                with scope:
                    pass
            elif mode == "outside":
                elsewhere.run(scope.__enter__)
                stack.callback(elsewhere.run, scope.__exit__, None, None, None)
            else:
                stack.enter_context(scope)
        yield


def http_client(port: int) -> Iterator[Callable[[], int]]:
    connection = load("http.client").HTTPConnection("127.0.0.1", port)

    def post() -> int:
        connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return int(response.status)

    yield post
    connection.close()


def urllib3_pool(port: int) -> Iterator[Callable[[], int]]:
    pool = load("urllib3").HTTPConnectionPool("127.0.0.1", port)
    yield lambda: int(pool.request("POST", PATH, body=BODY).status)
    pool.close()


def httpx2_client(port: int) -> Iterator[Callable[[], int]]:
    with load("httpx2").Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
        yield lambda: int(client.post(PATH, content=BODY).status_code)


async def aiohttp_session(port: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    async with load("aiohttp").ClientSession(f"http://127.0.0.1:{port}") as session:

        async def post() -> int:
            async with session.post(PATH, data=BODY) as response:
                await response.read()
                return int(response.status)

        yield post


def time_requests(library: str, mode: str, calls: int, reps: int) -> dict[str, Any]:
    """CPU µs per request of each rep."""
    for name in ("penstock.providers", "http.client", "urllib3", "httpx2", "aiohttp"):
        load(name)  # for every contestant alike, and before they are patched
    gc.freeze()
    with server() as port, patched(mode):
        if library == "aiohttp_session":
            return {"cpu_us": asyncio.run(_time_async(aiohttp_session(port), calls, reps))}
        opened = globals()[library](port)
        post, cpu_us = next(opened), []
        for _ in range(reps + 1):
            gc.collect()
            began = time.process_time_ns()
            for _ in range(calls):
                expect("status", post(), 200)
            cpu_us.append((time.process_time_ns() - began) / 1_000 / calls)
        expect("an end", next(opened, "ended"), "ended")
    return {"cpu_us": cpu_us[1:]}


async def _time_async(opened: AsyncIterator[Callable[[], Awaitable[int]]], calls: int, reps: int) -> list[float]:
    post, cpu_us = await anext(opened), []
    for _ in range(reps + 1):
        gc.collect()
        began = time.process_time_ns()
        for _ in range(calls):
            expect("status", await post(), 200)
        cpu_us.append((time.process_time_ns() - began) / 1_000 / calls)
    expect("an end", await anext(opened, "ended"), "ended")
    return cpu_us[1:]


def ask(quick: bool) -> list[Table]:
    """What hooks cost requests that are no model calls, by library."""
    calls, rounds, reps = (200, 2, 3) if quick else (500, 5, 5)
    contestants = [
        Contestant(f"{library}, {mode}", function, None, {"library": function, "mode": setting})
        for library, function in LIBRARIES.items()
        for mode, setting in MODES.items()
    ]

    def once(each: Contestant) -> None:
        measure(each, "benchmarks.hooks", "time_requests", 60.0, calls=calls, reps=reps, **each.settings)

    play(contestants, rounds, once)
    bare = {
        each.name: min(each.figures("cpu_us")) for each in contestants if each.results and not each.settings["mode"]
    }
    return [
        Table(
            question="What do hooks cost requests that are no model calls?",
            measured=f"CPU µs of the client for a small POST over a kept connection; {calls:,} requests, {reps} times "
            f"in each of {rounds} fresh processes, in shuffled rounds. The ratio is of the minima.",
            columns=("one request", "min µs", "median µs", "× unpatched"),
            rows=[_row(each, bare.get(each.name)) for each in contestants],
            raw={each.label: each.figures("cpu_us") for each in contestants},
        )
    ]


def _row(contestant: Contestant, bare: float | None) -> tuple[Cell, ...]:
    if contestant.trouble:
        return contestant.label, contestant.trouble, None, None
    least, median = least_and_median(contestant.figures("cpu_us"))
    return contestant.label, least, median, bare and least / bare


if __name__ == "__main__":
    main(ask)
