"""Start `penstock serve` with a scripted model on loopback, and drive every client of `programs/` against it.

    python -m tools.clients [NAME …]

Served are a graph in JSON, an agent in Python and a graph in Python; each client talks to both agents. Each client has
an environment of its own below build/clients/, made on first use; those for Node need node and npm. A program prints
one line for each thing it has shown, and fails if something is not so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
PROGRAMS = HERE / "programs"
MAX_PROGRAM_S = 120
MAX_INSTALL_S = 600

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
    unknown = set(names) - CLIENTS.keys()
    if unknown:
        print(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
        return 2
    with _serving() as url:
        failed = [name for name in names or [*CLIENTS] if not _drive(name, f"{url}/v1")]
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
    """Make the environment if it is not there, run the program with each agent, and return whether it passed."""
    kept = {key: value for key in ("PATH", "LANG", "TMPDIR", "HOME") if (value := os.environ.get(key)) is not None}
    env = {**kept, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "BASE_URL": url, "NO_PROXY": "*"}
    for model in AGENTS:
        try:
            command = _node(name) if (PROGRAMS / f"{name}.mjs").exists() else _python(name)
            ended = subprocess.run(
                command,
                env={**env, "MODEL": model},
                capture_output=True,
                text=True,
                timeout=MAX_PROGRAM_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{name}, {model}: not run: {getattr(error, 'stderr', None) or error}")
            return False
        for line in ended.stdout.splitlines():
            print(f"{name}, {model}: {line}")
        if ended.returncode:
            print(f"{name}, {model}: failed:\n{ended.stderr[-2_000:]}")
            return False
    return True


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
