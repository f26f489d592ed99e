"""Drive clients of many kinds, unmodified: against `penstock serve` with a scripted model, and through the gateway.

What they have shown is written into docs/openai-api.md and docs/gateway.md.

    python -m tools.clients [NAME …]

Served are a graph in JSON, an agent in Python and a graph in Python; each client of the server talks to both agents.
`comparison` runs the programs of `programs/gateway/` with and without the gateway. Each client has an environment of
its own below build/clients/, made on first use; those for Node need node and npm. A program prints one line for each
thing it has shown, and fails if something is not so. Results of clients that are not named are those of the last time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tools.clients import comparison
from tools.clients.running import BUILD, HERE, command_of, run_program, versions
from tools.environments import ROOT
from tools.pages import write_part

DOCS = ROOT / "docs"
RESULTS = BUILD / "results.json"
AGENTS = ("assistant", "helper")
"""A graph in JSON, and an agent in Python."""
CLIENTS: dict[str, tuple[str, ...]] = {
    "openai_python": ("openai", "pydantic"),
    "langchain": ("langchain-openai",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "openai_node": ("openai", "zod"),
    "vercel_ai": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
}
"""The packages of each program's environment; those of Node for programs that end in .mjs."""


def main(names: list[str]) -> int:
    chosen = names or [*CLIENTS, *comparison.CLIENTS]
    unknown = set(chosen) - CLIENTS.keys() - comparison.CLIENTS.keys()
    if unknown:
        known = ", ".join([*CLIENTS, *comparison.CLIENTS])
        print(f"no such client: {', '.join(sorted(unknown))}; there are {known}")
        return 2
    shown = {name: comparison.compare(name) for name in chosen if name in comparison.CLIENTS}
    if of_server := [name for name in chosen if name in CLIENTS]:
        with serving() as url:
            shown |= {name: _drive(name, f"{url}/v1") for name in of_server}
    _write_tables(shown)
    failed = [name for name, cells in shown.items() if cells is None]
    print("all clients passed" if not failed else f"failed: {', '.join(failed)}")
    return int(bool(failed))


def _write_tables(shown: Mapping[str, list[str] | None]) -> None:
    """Write what clients have shown into the pages; those that were not driven keep what they showed the last time."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, cells in shown.items():
        packages = (CLIENTS | comparison.CLIENTS)[name]
        known[name] = [f"failed: {name}"] if cells is None else [versions(name, packages), *cells]
    BUILD.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1))
    for page, clients, head in (
        (DOCS / "openai-api.md", CLIENTS, ("client", "shown")),
        (DOCS / "gateway.md", comparison.CLIENTS, ("client", "compared", "shown")),
    ):
        if not clients.keys() & shown.keys():
            continue
        rows = [head, ("---",) * len(head), *(known.get(name, [f"not driven: {name}"]) for name in clients)]
        write_part(page, "clients", "\n".join(f"| {' | '.join(row)} |" for row in rows))


@contextmanager
def serving() -> Iterator[str]:
    """Run `penstock serve`; yield its address."""
    code = str(HERE / "served.py")
    targets = [f"{code}:agent", f"{code}:graph", str(HERE / "assistant.json")]
    options = ["--models", f"{code}:models", "--prices", f"{code}:prices", "--db", "memory:", "--port", "0"]
    command = [sys.executable, "-m", "penstock.cli", "serve", *targets, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            greeting = server.stdout.readline()
            if not greeting:
                sys.exit("penstock serve did not start; the reason is above")
            yield greeting.rpartition(" ")[2].strip()
        finally:
            server.terminate()
            server.stdout.read()  # what it prints at its end


def _drive(name: str, url: str) -> list[str] | None:
    """Run the program with each agent; return what it has shown with every one, None if it failed."""
    command = command_of(name, CLIENTS[name])
    if command is None:
        return None
    env = {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "BASE_URL": url}
    printed = [run_program(f"{name}, {model}", command, {**env, "MODEL": model}) for model in AGENTS]
    lines = {text for text in printed if text is not None}
    return None if None in printed or len(lines) != 1 else ["; ".join(lines.pop().splitlines())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
