"""Drive clients of many kinds, unmodified: against `penstock serve` with a scripted model, and through the gateway.

    python -m tools.clients [NAME …]

Served are a graph in JSON, an agent in Python and a graph in Python; each client of the server talks to both agents.
`comparison` runs the programs of `programs/gateway/` with and without the gateway. Each client has an environment of
its own below build/clients/, made on first use; those for Node need node and npm. A program prints one line for each
thing it has shown, and fails if something is not so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tools.clients import comparison
from tools.clients.running import HERE, command_of, run_program

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
    failed = [name for name in chosen if name in comparison.CLIENTS and not comparison.compare(name)]
    if of_server := [name for name in chosen if name in CLIENTS]:
        with _serving() as url:
            failed += [name for name in of_server if not _drive(name, f"{url}/v1")]
    print("all clients passed" if not failed else f"failed: {', '.join(failed)}")
    return int(bool(failed))


@contextmanager
def _serving() -> Iterator[str]:
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


def _drive(name: str, url: str) -> bool:
    """Run the program with each agent, and return whether it passed."""
    command = command_of(name, CLIENTS[name])
    env = {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "BASE_URL": url}
    return command is not None and all(
        run_program(f"{name}, {model}", command, {**env, "MODEL": model}) is not None for model in AGENTS
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
