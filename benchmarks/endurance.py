"""Does a server keep its memory while hundreds of chats go on for minutes?

One `penstock serve` on SQLite, with every guarantee on. Each client begins a new conversation as soon as its answer is
complete, so that as many chats are open all the time. What counts is the resident memory minute by minute: the first
ones fill caches, the last ones must not be larger than those before them.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks._report import Table, main
from benchmarks._servers.load import Request, ask, connect
from benchmarks.servers import SECRETS, Server, cpu_s, memory_mb, serving, streamed

CHATS = 200
WORDS, PACE = 40, 10
SAMPLE_S = 5.0
"""Interval at which memory is read."""


async def chat_on(
    server: Server, number: int, request: Request, marker: bytes, until_s: float, first_s: list[float]
) -> None:
    """One client: one conversation after the other; seconds to each first word are added."""
    connection, secret = await connect(server.url), SECRETS[number % len(SECRETS)]
    try:
        while time.perf_counter() < until_s:
            first_s.append((await ask(server.url, connection, request, marker, secret)).first_s)
    finally:
        connection.close()


async def watch(server: Server, until_s: float) -> list[tuple[float, float, float]]:
    """The time, resident megabytes and CPU seconds of the server, every few seconds."""
    samples = []
    while time.perf_counter() < until_s:
        samples.append((time.perf_counter(), memory_mb(server.pid), cpu_s(server.pid)))
        await asyncio.sleep(SAMPLE_S)
    return samples


async def go_on(server: Server, minutes: int) -> tuple[list[tuple[float, float, float]], list[float]]:
    """All clients together; their samples, and seconds to the first word of each answer."""
    request, marker = streamed("sqlite", WORDS, PACE)
    until_s = time.perf_counter() + minutes * 60
    first_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch(server, until_s))
        for number in range(CHATS):
            group.create_task(chat_on(server, number, request, marker, until_s, first_s))
            await asyncio.sleep(WORDS / PACE / CHATS)
    return watching.result(), first_s


def ask_endurance(quick: bool) -> list[Table]:
    """Memory minute by minute."""
    minutes = 1 if quick else 10
    with serving("sqlite", with_tokens=True) as server:
        samples, first_s = asyncio.run(go_on(server, minutes))
    begun_s, _, begun_cpu_s = samples[0]
    of_minute: dict[int, list[tuple[float, float]]] = {}
    for at_s, megabytes, used_s in samples:
        of_minute.setdefault(int((at_s - begun_s) // 60) + 1, []).append((megabytes, used_s - begun_cpu_s))
    slowest = sorted(first_s)[len(first_s) * 99 // 100]
    return [
        Table(
            f"Does a server keep its memory in {minutes} minutes of {CHATS} chats at once?",
            f"`penstock serve` on SQLite; answers of {WORDS} words, {PACE} a second, {len(first_s):,} of them, each a "
            f"new conversation. The first word came after {statistics.median(first_s):.2f} s at the median, 99 of 100 "
            f"within {slowest:.2f} s, the model's own {1 / PACE:.2f} s included.",
            ("minute", "MB at the median", "MB at most", "CPU s so far"),
            [
                (
                    str(minute),
                    statistics.median(megabytes for megabytes, _ in of_it),
                    max(megabytes for megabytes, _ in of_it),
                    of_it[-1][1],
                )
                for minute, of_it in of_minute.items()
            ],
            raw={"samples": samples},
        )
    ]


if __name__ == "__main__":
    main(ask_endurance)
