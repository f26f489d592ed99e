"""What do others notice of a client that is slow, hostile or unknown?

The attacks of INV 24 against a `penstock serve` of its own process, and a bystander at another address that makes
ordinary requests: `GET /health` and a chat request over `/v1`, one after the other. Rounds with and without an attack
alternate, and percentiles are those of all their requests. Each attack is a process, so that it takes no turns from the
bystander.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks._report import Table, main
from tests.reliability import test_inv_24_fair_loop as inv_24

ATTACKS: dict[str, Callable[[inv_24.Address], AbstractContextManager[Any]]] = {
    **{flood.__name__.replace("_", " "): partial(inv_24.Attack, once=flood, clients=2) for flood in inv_24.FLOODS},
    "2,000 idle connections": partial(inv_24.idle_connections, addresses=1),
    "2,000 idle connections of four addresses": partial(inv_24.idle_connections, addresses=4),
    "200 slow heads": inv_24.slow_heads,
}
STARTED_S = 60


@contextmanager
def _serving() -> Iterator[inv_24.Address]:
    with tempfile.TemporaryDirectory() as folder:
        tokens, graph = Path(folder, "tokens"), Path(folder, "echo.json")
        tokens.write_text(f"ann:user:{inv_24.SECRET}\nbob:user:{inv_24.OTHER}\n")
        graph.write_text(json.dumps(inv_24.GRAPH))
        options = ["--port", "0", "--db", "memory:", "--tokens", str(tokens), "--allow-host", "127.0.0.2"]
        command = [sys.executable, "-m", "penstock.cli", "serve", str(graph), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                yield "127.0.0.1", int(process.stdout.readline().split(":")[-1])
            finally:
                process.kill()


def _attack(name: str, address: inv_24.Address, has_begun: Event, is_over: Event) -> None:
    with ATTACKS[name](address):
        has_begun.set()
        is_over.wait()


def _times_under(name: str, address: inv_24.Address) -> list[float]:
    """How long the bystander's requests take while the attack goes on."""
    context = multiprocessing.get_context("fork")
    has_begun, is_over = context.Event(), context.Event()
    process = context.Process(target=_attack, args=(name, address, has_begun, is_over))
    process.start()
    assert has_begun.wait(STARTED_S), name
    times = inv_24.times_of_a_bystander(address)
    is_over.set()
    process.join(STARTED_S)
    process.kill()
    return times


def ask(quick: bool) -> list[Table]:
    """Wall ms of the bystander, and the ratio of its p99 with the attack to that without."""
    rounds = 2 if quick else 10
    rows: list[tuple[str | float | None, ...]] = []
    with _serving() as address:
        inv_24.bystander(address)  # whatever is loaded on first use
        for name in ATTACKS:
            without: list[float] = []
            under: list[float] = []
            for _ in range(rounds):
                inv_24.times_of_a_bystander(address)  # not counted: what the last attack has left is cleared away
                without += inv_24.times_of_a_bystander(address)
                under += _times_under(name, address)
            calm, attacked = quantiles(without, n=100), quantiles(under, n=100)
            ms = [1_000 * one for one in (calm[49], attacked[49], calm[98], attacked[98])]
            rows.append((name, *ms, attacked[98] / calm[98]))
    return [
        Table(
            question="What do others notice of a client that is slow, hostile or unknown?",
            measured=f"Wall ms of {2 * inv_24.REQUESTS * rounds} requests each, in {rounds} alternating rounds.",
            columns=("attack", "p50 without", "p50", "p99 without", "p99", "× p99"),
            rows=rows,
        )
    ]


if __name__ == "__main__":
    main(ask)
