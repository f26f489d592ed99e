"""Serve an agent with a scripted model on loopback, and drive every client of `programs/` against it.

    python -m tools.clients [NAME …]

Each client has an environment of its own below build/clients/, made on first use; those for Node need node and npm. A
program prints one line for each thing it has shown, and fails if something is not so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.server.serve import configured, listen
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "clients"
PROGRAMS = ROOT / "tools" / "clients" / "programs"
MAX_PROGRAM_S = 120
MAX_INSTALL_S = 600

CLIENTS: dict[str, tuple[str, ...]] = {
    "langchain": ("langchain-openai",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "openai_agents": ("openai-agents",),
    "openai_node": ("openai", "zod"),
    "vercel_ai": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
}
"""The packages of each program's environment; those of Node for programs that end in .mjs."""

GRAPH = {
    "id": "assistant",
    "nodes": [
        {"id": "start", "type": "chat-start", "data": {}},
        {"id": "agent", "type": "agent", "data": {"model": "scripted", "stream": True}},
    ],
    "edges": [{"id": "e", "source": "start", "target": "agent", "data": {"channel": "flow"}}],
}
ANSWER = {"city": "Rome", "celsius": 21}


def reply(request: ModelRequest) -> Any:
    """Call `weather` if it is offered and has no result yet; then answer in the requested way."""
    results = [message.text for message in request.messages if message.role == "tool"]
    names = [spec.name for spec in request.tools]
    if "weather" in names and not results:
        return ToolCall("0", "weather", {"city": "Rome"})
    structured = [name for name in names if name != "weather"]
    if structured:
        return ToolCall("1", structured[0], ANSWER)
    if "JSON Schema" in request.instructions:
        return '{"city": "Rome", "celsius": 21}'
    return f"In Rome: {results[-1]}." if results else "Hello."


def main(names: list[str]) -> int:
    unknown = set(names) - CLIENTS.keys()
    if unknown:
        print(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
        return 2
    return asyncio.run(_drive_all(names or [*CLIENTS]))


async def _drive_all(names: list[str]) -> int:
    async with await open_stores("memory:") as stores:
        await stores.graphs.save("assistant", "local", "Assistant", GRAPH, now_ms=0)
        services = {"models": {"scripted": ScriptedModel(reply)}}
        host = RunHost(stores, executors=executors(), services=services, settings=HostSettings(drain_s=0))
        app = create_app(host, ChatService(host, stores.chats), stores)
        async with host, _listening(app) as port:
            failed = [
                name for name in names if not await asyncio.to_thread(_drive, name, f"http://127.0.0.1:{port}/v1")
            ]
    print("all clients passed" if not failed else f"failed: {', '.join(failed)}")
    return int(bool(failed))


@asynccontextmanager
async def _listening(app: Any) -> AsyncIterator[int]:
    """Serve the app on a free port, as `penstock serve` does."""
    server, listener = uvicorn.Server(configured(app)), listen(ServerSettings(port=0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _drive(name: str, url: str) -> bool:
    """Make the environment if it is not there, run the program, and return whether it passed."""
    kept = {key: value for key in ("PATH", "LANG", "TMPDIR", "HOME") if (value := os.environ.get(key)) is not None}
    env = {**kept, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "BASE_URL": url, "NO_PROXY": "*"}
    try:
        command = _node(name) if (PROGRAMS / f"{name}.mjs").exists() else _python(name)
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=MAX_PROGRAM_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name}: not run: {getattr(error, 'stderr', None) or error}")
        return False
    for line in ended.stdout.splitlines():
        print(f"{name}: {line}")
    if ended.returncode:
        print(f"{name}: failed:\n{ended.stderr[-2_000:]}")
    return ended.returncode == 0


def _python(name: str) -> list[str]:
    folder, packages = BUILD / name, CLIENTS[name]
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    if not stamp.exists() or tuple(stamp.read_text().split()) != packages:
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
        _run([uv, "pip", "install", "--quiet", "--python", str(python), *packages])
        stamp.write_text("\n".join(packages))
    return [str(python), "-P", str(PROGRAMS / f"{name}.py")]  # -P: programs have the names of packages


def _node(name: str) -> list[str]:
    folder, packages = BUILD / name, CLIENTS[name]
    stamp = folder / "packages.txt"
    if not stamp.exists() or tuple(stamp.read_text().split()) != packages:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _run(["npm", "install", "--silent", "--no-fund", "--no-audit", *packages], folder)
        stamp.write_text("\n".join(packages))
    shutil.copy(PROGRAMS / f"{name}.mjs", folder / "program.mjs")  # packages are found beside the program
    return ["node", str(folder / "program.mjs")]


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=MAX_INSTALL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
